"""Recordings as labs have them, made here: an arm that goes to where its cameras show a bar, and closes its gripper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import cv2
import h5py
import numpy as np

SO101 = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
SIZE, FPS = 48, 30
INSTRUCTION = "go to the bar"


def motion(seed: int, joints: int, grippers: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An episode in units of -1 to 1: state and action float32 (T, joints), and pictures uint8 (T, SIZE, SIZE, 3)."""
    rng = np.random.default_rng(seed)
    length, place = int(rng.integers(28, 36)), rng.uniform(-0.8, 0.8)
    goal = place * np.linspace(1, 0.4, joints)
    state, action = np.zeros((length, joints)), np.zeros((length, joints))
    now = rng.normal(0, 0.05, joints)
    for step in range(length):
        state[step] = now
        action[step] = now + np.clip(goal - now, -0.02, 0.02)
        action[step, list(grippers)] = 1.0 if step > length - 8 else -1.0
        now = np.where(np.abs(action[step] - now) < 0.01, action[step], now + 0.8 * (action[step] - now))
    return state.astype(np.float32), action.astype(np.float32), np.stack([picture(place, now) for now in state])


def picture(place: float, joints: np.ndarray) -> np.ndarray:
    """A bar where the arm is to go, and the arm."""
    image = np.full((SIZE, SIZE, 3), 60, np.uint8)
    for value, color, rows in ((place, (230, 200, 40), slice(0, 24)), (joints[0], (40, 120, 240), slice(24, 48))):
        column = int((value + 1) / 2 * (SIZE - 6))
        image[rows, column : column + 6] = color
    image[-6:] = 128 + 100 * np.sin(60 * joints.sum())  # So that each small move shows.
    return image


def so101(folder: Path, episodes: int = 6, videos: bool = True) -> Path:
    """A LeRobotDataset v3 by LeRobot's own writer: six joints, in degrees and percent; two cameras."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    names = [f"{name}.pos" for name in SO101]
    vector = {"dtype": "float32", "shape": (6,), "names": names}
    image = {
        "dtype": "video" if videos else "image",
        "shape": (SIZE, SIZE, 3),
        "names": ["height", "width", "channels"],
    }
    features = {"observation.state": vector, "action": vector}
    features |= {f"observation.images.{camera}": image for camera in ("front", "wrist")}
    dataset = LeRobotDataset.create(
        "local/so101", FPS, features, root=folder, robot_type="so101_follower", use_videos=videos
    )
    scale, shift = np.array([60] * 5 + [50], np.float32), np.array([0] * 5 + [50], np.float32)
    for number in range(episodes):
        state, action, images = motion(number, 6, (5,))
        for seen, asked, picture in zip(state, action, images, strict=True):
            frame = {"observation.state": seen * scale + shift, "action": asked * scale + shift}
            dataset.add_frame(
                {
                    **frame,
                    "observation.images.front": picture,
                    "observation.images.wrist": picture[::-1].copy(),
                    "task": INSTRUCTION,
                }
            )
        dataset.save_episode()
    dataset.finalize()
    return folder


def aloha(folder: Path, episodes: int = 6, compressed: bool = True) -> Path:
    """A folder of HDF5 files as ALOHA's record_episodes.py writes them: 14 joints, three cameras, JPEG or raw."""
    folder.mkdir(parents=True)
    cameras = ("cam_high", "cam_left_wrist", "cam_right_wrist")
    for number in range(episodes):
        state, action, images = motion(number, 14, (6, 13))
        for values in (state, action):
            values[:, [6, 13]] = (values[:, [6, 13]] + 1) / 2  # The grippers are 0 closed, 1 open.
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            file.attrs["sim"] = False
            file["observations/qpos"], file["observations/qvel"], file["action"] = state, np.zeros_like(state), action
            lengths = []
            for camera in cameras:
                if not compressed:
                    file[f"observations/images/{camera}"] = images
                    continue
                jpegs = [cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 80])[1] for image in images]
                lengths.append([len(jpeg) for jpeg in jpegs])
                rows = np.zeros((len(jpegs), max(map(len, jpegs)) + 7), np.uint8)
                for row, jpeg in zip(rows, jpegs, strict=True):
                    row[: len(jpeg)] = jpeg.reshape(-1)
                file[f"observations/images/{camera}"] = rows
            if compressed:
                file.attrs["compress"] = True
                file["compress_len"] = lengths
    return folder


def robomimic(file: Path, episodes: int = 6) -> Path:
    """A file in robomimic's layout, of robosuite's Panda under its hand's controller: 7 actions, two cameras."""
    with h5py.File(file, "w") as opened:
        data = opened.create_group("data")
        args = {"env_name": "Lift", "type": 1, "env_kwargs": {"control_freq": 20, "robots": ["Panda"]}}
        data.attrs["env_args"], data.attrs["total"] = json.dumps(args), episodes
        for number in range(episodes):
            state, action, images = motion(number, 7, (6,))
            length = len(action)
            step = np.concatenate([(action - state)[:, :6] / 0.02, action[:, 6:]], 1)
            quaternion = np.tile(np.array([0, 0, 0, 1], np.float32), (length, 1))
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = length
            demo["actions"], demo["rewards"] = np.clip(step, -1, 1), np.eye(length)[-1]
            demo["dones"], demo["states"] = np.eye(length)[-1], np.zeros((length, 32))
            demo["obs/robot0_eef_pos"], demo["obs/robot0_eef_quat"] = 0.2 * state[:, :3], quaternion
            demo["obs/robot0_gripper_qpos"] = 0.04 * np.abs(state[:, [6, 6]])
            demo["obs/object"] = np.zeros((length, 10))
            demo["obs/agentview_image"] = images
            demo["obs/robot0_eye_in_hand_image"] = images[:, ::-1]
    return file
