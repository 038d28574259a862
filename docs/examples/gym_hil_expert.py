"""A scripted expert for gym-hil's PandaPickCube: above the cube, down, close, up. It keeps no memory."""

from typing import Any

import numpy as np

STEP = 0.025  # meters of an action of 1
OPEN, CLOSE = 0.0, 2.0  # the last of the four numbers: what it adds to how far the gripper is closed


def pick(env: Any, obs: Any) -> np.ndarray:
    """The next action, float32 (4,): dx, dy, dz and the gripper."""
    cube, hand = env.data.sensor("block_pos").data, env.data.sensor("2f85/pinch_pos").data
    error = cube - hand
    if np.linalg.norm(error[:2]) > 0.01:  # not above it
        return np.array([*np.clip([*error[:2] / STEP, (error[2] + 0.1) / STEP], -1, 1), OPEN], np.float32)
    if abs(error[2]) > 0.01:  # not around it
        return np.array([*np.clip(error / STEP, -1, 1), OPEN], np.float32)
    closed = float(env.get_gripper_pose()[0]) > 200
    return np.array([0.0, 0.0, 1.0 if closed else 0.0, CLOSE], np.float32)
