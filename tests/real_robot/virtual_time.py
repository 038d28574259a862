"""Threads on a clock of the test's own: exact, the same again with the same seed, and as fast as what they compute.

    virtual.install(monkeypatch, "real_robot.guard")  # the fixture `virtual`; that package's `threading` and `time`

Each thread is a greenlet. One runs at a time, until it waits or needs a lock that another has; then one of those that
may go on, as the seed says. Where none may, the clock goes to the earliest time-out. The test itself takes part: while
it computes, nothing passes.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
from greenlet import getcurrent, greenlet

WALL = 1_700_000_000.0  # seconds since the epoch at the beginning
STEP = 0.005  # seconds between two looks of `until`
MOST = 3600.0  # seconds that a test may last


class _EndedError(BaseException):
    """Ends a thread that waits when the test is over."""


class _Waiter:
    def __init__(self, thread: greenlet, ready: Callable[[], Any], deadline: float) -> None:
        self.thread, self.ready, self.deadline = thread, ready, deadline


class VirtualTime:
    """See the module. Stands for the modules `threading` and `time`, as far as the robot's side uses them."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 1000.0
        self._end = self.now + MOST
        self.rng = random.Random(seed)
        self._main = getcurrent()
        self._waiters: list[_Waiter] = []
        self._errors: list[Exception] = []
        self._has_ended = False

    def install(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        """Put this in the place of `threading` and `time`, also of the clocks that functions take by default, in the
        modules of these names, and in those of these packages that are loaded."""
        for name in names:
            importlib.import_module(name)
        clocks: dict[Any, Any] = {getattr(time, name): getattr(self, name) for name in ("monotonic", "time_ns")}
        for module in [m for n, m in sys.modules.items() if n.startswith(names)]:
            for name in {"threading", "time"} & vars(module).keys():
                monkeypatch.setattr(module, name, self)
            owners = [module, *(v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__)]
            for function in [f for owner in owners for f in getattr(owner, "__dict__", {}).values()]:
                defaults = getattr(function, "__defaults__", None) or ()
                if any(callable(default) and default in clocks for default in defaults):
                    changed = tuple(clocks.get(d, d) if callable(d) else d for d in defaults)
                    monkeypatch.setattr(function, "__defaults__", changed)

    def wait_until(self, ready: Callable[[], Any], timeout: float | None = None) -> bool:
        """Let others run until `ready` holds, at most `timeout` seconds. Returns whether it does.

        Raises:
            AssertionError: in the test's own thread, where nobody goes on within an hour.
        """
        if self._has_ended:
            raise _EndedError
        deadline = math.inf if timeout is None else self.now + max(0.0, timeout)
        waiter = _Waiter(getcurrent(), ready, deadline)
        self._waiters.append(waiter)
        self._next().switch()
        assert waiter.deadline > -math.inf, "what the test waits for does not come in an hour"
        return bool(ready())

    def _next(self) -> greenlet:
        """One of those that wait and may go on; it waits no more."""
        able = [w for w in self._waiters if w.ready() or w.deadline <= self.now]
        if not able:
            earliest = min(w.deadline for w in self._waiters)
            if earliest > self._end:
                earliest = self.now
                next(w for w in self._waiters if w.thread is self._main).deadline = -math.inf
            self.now = earliest
            able = [w for w in self._waiters if w.deadline <= self.now]
        chosen = self.rng.choice(able)
        self._waiters.remove(chosen)
        return chosen.thread

    def start(self, target: Callable[[], object]) -> None:
        """Begin a thread; it runs when the others wait."""

        def run(*_: Any) -> None:  # It is given what the one before it returned.
            try:
                target()
            except _EndedError:
                return
            except Exception as error:  # A thread's edge: `close` raises it.
                self._errors.append(error)
            if not self._has_ended:
                thread.parent = self._next()  # who goes on at the end of this one

        thread = greenlet(run, self._main)
        self._waiters.append(_Waiter(thread, lambda: True, self.now))

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 90.0) -> Any:
        """As `processes.until`, in these seconds."""
        deadline = self.now + seconds
        while not (value := condition()):
            assert self.now < deadline, f"{what}: not within {seconds:.0f} s"
            self.sleep(STEP)
        return value

    def close(self) -> None:
        """End all threads, wherever they wait.

        Raises:
            Exception: what one of them ended with.
        """
        self._has_ended = True
        for waiter in self._waiters:
            if waiter.thread:  # that has begun
                waiter.thread.throw(_EndedError)
        if self._errors:
            raise self._errors[0]

    # --- as the module time -----------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        self.wait_until(lambda: False, seconds)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def time(self) -> float:
        return WALL + self.now

    def time_ns(self) -> int:
        return round(self.time() * 1e9)

    # --- as the module threading ------------------------------------------------------------------

    def get_ident(self) -> int:
        return id(getcurrent())

    def Thread(
        self, target: Callable[..., object], args: Any = (), name: str = "", daemon: bool = False
    ) -> VirtualThread:
        return VirtualThread(self, target, args)

    def Timer(self, seconds: float, target: Callable[..., object], args: Any = ()) -> VirtualThread:
        return VirtualThread(self, lambda: (self.sleep(seconds), target(*args)))

    def Lock(self) -> VirtualLock:
        return VirtualLock(self)

    RLock = Lock

    def Event(self) -> VirtualEvent:
        return VirtualEvent(self)

    def Condition(self, lock: VirtualLock | None = None) -> VirtualCondition:
        return VirtualCondition(self, lock or VirtualLock(self))

    def Semaphore(self, value: int = 1) -> VirtualSemaphore:
        return VirtualSemaphore(self, value)


