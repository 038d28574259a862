"""Finished episodes written as a LeRobotDataset v3, as `vla-rl collect` writes those that it runs."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.dataset import OBSERVED_EVERY
from vla_rl.data.lerobot_assembly import assemble
from vla_rl.data.lerobot_io import RecordedEpisode, dataset_features, write_shard
from vla_rl.rollout.episode_recording import EpisodeRecording
from vla_rl.types import EnvSpec, Episode, StepResult


def write_rollouts(
    dataset: Path, episodes: Sequence[Episode], spec: EnvSpec, policy_version: str, notes: Mapping[str, Any]
) -> int:
    """Write a policy's episodes as a dataset, in place of one that is there; lost ones are left out.

    Args:
        episodes: where they have no frames, images and states repeat within a chunk, and the dataset says so.
        spec: of the environment that they were run in.
        policy_version: which policy acted, recorded with every frame.
        notes: JSON-able provenance.

    Returns:
        how many were written.
    """
    kept = [episode for episode in episodes if not episode.lost]
    if not kept:
        return 0
    features = dataset_features(list(spec.cameras), spec.image_size, spec.state_dim, spec.action_dim)
    staging = dataset.parent / f".{dataset.name}.writing"
    shutil.rmtree(staging, ignore_errors=True)
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="png") as encoders:
        recorded = [_record(episode, spec, policy_version, encoders) for episode in kept]
    write_shard(staging / "shard_00000", recorded, [], features)
    every = 1 if kept[0].frames is not None else int(kept[0].reward.shape[1])
    shutil.rmtree(dataset, ignore_errors=True)
    assemble(
        staging,
        dataset,
        fps=round(spec.control_hz),
        features=features,
        robot=spec.kind,
        notes={**notes, "attempts": Counter(episode.spec.task for episode in kept), OBSERVED_EVERY: every},
    )
    shutil.rmtree(staging)
    return len(kept)


def _record(episode: Episode, spec: EnvSpec, policy_version: str, encoders: ThreadPoolExecutor) -> RecordedEpisode:
    recording = EpisodeRecording(episode.spec, episode.obs.select([0]), encoders)
    actions = np.clip(episode.chunks.actions, spec.action_low, spec.action_high)
    starts = np.concatenate([[0], np.cumsum(episode.num_steps)])
    for k in range(episode.num_chunks):
        recording.add(actions[k], actions[k], _result(episode, k, slice(starts[k], starts[k + 1])))
    return recording.finish(episode.success, "policy", policy_version)


def _result(episode: Episode, k: int, steps: slice) -> StepResult:
    """What the environment answered to chunk `k`, whose control steps are `steps`; one row."""
    last = k == episode.num_chunks - 1
    info: dict[str, Any] = {}
    if episode.frames is not None:
        assert episode.states is not None, "recorded with the frames"
        info["frames"] = [{camera: frames[steps] for camera, frames in episode.frames.items()}]
        info["states"] = [episode.states[steps]]
    return StepResult(
        obs=episode.final_obs if last else episode.obs.select([k + 1]),
        reward=episode.reward[k : k + 1],
        terminated=episode.terminated[k : k + 1],
        truncated=episode.truncated[k : k + 1],
        num_steps=episode.num_steps[k : k + 1],
        success=np.array([last and episode.success]),
        lost=np.array([False]),
        info=info,
    )
