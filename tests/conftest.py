"""For all tests: no property test fails for being slow; Ctrl-C works as usual.

What is imported is put out of the garbage collector's sight: going through its 700 thousand objects again and again
took a third of the tests' time.
"""

import gc
import logging
import signal
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # As a shell starts what it runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def virtual(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Threads in virtual time. Parametrize it indirectly with seeds, for other orders of them."""
    from virtual_time import VirtualTime  # Beside the robot side's tests.

    time = VirtualTime(getattr(request, "param", 0))
    yield time
    time.close()


typer.testing._get_command = cache(typer.testing._get_command)  # It took 45 ms to make ours anew for each call.

gc.disable()  # Until all tests are collected, which imports most.
_hidden = 0  # Modules that the collector does not see.


def _hide_imported() -> None:
    global _hidden  # noqa: PLW0603
    if len(sys.modules) > _hidden + 50:
        gc.collect()
        gc.freeze()
        _hidden = len(sys.modules)


def pytest_collection_finish() -> None:
    _hide_imported()
    gc.enable()


_root = logging.getLogger()
_logging_before: tuple[int, list[logging.Handler]] = (_root.level, [])


def pytest_runtest_logstart() -> None:
    global _logging_before  # noqa: PLW0603
    _logging_before = (_root.level, list(_root.handlers))


def pytest_runtest_logfinish() -> None:
    """Take back what a library did to logging (LeRobot's commands set the root logger's level and handlers)."""
    _root.setLevel(_logging_before[0])
    _root.handlers[:] = _logging_before[1]
    _hide_imported()


@pytest.fixture(scope="session")
def tiny_loop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A recipe of `vla-rl loop` with its policy and world model, which no test changes."""
    from test_loop import make_recipe

    return make_recipe(tmp_path_factory.mktemp("loop"))
