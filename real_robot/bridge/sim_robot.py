"""A simulated robot on a ROS graph: a plain node around a simulator, in a process of its own.

It takes twists and gripper commands and publishes its camera, the end effector's pose and its joints at the
simulator's control rate, as a velocity-controlled arm does: a twist is followed until the next one, for at
most `command_timeout`, then the arm stands. It knows nothing of the bridge: it speaks rospy or rclpy directly.

It starts with a scene laid out, in which the arm can be driven and nothing is counted. An episode begins when somebody
asks: a person (the service /episode/begin: the scene that waits, else the next one of the split) or a script (the topic
/episode/start: a scene of its choice). The terminal says what happens.

Services (std_srvs/Trigger; answered when the first pictures of the scene are out):
    /episode/begin, /scene/reset (the next scene is laid out, and waits)
Topics (all stamped with the wall clock):
    in   /twist_command TwistStamped, /gripper/command JointState (joint "gripper": below 0 opens, above closes),
         /episode/start String (JSON: id, task, split, index)
    out  /<camera>/image/compressed CompressedImage, /end_effector_pose PoseStamped, /joint_states JointState,
         /episode/state String (JSON, latched), /episode/instruction String (latched),
         /episode/outcome String: "success" or "failure", once, at an episode's end, as a sensor would say it
         with `publish_expert`: /expert/command Float64MultiArray, after each observation: what the scripted expert
         would send next, from the simulator's true state (a twist, m/s and rad/s, and the gripper command), and about
         how many control steps it would still need (infinite: it cannot)
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from real_robot.bridge.codec import encode_image, to_quaternion
from real_robot.bridge.sim_node import GraphKind, open_node
from real_robot.transports.ros.install import RosInstallError
from real_robot.transports.ros.master import Master, master_pid
from vla_rl.config import Config, ConfigError, build_component
from vla_rl.types import EpisodeSpec, Split

FRAME = "table"
SCALES = (1.0, 1.0, 1.0, 10.0, 10.0, 10.0)  # m/s and rad/s for an action of 1
FINGERS = ("finger_left", "finger_right")
BEGIN, RESET = "/episode/begin", "/scene/reset"  # services
_POLL = 0.02  # seconds between looks at the world while the simulator waits for a command
_ANSWER_SECONDS = 9.0  # that a caller of a service waits for the simulator


class SimRobotConfig(Config):
    """The simulator behind the node, and how the node behaves. Defaults are the tabletop's."""

    env: dict[str, Any] = Field(default={"kind": "tabletop"}, description="The env section of a recipe.")
    graph: GraphKind = Field(default="ros1", description="Whose node it is: ROS 1's, or ROS 2's (rclpy, sourced).")
    speed: float = Field(default=1.0, gt=0, le=20, description="How many times faster than real time it runs.")
    lockstep: bool = Field(
        default=False, description="Wait for a command before each control step: no timing, the same result each time."
    )
    image_format: Literal["jpeg", "png"] = Field(
        default="jpeg", description="How the cameras' pictures are compressed."
    )
    command_timeout: float = Field(default=0.1, gt=0, description="Seconds for which a twist is followed, at speed 1.")
    publish_expert: bool = Field(
        default=False,
        description="Say on /expert/command what the simulator's scripted expert would do next, for a scripted person. "
        "It is asked at each control step, whoever drives.",
    )
    task: str = Field(default="push_to_zone", description="Task of the episodes that a person begins.")
    split: Split = Field(default="train", description="Split that their scenes are taken from, one after the other.")
    index: int = Field(default=0, ge=0, description="Index of the first scene.")
    patience: float = Field(
        default=300,
        gt=0,
        description="Seconds at speed 1 that a person's episode has at least; the task's own horizon is short.",
    )
    trace: Path | None = Field(default=None, description="Write each control step's commands here, a JSON line each.")


@dataclass
class EpisodeState:
    """What /episode/state says. `stamp`: header time of the newest observation, ns since the epoch.

    `id` is 0 while a scene waits for its start; it is `done` then, as after an episode's end.
    """

    id: int = 0
    task: str = ""
    split: Split = "train"
    index: int = 0
    instruction: str = ""
    step: int = 0
    horizon: int = 0
    success: bool = False
    done: bool = True
    stamp: int = 0


