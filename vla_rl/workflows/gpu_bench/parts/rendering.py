"""Rendering in 1 to 16 processes, alone and while the policy acts on the same device; what each costs the other."""

from __future__ import annotations

import statistics
import threading
import time

import torch

from sim.bench import OursRunner
from sim.rendering.devices import RenderError
from vla_rl.config import build_component
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.workflows.gpu_bench.large_policy import LORA, PARALLEL, observations, on_device, options
from vla_rl.workflows.gpu_bench.sheet import Attempt, LeftOutError, Sheet
from vla_rl.workflows.gpu_bench.timing import median_seconds, synchronize

ENVS_PER_PROCESS, CHUNK = 2, 8
BATCH = 16


class Beside:
    """The policy that acts beside the simulators, and its time when it is alone."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._policy: OpenVLAPolicy | None = None
        self.batch = BATCH if sheet.is_full else 2
        self.alone = 0.0

    @property
    def policy(self) -> OpenVLAPolicy:
        if self._policy is None:
            self._policy = on_device(options(self.sheet.is_full, **PARALLEL, **LORA), self.sheet.device)
            self.alone = median_seconds(self.act, self.sheet.device, 5 if self.sheet.is_full else 1)
            self.sheet.add(f"act alone, B={self.batch}", 1000 * self.alone, "ms")
        return self._policy

    def act(self) -> None:
        """One chunk for a batch."""
        self.policy.act(observations(self.policy, self.batch), torch.Generator().manual_seed(0), 1.0)

    def measure(self, processes: int) -> None:
        """Steps per second of the simulator alone, and of both together."""
        sheet, seconds = self.sheet, 8.0 if self.sheet.is_full else 0.2
        assert self.policy is not None
        values = {"kind": "tabletop", "image_size": 256 if sheet.is_full else 32, "num_workers": processes}
        try:
            env = build_component("env", values).build(ENVS_PER_PROCESS * processes)
        except RenderError as error:
            raise LeftOutError(str(error)) from error
        try:
            runner = OursRunner(env, CHUNK)
            runner.run(0.01)
            steps, spent = runner.run(seconds)
            alone = steps / spent
            together: list[tuple[int, float]] = []
            thread = threading.Thread(target=lambda: together.append(runner.run(seconds)))
            thread.start()
            times = []
            while thread.is_alive() or not times:
                started = time.perf_counter()
                self.act()
                synchronize(sheet.device)
                times.append(time.perf_counter() - started)
            thread.join()
        finally:
            env.close()
        if not together:
            raise RuntimeError("the simulator's thread failed; its error is above")
        beside = together[0][0] / together[0][1]
        name = f"{processes} processes"
        sheet.add(
            f"{name}: steps alone", alone, "steps/s", note=f"an image of {values['image_size']} px each {CHUNK} steps"
        )
        sheet.add(f"{name}: steps beside act", beside, "steps/s", note=f"{beside / alone:.2f} of alone")
        act = statistics.median(times)
        sheet.add(f"{name}: act beside rendering", 1000 * act, "ms", note=f"{act / self.alone:.2f} of alone")


def measure(sheet: Sheet) -> None:
    """Images of 256 pixels, on the device that `env.render_devices: auto` gives."""
    beside = Beside(sheet)
    counts = (1, 2, 4, 8, 16) if sheet.is_full else (1,)
    attempts: list[Attempt] = [(f"{n} processes", lambda n=n: beside.measure(n)) for n in counts]
    sheet.run(attempts)
