"""Dynamic latent bootstrapping (Sword, arXiv 2605.07288): the dynamics learns to go on from its own frames.

In imagination a frame follows imagined ones, in training real ones. So a rising share of the clips comes from episodes
that the dynamics has imagined itself, with the logged actions: what it sees before each frame is what it imagined, what
it is to predict is what really came. The imagined latents lie in a bounded cache, which is made anew at intervals.
The paper does not publish its schedule and refresh rule; these are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from vla_rl.config import ConfigError
from world_model.data.clips import ClipDataset, ClipSourceConfig
from world_model.interfaces import Dynamics
from world_model.noise import NoiseStream
from world_model.types import Clip, Frames

EPISODES_AT_ONCE = 32
SHARE, START, RAMP = 0.5, 0.2, 0.5  # Of the clips, at the end; of the updates after, and over, which it rises from 0.
REFRESH_EVERY = 100  # Updates after which the cache is imagined anew.
EPISODES, MAX_FRAMES = 64, 4096  # Imagined at each refresh, and kept of them, at most.
_EPISODES, _CLIPS = 3, 4  # Streams of random numbers.


class BootstrapConfig(ClipSourceConfig):
    """Dynamic latent bootstrapping: the dynamics' own frames as context. Measured, it made imagination worse."""

    kind: Literal["latent_bootstrap"] = "latent_bootstrap"

    def check(self, save_every: int) -> None:
        """See `ClipSourceConfig.check`: the cache is made anew where a fit may resume."""
        if save_every % REFRESH_EVERY:
            raise ConfigError(
                f"world_model.save_every: got {save_every}, must be a multiple of {REFRESH_EVERY} with clip_source "
                "latent_bootstrap, or a stopped fit would not go on as it was"
            )

    def build(
        self, clips: ClipDataset, dynamics: Dynamics, num_steps: int, seed: int, device: torch.device | str
    ) -> LatentBootstrap:
        """See `ClipSourceConfig.build`."""
        return LatentBootstrap(clips, dynamics, num_steps, seed, device)


@dataclass(frozen=True)
class CachedEpisode:
    """An imagined episode, on the CPU: latents float16 (T, V, C, h, w), states float32 (T, S); frame 0 is real."""

    latents: torch.Tensor
    states: torch.Tensor


class LatentBootstrap:
    """Clips for the dynamics, some of them with its own frames as context.

    What a step draws depends on its number, and on the weights at the last refresh, which is at every
    REFRESH_EVERY-th step. The cache is replaced there, so it is never larger, and a fit that resumes there is exact.

    Args:
        num_steps: of the stage, over which the share rises.
    """

    def __init__(
        self,
        clips: ClipDataset,
        dynamics: Dynamics,
        num_steps: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.clips, self.dynamics = clips, dynamics
        self.num_steps, self.seed, self.device = num_steps, seed, device
        self.cache: dict[tuple[int, int], CachedEpisode] = {}

    @property
    def num_frames(self) -> int:
        """Frames in the cache, at most MAX_FRAMES."""
        return sum(len(episode.states) for episode in self.cache.values())

    def share(self, step: int) -> float:
        """Of the clips of a step that are to have imagined context: 0 at first, then rising to SHARE."""
        done = step / max(self.num_steps, 1) - START
        return SHARE * min(max(done / RAMP, 0.0), 1.0)

    def batch(self, size: int, step: int) -> tuple[Clip, Frames | None]:
        """Clips, and what the dynamics is to see of them in place of their own frames; None: just those."""
        share = self.share(step)
        if share and step % REFRESH_EVERY == 0:
            self.refresh(step)
        drawn = self.clips.draw(size, self.seed, step)
        if not share or not self.cache:
            return self.clips.clip_of(*drawn), None
        own = np.random.default_rng([self.seed, step, _CLIPS]).random(size) < share
        others = self.clips.draw(size, self.seed, step, self._targets())
        which, frame, valid, first = (
            np.where(own.reshape(-1, *[1] * (a.ndim - 1)), b, a) for a, b in zip(drawn, others, strict=True)
        )
        clip = self.clips.clip_of(which, frame, valid, first)
        return clip, self._context(clip, which, frame, own)

    @torch.no_grad()
    def refresh(self, step: int) -> None:
        """Imagine other episodes with the dynamics as it is now, and forget the ones before."""
        rng = np.random.default_rng([self.seed, step, _EPISODES])
        chosen, room = [], MAX_FRAMES
        for number in rng.permutation(self.clips.num_episodes).tolist():
            part, episode = self.clips.locate(number)
            room -= int(self.clips.parts[part].frames.counts[episode])
            if room < 0 or len(chosen) == EPISODES:
                break
            chosen.append((part, episode))
        self.cache = {}
        for start in range(0, len(chosen), EPISODES_AT_ONCE):
            self._imagine(chosen[start : start + EPISODES_AT_ONCE], step)

    def _imagine(self, chosen: list[tuple[int, int]], step: int) -> None:
        which = np.array([part for part, _ in chosen])
        starts, counts = (
            np.array([getattr(self.clips.parts[w].frames, name)[e] for w, e in chosen]) for name in ("starts", "counts")
        )
        number = np.arange(counts.max())
        frame = starts[:, None] + np.minimum(number, counts[:, None] - 1)
        clip = self.clips.clip_of(which, frame, number < counts[:, None]).to(self.device)
        keys = np.random.SeedSequence([self.seed, step]).generate_state(len(chosen), np.uint64)
        noise = NoiseStream(keys.tolist(), self.device)
        context = self.dynamics.begin(clip.frames.at(slice(0, 1)), noise)
        frames = [clip.frames.at(slice(0, 1))]
        for i in range(1, len(number)):
            action = clip.actions.at(slice(i, i + 1))
            frames.append(self.dynamics.imagine(context, action, noise))
            context = self.dynamics.extend(context, frames[-1], action, noise)
        latents = torch.cat([f.latents for f in frames], 1).detach().half().cpu()
        states = torch.cat([f.states for f in frames], 1).detach().float().cpu()
        for row, (key, count) in enumerate(zip(chosen, counts.tolist(), strict=True)):
            self.cache[key] = CachedEpisode(latents[row, :count].clone(), states[row, :count].clone())

    def _targets(self) -> list[np.ndarray]:
        """Of each part, the frames of cached episodes that follow another."""
        targets: list[list[np.ndarray]] = [[] for _ in self.clips.parts]
        for part, episode in self.cache:
            frames = self.clips.parts[part].frames
            start, count = int(frames.starts[episode]), int(frames.counts[episode])
            targets[part].append(np.arange(start + 1, start + count))
        return [np.concatenate(found) if found else np.zeros(0, np.int64) for found in targets]

    def _context(self, clip: Clip, which: np.ndarray, frame: np.ndarray, own: np.ndarray) -> Frames:
        latents, states = clip.frames.latents.clone(), clip.frames.states.clone()
        for row in np.flatnonzero(own).tolist():
            frames = self.clips.parts[which[row]].frames
            episode = int(frames.owner[frame[row, 0]])
            found = self.cache[int(which[row]), episode]
            number = torch.from_numpy(frame[row] - frames.starts[episode])
            latents[row], states[row] = found.latents[number].float(), found.states[number]
        return Frames(latents, states)


METHOD = BootstrapConfig
