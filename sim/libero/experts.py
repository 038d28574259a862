"""Scripted experts for LIBERO's pick-and-place tasks, from privileged state.

Reach above the object, descend, close, lift, carry above everything on the way, lower, let go. What to
do next follows from the state alone (where the hand is, what the fingers touch, how far they are
closed), so the expert goes on from any state, also after noise, a lost grasp or a restored keyframe.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mujoco
import numpy as np

from sim.libero.clearance import Shape, highest_near_path
from sim.libero.scene import Scene

GAIN = 40.0  # action per meter; 1 from 25 mm on. The controller then settles without overshoot.
TURN_GAIN = 4.0  # action per radian
TURN_DEADBAND = 0.02  # radians; a zero turn keeps the controller's goal
FINGER_REACH = 0.010  # meters from the grip site down to the fingertips
PAD_DEPTH = 0.018  # meters from a rim down to the grip site
HAND_CLEARANCE = 0.022  # meters from the grip site up to the hand, less a margin
HAND_HALF = (0.105, 0.035)  # meters, half the hand's extent along and across the closing direction
FINGERS_HALF = (0.065, 0.013)  # meters, likewise of the open fingers
ENOUGH_ROOM = 0.02  # meters; more room around the hand is no better
WRIST_HEIGHT, WRIST_OFFSET = 0.204, 0.088  # meters from the grip site up, and back, to the Panda's wrist
COMFORTABLE_REACH = 0.64  # meters from shoulder to wrist; the stretched arm (0.72) loses its way
MAX_WIDTH = 0.074  # meters; wider things do not fit between the fingers (which open 80 mm)
EMPTY_GAP = 0.003  # meters between fingers that closed on nothing
HOVER = 0.06  # meters above the grasp, before descending
MARGIN = 0.03  # meters kept above things on the way
HAND_DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])  # fingers close along the world's y
OPEN, CLOSE = -1.0, 1.0


@dataclass
class Grasp:
    """Where to put the grip site, relative to the object's body frame: `offset` (3,), turned by `yaw` about z."""

    offset: np.ndarray
    yaw: float


def placed_object(goal: Sequence[Sequence[str]], movable: Collection[str]) -> tuple[str, str] | None:
    """The object and what it goes on or in, of a BDDL goal that is one such placement; None for any other."""
    if len(goal) != 1 or goal[0][0] not in ("on", "in") or goal[0][1] not in movable:
        return None
    return goal[0][1], goal[0][2]


