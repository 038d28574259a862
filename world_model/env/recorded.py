"""Imagining as recorded passes: of all episodes of an environment at once, without the host.

A chunk is three passes (`ReplayedPass`: on CUDA a graph each): a future, from the noise over the flow's steps of all
frames to both heads' logits; what is shown of it, with its pictures, as the bytes of one transfer; and remembering it.
Other futures, where successes are verified or futures disagree, are the first one again with other noise. Keys and
values are read where they lie; what is remembered anew is written there after the last pass.

Sizes never change: episodes in which no action is executed pass through, and nothing of them changes.

Recorded or not, what the host needs of a chunk (`Seen`) is read in one transfer: it waits for the device once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

import numpy as np
import torch

from vla_rl.common.cuda_graphs import ReplayedPass, Result
from vla_rl.common.instruction_embedding import WordEmbedding
from world_model.config import ImaginationConfig
from world_model.imagination.chunk import Future, ImaginedChunk, imagine_chunk, imagine_future
from world_model.imagination.reward import probability, worth
from world_model.model.dynamics import VideoDynamics
from world_model.model.memory import Memory
from world_model.model.transformer_block import Remembered, VideoContext
from world_model.model.world_model import WorldModel
from world_model.noise import NoiseStream
from world_model.types import Actions, Frames


@dataclass(frozen=True)
class Seen:
    """A chunk of B episodes on the host.

    Attributes:
        worth: (B, F), see `reward.worth`.
        finite: bool (B,), nothing of it is NaN or infinite.
        discarded, disagreement: (B,), see `ImaginedChunk`.
        states: float32 (B, F, S), the robot's units.
        images: uint8 (B, F, V, height, width, 3); None where one frame of several will be asked for.
        action_error: float32 (B, F), see `WorldModel.action_errors`; None where nothing is taken off for it.
        probability: float32 (B, F), of success, where it is known and `worth` is a verdict.
    """

    worth: np.ndarray
    finite: np.ndarray
    discarded: np.ndarray
    disagreement: np.ndarray
    states: np.ndarray
    images: np.ndarray | None = None
    action_error: np.ndarray | None = None
    probability: np.ndarray | None = None

    def select(self, rows: Sequence[int]) -> Seen:
        """Of the episodes at `rows`."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: array[rows] for name, array in arrays.items() if array is not None})


@torch.no_grad()
def read_chunk(
    world_model: WorldModel,
    memory: Memory,
    chunk: ImaginedChunk,
    config: ImaginationConfig,
    every_image: bool = False,
) -> Seen:
    """Bring a chunk to the host; with a single frame, or `every_image`, its pictures come along."""
    every_image = every_image or chunk.frames.states.shape[1] == 1
    wanted = to_show(world_model, memory, chunk, config, every_image)
    return Seen(**dict(zip(wanted, download(*wanted.values()), strict=True)))


@torch.no_grad()
def to_show(
    world_model: WorldModel, memory: Memory, chunk: ImaginedChunk, config: ImaginationConfig, images: bool
) -> dict[str, torch.Tensor]:
    """What `Seen` has of the chunk that follows `memory`, on the device."""
    frames = chunk.frames
    wanted = {
        "worth": worth(world_model, chunk, config),
        "finite": frames.latents.isfinite().flatten(1).all(1) & frames.states.isfinite().flatten(1).all(1),
        "discarded": chunk.discarded,
        "disagreement": chunk.disagreement,
        "states": world_model.raw_states(frames),
    }
    if images:
        wanted["images"] = world_model.decoded(frames)
    if config.action_penalty:
        wanted["action_error"] = world_model.action_errors(memory, frames, chunk.actions)
    if config.reward == "success" and world_model.metadata.success_probability is not None:
        wanted["probability"] = probability(world_model, chunk, config)
    return wanted


