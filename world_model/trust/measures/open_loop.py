"""Open-loop replay of held-out episodes, with the logged actions or with others: images, and objects' poses.

Frames are numbered from 1 here: frame 0 is real in both. Shape legend as in `world_model.trust.types`.

Object pose errors, where the held-out episodes recorded poses (collect.objects).

Two judges: the objects part, rolled from the first real frame with the logged actions; and the probe, which reads poses
off frames, real or imagined. Errors are horizontal distances of slot 0, what is to be handled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vla_rl.evaluation.statistics import Figure, figure, ratio_interval
from world_model.trust.figures import MAX_OBJECT_FRAMES
from world_model.trust.measures.actions import ActionReader, other_actions
from world_model.trust.measures.metrics import MIN_SSIM_SIDE, psnr, ssim
from world_model.trust.measures.perceptual import Lpips, VideoFeatures
from world_model.trust.types import KnowsObjects, Scores, WorldModel
from world_model.types import Actions, Batch, Frames, LoggedEpisode, collate

# Frames of a clip whose features make the Fréchet video distance; shorter episodes are held at their end.
_VIDEO_FRAMES = 16
OTHER_ACTIONS = ("swapped", "zero", "random")


class Noise(NamedTuple):
    """Which noise to imagine with: equal ones give equal futures, whatever the batch."""

    seed: int
    draw: int = 0

    def of(self, rows: Sequence[int]) -> list[int]:
        """A seed below 2^32 for each episode."""
        return [int(np.random.SeedSequence((self.seed, self.draw, row)).generate_state(1)[0]) for row in rows]


@dataclass(frozen=True)
class Replay:
    """What replaying E episodes shows. F is the most frames that one has after its first.

    Attributes:
        frames: name -> float64 (E, F), NaN past an episode's end: "latent_error", "latent_error_copy", "state_error",
            "psnr", "psnr_copy", "psnr_reconstruction", and "ssim", "lpips" and "latent_spread" (squared distance of two
            futures) where they can be had.
        real, imagined: bool (E, F), has it succeeded by that frame; past an episode's end, as at its end.
        probability: float (E,), the highest of an episode, imagined.
        head, head_probability: bool (E,), float (E,): the success head's verdict on the real frames, and the highest
            probability there; the first frame is not asked about.
        features: of imagined and of real clips, float (E x V, D), for the Fréchet video distance; None without weights.
        imagined_again: bool (E,), the verdict at the end with other noise; None where there is no second future.
        disagreement: float (E,), of futures, the mean over an episode's frames up to the environment's horizon; None
            where there is one future alone.
    """

    frames: dict[str, np.ndarray]
    real: np.ndarray
    imagined: np.ndarray
    probability: np.ndarray
    head: np.ndarray
    head_probability: np.ndarray
    features: tuple[np.ndarray, np.ndarray] | None
    imagined_again: np.ndarray | None = None
    disagreement: np.ndarray | None = None

    @property
    def num_episodes(self) -> np.ndarray:
        """int (F,): how many episodes have the frame."""
        return np.isfinite(self.frames["latent_error"]).sum(0)


def replay(
    world_model: WorldModel,
    episodes: Sequence[LoggedEpisode],
    batch_size: int,
    noise: Noise,
    lpips: Lpips | None = None,
    video: VideoFeatures | None = None,
    other_noise: Noise | None = None,
) -> Replay:
    """Imagine each episode with its logged actions and set it against what really happened.

    Args:
        other_noise: of a second future; None: there is none.
    """
    num_frames = max(e.num_frames for e in episodes) - 1
    frames: dict[str, np.ndarray] = {}
    outcomes = {name: np.zeros((len(episodes), num_frames), bool) for name in ("real", "imagined")}
    probability, head_probability = np.zeros((2, len(episodes)))
    head, again = np.zeros((2, len(episodes)), bool)
    features: list[tuple[np.ndarray, np.ndarray]] = []
    spread: list[np.ndarray] = []
    for rows in _chunks(len(episodes), batch_size):
        batch = collate([episodes[i] for i in rows])
        real = world_model.encode(batch.images, batch.states)
        imagined, scores = imagine(world_model, batch, real, noise.of(rows))
        on_real = world_model.score(real, batch.instruction)
        valid, last = batch.valid[:, 1:], batch.valid.sum(1) - 2
        each, length = np.arange(len(rows)), valid.shape[1]

        found = _likeness(world_model, batch, real, imagined, lpips)
        if other_noise is not None:
            second, judged = imagine(world_model, batch, real, other_noise.of(rows))
            found["latent_spread"] = _squared(second.latents, imagined.latents)
            again[rows] = judged.success[each, last]
        for name, values in found.items():
            table = frames.setdefault(name, np.full((len(episodes), num_frames), np.nan))
            table[rows, :length] = np.where(valid, values, np.nan)
        for name, latched in (("real", batch.success[:, 1:]), ("imagined", scores.success)):
            ended = latched[each, last][:, None]
            outcomes[name][rows] = ended
            outcomes[name][rows, :length] = np.where(valid, latched, ended)
        probability[rows] = np.where(valid, scores.probability, 0).max(1)
        head[rows] = on_real.success[each, last + 1]
        head_probability[rows] = np.where(valid, on_real.probability[:, 1:], 0).max(1)
        if scores.disagreement is not None:
            spread.append(np.nanmean(np.where(valid, scores.disagreement, np.nan), 1))
        if video is not None:
            held = np.minimum(np.arange(_VIDEO_FRAMES), last[:, None])
            videos = (world_model.decode(imagined), batch.images[:, 1:])
            features.append(
                (video(_views(videos[0][each[:, None], held])), video(_views(videos[1][each[:, None], held])))
            )
    crowds = [np.concatenate(part) for part in zip(*features, strict=True)]
    return Replay(
        frames,
        **outcomes,
        probability=probability,
        head=head,
        head_probability=head_probability,
        imagined_again=again if other_noise is not None else None,
        features=(crowds[0], crowds[1]) if crowds else None,
        disagreement=np.concatenate(spread) if spread else None,
    )


def probability_ahead(
    world_model: WorldModel, episodes: Sequence[LoggedEpisode], batch_size: int, depth: int, seed: int
) -> np.ndarray:
    """The highest probability of each episode, float64 (E, depth), where frames follow a real one by 1 .. depth.

    Each frame is imagined from the real frames up to so many before it; an episode's first frames, which have fewer
    before them, from its first one.
    """
    highest = np.zeros((len(episodes), depth))
    for rows in _chunks(len(episodes), batch_size):
        batch = collate([episodes[i] for i in rows])
        real = world_model.encode(batch.images, batch.states)
        actions = Actions(torch.from_numpy(batch.actions)[:, 1:], torch.from_numpy(batch.executed)[:, 1:])
        found = world_model.imagine_ahead(real, actions, batch.instruction, Noise(seed, 2).of(rows), depth)
        for d in range(1, depth + 1):
            number = np.arange(found.shape[1])  # Of the frame, less 1: so many are before it, but the first.
            values = found[:, number, np.minimum(number, d - 1)]
            highest[rows, d - 1] = np.where(batch.valid[:, 1:], values, 0).max(1)
    return highest


def action_errors(
    world_model: WorldModel,
    episodes: Sequence[LoggedEpisode],
    batch_size: int,
    num_frames: int,
    seed: int,
    inverse: ActionReader | None,
) -> dict[str, np.ndarray]:
    """How the imagined frames 1 .. num_frames depend on the actions, the noise being the same throughout.

    Returns:
        float64 (E,), sums over an episode's frames: "true" and each of OTHER_ACTIONS, squared error of the imagined
        latents with these actions; "response", squared distance of "swapped" from "true"; and with `inverse`
        "inverse_real" and "inverse_imagined", its squared errors.
    """
    others = {kind: other_actions(episodes, kind, seed) for kind in OTHER_ACTIONS}
    names = ("true", *OTHER_ACTIONS, "response", *(("inverse_real", "inverse_imagined") if inverse else ()))
    errors = {name: np.zeros(len(episodes)) for name in names}
    for rows in _chunks(len(episodes), batch_size):
        batch = collate([episodes[i] for i in rows], num_frames + 1)
        seeds, valid = Noise(seed).of(rows), batch.valid[:, 1:]
        real = world_model.encode(batch.images, batch.states)
        true, _ = imagine(world_model, batch, real, seeds)

        def total(a: Frames, b: Frames, valid: np.ndarray = valid) -> np.ndarray:
            return np.where(valid, _squared(a.latents, b.latents), 0).sum(1)

        after = real.at(slice(1, None))
        errors["true"][rows] = total(true, after)
        for kind, actions in others.items():
            changed = _padded([actions[i] for i in rows], batch.actions.shape[1]) * batch.executed[..., None]
            other, _ = imagine(world_model, batch, real, seeds, changed.astype(np.float32))
            errors[kind][rows] = total(other, after)
            if kind == "swapped":
                errors["response"][rows] = total(other, true)
        if inverse is not None:
            whole = Frames(torch.cat([real.latents[:, :1], true.latents], 1), real.states)
            for name, shown in (("inverse_real", real), ("inverse_imagined", whole)):
                read = inverse.errors(shown, torch.from_numpy(batch.actions), torch.from_numpy(batch.executed))
                errors[name][rows] = np.nansum(read, axis=1)
    return errors


def imagine(
    world_model: WorldModel,
    batch: Batch,
    real: Frames,
    seeds: Sequence[int],
    actions: np.ndarray | None = None,
) -> tuple[Frames, Scores]:
    """Imagine a batch's frames 1 .. T - 1 from its first.

    Args:
        real: the batch's frames, of which the first is used. actions: (B, T, G, A) instead of the logged ones.

    Raises:
        ValueError: the world model imagines NaN or infinity, which the means would silently leave out.
    """
    context = world_model.begin(real.at(slice(0, 1)), batch.instruction, seeds)
    values = torch.from_numpy(batch.actions if actions is None else actions)[:, 1:]
    imagined, scores = world_model.imagine(context, Actions(values, torch.from_numpy(batch.executed)[:, 1:]))
    finite = bool(imagined.latents.isfinite().all()) and bool(imagined.states.isfinite().all())
    finite = finite and (scores.disagreement is None or not np.isinf(scores.disagreement).any())
    if not finite or not np.isfinite(scores.probability).all():
        raise ValueError(
            "the world model imagines NaN or infinity on held-out episodes; nothing can be measured. Fit it again, "
            "with a lower learning rate, or use an earlier one"
        )
    return imagined, scores


def _likeness(
    world_model: WorldModel, batch: Batch, real: Frames, imagined: Frames, lpips: Lpips | None
) -> dict[str, np.ndarray]:
    """Each figure of images and latents, float64 (B, F); padding is not masked yet."""
    after, first = real.at(slice(1, None)), real.at(slice(0, 1))
    pixels, shown = batch.images[:, 1:], world_model.decode(imagined)
    copied = np.broadcast_to(world_model.decode(first), pixels.shape)
    found = {
        "latent_error": _squared(imagined.latents, after.latents),
        "latent_error_copy": _squared(first.latents.expand_as(after.latents), after.latents),
        "state_error": _squared(imagined.states, after.states),
        "psnr": psnr(shown, pixels).mean(2),
        "psnr_copy": psnr(copied, pixels).mean(2),
        "psnr_reconstruction": psnr(world_model.decode(after), pixels).mean(2),
    }
    if min(pixels.shape[-3:-1]) >= MIN_SSIM_SIDE:
        found["ssim"] = ssim(shown, pixels).mean(2)
    if lpips is not None:
        found["lpips"] = lpips(shown, pixels).mean(2)
    return found


def _squared(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """Mean squared difference of (B, F, ...) each, float64 (B, F)."""
    return (a.float() - b.float()).square().flatten(2).mean(2).double().cpu().numpy()


def _padded(actions: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Arrays (T_i, G, A) cut or filled up with zeros to (B, length, G, A)."""
    result = np.zeros((len(actions), length, *actions[0].shape[1:]), np.float32)
    for row, values in zip(result, actions, strict=True):
        row[: len(values)] = values[:length]
    return result