class PickAndPlace:
    """The expert of one scene. `begin` at the start of each episode, then `action`.

    Raises:
        NotImplementedError: the task's goal is not one movable object on or in something.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene, self.env = scene, scene.env
        goal = self.env.parsed_problem["goal_state"]
        if (placed := placed_object(goal, self.env.objects_dict)) is None:
            raise NotImplementedError(f"there is no scripted expert for the goal {goal}")
        self.object_name, self.target_name = placed
        model = scene.model
        things = {**self.env.objects_dict, **self.env.fixtures_dict}
        self.shapes = {name: Shape(model, thing.contact_geoms) for name, thing in things.items() if thing.contact_geoms}
        self.body = model.body(things[self.object_name].root_body).id
        fingers = self.env.robots[0].gripper.important_geoms
        self.fingers = [{model.geom(name).id for name in fingers[side]} for side in ("left_finger", "right_finger")]
        self._shoulder = scene.data.body("robot0_link1").xpos.copy()
        self._grasp: Grasp | None = None

    def begin(self) -> None:
        """A new episode: the grasp is chosen at the first action."""
        self._grasp = None

    # ------------------------------------------------------------------ acting

    def action(self) -> np.ndarray:
        """The next action, float32 (7,)."""
        if self._grasp is None:
            self._grasp = self._choose_grasp()
        data, control = self.scene.data, self.scene.control
        hand = data.site_xpos[control.site]
        if self._is_held(hand):
            goal, gripper = self._carry(hand)
        elif self._is_placed():
            up = 0.0 if self._both_touch() else HOVER
            goal, gripper = np.array([hand[0], hand[1], hand[2] + up]), OPEN
        else:
            goal, gripper = self._reach(hand)
        return self._towards(goal, gripper)

    def _towards(self, goal: np.ndarray, gripper: float) -> np.ndarray:
        data, site = self.scene.data, self.scene.control.site
        assert self._grasp is not None, "the grasp is chosen before moving"
        action = np.zeros(7, np.float32)
        action[:3] = np.clip(GAIN * (goal - data.site_xpos[site]), -1, 1)
        turn = rotation_vector(_about_z(self._grasp.yaw) @ HAND_DOWN @ data.site_xmat[site].reshape(3, 3).T)
        if np.linalg.norm(turn) > TURN_DEADBAND:
            action[3:6] = np.clip(TURN_GAIN * turn, -1, 1)
        action[6] = gripper
        return action

    def _reach(self, hand: np.ndarray) -> tuple[np.ndarray, float]:
        """Above the grasp, then down to it, then close."""
        grasp = self._grasp_point()
        away = float(np.linalg.norm(hand[:2] - grasp[:2]))
        closing = self.scene.control.finger_command[1] > -0.9
        fully_closed = self.scene.control.finger_command[1] >= 1.0
        if fully_closed:  # on nothing, or what was held is lost: look at it afresh
            self._grasp = self._choose_grasp()
        tolerance = 0.025 if closing else 0.012
        if away < tolerance and abs(hand[2] - grasp[2]) < tolerance and not fully_closed:
            return grasp, CLOSE
        height = grasp[2] + np.clip(5.0 * (away - 0.008), 0.0, HOVER)
        if away > 0.04:
            obstacles = highest_near_path(self._obstacles(held=False), hand, grasp, 0.07)
            height = max(height, obstacles + MARGIN + FINGER_REACH)
            if hand[2] < height - 0.04 and away > 0.06:
                return np.array([hand[0], hand[1], height]), OPEN
        return np.array([grasp[0], grasp[1], height]), OPEN

    def _carry(self, hand: np.ndarray) -> tuple[np.ndarray, float]:
        """Up, across above everything, down, and open once there."""
        data = self.scene.data
        corners = self.shapes[self.object_name].points(data)
        middle = (corners.min(0) + corners.max(0)) / 2
        below = hand[2] - corners[:, 2].min()  # of the object, under the hand
        target, surface = self._target()
        away = float(np.linalg.norm(middle[:2] - target[:2]))
        goal = np.array([*(hand[:2] + target[:2] - middle[:2]), surface + below])
        if away < 0.02:
            done = goal[2] > hand[2] - 0.008
            return goal - [0, 0, 0.01], OPEN if done and self.target_name not in self.shapes else CLOSE
        others = self._obstacles(held=True, per_edge=6)
        aside = _from_under(others, corners)
        if aside is not None:  # as from a drawer, which the cabinet's top half covers
            return hand + 0.03 * aside, CLOSE
        clear = max(highest_near_path(others, middle, target, 0.09) + MARGIN, surface + 0.02) + below
        goal[2] = clear if away > 0.05 else max(surface + below, min(clear, hand[2]))
        if hand[2] < clear - 0.015 and away > 0.05:
            return np.array([hand[0], hand[1], clear + 0.02]), CLOSE
        return goal, CLOSE

    # ------------------------------------------------------------------ geometry

    def _target(self) -> tuple[np.ndarray, float]:
        """Where the object's middle goes (3,), and the height at which its underside is let go."""
        data = self.scene.data
        if self.target_name in self.shapes:  # on an object
            corners = self.shapes[self.target_name].points(data)
            return (corners.min(0) + corners.max(0)) / 2, float(corners[:, 2].max()) - 0.01
        site = data.site(self.target_name)
        half = self.env.object_sites_dict[self.target_name].size
        return site.xpos, float(site.xpos[2] + 0.5 * half[2])

    def _obstacles(self, held: bool, per_edge: int = 4) -> np.ndarray:
        """Points (n, 3) on everything but the object; when it is carried, also not on what it goes onto."""
        skipped = {self.object_name, self.target_name} if held else {self.object_name}
        data = self.scene.data
        parts = [shape.points(data, per_edge) for name, shape in self.shapes.items() if name not in skipped]
        return np.concatenate(parts)

    def _grasp_point(self) -> np.ndarray:
        assert self._grasp is not None, "the grasp is chosen before moving"
        data = self.scene.data
        return data.xpos[self.body] + data.xmat[self.body].reshape(3, 3) @ self._grasp.offset

    def _is_held(self, hand: np.ndarray) -> bool:
        """The fingers have closed at the grasp, but not to the end: there is something between them."""
        data, control = self.scene.data, self.scene.control
        if control.finger_command[1] < 0.95 or np.linalg.norm(hand - self._grasp_point()) > 0.04:
            return False
        return float(np.abs(data.qpos[self.scene.finger_qpos]).sum()) > EMPTY_GAP

    def _both_touch(self) -> bool:
        pairs = self.scene.data.contact.geom
        geoms = set(self.shapes[self.object_name].geoms.tolist())
        touching = [False, False]
        for first, second in pairs.tolist():
            other = second if first in geoms else first if second in geoms else None
            for side in range(2):
                touching[side] |= other in self.fingers[side]
        return all(touching)

    def _is_placed(self) -> bool:
        """The object is over its target and low, so that letting go is (or was) right."""
        corners = self.shapes[self.object_name].points(self.scene.data)
        middle = (corners.min(0) + corners.max(0)) / 2
        target, surface = self._target()
        return bool(np.linalg.norm(middle[:2] - target[:2]) < 0.03 and corners[:, 2].min() < surface + 0.02)

    def _choose_grasp(self) -> Grasp:
        """Across the object if it fits between the fingers, else over its rim; where there is most room."""
        data = self.scene.data
        corners = self.shapes[self.object_name].points(data)
        candidates = _across_grasps(corners) or _rim_grasps(corners)
        others = self._obstacles(held=False, per_edge=9)
        scores = []
        for point, yaw, cost in candidates:
            room = min(_room(others, point, yaw), ENOUGH_ROOM)
            wrist = point - self._shoulder + np.array([0.0, 0.0, WRIST_HEIGHT])
            stretch = max(np.hypot(np.linalg.norm(wrist[:2]) - WRIST_OFFSET, wrist[2]) - COMFORTABLE_REACH, 0.0)
            scores.append(room - cost - 0.01 * abs(yaw) - 2.0 * stretch)
        point, yaw, _ = candidates[int(np.argmax(scores))]
        offset = data.xmat[self.body].reshape(3, 3).T @ (point - data.xpos[self.body])
        return Grasp(offset, yaw)