def download(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Copy tensors of any types from the device in one transfer."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    return unpacked(packed(*tensors), [(tensor.dtype, tensor.shape) for tensor in tensors])


def packed(*tensors: torch.Tensor) -> torch.Tensor:
    """The bytes of tensors of any types, one after the other."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


def unpacked(data: torch.Tensor, layout: Sequence[tuple[torch.dtype, torch.Size]]) -> list[np.ndarray]:
    """The tensors that were `packed`, of these types and shapes, on the host."""
    host = data.cpu().split([shape.numel() * dtype.itemsize for dtype, shape in layout])
    # Cloned, so that each begins where its type may begin.
    return [part.clone().view(dtype).view(shape).numpy() for part, (dtype, shape) in zip(host, layout, strict=True)]


IN_PLACE = ("context.keys", "context.values")


class RecordedImagining:
    """See the module's text. An environment's memory keeps its keys and values where they are.

    Raises:
        ValueError: a dynamics of another kind.
    """

    def __init__(self, world_model: WorldModel, config: ImaginationConfig) -> None:
        if not isinstance(world_model.dynamics, VideoDynamics):
            world_model.dynamics.compile_imagining()  # Says that it cannot.
            raise ValueError(f"env.imagination.compile: {type(world_model.dynamics).__name__} cannot be recorded")
        self._world_model, self._config = world_model, config
        heads = (world_model.success, world_model.clip)
        self._words = [part for head in heads for part in head.modules() if isinstance(part, WordEmbedding)]
        self._passes: dict[tuple[str, tuple[str, ...]], ReplayedPass] = {}
        self._place: tuple[int, ...] = ()
        self._layouts: dict[torch.Size, tuple[list[str], list[tuple[torch.dtype, torch.Size]]]] = {}

    @torch.no_grad()
    def imagine(
        self, memory: Memory, actions: Actions, states: torch.Tensor | None = None
    ) -> tuple[ImaginedChunk, Seen]:
        """What `imagine_chunk` and `read_chunk` give, with all pictures."""
        self._hold(memory)
        text = tuple(text for text in memory.instruction for _ in range(actions.values.shape[1]))
        words = {f"words.{i}": part.ids(text) for i, part in enumerate(self._words)}
        given = _inputs(memory) | _of_actions(actions) | words | {"told": states}

        def future(noise: NoiseStream) -> Future:
            latents, after, success, clip, objects, rows = self._replay(self._future, given | {"noise": noise.rows})
            noise.rows = cast(torch.Tensor, rows)
            return Future(_frames(latents, after), cast(torch.Tensor, success), cast(torch.Tensor, clip), objects)

        chunk = imagine_chunk(self._world_model, memory, actions, self._config, states=states, future=future)
        scores = {name: getattr(chunk, name) for name in _CHUNK}
        shown = {"latents": chunk.frames.latents, "states": chunk.frames.states} | scores | _of_actions(actions)
        (data,) = self._replay(self._shown, shown | {"recent": memory.recent.latents})
        names, layout = self._layouts[chunk.frames.latents.shape]
        return chunk, Seen(**dict(zip(names, unpacked(cast(torch.Tensor, data), layout), strict=True)))

    @torch.no_grad()
    def extend(self, memory: Memory, frames: Frames, actions: Actions) -> Memory:
        """What `WorldModel.extend` gives, for the episodes in which an action is executed."""
        self._hold(memory)
        inputs = _inputs(memory)
        given = inputs | _of_actions(actions) | {"latents": frames.latents, "states": frames.states}
        keys, values, slots, *rest = self._replay(self._remembered, given)
        assert keys is not None and values is not None and slots is not None, "it gives tensors"
        context, row = cast(VideoContext, memory.context), torch.arange(memory.size, device=keys.device)
        for i in range(frames.states.shape[1]):
            context.write(Remembered(keys[:, i], values[:, i], context.latest), (row, slots[:, i]))
        names = [name for name in inputs if name != "objects.words"]
        return memory.with_tensors(_held(memory) | cast(dict[str, torch.Tensor], dict(zip(names, rest, strict=True))))

    # --- what is recorded -----------------------------------------------------------------------

    def _future(self, given: dict[str, torch.Tensor]) -> Result:
        memory, actions = self._inside(given), _actions(given)
        with torch.no_grad():
            for i, part in enumerate(self._words):
                part.given = given[f"words.{i}"]
            try:
                found = imagine_future(
                    self._world_model, memory, memory.noise, actions, self._config, given.get("told")
                )
            finally:
                for part in self._words:
                    part.given = None
        rows = _where(actions, memory.noise.rows, given["noise"])
        return (
            found.frames.latents, found.frames.states, found.success_score, found.clip_score, found.objects_score, rows,
        )  # fmt: skip

    def _shown(self, given: dict[str, torch.Tensor]) -> Result:
        frames = Frames(given["latents"], given["states"])
        chunk = ImaginedChunk(frames, _actions(given), **{name: given[name] for name in _CHUNK})
        recent = replace(self._memory.recent, latents=given["recent"])
        shown = to_show(self._world_model, replace(self._memory, recent=recent), chunk, self._config, images=True)
        layout = [(tensor.dtype, tensor.shape) for tensor in shown.values()]
        self._layouts[frames.latents.shape] = list(shown), layout
        return (packed(*shown.values()),)

    def _remembered(self, given: dict[str, torch.Tensor]) -> Result:
        memory, actions = self._inside(given), _actions(given)
        frames, dynamics = Frames(given["latents"], given["states"]), cast(VideoDynamics, self._world_model.dynamics)
        old = cast(VideoContext, memory.context)
        context, written = dynamics.to_remember(old, frames, actions, memory.noise)
        objects = memory.objects
        if self._world_model.objects is not None and objects is not None:
            objects = self._world_model.objects.roll(objects, actions)[0]
        after = _inputs(replace(memory.seeing(frames), context=context, objects=objects))
        keys = [_where(actions, new.keys, old.keys[row, :, slot]) for new, (row, slot) in written]
        values = [_where(actions, new.values, old.values[row, :, slot]) for new, (row, slot) in written]
        slots = torch.stack([slot for _, (_, slot) in written], 1)
        rest = [_where(actions, after[name], given[name]) for name in after if name != "objects.words"]
        return torch.stack(keys, 1), torch.stack(values, 1), slots, *rest

    # --- in and out -----------------------------------------------------------------------------

    def _hold(self, memory: Memory) -> None:
        """Keep hold of the keys and values; those that lie elsewhere are recorded anew."""
        self._memory, place = memory, tuple(tensor.data_ptr() for tensor in _held(memory).values())
        if place != self._place:
            self._passes, self._place = {}, place

    def _replay(
        self, function: Callable[[dict[str, torch.Tensor]], Result], given: Mapping[str, torch.Tensor | None]
    ) -> Result:
        key = function.__name__, tuple(given)
        if key not in self._passes:
            names = tuple(given)

            def by_name(*tensors: torch.Tensor | None) -> Result:
                return function(cast(dict[str, torch.Tensor], dict(zip(names, tensors, strict=True))))

            self._passes[key] = ReplayedPass(by_name, self._world_model)
        return self._passes[key](*given.values())

    def _inside(self, given: dict[str, torch.Tensor]) -> Memory:
        """The memory that a pass was given, in a pass."""
        memory = self._memory
        if memory.objects is not None:
            memory = replace(memory, objects=replace(memory.objects, words=given["objects.words"]))
        tensors = {name: given[name] for name in _inputs(memory) if name != "objects.words"}
        return memory.with_tensors(_held(memory) | tensors)


# Of an `ImaginedChunk`, beside frames and actions.
_CHUNK = (
    "success_score", "clip_score", "success", "discarded", "disagreement", "objects_score",
)  # fmt: skip


def _inputs(memory: Memory) -> dict[str, torch.Tensor]:
    """What changes of a memory otherwise than in place."""
    words = {} if memory.objects is None else {"objects.words": memory.objects.words}
    return {name: tensor for name, tensor in memory.tensors().items() if name not in IN_PLACE} | words


def _held(memory: Memory) -> dict[str, torch.Tensor]:
    """The keys and values."""
    context = cast(VideoContext, memory.context)
    return dict(zip(IN_PLACE, (context.keys, context.values), strict=True))


def _of_actions(actions: Actions) -> dict[str, torch.Tensor]:
    return {"actions": actions.values, "executed": actions.executed}


def _actions(given: dict[str, torch.Tensor]) -> Actions:
    return Actions(given["actions"], given["executed"])


def _frames(latents: torch.Tensor | None, states: torch.Tensor | None) -> Frames:
    assert latents is not None and states is not None, "a future has both"
    return Frames(latents, states)


def _where(actions: Actions, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The new rows of the episodes in which an action is executed, the old ones of the others."""
    return torch.where(actions.executed.flatten(1).any(1).view(-1, *[1] * (new.ndim - 1)), new, old)
