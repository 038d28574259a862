"""A tiny simulator that breaks on purpose, for the tests of the environment host. Imports numpy alone."""

import os
import signal
import subprocess
import sys
import time

import numpy as np


class FaultySim:
    """A dot that moves. `fault` happens in the third step of episodes with index 7."""

    env_facts = {  # noqa: RUF012
        "tasks": {"go": "go right", "stay": "stay where you are"},
        "horizon": 12,
        "control_hz": 10,
        "cameras": {"agentview": "camera.front", "wrist": "camera.wrist"},
        "state": ["position", "speed"],
        "action_low": [-1, -1],
        "action_high": [1, 1],
        "reward": "environment",
    }

    def __init__(self, fault: str = "none", size: int = 16) -> None:
        if fault == "init":
            print("the license server does not answer")
            raise RuntimeError("fault is 'init'")
        self.fault, self.size = fault, size
        self.child = subprocess.Popen(["sleep", "1000"]) if fault in ("child", "die with child") else None

    def reset(self, seed: int, options: dict) -> tuple:
        self.breaks = options["index"] == 7
        if self.breaks and self.fault == "reset":
            raise KeyError("no such scene")
        self.position = np.random.default_rng(seed).uniform(0.1, 0.5, 2)
        self.speed, self.time = np.zeros(2), 0
        return None, {"note": "not read"}

    def step(self, action: np.ndarray) -> tuple:
        self.time += 1
        if self.breaks and self.time == 3:
            getattr(self, "_" + self.fault.split()[0])()
        self.speed = 0.05 * action
        self.position = np.clip(self.position + self.speed, 0, 0.999)
        reward = float("nan") if self.fault == "reward" and self.breaks and self.time >= 3 else 0.0
        return None, reward, False, False, {"success": bool(self.position[0] > 0.99)}

    def _die(self) -> None:
        print("out of memory", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)

    def _hang(self) -> None:
        time.sleep(1000)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _raise(self) -> None:
        raise ArithmeticError("the solver diverged")

    def _exit(self) -> None:
        sys.exit("no license")

    def _print(self) -> None:
        os.write(1, b"\xff\x00\x00\x10 noise " * 10000)
        print("step done\n" * 1000)
        assert sys.stdin.read() == ""

    def _shape(self) -> None:
        self.size += 1

    def _nan(self) -> None:
        self.position = np.array([np.nan, 0.0])

    def _reward(self) -> None:
        pass

    def _slow(self) -> None:
        time.sleep(0.6)

    def _none(self) -> None:
        pass

    _child = _reset = _none

    def observe(self) -> dict:
        front = np.full((self.size, self.size, 3), 50, np.uint8)
        if np.isfinite(self.position).all():
            x, y = (self.position * self.size).astype(int)
            front[y, x] = (230, 60, 60)
            front[0] = np.uint8(self.position[0] * 255)
            front[1] = np.uint8(self.position[1] * 255)
        return {
            "camera": {"front": front, "wrist": front[::-1].copy()},
            "position": self.position,
            "speed": self.speed,
        }

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
