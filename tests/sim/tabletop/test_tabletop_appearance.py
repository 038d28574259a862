"""What the tabletop looks like: appearance without physics, and where the gripper is in the image."""

# ruff: noqa: F811  (fixtures of the file beside this one)

from __future__ import annotations

import numpy as np
import pytest
from test_tabletop import env  # noqa: F401  (fixtures)

from sim.tabletop import TabletopConfig
from sim.tabletop.env import TabletopEnv
from vla_rl.types import EpisodeSpec


@pytest.mark.parametrize("looks", [0.5, 1])
def test_appearance_changes_pixels_and_not_physics(env: TabletopEnv, looks: float) -> None:
    varied = TabletopConfig(looks=looks).make()
    changed = 0
    for index in range(4):
        spec = EpisodeSpec("pick_colour", "train", index)
        actions = np.random.default_rng(index).uniform(-1, 1, (8, 7)).astype(np.float32)
        first, second = env.reset(spec), varied.reset(spec)
        changed += not np.array_equal(first.images["agentview"], second.images["agentview"])
        assert np.array_equal(varied.reset(spec).images["agentview"], second.images["agentview"])
        assert np.array_equal(first.state, second.state) and first.instruction == second.instruction
        env.run_chunk(actions)
        varied.run_chunk(actions)
        assert np.array_equal(env._now.qpos, varied._now.qpos)
    assert changed == 4


def test_the_projection_finds_the_gripper_in_the_image() -> None:
    """Moving the gripper changes the picture around where the projection says its fingers are."""
    config = TabletopConfig(tasks=("push_to_zone",))
    projection = config.env_spec().projections["agentview"]
    env = config.make()
    before = env.reset(EpisodeSpec("push_to_zone", "train", 0))
    for _ in range(4):
        env.apply(np.array([0, 1, 0, 0, 0, 0, -1], np.float32))
    after = env.observe()
    env.close()
    changed = np.abs(after.images["agentview"].astype(int) - before.images["agentview"].astype(int)).sum(-1) > 60
    rows, columns = np.nonzero(changed)
    for obs in (before, after):
        x, y, depth = projection @ np.append(obs.state[:3], 1.0)
        distance = np.hypot(columns / 64 - x / depth, rows / 64 - y / depth)
        assert distance.min() < 0.12  # The fingers stand to either side of it.


def test_a_camera_that_differs_between_episodes_has_no_projection() -> None:
    assert TabletopConfig().env_spec().projections
    assert not TabletopConfig().perturbed("camera", 1).env_spec().projections
