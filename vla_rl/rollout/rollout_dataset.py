"""Writer of finished episodes as a LeRobotDataset v3."""

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


class RolloutWriter:
    """Writes a policy's episodes as a dataset, batch by batch: none stays in memory. Lost ones are left out.

    Args:
        dataset: its folder, which `finish` makes; one that is there is replaced.
        spec: of the environment that the episodes are run in.
        policy_version: which policy acts, recorded with every frame.
        notes: JSON-able provenance.
    """

    def __init__(self, dataset: Path, spec: EnvSpec, policy_version: str, notes: Mapping[str, Any]) -> None:
        self._dataset, self._spec, self._version, self._notes = dataset, spec, policy_version, notes
        self._features = dataset_features(list(spec.cameras), spec.image_size, spec.state_dim, spec.action_dim)
        self._staging = dataset.parent / f".{dataset.name}.writing"
        self._num_shards = self._observed_every = 0
        self._written = Counter[str]()  # By task.
        shutil.rmtree(self._staging, ignore_errors=True)

    def add(self, episodes: Sequence[Episode]) -> None:
        """Write a batch. Where episodes have no frames, images and states repeat within a chunk; the dataset says so.

        Args:
            episodes: all with frames, or all without, as those of other batches.
        """
        kept = [episode for episode in episodes if not episode.lost]
        if not kept:
            return
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="png") as encoders:
            recorded = [_record(episode, self._spec, self._version, encoders) for episode in kept]
        write_shard(self._staging / f"shard_{self._num_shards:05d}", recorded, [], self._features)
        self._num_shards += 1
        self._observed_every = 1 if kept[0].frames is not None else int(kept[0].reward.shape[1])
        self._written.update(episode.spec.task for episode in kept)

    def finish(self) -> int:
        """Make the dataset of all batches; what is there stays where there is nothing to write.

        Returns:
            how many episodes were written.
        """
        if not self._written:
            return 0
        shutil.rmtree(self._dataset, ignore_errors=True)
        assemble(
            self._staging,
            self._dataset,
            fps=round(self._spec.control_hz),
            features=self._features,
            robot=self._spec.kind,
            notes={**self._notes, "attempts": self._written, OBSERVED_EVERY: self._observed_every},
        )
        shutil.rmtree(self._staging)
        return self._written.total()


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
