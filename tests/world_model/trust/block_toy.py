"""A block pushed over a 16 x 16 table: logged episodes, and a world model of it that is right, or wrong on purpose.

A control step moves the block by the rounded action; the episode succeeds once the block lies on the target. The
latents are the image itself, so that every error can be worked out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from world_model.trust.types import Scores
from world_model.types import Actions, Frames, LoggedEpisode

SIDE, BLOCK, FRAME_STEPS, NUM_FRAMES = 16, 3, 2, 7
TARGET = np.array([11, 11])
REACH = 1  # The block lies on the target where neither coordinate is further off than this.
RED, BLUE = (230, 30, 30), (30, 30, 230)


def draw(positions: np.ndarray, color: tuple[int, int, int] = RED) -> np.ndarray:
    """int (..., 2) -> uint8 (..., 16, 16, 3): a colored block and a gray target."""
    flat = positions.reshape(-1, 2)
    images = np.full((len(flat), SIDE, SIDE, 3), 20, np.uint8)
    images[:, TARGET[1] : TARGET[1] + BLOCK, TARGET[0] : TARGET[0] + BLOCK] = 90
    for image, (x, y) in zip(images, flat, strict=True):
        image[y : y + BLOCK, x : x + BLOCK] = color
    return images.reshape(*positions.shape[:-1], SIDE, SIDE, 3)


def find(images: np.ndarray) -> np.ndarray:
    """uint8 (..., 16, 16, 3) -> int (..., 2): where the red block lies; the corner where there is none."""
    red = (images[..., 0] > 150).reshape(*images.shape[:-3], -1)
    place = red.argmax(-1)
    return np.stack([place % SIDE, place // SIDE], -1)


def moved(position: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """int (B, 2), float (B, G, 2) -> int (B, 2)."""
    for g in range(actions.shape[1]):
        position = np.clip(position + np.rint(actions[:, g]).astype(np.int64), 0, SIDE - BLOCK)
    return position


def on_target(positions: np.ndarray, reach: float = REACH) -> np.ndarray:
    """int (..., 2) -> bool (...)."""
    return np.abs(positions - TARGET).max(-1) <= reach


def episodes(
    num: int,
    seed: int = 0,
    color: tuple[int, int, int] = RED,
    skill: float = 0.62,
    past_success: bool = True,
    slip: float = 0.0,
) -> list[LoggedEpisode]:
    """Episodes of a policy that steps towards the target with probability `skill`, else anywhere.

    Args:
        past_success: go on after it; else the episode ends there, so that lengths differ.
        slip: probability that a control step does not move the block.
    """
    rng = np.random.default_rng(seed)
    found = []
    for i in range(num):
        position = rng.integers(0, 7, 2)
        positions: list[np.ndarray] = [position]
        actions: list[np.ndarray] = [np.zeros((FRAME_STEPS, 2))]
        for _ in range(NUM_FRAMES - 1):
            steps = []
            for _ in range(FRAME_STEPS):
                wanted = np.sign(TARGET - position) if rng.random() < skill else rng.integers(-1, 2, 2)
                steps.append(wanted)
                if not slip or rng.random() >= slip:
                    position = moved(position[None], wanted[None, None])[0]
            positions.append(position)
            actions.append(np.array(steps))
            if on_target(position) and not past_success:
                break
        track = np.array(positions)
        executed = np.ones((len(track), FRAME_STEPS), bool)
        executed[0] = False
        found.append(
            LoggedEpisode(
                images=draw(track, color)[:, None],
                states=track.astype(np.float32),
                actions=np.array(actions, np.float32),
                executed=executed,
                success=np.maximum.accumulate(on_target(track)),
                instruction="push the block onto the target",
                start=f"push/eval/{i}",
            )
        )
    return found


@dataclass(frozen=True)
class BlockWorldModel:
    """The table's world model.

    Attributes:
        reach: of the success head; above REACH it is optimistic.
        follows: actions count. Else the block always makes the same move, the policy's mean one.
        wobble: standard deviation of the noise on imagined latents.
        slip: probability that an imagined control step does not move the block.
        sure: probability of a success where it sees one, and of a failure where it does not.
        enlarge: images are so many times as large, each pixel a square of equal ones.
    """

    reach: float = REACH
    follows: bool = True
    wobble: float = 0.02
    slip: float = 0.0
    enlarge: int = 1
    sure: float = 0.97
    frame_steps: int = FRAME_STEPS

    def encode(self, images: np.ndarray, states: np.ndarray) -> Frames:
        return self._frames(images[:, :, :, :: self.enlarge, :: self.enlarge], states)

    def decode(self, frames: Frames) -> np.ndarray:
        return _pixels(frames).repeat(self.enlarge, 3).repeat(self.enlarge, 4)

    def begin(self, first: Frames, instruction: Sequence[str], seeds: Sequence[int]) -> tuple[np.ndarray, list]:
        return find(_pixels(first)[:, 0, 0]), [np.random.default_rng(seed) for seed in seeds]

    def imagine(self, context: tuple[np.ndarray, list], actions: Actions) -> tuple[Frames, Scores]:
        position, generators = context
        values = (actions.values * actions.executed[..., None]).numpy()
        if not self.follows:
            values = np.full_like(values, 0.6)
        positions, noise = [], []
        for f in range(values.shape[1]):
            keeps = np.stack([g.random(self.frame_steps) >= self.slip for g in generators])
            position = moved(position, values[:, f] * keeps[..., None])
            positions.append(position)
            noise.append(np.stack([g.standard_normal((1, 3, SIDE, SIDE)) for g in generators]))
        track = np.stack(positions, 1)
        clean = self._frames(draw(track)[:, :, None], track.astype(np.float32))
        wobbly = clean.latents + self.wobble * torch.from_numpy(np.stack(noise, 1)).float()
        return replace(clean, latents=wobbly), self._scores(track)

    def imagine_ahead(
        self, real: Frames, actions: Actions, instruction: Sequence[str], seeds: Sequence[int], depth: int
    ) -> np.ndarray:
        positions, values = find(_pixels(real)[:, :, 0]), (actions.values * actions.executed[..., None]).numpy()
        if not self.follows:
            values = np.full_like(values, 0.6)
        generators = [np.random.default_rng(seed) for seed in seeds]
        found = np.zeros((*values.shape[:2], depth))
        for last in range(values.shape[1]):
            position = positions[:, last]
            for d in range(depth):  # The same draws however many frames follow.
                keeps = np.stack([g.random(self.frame_steps) >= self.slip for g in generators])
                if last + d < values.shape[1]:
                    position = moved(position, values[:, last + d] * keeps[..., None])
                    found[:, last + d, d] = self._probability(position)
        return found

    def score(self, frames: Frames, instruction: Sequence[str]) -> Scores:
        return self._scores(find(_pixels(frames)[:, :, 0]))

    def _frames(self, images: np.ndarray, states: np.ndarray) -> Frames:
        latents = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 1, 2, 5, 3, 4) / 127.5 - 1
        return Frames(latents, torch.from_numpy(states / SIDE))

    def _scores(self, track: np.ndarray) -> Scores:
        success = np.maximum.accumulate(on_target(track, self.reach), axis=1)
        return Scores(self._probability(track).astype(np.float32), success)

    def _probability(self, track: np.ndarray) -> np.ndarray:
        return np.where(on_target(track, self.reach), self.sure, 1 - self.sure)


def _pixels(frames: Frames) -> np.ndarray:
    """B x F frames -> uint8 (B, F, 1, 16, 16, 3)."""
    pixels = ((frames.latents + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return pixels.permute(0, 1, 2, 4, 5, 3).numpy()
