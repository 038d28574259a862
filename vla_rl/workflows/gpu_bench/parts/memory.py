"""Memory that training steps really take, against what `vla-rl plan --memory` predicts before anything is loaded."""

from __future__ import annotations

import torch

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.training import memory
from vla_rl.training.optimizers import build_optimizers
from vla_rl.workflows.gpu_bench import large_policy
from vla_rl.workflows.gpu_bench.large_policy import LORA, PARALLEL, drawn_chunk, observations
from vla_rl.workflows.gpu_bench.record import Target
from vla_rl.workflows.gpu_bench.sheet import Attempt, Sheet
from vla_rl.workflows.gpu_bench.timing import peak_bytes

GIB = 1024**3
CLOSE = Target(0.15)  # Largest share by which the prediction may be off.
# name -> options, micro-batch
CASES = {
    "LoRA, checkpointing": ({**PARALLEL, **LORA, "gradient_checkpointing": True}, 8),
    "LoRA": ({**PARALLEL, **LORA}, 8),
    "all weights, checkpointing, preset base": ({**PARALLEL, "preset": "base", "gradient_checkpointing": True}, 16),
}


def measure(sheet: Sheet) -> None:
    """The peak of a training step, weights, gradients and the optimizer's state there."""
    names = list(CASES) if sheet.is_full else list(CASES)[:1]
    attempts: list[Attempt] = [(name, lambda name=name: _case(sheet, name)) for name in names]
    sheet.run(attempts)


def _case(sheet: Sheet, name: str) -> None:
    chosen, size = CASES[name]
    if not sheet.is_full:
        chosen, size = chosen | {"preset": "tiny"}, 2
    config = large_policy.options(sheet.is_full, **chosen)
    skeleton = large_policy.without_values(config, sheet.device.type)
    with memory.without_values(skeleton):
        predicted = memory.measure(skeleton, large_policy.spec_of(config), batch_size=size)
    measured = peak_bytes(lambda: _steps(config, sheet.device, size), sheet.device)
    sheet.add(f"{name}, micro-batch of {size}: predicted", predicted.total / GIB, "GiB")
    sheet.add(f"{name}, micro-batch of {size}: measured", measured / GIB, "GiB")
    sheet.add(f"{name}, micro-batch of {size}: prediction off by", abs(predicted.total / measured - 1), "of 1", CLOSE)


def _steps(config: large_policy.OpenVLAConfig, device: torch.device, size: int) -> None:
    """Two optimizer steps: in the second all is there that a step needs."""
    policy = large_policy.on_device(config, device)
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    optimizers = build_optimizers(GRPOConfig().optim, trained)
    obs, chunk = observations(policy, size), drawn_chunk(policy, size)
    for _ in range(2):
        out = policy.evaluate(obs, chunk)
        (out.log_prob.mean() + out.entropy.mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