class VirtualThread:
    def __init__(self, virtual: VirtualTime, target: Callable[..., object], args: Any = ()) -> None:
        self._virtual, self._target, self._args = virtual, target, args
        self._is_alive = False

    def start(self) -> None:
        self._is_alive = True
        self._virtual.start(self._run)

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            self._is_alive = False

    def is_alive(self) -> bool:
        return self._is_alive

    def join(self, timeout: float | None = None) -> None:
        self._virtual.wait_until(lambda: not self._is_alive, timeout)


class VirtualEvent:
    def __init__(self, virtual: VirtualTime) -> None:
        self._virtual, self._is_set = virtual, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._virtual.wait_until(self.is_set, timeout)


class VirtualSemaphore:
    def __init__(self, virtual: VirtualTime, value: int) -> None:
        self._virtual, self._value = virtual, value

    def acquire(self, timeout: float | None = None) -> bool:
        has_one = self._virtual.wait_until(lambda: self._value, timeout)
        self._value -= has_one
        return has_one

    def release(self) -> None:
        self._value += 1


class VirtualLock:
    """The same thread may take it again."""

    def __init__(self, virtual: VirtualTime) -> None:
        self._virtual = virtual
        self.owner: int | None = None
        self.depth = 0

    def __enter__(self) -> None:
        me = self._virtual.get_ident()
        if self.owner != me:
            self._virtual.wait_until(lambda: self.owner is None)
            self.owner = me
        self.depth += 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.depth -= 1
        if self.depth <= 0:
            self.owner, self.depth = None, 0


class VirtualCondition:
    def __init__(self, virtual: VirtualTime, lock: VirtualLock) -> None:
        self._virtual, self._lock = virtual, lock
        self._tickets: list[list[bool]] = []

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)

    def wait(self, timeout: float | None = None) -> bool:
        assert self._lock.owner == self._virtual.get_ident(), "waits without the lock"
        ticket, depth = [False], self._lock.depth
        self._tickets.append(ticket)
        self._lock.owner, self._lock.depth = None, 0
        is_notified = self._virtual.wait_until(lambda: ticket[0], timeout)
        self._tickets = [t for t in self._tickets if t is not ticket]
        self._lock.__enter__()
        self._lock.depth = depth
        return is_notified

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = math.inf if timeout is None else self._virtual.now + timeout
        while not (value := predicate()) and self._virtual.now < deadline:
            self.wait(None if timeout is None else deadline - self._virtual.now)
        return value

    def notify(self, number: int = 1) -> None:
        for ticket in self._tickets[:number]:
            ticket[0] = True
        self._tickets = self._tickets[number:]

    def notify_all(self) -> None:
        self.notify(len(self._tickets))
