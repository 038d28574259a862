"""Object pose errors, where the held-out episodes recorded poses (collect.objects).

Two judges: the objects part, rolled from the first real frame with the logged actions; and the probe, which reads poses
off frames, real or imagined. Errors are horizontal distances of slot 0, what is to be handled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vla_rl.evaluation.statistics import Figure, figure, ratio_interval
from world_model.trust.figures import MAX_OBJECT_FRAMES
from world_model.trust.measures.open_loop import Noise, imagine
from world_model.trust.types import KnowsObjects, WorldModel
from world_model.types import Actions, LoggedEpisode, collate

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
