"""World model as trust measures it: imagined from real first frames, judged as `WorldModelEnv` does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from world_model.config import ImaginationConfig
from world_model.imagination import reward
from world_model.imagination.chunk import imagine_chunk
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel
from world_model.trust.types import Scores
from world_model.types import Actions, Frames


class OpenLoop:
    """See `world_model.trust.types.WorldModel`; frames lie on the CPU.

    Args:
        config: how the environment imagines: what counts as a success, verification, disagreement, horizon.
        chunk_frames: frames of the policy's chunk, ceil(H / G): success is verified, and futures compared, chunk by
            chunk.
    """

    def __init__(self, world_model: WorldModel, config: ImaginationConfig, chunk_frames: int = 1) -> None:
        config = config.model_copy(update={"action_penalty": 0.0})  # Nobody is paid here.
        self.world_model, self.config, self.chunk_frames = world_model, config, chunk_frames
        self.frame_steps = world_model.frame_steps

    def encode(self, images: np.ndarray, states: np.ndarray) -> Frames:
        """See `WorldModel.encode`."""
        return _to(self.world_model.encode(images, states), "cpu")

    def decode(self, frames: Frames) -> np.ndarray:
        """See `WorldModel.decode`."""
        return self.world_model.decode(_to(frames, self.world_model.device))

    def begin(self, first: Frames, instruction: Sequence[str], seeds: Sequence[int]) -> Memory:
        """See `trust.types.WorldModel.begin`. The same seeds and actions give the same future once: noise goes on."""
        return self.world_model.begin(_to(first, self.world_model.device), instruction, seeds)

    def imagine(self, context: Memory, actions: Actions) -> tuple[Frames, Scores]:
        """The F frames that follow, and what the environment would say of them.

        Like there, no success counts after futures disagreed too much, or after the config's horizon, and the
        probability there is 0. Unlike there, episodes go on after they have ended, with what they ended with, also
        where the probability has passed `stop_probability`. With reward "objects" the verdict is a probability above a
        half.
        """
        device, context = self.world_model.device, context.copy()
        succeeded = torch.zeros(context.size, dtype=torch.bool, device=device)
        steps = torch.zeros(context.size, dtype=torch.int64, device=device)
        frames: list[Frames] = []
        probability: list[torch.Tensor] = []
        success: list[torch.Tensor] = []
        disagreement: list[torch.Tensor] = []
        for start in range(0, actions.executed.shape[1], self.chunk_frames):
            part = actions.at(slice(start, start + self.chunk_frames))
            part = Actions(part.values.to(device), part.executed.to(device))
            executed = part.executed.sum(2)
            before = steps[:, None] + executed.cumsum(1) - executed
            steps = steps + executed.sum(1)
            judged = (executed > 0) & (before < (self.config.horizon or math.inf))
            chunk = imagine_chunk(self.world_model, context, part, self.config, judged)
            context = self.world_model.extend(context, chunk.frames, part)
            is_objects = self.config.reward == "objects"
            found = (
                reward.probability(self.world_model, chunk, self.config)
                if is_objects
                else self._probability(chunk.success_score, chunk.clip_score)
            )
            probability.append(found * judged)
            counted = (probability[-1] > reward.LIKELY).cummax(1).values if is_objects else chunk.success
            success.append(succeeded[:, None] | counted)
            succeeded = success[-1][:, -1]
            frames.append(chunk.frames)
            spread = chunk.disagreement.nan_to_num(nan=math.inf)
            disagreement.append(torch.where(judged, spread[:, None], math.nan))
        together = Frames.joined(frames, 1)
        return _to(together, "cpu"), _scores(probability, success, disagreement if self.config.ensemble > 1 else None)

    @torch.no_grad()
    def imagine_ahead(
        self, real: Frames, actions: Actions, instruction: Sequence[str], seeds: Sequence[int], depth: int
    ) -> np.ndarray:
        """See `trust.types.WorldModel.imagine_ahead`. Noise is drawn for `depth` frames wherever it starts."""
        device, num_frames = self.world_model.device, actions.executed.shape[1]
        real = _to(real, device)
        room = (0, 0, 0, 0, 0, depth - 1)  # Beyond the end nothing is executed, nor looked at.
        values = torch.nn.functional.pad(actions.values, room).to(device)
        every = Actions(values, torch.nn.functional.pad(actions.executed, room[2:]).to(device))
        memory = self.begin(real.at(slice(0, 1)), instruction, seeds)
        found = torch.zeros(memory.size, num_frames, depth)
        for last in range(num_frames):
            ahead = self.world_model.dynamics.imagine(memory.context, every.at(slice(last, last + depth)), memory.noise)
            probability = self._probability(*self.world_model.scores(memory, ahead)).cpu()
            for d in range(min(depth, num_frames - last)):
                found[:, last + d, d] = probability[:, d]
            here = slice(last, last + 1)
            memory = self.world_model.extend(memory, real.at(slice(last + 1, last + 2)), every.at(here))
        return found.numpy()

    def score(self, frames: Frames, instruction: Sequence[str]) -> Scores:
        """The same heads and thresholds on real frames, B x F with the episode's first; that one is never a success."""
        frames = _to(frames, self.world_model.device)
        memory = self.world_model.begin(frames.at(slice(0, 1)), instruction, [0] * len(instruction))
        score, clip = self.world_model.scores(memory, frames)
        counted = self.world_model.counts(score, clip)
        counted[:, 0] = False
        return _scores([self._probability(score, clip)], [counted.cummax(1).values])

    @property
    def has_objects(self) -> bool:
        """See `KnowsObjects.has_objects`."""
        return self.world_model.objects is not None

    def object_poses(self, first: Frames, actions: Actions, instruction: Sequence[str]) -> np.ndarray:
        """See `KnowsObjects.object_poses`."""
        device, part = self.world_model.device, self.world_model.objects
        assert part is not None, "has_objects says whether there is such a part"
        memory = self.begin(first, instruction, [0] * len(instruction)).objects
        assert memory is not None, "a world model with this part remembers objects"
        actions = Actions(actions.values.to(device), actions.executed.to(device))
        return torch.cat([memory.poses[:, None], part.roll(memory, actions)[1]], 1).cpu().numpy()

    def read_objects(self, frames: Frames, instruction: Sequence[str]) -> np.ndarray:
        """See `KnowsObjects.read_objects`."""
        part = self.world_model.objects
        assert part is not None, "has_objects says whether there is such a part"
        return part.read(_to(frames, self.world_model.device), instruction).cpu().numpy()

    def _probability(self, score: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        """What RL is paid with reward "probability"; the less sure network's own where none was calibrated."""
        if self.world_model.metadata.success_probability is None:
            return torch.minimum(score, clip).float().sigmoid()
        return self.world_model.probability(score, clip)


def _scores(
    probability: Sequence[torch.Tensor],
    success: Sequence[torch.Tensor],
    disagreement: Sequence[torch.Tensor] | None = None,
) -> Scores:
    def on_host(parts: Sequence[torch.Tensor]) -> np.ndarray:
        return torch.cat(list(parts), 1).cpu().numpy()

    spread = None if disagreement is None else on_host(disagreement)
    return Scores(on_host(probability), on_host(success), spread)


def _to(frames: Frames, device: torch.device | str) -> Frames:
    return Frames(frames.latents.to(device), frames.states.to(device))
