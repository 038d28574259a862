"""A policy behind a real server, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from real_robot.serving.requests import PolicyFacts
from real_robot.serving.server import PolicyServer, ServeConfig

PATIENCE = 60.0  # seconds; far beyond what any of this takes


@contextmanager
def server_thread(
    load: Callable[[], tuple[Any, PolicyFacts]], wait: bool = True, **config: Any
) -> Iterator[PolicyServer]:
    """The server, listening on its port; ready, unless `wait` is False. `config`: of its `ServeConfig`."""
    loop, ended = asyncio.new_event_loop(), asyncio.Event()
    server = PolicyServer(load, ServeConfig(**{"port": 0, "max_batch": 1, **config}))
    failure: list[BaseException] = []
    started = threading.Event()

    async def serve() -> None:
        try:
            await server.start()
            if wait:
                await server.ready()
            started.set()
            await ended.wait()
        except BaseException as error:
            failure.append(error)
        finally:
            started.set()
            await server.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert started.wait(PATIENCE)
    try:
        if failure:
            raise failure[0]
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(PATIENCE)
        loop.close()
