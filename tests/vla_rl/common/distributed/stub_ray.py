"""Ray's calls in one process, for fast tests of what its actors and their callers do where something breaks.

    stub = StubRay(monkeypatch)   # from here on `ray.remote`, `wait`, `get` ... are the stub's
    stub.rules["open"] = never    # by the name of an actor's method: what it answers in its own place

An actor is an object of its class. Plain methods run when they are asked, async ones while somebody waits. `now` is the
clock of our modules, in seconds: it goes on while somebody waits in vain, so that limits of minutes pass at once.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from vla_rl.rollout.actors import ahead, ahead_worker, cluster, source, vec_env  # noqa: E402

FOR_EVER = 4_000.0  # seconds of the stub's clock after which whoever waits would wait for ever
PASSES = 10  # of the loop, before somebody waits in vain
MACHINE = {"Alive": True, "Resources": {"CPU": 8.0}}


class Ref:
    """An answer that is there at once, or when its coroutine has ended, or never."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Any] = loop.create_future()

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self.future).__await__()

    def settle(self, value: Any, error: BaseException | None) -> None:
        if error is not None:
            self.future.set_exception(as_ray_says(error))
            self.future.exception()  # Else asyncio says at the end that nobody asked for it.
        else:
            self.future.set_result(value)


def as_ray_says(error: BaseException) -> BaseException:
    """What Ray raises where an actor raised this; its own errors as they are."""
    if isinstance(error, ray.exceptions.RayError):
        return error
    account = f"Traceback, far away:\n{type(error).__name__}: {error}"
    return ray.exceptions.RayTaskError("f", account, error, proctitle="actor", ip="10.0.0.7")


def gone() -> BaseException:
    return ray.exceptions.ActorDiedError()


class StubRay:
    """See the file's first lines.

    Attributes:
        killed: actors that were killed. made: all that were asked for.
        rules: what a method does in place of its own; it gets the actor and the arguments. `never` for no answer.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.loop, self.killed, self.made = 1000.0, asyncio.new_event_loop(), list[Any](), list[Any]()
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.rules: dict[str, Callable[..., Any]] = {"where": lambda _: ("a node", 1)}
        self.machines = [MACHINE]
        for name in ("remote", "wait", "get", "kill", "put", "nodes", "cluster_resources", "available_resources"):
            patch.setattr(ray, name, getattr(self, name))
        patch.setattr(ray, "is_initialized", lambda: True)
        for module in (ahead, ahead_worker, cluster, source, vec_env):
            patch.setattr(module, "time", self, raising=False)

    # --- the clock --------------------------------------------------------------------------

    def monotonic(self) -> float:
        self.now += 1e-3
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def turn(self) -> None:
        """Let what is async go on."""

        async def passes() -> None:
            for _ in range(PASSES):
                await asyncio.sleep(0)

        self.loop.run_until_complete(passes())

    def close(self) -> None:
        """End what still goes on."""
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                self.loop.run_until_complete(task)
        self.loop.close()

    # --- Ray's calls ------------------------------------------------------------------------

    def remote(self, actor: type) -> Any:
        return _Class(self, actor)

    def put(self, value: Any) -> Ref:
        ref = Ref(self.loop)
        ref.settle(value, None)
        return ref

    def wait(
        self, refs: Sequence[Ref], num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
    ) -> tuple[list[Ref], list[Ref]]:
        def ready() -> list[Ref]:
            return [ref for ref in refs if ref.future.done()]

        end = self.now + (FOR_EVER if timeout is None else timeout)
        if not self.loop.is_running():
            self.turn()
        while len(ready()) < num_returns and self.now < end:
            assert self.now < FOR_EVER, "it waits for ever"
            self.now = min(end, self.now + 1)
            self.turn()
        found = ready()[:num_returns]
        return found, [ref for ref in refs if ref not in found]

    def get(self, refs: Any) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if not refs.future.done():
            self.wait([refs])
        return refs.future.result()

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def nodes(self) -> list[dict[str, Any]]:
        return self.machines

    def cluster_resources(self) -> dict[str, float]:
        return {name: sum(m["Resources"].get(name, 0.0) for m in self.machines) for name in ("CPU", "GPU")}

    available_resources = cluster_resources


class _Class:
    def __init__(self, stub: StubRay, actor: type) -> None:
        self.stub, self.actor = stub, actor

    def options(self, **_: Any) -> _Class:
        return self

    def remote(self, *arguments: Any) -> _Handle:
        handle = _Handle(self.stub, self.actor(*arguments))
        self.stub.made.append(handle)
        return handle


class _Handle:
    def __init__(self, stub: StubRay, actor: Any) -> None:
        self.stub, self.actor = stub, actor

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)


class _Method:
    def __init__(self, handle: _Handle, name: str, num_returns: int = 1) -> None:
        self.handle, self.name, self.num_returns = handle, name, num_returns

    def options(self, num_returns: int) -> _Method:
        return _Method(self.handle, self.name, num_returns)

    def remote(self, *arguments: Any) -> Any:
        stub, refs = self.handle.stub, [Ref(self.handle.stub.loop) for _ in range(self.num_returns)]
        given = [argument.future.result() if isinstance(argument, Ref) else argument for argument in arguments]
        rule, own = stub.rules.get(self.name), getattr(self.handle.actor, self.name)
        if rule is never:
            return refs[0] if self.num_returns == 1 else refs

        def settle(value: Any, error: BaseException | None) -> None:
            for number, ref in enumerate(refs):
                part = value if self.num_returns == 1 or error is not None else value[number]
                ref.settle(part, error)

        def ended(task: asyncio.Task[Any]) -> None:
            error = task.exception()
            settle(None if error else task.result(), error)

        try:
            value = own(*given) if rule is None else rule(self.handle.actor, *given)
        except Exception as error:
            settle(None, error)
        else:
            if inspect.iscoroutine(value):
                stub.loop.create_task(value).add_done_callback(ended)
            else:
                settle(value, None)
        return refs[0] if self.num_returns == 1 else refs


def never(*_: Any) -> Any:
    """A rule: there is no answer."""
    raise AssertionError("it is not called")
