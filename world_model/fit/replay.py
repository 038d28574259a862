"""Open-loop replay of recorded episodes with their executed actions, the loss on it, and a refit's guard by it.

Refit guard: AUC before and after a stage, on the newest policy's episodes; what made it worse is undone.

A fit that starts from a world model may make it worse: too few episodes, too high a learning rate, outcomes that were
recorded wrongly. What is judged is the order of successes and failures among the episodes that choose the thresholds,
none of which was fitted on, imagined with the same noise before and after each part is fitted. A part that clearly
lost is put back as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vla_rl.config import Config
from vla_rl.evaluation.signal import auc, auc_draws, auc_figure, interval_of
from vla_rl.evaluation.statistics import Figure, figure
from vla_rl.training.trainer import Loss
from world_model.data.clips import NEAR_FRAMES, ClipDataset, SuccessBatch, SuccessSamples
from world_model.data.latents import uploaded
from world_model.fit.config import FitConfig
from world_model.interfaces import SuccessHead
from world_model.model.world_model import WorldModel, load_world_model
from world_model.types import Actions, Frames, LoggedEpisode, collate

EPISODES_AT_ONCE = 64


@torch.no_grad()
def imagine_episodes(
    world_model: WorldModel, first: Frames, actions: Actions, instruction: Sequence[str], seeds: Sequence[int]
) -> tuple[Frames, torch.Tensor, torch.Tensor]:
    """What follows B first frames (F = 1) under B x F actions: frames, and both heads' logits, float32 (B, F)."""
    memory = world_model.begin(first, instruction, seeds)
    frames, success, clip = [], [], []
    for number in range(actions.executed.shape[1]):
        action = actions.at(slice(number, number + 1))
        frame = world_model.dynamics.imagine(memory.context, action, memory.noise)
        scores = world_model.scores(memory, frame)
        memory = world_model.extend(memory, frame, action)
        frames.append(frame)
        success.append(scores[0])
        clip.append(scores[1])
    together = Frames.joined(frames, 1)
    return together, torch.cat(success, 1), torch.cat(clip, 1)


