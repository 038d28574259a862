"""Recording of episodes step by step, and of finished ones, as a LeRobotDataset v3."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.dataset import OBSERVED_EVERY
from vla_rl.data.lerobot_assembly import assemble
from vla_rl.data.lerobot_io import RecordedEpisode, dataset_features, encode_png, write_shard
from vla_rl.data.segmentation import CAMERA_PREFIX, split_cameras
from vla_rl.types import ControlSource, EnvSpec, Episode, EpisodeSpec, Keyframe, Observation, StepResult


class EpisodeRecording:
    """One episode so far: each executed action with the observation before it.

    Args:
        first: the observation that it begins with, one row.
        encoders: threads that turn images into PNGs.

    Attributes:
        obs: the latest observation without structure, one row.
        simulator_states: filled by the caller where they are wanted.
    """

    def __init__(self, spec: EpisodeSpec, first: Observation, encoders: ThreadPoolExecutor) -> None:
        self.spec, self._encoders = spec, encoders
        pictures, structure = split_cameras(first.images)
        self.obs = replace(first, images=pictures)
        self.simulator_states: list[Keyframe] = []
        self._structure = {camera: [image[0]] for camera, image in structure.items()}
        self._png: dict[str, list[Future[bytes]]] = {camera: [] for camera in pictures}
        self._state: list[np.ndarray] = []
        self._actions: list[np.ndarray] = []
        self._executed: list[np.ndarray] = []
        self._reward: list[float] = []
        self._objects: list[np.ndarray] = []

    def __len__(self) -> int:
        """Control steps so far."""
        return len(self._actions)

    def add(self, label: np.ndarray, executed: np.ndarray, result: StepResult) -> None:
        """Append the executed steps of a chunk.

        Args:
            label: float32 (H, A), what a policy should learn. executed: float32 (H, A), what the environment was given.
            result: of this environment alone, one row. Without frames, each of its steps gets the observation before
                the chunk.
        """
        images = {camera: image[0] for camera, image in self.obs.images.items()}
        state = self.obs.state[0]
        num_steps = int(result.num_steps[0])
        frames = result.info["frames"][0] if "frames" in result.info else None
        png: dict[str, Future[bytes]] = {}
        for i in range(num_steps):
            if i == 0 or frames is not None:
                png = {camera: self._encoders.submit(encode_png, image) for camera, image in images.items()}
            for camera, encoded in png.items():
                self._png[camera].append(encoded)
            self._state.append(state)
            self._actions.append(label[i])
            self._executed.append(executed[i])
            self._reward.append(float(result.reward[0, i]))
            if frames is not None:
                images = {camera: frames[camera][i] for camera in images}
                state = result.info["states"][0][i]
        if "objects" in result.info:
            poses = result.info["objects"][0]
            self._objects += list(poses[1:] if self._objects else poses)
        pictures, structure = split_cameras(result.obs.images)
        self.obs = replace(result.obs, images=pictures)
        for camera, image in structure.items():
            seen = image if frames is None else frames[CAMERA_PREFIX + camera]
            self._structure[camera] += list(seen[:num_steps])

    def finish(self, success: bool, source: ControlSource, policy_version: str) -> RecordedEpisode:
        """The whole episode; waits for its images.

        Args:
            source: who acted, in all of it.
        """
        return RecordedEpisode(
            task=self.spec.task,
            split=self.spec.split,
            index=self.spec.index,
            instruction=self.obs.instruction[0],
            png={camera: [f.result() for f in frames] for camera, frames in self._png.items()},
            state=np.stack(self._state),
            actions=np.stack(self._actions),
            executed_actions=np.stack(self._executed),
            reward=np.asarray(self._reward, np.float32),
            success=success,
            control_source=[source] * len(self),
            policy_version=policy_version,
            final_png={camera: encode_png(image[0]) for camera, image in self.obs.images.items()},
            final_state=self.obs.state[0],
            simulator_states=self.simulator_states,
            object_poses=np.stack(self._objects) if self._objects else None,
            structure={camera: np.stack(images) for camera, images in self._structure.items()},
        )


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
