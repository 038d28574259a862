"""Flow policies at their published sizes: acting with a likelihood for 1 to 64 environments, and a micro-batch."""

from __future__ import annotations

import torch

from vla_rl.policies.lerobot.policy import LeRobotPolicy
from vla_rl.workflows.gpu_bench.large_flow import OPTIONS, observations, on_device
from vla_rl.workflows.gpu_bench.sheet import Attempt, Sheet
from vla_rl.workflows.gpu_bench.timing import count_flops, median_seconds

FORMS = {"eager": False, "CUDA graphs": True}  # cuda_graphs
SIZES = {"full": (1, 16, 64), "tiny": (2,)}  # In the order of what matters, as time may run out.
MICRO_BATCHES = {"full": (8,), "tiny": (2,)}


class Flowing:
    """The policy at hand, made when it is first asked for; there is room for one."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._form: tuple[str, str] | None = None
        self._policy: LeRobotPolicy | None = None
        self._flops: dict[tuple[str, int], float] = {}

    def policy(self, name: str, form: str) -> LeRobotPolicy:
        """The policy of this name, which acts so."""
        if self._policy is None or self._form != (name, form):
            self._policy = None
            self._policy = on_device(name, self.sheet.is_full, self.sheet.device, cuda_graphs=FORMS[form])
            self._form = name, form
        return self._policy

    def act(self, name: str, form: str, batch_size: int) -> None:
        """One chunk for each environment, images on the host to actions."""
        policy, obs = self.policy(name, form), observations(self.sheet.is_full, batch_size)
        generator = torch.Generator().manual_seed(0)

        def act() -> None:
            assert policy.act(obs, generator, 1.0).log_prob is not None, "a flow policy draws with a likelihood"

        if form == "eager":
            self._flops[name, batch_size] = count_flops(act)
        seconds = median_seconds(act, self.sheet.device, 5 if self.sheet.is_full else 1, 1)
        self._add(f"{_text(name, policy)}, act, {form}, B={batch_size}", seconds, (name, batch_size), batch_size)

    def micro_batch(self, name: str, size: int) -> None:
        """Forward and backward of GRPO's loss of one micro-batch, through every denoising step."""
        policy, obs = self.policy(name, "eager"), observations(self.sheet.is_full, size)
        chunk = policy.act(obs, torch.Generator().manual_seed(0), 1.0)

        def step() -> None:
            out = policy.evaluate(obs, chunk)
            (out.log_prob.mean() + out.entropy.mean()).backward()

        policy.zero_grad()
        self._flops[name, -size] = count_flops(step)
        seconds = median_seconds(step, self.sheet.device, 5 if self.sheet.is_full else 1, 1)
        self._add(f"{_text(name, policy)}, forward and backward, micro-batch of {size}", seconds, (name, -size), size)
        policy.zero_grad()

    def _add(self, what: str, seconds: float, counted: tuple[str, int], decisions: int) -> None:
        note = self.sheet.speed_note(self._flops.get(counted), seconds, decisions)
        self.sheet.add(what, 1000 * seconds, "ms", note=note)


def _text(name: str, policy: LeRobotPolicy) -> str:
    sizes = [p.numel() for n, p in policy.named_parameters() if not n.endswith("paligemma.lm_head.weight")]
    return f"{name} ({sum(sizes) / 1e9:.2f} billion parameters)"  # Its head is its embedding.


def measure(sheet: Sheet) -> None:
    """Chunks of 50 actions in 10 denoising steps, one camera; adapters of rank 32 on the action expert are trained."""
    flowing, size = Flowing(sheet), "full" if sheet.is_full else "tiny"
    attempts: list[Attempt] = []
    for name in OPTIONS:
        attempts += [
            (f"{name}, micro-batch of {n}", lambda name=name, n=n: flowing.micro_batch(name, n))
            for n in MICRO_BATCHES[size]
        ]
        attempts += [
            (f"{name}, act, {form}, B={n}", lambda name=name, form=form, n=n: flowing.act(name, form, n))
            for form in FORMS
            for n in SIZES[size]
        ]
    sheet.run(attempts)
