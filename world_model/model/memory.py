"""Memory of imagined episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from world_model.interfaces import Context
from world_model.model.objects import ObjectMemory
from world_model.noise import NoiseStream
from world_model.types import Frames


@dataclass(frozen=True)
class Memory:
    """Memory of B imagined episodes.

    Imagining changes nothing of it but the noise, which goes on. `WorldModel.extend` and `put` may write into the
    context of the memory that they are given, which is used no more: see `copy`.

    Attributes:
        context: of the dynamics.
        reference: B x 1, the episode's first frame.
        recent: B x R, the last frames, the newest last; the first one repeated where there are fewer.
        instruction: B strings.
        noise: of what happens, a stream for each episode; also of what else might have happened (`other_futures`), so
            that asking changes nothing.
        objects: where the objects are, by the objects part; None where the world model has none.
    """

    context: Context
    reference: Frames
    recent: Frames
    instruction: list[str]
    noise: NoiseStream
    objects: ObjectMemory | None = None

    @property
    def size(self) -> int:
        return len(self.instruction)

    def select(self, rows: Sequence[int]) -> Memory:
        """Of the episodes at `rows`, in that order; repeats allowed, which then draw the same noise."""
        rows = list(rows)
        index = torch.tensor(rows, dtype=torch.int64, device=self.reference.states.device)
        return Memory(
            self.context.select(index),
            self.reference.select(index),
            self.recent.select(index),
            [self.instruction[i] for i in rows],
            self.noise.select(index),
            None if self.objects is None else self.objects.select(index),
        )

    def copy(self) -> Memory:
        """One whose extending leaves this one as it is; the noise stays in common."""
        rows = torch.arange(self.size, device=self.reference.states.device)
        return replace(self, context=self.context.select(rows))

    def put(self, rows: Sequence[int], other: Memory) -> Memory:
        """With the episodes at `rows` replaced by those of `other`."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.reference.states.device)
        place = {row: self.size + i for i, row in enumerate(rows)}
        order = [place.get(i, i) for i in range(self.size)]
        instruction, objects = self.instruction + other.instruction, self.objects
        if objects is not None and other.objects is not None:
            objects = objects.put(index, other.objects)
        return Memory(
            self.context.put(index, other.context),
            put_frames(self.reference, index, other.reference),
            put_frames(self.recent, index, other.recent),
            [instruction[i] for i in order],
            self.noise.put(index, other.noise),
            objects,
        )

    def seeing(self, frames: Frames) -> Memory:
        """With F more frames among the last ones, by which success is judged; the dynamics' context stays as it is."""
        kept = self.recent.states.shape[1]
        recent = Frames(
            torch.cat([self.recent.latents, frames.latents], 1)[:, -kept:],
            torch.cat([self.recent.states, frames.states], 1)[:, -kept:],
        )
        return replace(self, recent=recent)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All but the instruction, for a keyframe; the first dimension of each is B."""
        context = {f"context.{name}": tensor for name, tensor in self.context.tensors().items()}
        objects = {} if self.objects is None else self.objects.tensors()
        return (
            context
            | {f"objects.{name}": tensor for name, tensor in objects.items()}
            | {
                "reference.latents": self.reference.latents,
                "reference.states": self.reference.states,
                "recent.latents": self.recent.latents,
                "recent.states": self.recent.states,
                "noise": self.noise.rows,
            }
        )

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Memory:
        """The same episodes' instruction, with what `tensors` gave in place of the rest."""

        def of(part: str) -> dict[str, torch.Tensor]:
            return {name.removeprefix(part): tensor for name, tensor in tensors.items() if name.startswith(part)}

        return replace(
            self,
            context=type(self.context).from_tensors(of("context.")),
            objects=None if self.objects is None else self.objects.with_tensors(of("objects.")),
            reference=Frames(tensors["reference.latents"], tensors["reference.states"]),
            recent=Frames(tensors["recent.latents"], tensors["recent.states"]),
            noise=NoiseStream.from_rows(tensors["noise"]),
        )


def put_frames(frames: Frames, rows: torch.Tensor, other: Frames) -> Frames:
    """`frames` with those at `rows`, int64, replaced by `other`."""
    return Frames(frames.latents.index_copy(0, rows, other.latents), frames.states.index_copy(0, rows, other.states))
