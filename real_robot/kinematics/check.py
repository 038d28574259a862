"""The supervisor's check of motions against the robot's model: collisions, joint limits, singularities, efforts.

What it looks at is where the robot is, where this tick brings it, and where it would come to rest if it braked then:
by set-points for joints that are commanded by position; by the measured joints and what was sent since for joint
velocities; for twists the same through the Jacobian, with the smallest joint velocities that make them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from real_robot.checks import Motion, Newest
from real_robot.contract.channels import ActionSink
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import commanded_joints, measured_joints
from real_robot.contract.model import ModelConfig
from real_robot.kinematics.arm_model import LOOK, ArmModel, Pair
from real_robot.transports.base import QosConfig, Transport
from real_robot.transports.messages import JointState, Message
from real_robot.types import RobotObservation
from vla_rl.config import ConfigError

MAX_POINTS = 32  # of a path
FINEST = 0.01  # meters between two looked-at points of a path, at least
TWIST = "geometry_msgs/TwistStamped"
NEAR_SINGULAR = 1e-6  # relative growth of the condition number that is no growth


class CollisionCheck:
    """Follows a path, and looks at it closely where something is near.

    Between two points that it looks at, no part can have moved farther than the room that there was, except within
    min_distance of something: there the points are a centimeter, or min_distance, apart, at most 32 on a path.

    Where two things are too near already, as when the robot is found so, they may part, not come nearer: what counts
    is the widest distance since they were first so, less 5 % of min_distance for noise.
    """

    def __init__(self, arm: ArmModel) -> None:
        self._arm = arm
        self._least = arm.config.min_distance
        self._noise = max(1e-5, 0.05 * self._least)
        self._widest: dict[Pair, float] = {}  # of pairs that are too near now

    def restart(self) -> None:
        """Forget what was near: the robot may have been moved."""
        self._widest = {}

    def trouble(self, here: np.ndarray, path: Sequence[np.ndarray]) -> str | None:
        """What comes too near on the straight ways from `here` to each point of the path, joints (N,); or None."""
        arm = self._arm
        distances = arm.distances(here)
        too_near = {pair: distance for pair, distance in distances.items() if distance < self._limit(pair)}
        self._widest = {pair: max(distance, self._widest.get(pair, -math.inf)) for pair, distance in too_near.items()}
        points = [here, *path]
        lengths = [arm.farthest(after - before) for before, after in pairwise(points)]
        finest = max(FINEST, self._least, sum(lengths) / MAX_POINTS)
        room = self._room(distances)
        for start, end, length in zip(points[:-1], points[1:], lengths, strict=True):
            done = 0.0
            while done < length:
                done = min(length, done + max(room, finest))
                distances = arm.distances(start + (end - start) * (done / length))
                if reason := self._reason(distances):
                    return reason
                room = self._room(distances)
        return None

    def _limit(self, pair: Pair) -> float:
        return 0.0 if pair in self._arm.pairs.close else self._least

    def _room(self, distances: dict[Pair, float]) -> float:
        return min((distance - self._limit(pair) for pair, distance in distances.items()), default=LOOK)

    def _reason(self, distances: dict[Pair, float]) -> str | None:
        worst: tuple[float, str] | None = None
        for (first, second), distance in distances.items():
            limit = self._limit((first, second))
            widest = self._widest.get((first, second), math.inf)
            if distance < limit and distance < widest - self._noise and (worst is None or distance < worst[0]):
                how = "would touch" if distance <= 0 else f"would come {1000 * distance:.1f} mm near"
                worst = distance, f"{first} {how} {second}, at least {1000 * limit:g} mm is allowed"
        return worst[1] if worst else None


@dataclass(frozen=True)
class JointSample:
    """Newest joints.

    Attributes:
        stamp: monotonic seconds when they arrived.
        position, effort: the file's joint -> radians (meters), Nm (N); only those that the message had.
    """

    stamp: float
    position: dict[str, float]
    effort: dict[str, float]


class JointStates:
    """The newest message of `model.joint_states`. Messages that are not finite or lack a joint count as none.

    Args:
        needed: joints of the file whose position must be there. with_effort: joints whose effort must be.
    """

    def __init__(
        self,
        model: ModelConfig,
        transport: Transport,
        needed: tuple[str, ...],
        with_effort: tuple[str, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._needed, self._with_effort = model, needed, with_effort
        self._newest = Newest[tuple[dict[str, float], dict[str, float]]](model.joint_states, "the joints", clock)
        transport.subscribe(model.joint_states, JointState, QosConfig(), self._receive)

    def newest(self) -> JointSample | None:
        """What arrived last; None before the first."""
        shown = self._newest.get()
        return None if shown is None else JointSample(shown[0], *shown[1])

    def trouble(self, limit: float) -> str | None:
        """Why the joints are not known: nothing in `limit` seconds; or None."""
        return self._newest.trouble(limit)

    def _receive(self, message: Message) -> None:
        assert isinstance(message, JointState)
        position = self._read(message.name, message.position)
        effort = self._read(message.name, message.effort, with_units=False)
        fault = next((f"no position of {j}" for j in self._needed if j not in position), "")
        fault = fault or next((f"no effort of {j}" for j in self._with_effort if j not in effort), "")
        if fault:
            self._newest.refuse(fault)
        else:
            self._newest.show((position, effort))

    def _read(self, names: tuple[str, ...], values: np.ndarray, with_units: bool = True) -> dict[str, float]:
        """Joint of the file -> its number; those that are not finite are left out."""
        if len(values) != len(names):
            return {}
        found: dict[str, float] = {}
        for name, value in zip(names, values, strict=True):
            if (link := self._model.joint_of(name)) is None:
                continue
            number = link.scale * float(value) + link.offset if with_units else float(value)
            if np.isfinite(number):
                found[link.joint] = number
        return found


@dataclass(frozen=True)
class _Twist:
    """Where a twist is in the action: its six numbers, their factors to m/s and rad/s, what it moves, its frame."""

    numbers: np.ndarray
    factors: np.ndarray
    link: int
    frame: int | None


class ModelCheck:
    """A motion check and a state check of the supervisor. See the module.

    Raises:
        ConfigError: the model's file cannot be used; the contract commands poses; or a joint is neither commanded,
            measured nor fixed.
    """

    name = "model"

    def __init__(self, contract: RobotContract, transport: Transport | None = None) -> None:
        model = contract.model
        assert model is not None, "the caller has looked"
        self.arm = ArmModel(model, Path(model.file))
        self._model, self._timeout = model, contract.safety.observation_timeout
        commanded = [(self.arm.index(link.joint), link) for link in commanded_joints(contract, model)]
        kinds = [d.kind for d in contract.safety.dimensions]
        self._positions = [(i, link) for i, link in commanded if kinds[link.number] == "position"]
        self._velocities = [(i, link) for i, link in commanded if kinds[link.number] == "velocity"]
        self._twists = [self._twist(sink, model) for sink in contract.action if sink.type == TWIST]
        self._measured = [(self.arm.index(link.joint), link) for link in measured_joints(contract, model)]
        self._base = self.arm.neutral.copy()
        for joint, position in model.fixed.items():
            self._base[self.arm.index(joint)] = position
        self._max_effort = self._effort_limits(model)
        self._states = self._subscribe(contract, transport)
        self._collision = CollisionCheck(self.arm)
        for joint in model.margins:
            self.arm.index(joint)
        margin = np.array(
            [model.margin_of(j, bool(s)) for j, s in zip(self.arm.joints, self.arm.is_slide, strict=True)]
        )
        self._low, self._high = self.arm.low + margin, self.arm.high - margin
        self._sent: np.ndarray | None = None

    def _twist(self, sink: ActionSink, model: ModelConfig) -> _Twist:
        if not model.end_effector:
            raise ConfigError(f"model.end_effector: which link does {sink.topic} move?")
        factors = np.ones(6) * np.asarray(sink.convert.scale) * np.repeat(model.twist_scale, 3)
        frame = model.twist_frame or sink.frame
        return _Twist(
            np.array(sink.indices), factors, self.arm.link(model.end_effector), self.arm.link(frame) if frame else None
        )

    def _effort_limits(self, model: ModelConfig) -> dict[str, float]:
        limits: dict[str, float] = {}
        if model.effort_share is not None:
            given = zip(self.arm.joints, self.arm.effort, strict=True)
            limits = {joint: float(e) * model.effort_share for joint, e in given if np.isfinite(e)}
        for joint in model.max_effort:
            self.arm.index(joint)
        return {**limits, **model.max_effort}

    def _subscribe(self, contract: RobotContract, transport: Transport | None) -> JointStates | None:
        """Whose joints are measured by whom.

        Raises:
            ConfigError: a joint is neither commanded as a position, nor measured, nor fixed.
        """
        model = self._model
        known = {i for i, _ in (*self._positions, *self._measured)} | {self.arm.index(j) for j in model.fixed}
        missing = tuple(joint for i, joint in enumerate(self.arm.joints) if i not in known)
        if model.joint_states and transport is not None:
            return JointStates(model, transport, missing, tuple(self._max_effort))
        if missing and not model.joint_states:
            raise ConfigError(
                f"model: joint {missing[0]} is neither commanded by position nor measured; name the topic that has it "
                "(model.joint_states), or where it is to be taken for (model.fixed)"
            )
        return None

    def summary(self) -> str:
        """The file and what is kept apart, in a line."""
        file, least = Path(self._model.file).name, self._model.min_distance
        return f"{file}: {len(self.arm.joints)} joints, parts kept {least:g} m apart; {self.arm.summary()}"

    # --- what the robot reports ---------------------------------------------------------------

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        """Joints that are not known, or an effort beyond its limit."""
        self._sent = sent
        if self._states is None:
            return None
        if trouble := self._states.trouble(self._timeout):
            return trouble
        newest = self._states.newest()
        assert newest is not None, "else there is trouble"
        for joint, limit in self._max_effort.items():
            effort = newest.effort[joint]
            if abs(effort) > limit:
                return f"effort of {joint} is {effort:.3g}, at most {limit:g} is allowed"
        return None

    def restart(self) -> None:
        """The robot may have been moved."""
        self._sent = None
        self._collision.restart()

    # --- what is about to be sent -------------------------------------------------------------

    def refuse(self, motion: Motion) -> str | None:
        """What would come too near, pass its limit, or be near a singularity."""
        if self._states is not None and (trouble := self._states.trouble(self._timeout)):
            return trouble
        here = self._here(motion)
        after, rest = here.copy(), here.copy()
        for i, link in self._positions:
            after[i] = link.scale * motion.values[link.number] + link.offset
            rest[i] = after[i] + link.scale * motion.way[link.number]
        for i, link in self._velocities:
            after[i] = rest[i] = here[i] + link.scale * motion.way[link.number]
        for twist in self._twists:
            change, reason = self._follow_twist(twist, here, motion.way)
            if reason:
                return reason
            after, rest = after + change, rest + change
        if (self._velocities or self._twists) and (reason := self._beyond_limits(here, rest)):
            return reason
        return self._collision.trouble(here, [after, rest])

    def _here(self, motion: Motion) -> np.ndarray:
        """Joints (N,): set-points sent last, else measured, and moved by what was sent since."""
        here = self._base.copy()
        stamps = np.full(len(here), motion.observation.stamp)
        state = motion.observation.state
        for i, link in self._measured:
            here[i] = link.scale * float(state[link.number]) + link.offset
        if self._states is not None and (newest := self._states.newest()) is not None:
            for i, joint in enumerate(self.arm.joints):
                if joint in newest.position:
                    here[i], stamps[i] = newest.position[joint], newest.stamp
        moved = motion.moved_since(float(stamps.min()) - motion.tick)  # and the tick that it fell into
        for i, link in self._velocities:
            here[i] += link.scale * moved[link.number]
        values = motion.values if self._sent is None else self._sent
        for i, link in self._positions:
            here[i] = link.scale * float(values[link.number]) + link.offset
        for twist in self._twists:
            here = here + self._joint_change(twist, here, moved)
        return here

    def _joint_change(self, twist: _Twist, joints: np.ndarray, way: np.ndarray) -> np.ndarray:
        """How the joints (N,) move when the end effector makes the way (A,): the least change that does."""
        wanted = twist.factors * way[twist.numbers]
        if not wanted.any():
            return np.zeros(len(joints))
        if twist.frame is not None:
            turn = self.arm.rotation(joints, twist.frame)
            wanted = np.concatenate([turn @ wanted[:3], turn @ wanted[3:]])
        left, sizes, right = np.linalg.svd(self.arm.jacobian(joints, twist.link), full_matrices=False)
        damping = sizes[0] / (2 * (self._model.max_condition or 1e3))
        return right.T @ (sizes / (sizes**2 + damping**2) * (left.T @ wanted))

    def _follow_twist(self, twist: _Twist, here: np.ndarray, way: np.ndarray) -> tuple[np.ndarray, str | None]:
        change = self._joint_change(twist, here, way)
        most = self._model.max_condition
        if most is None or not change.any():
            return change, None
        before, after = self._condition(here, twist.link), self._condition(here + change, twist.link)
        if after > most and after > before * (1 + NEAR_SINGULAR):
            return change, f"{self._model.end_effector} would come too near to a singularity, condition above {most:g}"
        return change, None

    def _condition(self, joints: np.ndarray, link: int) -> float:
        jacobian = self.arm.jacobian(joints, link)
        sizes = np.linalg.svd(jacobian[:, jacobian.any(axis=0)], compute_uv=False)  # not the gripper's joints
        return float(sizes[0] / max(sizes[-1], 1e-12))

    def _beyond_limits(self, here: np.ndarray, rest: np.ndarray) -> str | None:
        """A joint that a velocity takes beyond its limit; back is allowed. Positions are cut in `safety`."""
        beyond = ((rest < self._low) & (rest < here - 1e-9)) | ((rest > self._high) & (rest > here + 1e-9))
        for i in np.flatnonzero(beyond):
            return f"{self.arm.joints[i]} would pass its limit, {self._low[i]:.4g}..{self._high[i]:.4g} is allowed"
        return None
