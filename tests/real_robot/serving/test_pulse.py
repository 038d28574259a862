"""What a client knows of its server's life between requests: a real server that computes, hangs, wakes and dies."""

from __future__ import annotations

import math
import os
import signal
import threading
import time

from processes import until
from toy_server import observation, toy_server

from real_robot.serving.client import PolicyClient


def test_the_server_is_heard_while_it_computes_and_not_while_it_hangs() -> None:
    with toy_server() as server:
        client = PolicyClient(server.address, infer_timeout=30.0)
        assert client.silence == math.inf
        with client:
            asked = threading.Thread(target=client.infer, args=(observation(instruction="sleep 3"),))
            asked.start()
            heard, end = [], time.monotonic() + 2.5
            while time.monotonic() < end:
                heard.append(client.silence)
                time.sleep(0.01)
            assert asked.is_alive() and max(heard) < 2.0, "a policy that computes is no silence"
            asked.join()
            os.kill(server.process.pid, signal.SIGSTOP)
            until(lambda: 2.0 < client.silence < math.inf, "the silence of a server that hangs", 20)
            os.kill(server.process.pid, signal.SIGCONT)
            until(lambda: client.silence < 0.5, "its next sign of life", 20)
            os.kill(server.process.pid, signal.SIGKILL)
            until(lambda: client.silence == math.inf, "its end", 20)
        assert client.silence == math.inf
        until(lambda: "pulse" not in [thread.name for thread in threading.enumerate()], "the end of its thread", 5)
