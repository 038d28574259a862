"""What a client knows of its server's life between requests: a real server that computes, hangs, wakes and dies."""

from __future__ import annotations

import math
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from processes import until
from toy_server import observation, toy_server, toy_thread

from real_robot.serving.client import PolicyClient


def no_pulse() -> bool:
    return "pulse" not in [thread.name for thread in threading.enumerate()]


def test_the_server_is_heard_while_it_computes() -> None:
    """A policy that computes is no silence."""
    with (
        toy_thread() as server,
        PolicyClient(server.address, infer_timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(client.infer, observation(instruction="wait"))
        with server.computing():
            silences = [client.silence]

            def is_heard() -> bool:
                silences.append(client.silence)
                return sum(after < before for before, after in pairwise(silences)) >= 5

            until(is_heard, "five signs of life")
            assert not asked.done()
        asked.result()
    until(no_pulse, "the end of its thread")


@pytest.mark.live
def test_the_server_is_not_heard_while_it_hangs_and_when_it_is_gone() -> None:
    with toy_server() as server:
        client = PolicyClient(server.address, infer_timeout=30.0)
        assert client.silence == math.inf
        with client:
            os.kill(server.process.pid, signal.SIGSTOP)
            until(lambda: 1.0 < client.silence < math.inf, "the silence of a server that hangs", 20)
            os.kill(server.process.pid, signal.SIGCONT)
            until(lambda: client.silence < 0.5, "its next sign of life", 20)
            os.kill(server.process.pid, signal.SIGKILL)
            until(lambda: client.silence == math.inf, "its end", 20)
        assert client.silence == math.inf
    until(no_pulse, "the end of its thread")