def _views(video: np.ndarray) -> np.ndarray:
    """(B, F, V, height, width, 3) -> (B V, F, height, width, 3)."""
    return video.swapaxes(1, 2).reshape(-1, video.shape[1], *video.shape[3:])


def _chunks(count: int, size: int) -> Iterator[list[int]]:
    for start in range(0, count, size):
        yield list(range(start, min(start + size, count)))


MOVED = 0.01  # Meters: what has moved less by a frame tells nothing of the dynamics, and is left out there.


def object_figures(
    world_model: WorldModel, episodes: Sequence[LoggedEpisode], batch_size: int, seed: int, not_measured: dict[str, str]
) -> dict[str, Figure]:
    """The mean errors `object_error_N` and `picture_object_error_N`, meters, N frames after the real first one.

    From N = 1 on of episodes whose object has moved by more than 1 cm by then. Nothing where the world model has no
    objects part; where the episodes have no poses, `not_measured` says so.
    """
    if not isinstance(world_model, KnowsObjects) or not world_model.has_objects:
        return {}
    known = [episode for episode in episodes if episode.objects is not None]
    if not known:
        why = "the held-out episodes have no poses; collect them with collect.objects=true"
        names = [f"object_error_{n}" for n in range(MAX_OBJECT_FRAMES + 1)]
        names += [f"picture_object_error_{n}" for n in range(1, MAX_OBJECT_FRAMES + 1)]
        not_measured |= dict.fromkeys(names, why)
        return {}
    groups = np.array([episode.start for episode in known])
    rolled, read, moved = _errors(world_model, known, batch_size, seed)
    found: dict[str, Figure] = {}
    for prefix, errors in (("object_error", rolled), ("picture_object_error", read)):
        for number in range(errors.shape[1]):
            counted = np.isfinite(errors[:, number]) & (moved[:, number] | (number == 0))
            if counted.any() and (number or prefix == "object_error"):
                values = np.where(counted, errors[:, number], 0.0)
                interval = ratio_interval(values, counted.astype(np.float64), groups)
                found[f"{prefix}_{number}"] = figure(*interval, int(counted.sum()))
    return found


