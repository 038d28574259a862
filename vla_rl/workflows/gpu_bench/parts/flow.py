"""Flow policies at their published sizes: acting with a likelihood for 1 to 64 environments, and a micro-batch."""

from __future__ import annotations

import torch

from vla_rl.policies.lerobot.policy import LeRobotPolicy
from vla_rl.workflows.gpu_bench.large_flow import OPTIONS, observations, on_device
from vla_rl.workflows.gpu_bench.sheet import Attempt, Sheet
from vla_rl.workflows.gpu_bench.timing import count_flops, median_seconds

SIZES = {"full": (16, 1, 64), "tiny": (2,)}  # In the order of what matters, as time may run out.
MICRO_BATCHES = {"full": (8,), "tiny": (2,)}


class Flowing:
    """The policy at hand, made when it is first asked for; there is room for one."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._name = ""
        self._policy: LeRobotPolicy | None = None

    def policy(self, name: str) -> LeRobotPolicy:
        """The policy of this name."""
        if self._policy is None or self._name != name:
            self._policy = None
            self._policy, self._name = on_device(name, self.sheet.is_full, self.sheet.device), name
        return self._policy

    def act(self, name: str, batch_size: int) -> None:
        """One chunk for each environment, images on the host to actions."""
        policy, obs = self.policy(name), observations(self.sheet.is_full, batch_size)
        generator = torch.Generator().manual_seed(0)

        def act() -> None:
            assert policy.act(obs, generator, 1.0).log_prob is not None, "a flow policy draws with a likelihood"

        flops = count_flops(act)
        seconds = median_seconds(act, self.sheet.device, 5 if self.sheet.is_full else 1, 1)
        self._add(f"{self._text(policy)}, act, B={batch_size}", seconds, flops, batch_size)

    def micro_batch(self, name: str, size: int) -> None:
        """Forward and backward of GRPO's loss of one micro-batch, through every denoising step."""
        policy, obs = self.policy(name), observations(self.sheet.is_full, size)
        chunk = policy.act(obs, torch.Generator().manual_seed(0), 1.0)

        def step() -> None:
            out = policy.evaluate(obs, chunk)
            (out.log_prob.mean() + out.entropy.mean()).backward()

        policy.zero_grad()
        flops = count_flops(step)
        seconds = median_seconds(step, self.sheet.device, 5 if self.sheet.is_full else 1, 1)
        self._add(f"{self._text(policy)}, forward and backward, micro-batch of {size}", seconds, flops, size)
        policy.zero_grad()

    def _text(self, policy: LeRobotPolicy) -> str:
        sizes = [p.numel() for n, p in policy.named_parameters() if not n.endswith("paligemma.lm_head.weight")]
        return f"{self._name} ({sum(sizes) / 1e9:.2f} billion parameters)"  # Its head is its embedding.

    def _add(self, what: str, seconds: float, flops: float, decisions: int) -> None:
        rate = self.sheet.results.fact("rates", "flops_bf16")
        note = f"{decisions / seconds:,.4g} decisions/s; {flops / seconds / 1e12:,.4g} TFLOP/s"
        if rate is not None:
            note += f", {100 * flops / seconds / rate:.0f} % of the measured rate"
        self.sheet.add(what, 1000 * seconds, "ms", note=note)


def measure(sheet: Sheet) -> None:
    """Chunks of 50 actions in 10 denoising steps, one camera; adapters of rank 32 on the action expert are trained."""
    flowing, size = Flowing(sheet), "full" if sheet.is_full else "tiny"
    attempts: list[Attempt] = []
    for name in OPTIONS:
        attempts += [(f"{name}, act, B={n}", lambda name=name, n=n: flowing.act(name, n)) for n in SIZES[size]]
        attempts += [
            (f"{name}, micro-batch of {n}", lambda name=name, n=n: flowing.micro_batch(name, n))
            for n in MICRO_BATCHES[size]
        ]
    sheet.run(attempts)
