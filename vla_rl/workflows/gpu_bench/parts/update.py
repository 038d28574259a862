"""Updates with 7 billion parameters: forward and backward of a micro-batch with checkpointing, and a learner's step."""

from __future__ import annotations

from vla_rl.config import build_component
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.workflows.gpu_bench.large_policy import LORA, PARALLEL, drawn_chunk, observations, on_device, options
from vla_rl.workflows.gpu_bench.learner_matrix import episodes
from vla_rl.workflows.gpu_bench.record import Target
from vla_rl.workflows.gpu_bench.sheet import Attempt, Sheet
from vla_rl.workflows.gpu_bench.timing import count_flops, median_seconds

TARGETS = {8: Target(245.0, device="H200")}
OPTIONS = {**PARALLEL, **LORA, "gradient_checkpointing": True}


class Updating:
    """The policy that is trained, made when it is first asked for."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._policy: OpenVLAPolicy | None = None

    @property
    def policy(self) -> OpenVLAPolicy:
        if self._policy is None:
            self._policy = on_device(options(self.sheet.is_full, **OPTIONS), self.sheet.device)
        return self._policy

    def micro_batch(self, size: int, checkpointing: bool = True) -> None:
        """Forward and backward of one micro-batch, gradients added up as in a minibatch."""
        sheet, policy = self.sheet, self.policy
        policy.network.language_model.model.gradient_checkpointing = checkpointing
        obs, chunk = observations(policy, size), drawn_chunk(policy, size)

        def step() -> None:
            out = policy.evaluate(obs, chunk)
            (out.log_prob.mean() + out.entropy.mean()).backward()

        policy.zero_grad()
        flops = count_flops(step)
        seconds = median_seconds(step, sheet.device, 5 if sheet.is_full else 1, 1)
        note = sheet.speed_note(flops, seconds, size)
        text, target = f"forward and backward, micro-batch of {size}", None
        if checkpointing:
            note, target = note + ", what checkpointing computes again counted", TARGETS.get(size)
        else:
            text += ", without checkpointing"
        sheet.add(text, 1000 * seconds, "ms", target, note)
        policy.zero_grad()
        policy.network.language_model.model.gradient_checkpointing = True

    def learner(self, size: int) -> None:
        """One optimizer step of GRPO, of two micro-batches."""
        sheet, policy = self.sheet, self.policy
        values = {"kind": "grpo", "epochs": 1, "minibatch_size": 2 * size, "micro_batch_size": size}
        config = build_component("algo", values)
        learner = config.build(policy, 0, temperature=1.0)
        batch = learner.prepare(episodes(policy, groups=2, size=size, decisions=1))
        seconds = median_seconds(lambda: learner.update(batch), sheet.device, 3 if sheet.is_full else 1, 1)
        sheet.add(
            f"GRPO's optimizer step of 2 micro-batches of {size}", 1000 * seconds, "ms", note="host's work included"
        )


def measure(sheet: Sheet) -> None:
    """LoRA of rank 32, chunks of 8 actions in parallel, activations computed again in the backward pass."""
    updating = Updating(sheet)
    sizes = (8, 16, 32) if sheet.is_full else (2,)
    attempts: list[Attempt] = [(f"micro-batch of {n}", lambda n=n: updating.micro_batch(n)) for n in sizes]
    attempts += [
        (f"micro-batch of {n}, without checkpointing", lambda n=n: updating.micro_batch(n, checkpointing=False))
        for n in sizes[:2]
    ]
    attempts += [(f"learner, micro-batch of {n}", lambda n=n: updating.learner(n)) for n in sizes[:1]]
    sheet.run(attempts)
