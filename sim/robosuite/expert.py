"""Scripted experts for the robosuite tasks: reach, grasp, lift, and carry and release where asked.

They read the simulator's own positions, and decide from the state alone what comes next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

HOVER = 0.10  # meters above the object at which the gripper travels
ALIGNED = 0.012  # horizontal distance below which it goes down, meters
CARRY = 0.16  # height above its resting place at which an object is carried, meters
GAIN = 20.0  # action per meter of error; an action of 1 asks for 5 cm
OPEN, CLOSED = -1.0, 1.0
ON_TOP = np.array([0.0, 0.0, 0.048])  # a cube's center on the other's, meters
IN_BIN = np.array([-0.02, -0.03, 0.10])  # the can from its bin's center when let go; nearer, where the arm reaches well


def act(task: str, env: Any) -> np.ndarray:
    """The next action, float32 (7,), for the environment's current state."""
    hand = np.array(env.sim.data.site_xpos[env.robots[0].eef_site_id])
    match task:
        case "Lift":
            held = _held(env, env.cube)
            cube = env.sim.data.body_xpos[env.cube_body_id]
            return _move([0, 0, 0.1], CLOSED) if held else _pick(hand, cube)
        case "Stack":
            cube = env.sim.data.body_xpos[env.cubeA_body_id]
            base = env.sim.data.body_xpos[env.cubeB_body_id]
            return _place(cube, base + ON_TOP, ALIGNED) if _held(env, env.cubeA) else _pick(hand, cube)
        case "PickPlaceCan":
            index = env.object_id
            can = env.sim.data.body_xpos[env.obj_body_id[env.objects[index].name]]
            bin_center = env.target_bin_placements[index]
            if _held(env, env.objects[index]):
                return _place(can, bin_center + IN_BIN, 0.05)
            if not env.not_in_bin(can, index):
                return _move([0, 0, 0.1], OPEN)  # released: make room
            return _pick(hand, can)
    raise NotImplementedError(f"robosuite has no scripted expert for {task!r}")


def _held(env: Any, thing: Any) -> bool:
    return env._check_grasp(gripper=env.robots[0].gripper, object_geoms=thing)


def _move(offset: Any, gripper: float) -> np.ndarray:
    """Move by an offset in meters, without turning."""
    action = np.zeros(7, np.float32)
    action[:3] = np.clip(GAIN * np.asarray(offset), -1, 1)
    action[6] = gripper
    return action


def _pick(hand: np.ndarray, thing: np.ndarray) -> np.ndarray:
    """Go above it, down on it, and close."""
    offset = thing - hand
    if np.linalg.norm(offset[:2]) > ALIGNED:
        height = offset[2] + HOVER
        return _move([*offset[:2], height if height > 0 or offset[2] < -HOVER else 0.0], OPEN)
    if abs(offset[2]) > ALIGNED:
        return _move(offset, OPEN)
    return _move(offset, CLOSED)


def _place(thing: np.ndarray, goal: np.ndarray, aligned: float) -> np.ndarray:
    """Carry it, held, to within `aligned` meters above the goal, lower it, and let go."""
    offset = goal - thing
    if np.linalg.norm(offset[:2]) > aligned:
        height = offset[2] + CARRY
        return _move([0, 0, height] if height > 0.04 else [*offset[:2], height], CLOSED)
    return _move(offset, CLOSED) if offset[2] < -ALIGNED else _move([0, 0, 0], OPEN)


BENCHMARK_HORIZON = 500  # control steps, of robosuite's benchmark
ALL_OBJECTS_HORIZON = 1000  # robosuite's default, where several objects are to be placed


@dataclass(frozen=True)
class Task:
    """One of robosuite's environments. horizon: control steps. robots: robosuite's names, one an arm."""

    instruction: str
    horizon: int = BENCHMARK_HORIZON
    robots: tuple[str, ...] = ("Panda",)


# The nine tasks of robosuite 1.4, two of them as their variants with one object or all. The first three have scripted
# experts, and horizons of about twice what these need.
TASKS: dict[str, Task] = {
    "Lift": Task("lift the red cube", 120),
    "Stack": Task("stack the red cube on the green cube", 200),
    "PickPlaceCan": Task("pick up the can and put it in its bin", 240),
    "PickPlaceMilk": Task("pick up the milk and put it in its bin"),
    "PickPlaceBread": Task("pick up the bread and put it in its bin"),
    "PickPlaceCereal": Task("pick up the cereal box and put it in its bin"),
    "PickPlace": Task("put each of the four things in its bin", ALL_OBJECTS_HORIZON),
    "NutAssemblyRound": Task("put the round nut on the round peg"),
    "NutAssemblySquare": Task("put the square nut on the square peg"),
    "NutAssembly": Task("put each nut on its peg", ALL_OBJECTS_HORIZON),
    "Door": Task("open the door"),
    "Wipe": Task("wipe the dirt off the table"),
    "TwoArmLift": Task("lift the pot with both arms and keep it level", robots=("Panda", "Panda")),
    # The benchmark's second arm is a Sawyer, whose head MuJoCo 3.8 does not load: its mesh has no volume.
    "TwoArmPegInHole": Task("put the peg into the hole", robots=("Panda", "Panda")),
    "TwoArmHandover": Task("pick up the hammer with one arm and hand it to the other", robots=("Panda", "Panda")),
}
WITH_EXPERT = ("Lift", "Stack", "PickPlaceCan")


def tasks_with(arms: int) -> dict[str, Task]:
    """The tasks of so many arms."""
    return {name: task for name, task in TASKS.items() if len(task.robots) == arms}