def _errors(
    world_model: KnowsObjects, episodes: Sequence[LoggedEpisode], batch_size: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Errors of poses rolled and read, float64 (E, N + 1), NaN past an episode's end; and whether it has moved."""
    most = MAX_OBJECT_FRAMES + 1
    errors, moved = np.full((2, len(episodes), most), np.nan), np.zeros((len(episodes), most), bool)
    for start in range(0, len(episodes), batch_size):
        part = episodes[start : start + batch_size]
        rows = list(range(start, start + len(part)))
        batch = collate(part, most)
        real = world_model.encode(batch.images[:, :1], batch.states[:, :1])
        actions = Actions(torch.from_numpy(batch.actions)[:, 1:], torch.from_numpy(batch.executed)[:, 1:])
        pictures, _ = imagine(world_model, batch, real, Noise(seed).of(rows))
        count = batch.valid.shape[1]
        true = np.stack([_held(episode, count) for episode in part])[:, :, :2]
        valid = np.where(batch.valid, 1.0, np.nan)
        rolled = world_model.object_poses(real, actions, batch.instruction)[:, :, 0, :2]
        errors[0, rows, :count] = np.linalg.norm(rolled - true, axis=2) * valid
        seen = world_model.read_objects(pictures, batch.instruction)[:, :, 0, :2]
        errors[1, rows, 1:count] = np.linalg.norm(seen - true[:, 1:], axis=2) * valid[:, 1:]
        moved[rows, :count] = np.linalg.norm(true - true[:, :1], axis=2) > MOVED
    return errors[0], errors[1], moved


def _held(episode: LoggedEpisode, count: int) -> np.ndarray:
    """The poses of slot 0 at the first `count` frames, the last repeated: float32 (count, 4)."""
    assert episode.objects is not None, "only episodes with poses are measured"
    return episode.objects[np.minimum(np.arange(count), episode.num_frames - 1), 0]
