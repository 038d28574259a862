"""The parts of the benchmark, each in a file of its own with `measure(sheet)`; this one says when and how long."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Part:
    """One part, in the module of its name.

    Attributes:
        what: for people. minutes: it may take at full size, at most 8. needs: packages without which it is left out.
    """

    name: str
    what: str
    minutes: float
    needs: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Where it is."""
        return f"{__name__}.{self.name}"

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and this Python lacks."""
        return [name for name in self.needs if find_spec(name) is None]


_CONFIG = ("pydantic", "yaml")
_POLICY = (*_CONFIG, "safetensors", "timm", "torchvision", "transformers", "tokenizers", "peft")
_WORLD_MODEL = (*_CONFIG, "safetensors", "diffusers")
# In order: what says most comes first, as time may run out.
PARTS = {
    part.name: part
    for part in (
        Part("rates", "What the machine gives at best: matrix products, copies, launches", 1.0),
        Part("correctness", "Policies and learners against the CPU", 4.0, _POLICY),
        Part("runs", "Real runs: GRPO stopped and resumed, cloning", 4.0, (*_POLICY, "accelerate")),
        Part(
            "imagination", "Imagined episodes, 40 to 2,048 at once, and frames of 64 and 256 pixels", 4.0, _WORLD_MODEL
        ),
        Part("act", "Acting with 7 billion parameters, 1 to 64 environments", 8.0, _POLICY),
        Part("update", "An update with 7 billion parameters, micro-batches of 8 to 32", 4.0, _POLICY),
        Part("flow", "Acting and updating with SmolVLA and pi0", 4.0, (*_POLICY, "lerobot")),
        Part("memory", "Memory measured, against what `vla-rl plan --memory` predicts", 3.0, _POLICY),
        Part("rendering", "EGL rendering in 1 to 16 processes beside acting", 4.0, (*_POLICY, "mujoco")),
        Part(
            "rl7b",
            "A whole iteration of RL in LIBERO with 7 billion parameters",
            7.0,
            (*_POLICY, "accelerate", "mujoco", "libero"),
        ),
        Part(
            "recipes",
            "Two updates of each recipe for a published checkpoint",
            4.0,
            (*_POLICY, "lerobot", "libero"),
        ),
        Part("video", "Wan's transformers at their published sizes", 4.0, _WORLD_MODEL),
    )
}
FIRST = "rates"  # Others measure against it.