def replay_logits(
    world_model: WorldModel, episodes: Sequence[LoggedEpisode], seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Both heads' logits at each imagined frame of each episode, float (frames - 1,): success head, classifier."""
    success: list[np.ndarray] = []
    clip: list[np.ndarray] = []
    for start in range(0, len(episodes), EPISODES_AT_ONCE):
        part = episodes[start : start + EPISODES_AT_ONCE]
        batch = collate(part)
        first = world_model.encode(batch.images[:, :1], batch.states[:, :1])
        actions = Actions(torch.from_numpy(batch.actions[:, 1:]), torch.from_numpy(batch.executed[:, 1:]))
        device = world_model.device
        actions = Actions(actions.values.to(device), actions.executed.to(device))
        seeds = [_seed(seed, start + i) for i in range(len(part))]
        _, *logits = imagine_episodes(world_model, first, actions, batch.instruction, seeds)
        for each, found in zip((success, clip), logits, strict=True):
            each += [row[: e.num_frames - 1].cpu().numpy() for row, e in zip(found, part, strict=True)]
    return success, clip


@dataclass(frozen=True)
class ImaginedSamples:
    """Imagined frames of recorded episodes with the real outcomes, for success heads to learn from.

    A head that learns from real frames alone has never seen what the dynamics makes of them; one that learns from these
    as well is as sure as the picture warrants.

    Attributes:
        frames: E x F, float16 latents, frame 0 real; on the device where `clips` are held there, else on the CPU.
        success: bool (E, F), really, latched, on the CPU.
        instruction: E strings.
        pools: int64 (n, 2) each, (episode, frame) of successes, near-successes and others; see `SuccessSamples`.
    """

    frames: Frames
    success: torch.Tensor
    instruction: list[str]
    pools: list[np.ndarray]

    @classmethod
    def of(cls, world_model: WorldModel, clips: ClipDataset, most: int, seed: int) -> ImaginedSamples:
        """Imagine the episodes of `clips`, about `most` of them, drawn in proportion to the datasets' weights."""
        chosen = _choose(clips, most, seed)
        longest = max(int(part.frames.counts[part.chosen].max()) for part in clips.parts)
        latents, states, successes, counts, instruction = [], [], [], [], []
        for start in range(0, len(chosen), EPISODES_AT_ONCE):
            which, episode = chosen[start : start + EPISODES_AT_ONCE].T
            firsts = np.array([clips.parts[w].frames.starts[e] for w, e in zip(which, episode, strict=True)])
            count = np.array([clips.parts[w].frames.counts[e] for w, e in zip(which, episode, strict=True)])
            number = np.minimum(np.arange(longest), count[:, None] - 1)
            clip = clips.clip_of(which, firsts[:, None] + number, np.arange(longest) < count[:, None]).to(
                world_model.device
            )
            seeds = [_seed(seed, start + i) for i in range(len(which))]
            reference = clip.frames.at(slice(0, 1))
            imagined, _, _ = imagine_episodes(
                world_model, reference, clip.actions.at(slice(1, None)), clip.instruction, seeds
            )
            kept_on = "cpu" if clips.held is None else world_model.device
            latents.append(torch.cat([reference.latents, imagined.latents], 1).half().to(kept_on))
            states.append(torch.cat([reference.states, imagined.states], 1).to(kept_on))
            successes.append(clip.success.cpu())
            counts.append(count)
            instruction += clip.instruction
        success = torch.cat(successes)
        pools = _pools(success.numpy(), np.concatenate(counts))
        return cls(Frames(torch.cat(latents), torch.cat(states)), success, instruction, pools)

    def batch(self, size: int, num_frames: int, seed: int, step: int) -> SuccessBatch:
        """`size` windows of R = `num_frames`, kinds in equal shares, the same for the same (seed, step)."""
        episode, frame = torch.from_numpy(self._draw(size, seed, step)).T
        window = (frame[:, None] + torch.arange(1 - num_frames, 1)).clamp_min(0)
        rows = episode[:, None]
        return SuccessBatch(
            frames=Frames(self.frames.latents[rows, window].float(), self.frames.states[rows, window]),
            reference=Frames(self.frames.latents[episode, :1].float(), self.frames.states[episode, :1]),
            instruction=[self.instruction[e] for e in episode.tolist()],
            success=self.success[episode, frame],
        )

    def numbers(self, size: int, num_frames: int, seed: int, step: int) -> tuple[np.ndarray, list[str]]:
        """What `batch` is of, in `flat`: reference, window, label, int64 (size, R + 2); instructions."""
        episode, frame = self._draw(size, seed, step).T
        window = np.maximum(frame[:, None] + np.arange(1 - num_frames, 1), 0)
        found = np.concatenate([np.zeros((size, 1), np.int64), window], 1) + (episode * self.success.shape[1])[:, None]
        label = self.success.numpy()[episode, frame]
        return np.concatenate([found, label[:, None]], 1), [self.instruction[e] for e in episode.tolist()]

    def flat(self, index: torch.Tensor) -> Frames:
        """Frames at int64 (B, F), counted over all episodes."""
        return Frames(self.frames.latents.flatten(0, 1)[index].float(), self.frames.states.flatten(0, 1)[index])

    def _draw(self, size: int, seed: int, step: int) -> np.ndarray:
        """Episode and frame, int64 (size, 2)."""
        rng = np.random.default_rng([seed, step, 1])
        pools = [pool for pool in self.pools if len(pool)]
        kind = rng.integers(len(pools), size=size)
        return np.stack([pools[k][rng.integers(len(pools[k]))] for k in kind])


def _choose(clips: ClipDataset, most: int, seed: int) -> np.ndarray:
    """int64 (E, 2): part, and episode in it; about `most`, or as many as there are, in proportion to the weights.

    An episode comes again, to be imagined with other noise, where its part has fewer than its share.
    """
    rng = np.random.default_rng([seed, 2])
    weights = np.array([part.frames.dataset.weight for part in clips.parts])
    chosen, most = [], min(most, clips.num_episodes)
    for number, part in enumerate(clips.parts):
        share = int(np.ceil(most * weights[number] / weights.sum()))
        episodes = np.resize(rng.permutation(part.chosen), share)
        chosen.append(np.stack([np.full(len(episodes), number), episodes], 1))
    return np.concatenate(chosen)


def _pools(success: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    number = np.arange(success.shape[1])
    asked = (number > 0) & (number < counts[:, None])
    end = np.where(success.any(1), success.argmax(1), counts)[:, None]
    near = number >= end - NEAR_FRAMES
    kinds = (success, ~success & near, ~success & ~near)
    return [np.argwhere(asked & kind) for kind in kinds]


def _seed(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


def success_loss(
    network: SuccessHead,
    clips: ClipDataset,
    imagined: ImaginedSamples | None,
    config: FitConfig,
    seed: int,
    number: int,
    device: torch.device,
) -> Loss:
    """What a step of the stage learns from.

    Args:
        number: of the network, so that each draws samples of its own.
    """
    stage = config.success
    num_imagined = round(stage.batch_size * config.imagined_share) if imagined is not None else 0
    real = SuccessSamples(clips, network.num_frames)

    def there(step: int) -> tuple[Frames, Frames, list[str], torch.Tensor]:
        """The batch from frames that are held on the device, in one upload."""
        assert clips.held is not None
        num_real, sources, drawn = stage.batch_size - num_imagined, [], []
        if num_real:
            sources.append(clips.held.frames)
            drawn.append(real.numbers(num_real, seed + number, step))
        if imagined is not None and num_imagined:
            sources.append(imagined.flat)
            drawn.append(imagined.numbers(num_imagined, network.num_frames, seed + number, step))
        index = uploaded(np.concatenate([numbers for numbers, _ in drawn]), device)
        parts = zip(sources, index.split([len(numbers) for numbers, _ in drawn]), strict=True)
        frames = Frames.joined([source(part[:, :-1]) for source, part in parts])
        texts = [text for _, given in drawn for text in given]
        return frames.at(slice(1, None)), frames.at(slice(0, 1)), texts, index[:, -1] > 0

    def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(np.random.SeedSequence([seed, number, step]).generate_state(1)[0])  # Dropout.
        if clips.held is not None:
            return network.loss(*there(step))
        parts = []
        if num_imagined < stage.batch_size:
            parts.append(real.batch(stage.batch_size - num_imagined, seed + number, step))
        if imagined is not None and num_imagined:
            parts.append(imagined.batch(num_imagined, network.num_frames, seed + number, step))
        batch = SuccessBatch.concatenate(parts).to(device)
        return network.loss(batch.frames, batch.reference, batch.instruction, batch.success)

    return loss


JUDGED = 200  # Episodes imagined before and after each part, at most: enough for what is clear.
log = logging.getLogger(__name__)


class Logits(NamedTuple):
    """Both success networks' at each imagined frame of E episodes; see `replay_logits`."""

    success: list[np.ndarray]
    clip: list[np.ndarray]

    @property
    def score(self) -> np.ndarray:
        """The highest over each episode's frames of the lower of the two, float64 (E,); NaN where one is not finite."""
        pairs = zip(self.success, self.clip, strict=True)
        found = [np.minimum(*pair).max() if np.isfinite(pair).all() else np.nan for pair in pairs]
        return np.array(found, np.float64)


class Refit(Config):
    """What fitting a part did to the order of successes and failures.

    Attributes:
        before, after: AUC; 0.5 where the part gave NaN or infinity afterwards. change: after minus before, with a
            paired bootstrap interval over initial states.
        put_back: the part is as it was before.
    """

    before: Figure
    after: Figure
    change: Figure
    put_back: bool


class RefitGuard:
    """Guard of a fit's stages, which puts back what they made clearly worse.

    Args:
        world_model: under way, now as it was at the start.
        start_from: the start's folder; None: fitted from scratch, or in a way that leaves nothing to compare.
        episodes: the policy's newest, that the thresholds are chosen on.
        seed: of the noise.

    Attributes:
        refits: by part, "dynamics", "success", or both at once. logits: to choose thresholds on, of parts that have not
            seen the episodes; None where those of the world model as it is do.
    """

    def __init__(
        self, world_model: WorldModel, start_from: str | None, episodes: Sequence[LoggedEpisode], seed: int
    ) -> None:
        self.world_model, self.start_from, self.episodes, self.seed = world_model, start_from, episodes, seed
        self.refits: dict[str, Refit] = {}
        self.logits: Logits | None = None
        self.score: np.ndarray | None = None  # Of the episodes that are judged, by the world model as it is.
        self.real = np.array([episode.succeeded for episode in episodes])
        self.groups = np.array([episode.start for episode in episodes])

    def watch(self, part: str, networks: Sequence[str], stage: Callable[[], None]) -> None:
        """Run a stage that fits `networks`, attributes of the world model, and keep them as they were if they lost."""
        if self.start_from is None:
            stage()
            return
        some = np.random.default_rng(self.seed).permutation(len(self.episodes))[:JUDGED]
        before = self._replayed(some).score if self.score is None else self.score
        stage()
        self.score = self._replayed(some).score
        if self._holds(part, before, self.score, some):
            return
        self.score, start = before, load_world_model(self.start_from)
        for name in networks:
            network: nn.Module = getattr(self.world_model, name)
            network.load_state_dict(getattr(start, name).state_dict())
            network.eval()

    def admits(self, cross_fitted: Logits) -> bool:
        """Whether the parts are worth fitting on all episodes, by what parts fitted without them say of each.

        False: the world model stays as it was. Either way `logits` are honest: of parts that have not seen the episode.
        """
        if self.start_from is None:
            self.logits = cross_fitted
            return True
        every = np.arange(len(self.episodes))
        before = self._replayed(every)
        held = self._holds("dynamics and success", before.score, cross_fitted.score, every)
        self.logits = cross_fitted if held else before
        return held

    def _replayed(self, rows: np.ndarray) -> Logits:
        return Logits(*replay_logits(self.world_model, [self.episodes[row] for row in rows], self.seed))

    def _holds(self, part: str, before: np.ndarray, after: np.ndarray, rows: np.ndarray) -> bool:
        """Note what became of the order of the episodes at `rows`, and say so where it was lost."""
        refit = compare_order(before, after, self.real[rows], self.groups[rows])
        self.refits[part] = refit
        if refit.put_back:
            log.warning(
                "world_model.%s: the fit made it worse at telling successes from failures on %d episodes of the newest "
                "policy (AUC %.2f before, %.2f after), so it stays as it was before; fit it on more episodes, or with "
                "a lower optim.lr",
                *(part, len(rows), refit.before.value, refit.after.value),
            )
        return not refit.put_back


def compare_order(before: np.ndarray, after: np.ndarray, real: np.ndarray, groups: np.ndarray) -> Refit:
    """Hold the order by two scores of the same episodes against each other; put back where the 95 % interval of the
    change lies below 0, or the second is not finite.

    Args:
        before, after: float (E,). real: bool (E,), outcomes. groups: (E,), initial states.
    """
    finite = bool(np.isfinite(after).all())
    usable = after if finite else np.zeros_like(before)  # No order at all.
    change = auc(usable, real) - auc(before, real)
    draws = auc_draws(usable, real, groups) - auc_draws(before, real, groups)
    interval = interval_of(draws)
    first, second = (auc_figure(score, real, groups) for score in (before, usable))
    return Refit(
        before=first,
        after=second,
        change=figure(change, interval, first.n, first.of),
        put_back=not finite or interval.high < 0,
    )
