"""Recording of one episode for a dataset, step by step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from vla_rl.data.lerobot_io import RecordedEpisode, encode_png
from vla_rl.data.segmentation import CAMERA_PREFIX, split_cameras
from vla_rl.types import ControlSource, EpisodeSpec, Keyframe, Observation, StepResult


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
