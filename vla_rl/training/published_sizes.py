"""Memory of published checkpoints, from sizes known without a download. Imports no torch.

`vla-rl doctor`, `vla-rl plan --memory` and docs/gpu.md say it from here.
"""

from __future__ import annotations

from dataclasses import dataclass

GIGABYTE = 1024**3
_FROZEN = 2  # Bytes of a weight in bfloat16.
_TRAINED = 16  # Of a trained one: weight, gradient and two moments of AdamW, in float32.
# How the names of checkpoints on the Hub begin that all have one size: OpenVLA's, and OpenVLA-OFT's for LIBERO, which
# have an L1 head and read the state.
OPENVLA_7B = "openvla/openvla-7b"
OPENVLA_OFT_7B = "moojink/openvla-7b-oft-finetuned-libero"


@dataclass(frozen=True)
class PublishedCheckpoint:
    """A family of checkpoints, published in bfloat16.

    Attributes:
        name: for people.
        parameters: of the whole policy. adapters: of LoRA's, of rank 32, on every linear layer of OpenVLA, on those of
            the action expert of the others.
        working: bytes that training adapters needs beside weights, gradients and optimizer, with gradient checkpointing
            and a micro-batch of 8 decisions, as `vla_rl.training.memory` counts them; 0: not counted.
    """

    name: str
    parameters: int
    adapters: int
    working: float = 0

    @property
    def acting(self) -> float:
        """Bytes of the weights, which is what acting needs beside a little."""
        return _FROZEN * self.parameters

    @property
    def with_adapters(self) -> float:
        """Bytes to train adapters."""
        return self.acting + _TRAINED * self.adapters + self.working

    @property
    def with_all(self) -> float:
        """Bytes to train every weight."""
        return _TRAINED * self.parameters + self.working


PUBLISHED = (
    PublishedCheckpoint("OpenVLA 7B", 7_541_237_184, 107_862_016, 4.39 * GIGABYTE),
    PublishedCheckpoint("OpenVLA-OFT 7B (discrete)", 7_541_237_184, 107_862_016, 4.57 * GIGABYTE),
    PublishedCheckpoint("SmolVLA", 450_046_176, 6_832_128),
    PublishedCheckpoint("pi0", 3_501_372_176, 13_860_864),
    PublishedCheckpoint("pi0.5", 3_616_757_520, 13_860_864),
)


def needs(checkpoint: PublishedCheckpoint) -> tuple[str, str, str]:
    """GB to act, to train adapters, and to train every weight; "+": and activations, which are not counted."""
    acting, adapters, weights = (
        f"{size / GIGABYTE:.1f} GB" for size in (checkpoint.acting, checkpoint.with_adapters, checkpoint.with_all)
    )
    more = "" if checkpoint.working else " +"
    return acting, adapters + more, weights + more


def table() -> str:
    """What each needs, in Markdown, for docs/gpu.md."""
    rows = [("published checkpoint", "parameters", "to act", "to train adapters", "to train every weight")]
    rows += [(c.name, f"{c.parameters / 1e9:.2f} billion", *needs(c)) for c in PUBLISHED]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- | ---: | ---: | ---: | ---: |", *lines[1:]])


def advice(gpu_bytes: float | None = None) -> str:
    """A line for people: which of them a GPU of that memory trains; None: what GPUs they need."""
    if gpu_bytes is None:
        parts = []
        for checkpoint in PUBLISHED:
            adapters, weights = (f"{n / GIGABYTE:.0f}" for n in (checkpoint.with_adapters, checkpoint.with_all))
            more = "" if checkpoint.working else "+"
            parts.append(f"{checkpoint.name} {adapters}{more} ({weights}{more})")
        return (
            f"GB of a GPU to train adapters (every weight) of published checkpoints: {', '.join(parts)}; +: and "
            "activations"
        )
    trained = [c.name for c in PUBLISHED if c.with_adapters < gpu_bytes]
    trained_whole = [c.name for c in PUBLISHED if c.with_all < gpu_bytes]
    return (
        f"has memory to train adapters of: {', '.join(trained) or 'none'}; every weight of: "
        f"{', '.join(trained_whole) or 'none'} (of SmolVLA, pi0 and pi0.5 before activations)"
    )
