"""Protocols of the world model's parts: autoencoder, dynamics, success head."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

import torch
from pydantic import Field
from torch import nn

from vla_rl.config import Config
from vla_rl.types import EnvSpec
from world_model.noise import NoiseStream
from world_model.types import Actions, Clip, DynamicsInputs, Frames


class Autoencoder(nn.Module):
    """Images to latents and back."""

    latent_shape: tuple[int, int, int]  # (C, h, w) of one image
    image_size: tuple[int, int]  # (height, width), pixels

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (N, height, width, 3) -> scaled latents float32 (N, C, h, w). No gradient."""
        raise NotImplementedError

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Scaled latents float32 (N, C, h, w) -> uint8 (N, height, width, 3). No gradient."""
        raise NotImplementedError


class Context(Protocol):
    """What a dynamics model remembers of B episodes: the reference frame and the last few, as keys and values.

    `Dynamics.extend` and `put` may write into the context that they are given, which is then used no more; whoever goes
    on from one context in two ways selects all of it first, which copies. Imagining does not write into it.
    """

    def select(self, rows: torch.Tensor) -> Self:
        """Of the episodes at `rows`, int64, in that order (repeats allowed)."""
        ...

    def put(self, rows: torch.Tensor, other: Any) -> Self:
        """With the episodes at `rows`, int64, replaced by those of `other`, a context of the same dynamics."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it, for a keyframe; the first dimension of each is B."""
        ...

    @staticmethod
    def from_tensors(tensors: dict[str, torch.Tensor]) -> Any:
        """What `tensors` gave."""
        ...


class DynamicsConfig(Config):
    """Base of every dynamics' options: what the world model reads of them, and how the network is built.

    For a dynamics of your own extend it, implement `build`, and name it in a recipe as "package.module:Class".

    Attributes:
        learns_from_own_frames: `Dynamics.loss` takes `seen`, which `world_model.clip_source` needs.
        needs_body: actions are followed by what they move the robot's body alone (`Actions.values`).
    """

    learns_from_own_frames: ClassVar[bool] = False

    @property
    def needs_body(self) -> bool:
        return False

    kind: str = Field(description="The dynamics: transformer, wan, or package.module:Class.")
    temperature: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Strength of the noise that imagining begins with: 1 draws futures as they were learned, weaker "
        "noise stays nearer to the expected one, 0 is always the same.",
    )

    def build(self, inputs: DynamicsInputs) -> Dynamics:
        """Return a fresh network; torch has been seeded.

        Raises:
            ValueError: sizes that do not fit each other, or a folder of weights that cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__}.build: return a world_model.interfaces.Dynamics")

    def for_env(self, spec: EnvSpec) -> Self:
        """Return these options completed by what the environment knows, such as its cameras' projections."""
        return self


class Dynamics[C: DynamicsConfig](nn.Module):
    """Action-conditioned video prediction in latent space.

    A frame depends on earlier frames and on the actions up to it, never on later ones. Every random number of
    imagination comes from the `NoiseStream` that is handed in.
    """

    config: C  # With the state dict all that it takes to build the same again; `temperature` may be set.
    frame_steps: int  # G

    def loss(
        self, clip: Clip, generator: torch.Generator, seen: Frames | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Training loss, and metrics: numbers, or scalars without gradient, which are read all at once.

        `seen`: what it sees of the clip in place of its frames, to learn from its own predictions.

        Raises:
            ValueError: `seen` is given, and this dynamics cannot.
        """
        raise NotImplementedError

    def begin(self, reference: Frames, noise: NoiseStream) -> Context:
        """Start B episodes at their first frame (F = 1). No gradient."""
        raise NotImplementedError

    def extend(self, context: Any, frames: Frames, actions: Actions, noise: NoiseStream) -> Context:
        """Remember F more frames, real or imagined, with the actions that led to them. No gradient.

        It may write into `context`, which is used no more (see `Context`).
        """
        raise NotImplementedError

    def compile_imagining(self, backend: str = "inductor") -> None:
        """Compile, from the next use on, what imagining computes.

        Args:
            backend: torch.compile's; "aot_eager" captures alone, which takes seconds and gains nothing.

        Raises:
            ValueError: this dynamics cannot.
        """
        raise ValueError(f"env.imagination.compile: not for {type(self).__name__}; set it to false")

    def imagine(self, context: Any, actions: Actions, noise: NoiseStream, num_steps: int | None = None) -> Frames:
        """Predict the F frames that follow; does not remember them (call `extend`). No gradient.

        Args:
            num_steps: of the sampler; None takes the config's.
        """
        raise NotImplementedError


class SuccessHead(nn.Module):
    """Whether the instruction has been carried out, from the last few frames and the reference."""

    num_frames: int  # R, how many last frames it sees

    def loss(
        self, frames: Frames, reference: Frames, instruction: list[str], success: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Binary cross-entropy. frames: B x R, the newest last, earliest repeated where fewer; reference: B x 1;
        success: bool (B,)."""
        raise NotImplementedError

    def score(self, frames: Frames, reference: Frames, instruction: list[str]) -> torch.Tensor:
        """Logit of success, float32 (B,). No gradient."""
        raise NotImplementedError