@dataclass
class _Command:
    stamp: int
    arrival: float
    values: np.ndarray


class SimRobot:
    """The node. `run` returns when the process is told to stop.

    Args:
        say: told what happens, a line each.

    Raises:
        ConfigError: the environment has no such task.
    """

    def __init__(self, config: SimRobotConfig, say: Callable[[str], None] = lambda text: None) -> None:
        self.config, self._say = config, say
        env_config = build_component("env", config.env)
        self._env = env_config.start()
        self._spec = self._env.spec
        if config.task not in self._spec.tasks:
            raise ConfigError(f"sim.task: got {config.task!r}, allowed: {', '.join(self._spec.tasks)}")
        self._period = 1 / (self._spec.control_hz * config.speed)
        self._state = EpisodeState()
        self._index, self._num_begun = config.index, 0
        self._succeeded_at = 0  # the step, where the episode has succeeded
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._twist: _Command | None = None
        self._gripper: _Command | None = None
        # For the simulator's thread: what to do, and who hears that there is no such scene.
        self._asked: queue.SimpleQueue[tuple[Callable[[], None], Callable[[str], None]]] = queue.SimpleQueue()
        self._trace = config.trace.open("a", buffering=1) if config.trace else None
        node = self._node = open_node(config.graph, "sim_robot")
        image, string = "sensor_msgs/CompressedImage", "std_msgs/String"
        self._image = {c: node.publisher(f"/{c}/image/compressed", image) for c in self._spec.cameras}
        self._pose = node.publisher("/end_effector_pose", "geometry_msgs/PoseStamped")
        self._joints = node.publisher("/joint_states", "sensor_msgs/JointState")
        self._episode = node.publisher("/episode/state", string, latched=True)
        self._instruction = node.publisher("/episode/instruction", string, latched=True)
        self._outcome = node.publisher("/episode/outcome", string)
        self._expert = None
        if config.publish_expert:
            self._expert = node.publisher("/expert/command", "std_msgs/Float64MultiArray")
        node.subscribe("/twist_command", "geometry_msgs/TwistStamped", self._on_twist)
        node.subscribe("/gripper/command", "sensor_msgs/JointState", self._on_gripper)
        node.subscribe("/episode/start", string, self._on_start)
        node.serve(BEGIN, lambda: self._answer(self._begin))
        node.serve(RESET, lambda: self._answer(self._reset_scene))
        self._lay_out(config.index)

    # --- callbacks: the node's threads -----------------------------------------------------------------

    def _on_twist(self, message: Any) -> None:
        linear, angular = message.twist.linear, message.twist.angular
        values = np.array([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z])
        with self._lock:
            self._twist = _Command(self._node.stamp_of(message), time.monotonic(), values)
        self._news.set()

    def _on_gripper(self, message: Any) -> None:
        with self._lock:
            self._gripper = _Command(self._node.stamp_of(message), time.monotonic(), np.array(message.position[:1]))
        self._news.set()

    def _on_start(self, message: Any) -> None:
        try:
            wanted = json.loads(message.data)
            number, spec = int(wanted["id"]), EpisodeSpec(str(wanted["task"]), wanted["split"], int(wanted["index"]))
        except (ValueError, KeyError, TypeError) as error:
            self._say(f"/episode/start: not readable: {error}")
            return
        self._ask(lambda: self._start(number, spec), lambda error: self._say(f"/episode/start: {error}"))

    def _answer(self, act: Callable[[], str]) -> tuple[bool, str]:
        """A service's answer, once the simulator's thread has done what was asked."""
        done: queue.SimpleQueue[tuple[bool, str]] = queue.SimpleQueue()
        self._ask(lambda: done.put((True, act())), lambda error: done.put((False, error)))
        try:
            return done.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            return False, f"the simulator is busy: nothing within {_ANSWER_SECONDS:g} s"

    def _ask(self, act: Callable[[], None], refuse: Callable[[str], None]) -> None:
        self._asked.put((act, refuse))
        self._news.set()

    # --- the simulator: this thread -----------------------------------------------------------------

    def run(self) -> None:
        """Step and publish until the node shuts down or `stop` is called."""
        next_tick = time.monotonic()
        while self._node.is_running:
            while not self._asked.empty():
                act, refuse = self._asked.get()
                try:
                    act()
                except ValueError as error:  # the environment has no such scene
                    refuse(str(error))
            if self.config.lockstep:
                command = self._await_command()
                if command is not None and not self._state.done:
                    self._step(*command)
                continue
            next_tick = max(next_tick + self._period, time.monotonic() - self._period)
            time.sleep(max(0.0, next_tick - time.monotonic()))
            self._step(*self._newest_commands())

    def stop(self) -> None:
        self._node.stop()

    def _begin(self) -> str:
        """A person's episode, in the scene that waits; where none does, in the next one."""
        index = self._index + bool(self._state.id)
        self._start(time.time_ns() // 1000 % 10**12, self._scene(index), self.config.patience)
        self._index = index
        return f"{_name(self._state)}: {self._state.instruction}"

    def _reset_scene(self) -> str:
        self._lay_out(self._index + 1)
        return _name(self._state)

    def _scene(self, index: int) -> EpisodeSpec:
        return EpisodeSpec(self.config.task, self.config.split, index)

    def _lay_out(self, index: int) -> None:
        """A scene that waits for its start."""
        self._place(0, self._scene(index))
        self._index = index
        self._say(
            f"scene laid out: {_name(self._state)}. Waiting for a start: Start in the console of `vla-rl deploy`, or "
            f"the service {BEGIN}"
        )

    def _start(self, number: int, spec: EpisodeSpec, patience: float = 0.0) -> None:
        """The episode of that number; nothing where it has been started, since scripts ask again until they hear."""
        if number == self._state.id:
            return
        self._place(number, spec, patience)
        self._num_begun += 1
        seconds = self._state.horizon / self._spec.control_hz
        self._say(
            f"episode {self._num_begun} runs: {_name(self._state)}, at most {self._state.horizon} steps "
            f"({seconds:.1f} s at speed 1): {self._state.instruction}"
        )

    def _place(self, number: int, spec: EpisodeSpec, patience: float = 0.0) -> None:
        """Lay the scene out and publish what it looks like.

        Raises:
            ValueError: the environment has no such scene.
        """
        observation = self._env.reset(spec)
        if self._state.id and not self._state.done:
            self._say(f"episode {self._num_begun}: left after {self._state.step} steps for another scene")
        self._env.horizon = max(self._env.horizon, round(patience * self._spec.control_hz))
        with self._lock:
            self._twist = self._gripper = None
        self._state = EpisodeState(
            id=number,
            task=spec.task,
            split=spec.split,
            index=spec.index,
            instruction=observation.instruction,
            horizon=self._env.horizon,
            done=not number,
        )
        self._publish(observation)

    def _await_command(self) -> tuple[_Command | None, _Command | None] | None:
        """Lockstep: a twist and the gripper command of the same stamp, not older than the newest observation."""
        self._news.wait(_POLL)
        self._news.clear()
        with self._lock:
            twist, gripper = self._twist, self._gripper
            if twist is None or gripper is None or twist.stamp != gripper.stamp or twist.stamp < self._state.stamp:
                return None
            self._twist = self._gripper = None
            return twist, gripper

    def _newest_commands(self) -> tuple[_Command | None, _Command | None]:
        oldest = time.monotonic() - self.config.command_timeout / self.config.speed
        with self._lock:
            twist, gripper = self._twist, self._gripper
        return twist if twist and twist.arrival >= oldest else None, gripper

    def _step(self, twist: _Command | None, gripper: _Command | None) -> None:
        state = self._state
        action = np.zeros(self._spec.action_dim, np.float32)
        if twist is not None:
            action[:6] = twist.values / np.array(SCALES)
        if gripper is not None and len(gripper.values):
            action[6] = gripper.values[0]
        if self._trace is not None:
            self._write_trace(twist, gripper)
        if np.isfinite(action).all():
            solved = bool(self._env.apply(np.clip(action, self._spec.action_low, self._spec.action_high)))
            if not state.done:
                self._count(state, solved)
        self._publish(self._env.observe())

    def _count(self, state: EpisodeState, solved: bool) -> None:
        """A step of an episode that runs; says how it ends. Afterwards the arm still moves, and nothing is counted."""
        state.step += 1
        self._env.num_steps += 1  # Physics that diverged has set it to the horizon.
        if solved and not state.success:
            state.success, self._succeeded_at = True, state.step
        is_over = state.success and state.step - self._succeeded_at >= self._env.steps_after_success
        state.done = is_over or self._env.num_steps >= state.horizon
        if state.done:
            how = "solved" if state.success else "out of time"
            steps = self._succeeded_at if state.success else state.step
            self._say(f"episode {self._num_begun}: {how} after {steps} steps ({steps / self._spec.control_hz:.1f} s)")
            self._outcome.publish(self._text("success" if state.success else "failure"))

    def _write_trace(self, twist: _Command | None, gripper: _Command | None) -> None:
        assert self._trace is not None
        line = {
            "time": time.monotonic(),
            "episode": self._state.id,
            "step": self._state.step,
            "twist": None if twist is None else twist.values.tolist(),
            "gripper": None if gripper is None else gripper.values.tolist(),
        }
        self._trace.write(json.dumps(line) + "\n")

    def _publish(self, observation: Any) -> None:
        now = self._state.stamp = time.time_ns()
        self._episode.publish(self._text(json.dumps(asdict(self._state))))
        self._instruction.publish(self._text(self._state.instruction))
        pose = self._node.message("geometry_msgs/PoseStamped", now)
        pose.header.frame_id = FRAME
        position, orientation = observation.state[:3], to_quaternion(observation.state[3:6].astype(np.float64))
        pose.pose.position.x, pose.pose.position.y, pose.pose.position.z = map(float, position)
        for axis, value in zip("xyzw", orientation, strict=True):
            setattr(pose.pose.orientation, axis, float(value))
        self._pose.publish(pose)
        fingers = [float(v) for v in observation.state[6:8]]
        self._joints.publish(self._node.message("sensor_msgs/JointState", now, name=list(FINGERS), position=fingers))
        for camera, picture in observation.images.items():
            form = self.config.image_format
            image = self._node.message(
                "sensor_msgs/CompressedImage", now, format=form, data=encode_image(picture, form)
            )
            image.header.frame_id = camera
            self._image[camera].publish(image)
        if self._expert is not None and not self._state.done:
            self._publish_expert(self._expert)

    def _publish_expert(self, publisher: Any) -> None:
        action = self._env.expert_action().astype(np.float64)
        action[:6] *= np.array(SCALES)
        numbers = [*action.tolist(), float(self._env.expert_remaining())]
        publisher.publish(self._node.message("std_msgs/Float64MultiArray", data=numbers))

    def _text(self, text: str) -> Any:
        return self._node.message("std_msgs/String", data=text)


def _name(state: EpisodeState) -> str:
    """A scene's name for people."""
    return f"{state.task}, {state.split} {state.index}"


def run_sim_robot(config: SimRobotConfig, master: str) -> None:
    """Run the node until SIGINT or SIGTERM; with `master` "new", also a ROS master. ROS 2 has none."""

    def say(text: str) -> None:
        print(f"sim_robot: {text}", flush=True)

    is_ros1 = config.graph == "ros1"
    own = Master(11311) if is_ros1 and master == "new" else None
    try:
        if is_ros1:
            os.environ["ROS_MASTER_URI"] = own.uri if own else master
            os.environ.setdefault("ROS_IP", "127.0.0.1")
            if master_pid(os.environ["ROS_MASTER_URI"]) is None:
                raise RosInstallError(
                    f"no ROS master answers at {master}; start one with --master new, or by itself with --master only"
                )
        where = f"the ROS master {os.environ['ROS_MASTER_URI']}" if is_ros1 else "the graph of ROS 2"
        say(f"on {where}; Ctrl-C ends it")
        robot = SimRobot(config, say)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: robot.stop())
        robot.run()
    finally:
        if own is not None:
            own.close()
