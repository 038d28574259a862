"""Demonstrations stored as LIBERO's script does from its stock environment, imported: what our environment shows."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from libero_setup import ASSETS, needs_assets

from sim.libero import LiberoConfig
from sim.libero.library import bddl_path, init_states_path, load_init_states
from vla_rl.data.hdf5 import import_libero
from vla_rl.types import EpisodeSpec

pytestmark = [pytest.mark.slow, needs_assets]
WAIT = [0, 0, 0, 0, 0, 0, -1]
SKIPPED = 5  # steps that the script does not store
LENGTH = 14


def test_rows_are_what_ours_shows_before_each_action(tmp_path: Path) -> None:
    options = {"cameras": ("agentview", "wrist"), "image_size": 64, "assets_path": ASSETS}
    ours = LiberoConfig(suite="libero_spatial", tasks=("0",), **options).make()
    (task,) = ours.spec.tasks
    actions = np.random.default_rng(0).uniform(-0.5, 0.5, (LENGTH, 7))
    ours.reset(EpisodeSpec(task, "eval", 0))
    seen = []  # after each action
    for action in actions:
        ours.apply(action)
        seen.append(ours.observe())
    ours.close()

    from libero.libero.envs import OffScreenRenderEnv  # ours has told LIBERO where its files are
    from robosuite.utils.transform_utils import quat2axisangle

    stock = OffScreenRenderEnv(
        bddl_file_name=str(bddl_path("libero_spatial", task)), camera_heights=64, camera_widths=64
    )
    stock.seed(0)
    stock.reset()
    stock.set_init_state(load_init_states(init_states_path("libero_spatial", task))[0])
    for _ in range(10):
        stock.step(WAIT)
    after = [stock.step(action)[0] for action in actions]
    stock.close()
    stored = after[SKIPPED:]
    with h5py.File(tmp_path / f"{task}_demo.hdf5", "w") as file:
        data = file.create_group("data")
        data.attrs["problem_info"] = json.dumps({"language_instruction": "pick it up"})
        data.attrs["macros_image_convention"] = "opengl"
        data["demo_0/actions"] = actions[SKIPPED:]
        data["demo_0/obs/agentview_rgb"] = np.stack([obs["agentview_image"] for obs in stored])
        data["demo_0/obs/eye_in_hand_rgb"] = np.stack([obs["robot0_eye_in_hand_image"] for obs in stored])
        poses = [np.hstack([obs["robot0_eef_pos"], quat2axisangle(obs["robot0_eef_quat"].copy())]) for obs in stored]
        data["demo_0/obs/ee_states"] = np.stack(poses)
        data["demo_0/obs/gripper_states"] = np.stack([obs["robot0_gripper_qpos"] for obs in stored])
    import_libero([tmp_path / f"{task}_demo.hdf5"], tmp_path / "dataset")

    dataset = LeRobotDataset("local/imported", root=tmp_path / "dataset")
    assert len(dataset) == LENGTH - SKIPPED - 1
    for number in range(len(dataset)):
        row, before = dataset[number], seen[SKIPPED + number]
        np.testing.assert_allclose(row["action"], actions[SKIPPED + number + 1].astype(np.float32))
        np.testing.assert_array_equal(row["observation.state"].numpy(), before.state)
        for camera, image in before.images.items():
            shown = (row[f"observation.images.{camera}"].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)
            np.testing.assert_array_equal(shown, image)
    assert dataset[0]["task"] == "pick it up"