def _across_grasps(corners: np.ndarray) -> list[tuple[np.ndarray, float, float]]:
    """Grasps (grip site, yaw, cost in meters) around the whole object, wherever it fits between the fingers."""
    low, high = corners.min(0), corners.max(0)
    height = max(high[2] - HAND_CLEARANCE, low[2] + FINGER_REACH + 0.003)
    grasps = []
    for yaw in np.radians(np.arange(-90, 90, 5)):
        along = corners[:, :2] @ _closing_direction(yaw)
        if np.ptp(along) < MAX_WIDTH:
            grasps.append((np.array([*(low + high)[:2] / 2, height]), yaw, 0.5 * float(np.ptp(along))))
    return grasps


def _rim_grasps(corners: np.ndarray) -> list[tuple[np.ndarray, float, float]]:
    """Grasps (grip site, yaw, cost in meters) with one finger inside a bowl's rim and one outside."""
    middle = (corners[:, :2].min(0) + corners[:, :2].max(0)) / 2
    widest = float(np.linalg.norm(corners[:, :2] - middle, axis=1).max())
    grasps = []
    for angle in np.radians(np.arange(0, 360, 15)):
        outward = np.array([np.cos(angle), np.sin(angle)])
        yaw = angle % np.pi - np.pi / 2
        wall = corners[np.linalg.norm(corners[:, :2] - (middle + widest * outward), axis=1) < 0.03]
        if not len(wall):
            continue
        top = float(wall[:, 2].max())  # here: the bowl may be tilted
        radius = float(np.median((wall[wall[:, 2] > top - 0.01, :2] - middle) @ outward))
        grasps += [
            (np.array([*(middle + (radius - inward) * outward), top - PAD_DEPTH]), yaw, 0.5 * inward)
            for inward in (0.0, 0.01, 0.02)
        ]
    return grasps


def _closing_direction(yaw: float) -> np.ndarray:
    return np.array([-np.sin(yaw), np.cos(yaw)])


def _room(others: np.ndarray, point: np.ndarray, yaw: float) -> float:
    """Meters between the open hand at a grasp and the nearest of `others` (n, 3); negative inside."""
    near = others[others[:, 2] > point[2] - FINGER_REACH - 0.003]
    relative = near[:, :2] - point[:2]
    closing = _closing_direction(yaw)
    along = np.abs(relative @ closing)
    across = np.abs(relative @ np.array([closing[1], -closing[0]]))
    is_high = near[:, 2] > point[2] + HAND_CLEARANCE - 0.01
    gap = np.maximum(
        along - np.where(is_high, HAND_HALF[0], FINGERS_HALF[0]),
        across - np.where(is_high, HAND_HALF[1], FINGERS_HALF[1]),
    )
    return float(gap.min()) if len(gap) else np.inf


def _from_under(others: np.ndarray, corners: np.ndarray) -> np.ndarray | None:
    """The direction (3,) in which an object with these corners gets out from under any of `others` (n, 3), if it is."""
    middle, radius = (corners.min(0) + corners.max(0)) / 2, float(np.ptp(corners[:, :2], axis=0).max()) / 2
    top = corners[:, 2].max()
    is_over = np.linalg.norm(others[:, :2] - middle[:2], axis=1) < radius + 0.005
    over = others[is_over & (others[:, 2] > top - 0.01) & (others[:, 2] < top + 0.12)]
    if not len(over):
        return None
    away = middle[:2] - over[:, :2].mean(0)
    return np.array([*(away / max(float(np.linalg.norm(away)), 1e-6)), 0.1])


def _about_z(angle: float) -> np.ndarray:
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])


def rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Axis times angle (3,), radians in [0, pi], of a rotation matrix."""
    quaternion, vector = np.zeros(4), np.zeros(3)
    mujoco.mju_mat2Quat(quaternion, rotation.reshape(9))
    mujoco.mju_quat2Vel(vector, quaternion, 1.0)
    return vector
