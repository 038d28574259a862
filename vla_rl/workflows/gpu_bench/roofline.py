"""What a GPU could do at best, computed from the code's own operations on fake tensors; nothing is measured.

    python -m vla_rl.workflows.gpu_bench.roofline      # The table of docs/gpu.md

Each operation takes the longer of its arithmetic at the GPU's rate of products and its bytes at the GPU's bandwidth.
Handing operations over takes the host a few microseconds each, whatever the GPU does, and eager code waits for the
longer of the two. Real kernels reach 50 to 90 % of this; images are prepared and copied besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vla_rl.policies.token_draws import decode
from vla_rl.training import memory
from vla_rl.workflows.gpu_bench import large_policy
from vla_rl.workflows.gpu_bench.large_policy import AUTOREGRESSIVE, LORA, PARALLEL, drawn_chunk, observations

LAUNCH_SECONDS = 6e-6
_NO_WORK = {"detach", "empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "lift_fresh", "alias"}


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU: products in bfloat16 and float32, FLOP/s; memory, bytes/s."""

    name: str
    bf16: float
    fp32: float
    bandwidth: float


H200 = Gpu("H200", 780e12, 60e12, 4.3e12)
H100 = Gpu("H100", 780e12, 60e12, 3.0e12)  # The same chip; its memory has 3.35 of 4.8 TB/s on the data sheets.


class Roofline(TorchDispatchMode):
    """Adds up what the operations inside its block take at best.

    Attributes:
        kernels: operations that do work. flops: of products and attention. bytes: read and written.
        seconds: of the GPU at its roof. waiting: of these, those of operations whose bytes take longer.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu, self.kernels, self.flops, self.bytes, self.seconds, self.waiting = gpu, 0, 0.0, 0, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        if is_view or func.namespace != "aten" or func.overloadpacket.__name__ in _NO_WORK:
            return out
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        count = flop_registry.get(func.overloadpacket)
        flops = 0.0 if count is None else float(count(*args, **(kwargs or {}), out_val=out))
        rate = self.gpu.bf16 if any(t.dtype == torch.bfloat16 for t in tensors) else self.gpu.fp32
        self.add(sum(t.numel() * t.element_size() for t in tensors), flops, rate)
        return out

    def add(self, size: int, flops: float = 0.0, rate: float = 1.0) -> None:
        """Count an operation on so many bytes, whose arithmetic runs at `rate`, FLOP/s."""
        arithmetic, moving = flops / rate, size / self.gpu.bandwidth
        self.kernels += 1
        self.flops += flops
        self.bytes += size
        self.seconds += max(arithmetic, moving)
        self.waiting += moving if moving > arithmetic else 0.0

    @property
    def eager_seconds(self) -> float:
        """With the host's time to hand over each operation, where that is longer."""
        return max(self.seconds, LAUNCH_SECONDS * self.kernels)

    @property
    def limit(self) -> str:
        """What decides: the host's launches, the GPU's memory or its arithmetic."""
        if LAUNCH_SECONDS * self.kernels > self.seconds:
            return "host"
        return "memory" if self.waiting > self.seconds / 2 else "arithmetic"


def of_act(is_full: bool, decoder: dict[str, Any], batch_size: int, gpu: Gpu = H200) -> Roofline:
    """Drawing one chunk for a batch, from images on the device to logits."""

    def act(policy: Any) -> None:
        with torch.no_grad(), policy._autocast():
            prefix = policy._prefix(observations(policy, batch_size))
            if policy.architecture.decoder != "autoregressive":
                policy.network.hidden(prefix, None)
                return
            decode(policy.network, [prefix], policy.num_tokens, 0.0, None)

    return _of(large_policy.options(is_full, **decoder, **LORA), act, gpu)


def of_update(is_full: bool, batch_size: int, gpu: Gpu = H200) -> Roofline:
    """Forward and backward of a micro-batch, with LoRA and checkpointing."""

    def step(policy: Any) -> None:
        out = policy.evaluate(observations(policy, batch_size), drawn_chunk(policy, batch_size))
        (out.log_prob.sum() + out.entropy.sum()).backward()

    return _of(large_policy.options(is_full, **PARALLEL, **LORA, gradient_checkpointing=True), step, gpu)


def _of(config: Any, run: Callable[[Any], None], gpu: Gpu) -> Roofline:
    policy = large_policy.without_values(config, "cuda")
    policy.norm_stats = memory._unit_statistics(policy, large_policy.spec_of(config))
    with memory.without_values(policy), Roofline(gpu) as roofline:
        run(policy)
    return roofline


def table(is_full: bool = True, gpu: Gpu = H200) -> str:
    """Markdown: acting and updating with 7 billion parameters."""
    rows = [(f"act, parallel, B={n}", of_act(is_full, PARALLEL, n, gpu), n) for n in (1, 16, 64)]
    rows += [(f"act, autoregressive, B={n}", of_act(is_full, AUTOREGRESSIVE, n, gpu), n) for n in (1, 16, 64)]
    rows += [(f"forward and backward, micro-batch of {n}", of_update(is_full, n, gpu), n) for n in (8, 32)]
    lines = ["| computed, not measured | operations | TFLOP | GPU at its roof, ms | with the host's hand-over, ms |"]
    lines += ["|---|---|---|---|---|"]
    for what, found, _ in rows:
        times = f"{1000 * found.seconds:,.0f} | {1000 * found.eager_seconds:,.0f}"
        lines.append(f"| {what} | {found.kernels:,} | {found.flops / 1e12:,.1f} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
