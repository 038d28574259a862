"""A simulated robot on the ROS 1 graph: a plain rospy node around a simulator, in a process of its own.

It takes twists and gripper commands and publishes its camera, the end effector's pose and its joints at the
simulator's control rate, as a velocity-controlled arm does: a twist is followed until the next one, for at
most `command_timeout`, then the arm stands. It knows nothing of the bridge: it speaks rospy directly.

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

# pyright: reportMissingImports=false
# (rospy comes from ROS 1's packages, not from PyPI.)

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from real_robot.bridge.codec import to_quaternion
from real_robot.bridge.images import encode_image
from real_robot.bridge.ros.install import RosInstallError, enable
from real_robot.bridge.ros.master import Master, master_pid
from vla_rl.config import Config, build_component
from vla_rl.types import EpisodeSpec, Split

FRAME = "table"
FINGERS = ("finger_left", "finger_right")
_POLL = 0.02  # seconds between looks at the world while the simulator waits for a command


class SimRobotConfig(Config):
    """The simulator behind the node, and how the node behaves. Defaults are the tabletop's."""

    env: dict[str, Any] = Field(default={"kind": "tabletop"}, description="The env section of a recipe.")
    speed: float = Field(default=1.0, gt=0, le=20, description="How many times faster than real time it runs.")
    lockstep: bool = Field(
        default=False, description="Wait for a command before each control step: no timing, the same result each time."
    )
    image_format: Literal["jpeg", "png"] = Field(
        default="jpeg", description="How the cameras' pictures are compressed."
    )
    jpeg_quality: int = Field(default=95, ge=1, le=100, description="Quality of jpeg pictures.")
    command_timeout: float = Field(default=0.1, gt=0, description="Seconds for which a twist is followed, at speed 1.")
    linear_scale: float = Field(default=1.0, gt=0, description="m/s for an action of 1.")
    angular_scale: float = Field(default=10.0, gt=0, description="rad/s for an action of 1.")
    publish_expert: bool = Field(
        default=False,
        description="Say on /expert/command what the simulator's scripted expert would do next, for a scripted person. "
        "It is asked at each control step, whoever drives.",
    )
    task: str = Field(default="push_to_zone", description="Task of the episode that runs until another is started.")
    split: Split = Field(default="train", description="Split that the first episode's initial state is taken from.")
    index: int = Field(default=0, ge=0, description="Index of the first episode's initial state.")
    trace: Path | None = Field(default=None, description="Write each control step's commands here, a JSON line each.")


@dataclass
class EpisodeState:
    """What /episode/state says. `stamp`: header time of the newest observation, ns since the epoch."""

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
    """The node. `run` returns when the process is told to stop."""

    def __init__(self, config: SimRobotConfig) -> None:
        enable()
        import rospy
        from geometry_msgs.msg import PoseStamped, TwistStamped
        from sensor_msgs.msg import CompressedImage, JointState
        from std_msgs.msg import Float64MultiArray, String

        self.config = config
        env_config: Any = build_component("env", config.env)
        self._env = env_config.start()
        self._spec = self._env.spec
        self._period = 1 / (self._spec.control_hz * config.speed)
        self._scales = np.array([config.linear_scale] * 3 + [config.angular_scale] * 3)
        self._state = EpisodeState()
        self._succeeded_at = 0  # the step, where the episode has succeeded
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._twist: _Command | None = None
        self._gripper: _Command | None = None
        self._wanted: dict[str, Any] | None = None
        self._trace = config.trace.open("a", buffering=1) if config.trace else None
        rospy.init_node("sim_robot", disable_signals=True)
        self._rospy = rospy
        self._image = {
            c: rospy.Publisher(f"/{c}/image/compressed", CompressedImage, queue_size=1) for c in self._spec.cameras
        }
        self._pose = rospy.Publisher("/end_effector_pose", PoseStamped, queue_size=1, tcp_nodelay=True)
        self._joints = rospy.Publisher("/joint_states", JointState, queue_size=1, tcp_nodelay=True)
        self._episode = rospy.Publisher("/episode/state", String, queue_size=1, latch=True)
        self._instruction = rospy.Publisher("/episode/instruction", String, queue_size=1, latch=True)
        self._outcome = rospy.Publisher("/episode/outcome", String, queue_size=1)
        self._expert = None
        if config.publish_expert:
            self._expert = rospy.Publisher("/expert/command", Float64MultiArray, queue_size=1, tcp_nodelay=True)
        rospy.Subscriber("/twist_command", TwistStamped, self._on_twist, queue_size=1, tcp_nodelay=True)
        rospy.Subscriber("/gripper/command", JointState, self._on_gripper, queue_size=1, tcp_nodelay=True)
        rospy.Subscriber("/episode/start", String, self._on_start, queue_size=1)
        self._wanted = {"id": 1, "spec": EpisodeSpec(config.task, config.split, config.index)}

    # --- callbacks: rospy's threads -----------------------------------------------------------------

    def _on_twist(self, message: Any) -> None:
        linear, angular = message.twist.linear, message.twist.angular
        values = np.array([linear.x, linear.y, linear.z, angular.x, angular.y, angular.z])
        with self._lock:
            self._twist = _Command(message.header.stamp.to_nsec(), time.monotonic(), values)
        self._news.set()

    def _on_gripper(self, message: Any) -> None:
        with self._lock:
            self._gripper = _Command(message.header.stamp.to_nsec(), time.monotonic(), np.array(message.position[:1]))
        self._news.set()

    def _on_start(self, message: Any) -> None:
        try:
            wanted = json.loads(message.data)
            wanted = {**wanted, "id": int(wanted["id"]), "spec": EpisodeSpec(**_spec_fields(wanted))}
        except (ValueError, KeyError, TypeError) as error:
            self._rospy.logwarn("/episode/start: not readable: %s", error)
            return
        with self._lock:
            self._wanted = wanted
        self._news.set()

    # --- the simulator: this thread -----------------------------------------------------------------

    def run(self) -> None:
        """Step and publish until rospy shuts down or `stop` is called."""
        next_tick = time.monotonic()
        while not self._rospy.is_shutdown():
            with self._lock:
                wanted, self._wanted = self._wanted, None
            if wanted is not None and wanted["id"] != self._state.id:
                self._start(wanted)
            if self.config.lockstep:
                command = self._await_command()
                if command is not None and not self._state.done:
                    self._step(*command)
                continue
            next_tick = max(next_tick + self._period, time.monotonic() - self._period)
            time.sleep(max(0.0, next_tick - time.monotonic()))
            if self._state.id:
                self._step(*self._newest_commands())

    def stop(self) -> None:
        self._rospy.signal_shutdown("stopped")

    def _start(self, wanted: dict[str, Any]) -> None:
        spec: EpisodeSpec = wanted["spec"]
        try:
            observation = self._env.reset(spec)
        except ValueError as error:
            self._rospy.logwarn("/episode/start: %s", error)
            return
        with self._lock:
            self._twist = self._gripper = None
        self._state = EpisodeState(
            id=wanted["id"],
            task=spec.task,
            split=spec.split,
            index=spec.index,
            instruction=observation.instruction,
            horizon=self._env.horizon,
            done=False,
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
            action[:6] = twist.values / self._scales
        if gripper is not None and len(gripper.values):
            action[6] = gripper.values[0]
        if self._trace is not None:
            self._write_trace(twist, gripper)
        if not state.done and np.isfinite(action).all():
            solved = bool(self._env.apply(np.clip(action, self._spec.action_low, self._spec.action_high)))
            state.step += 1
            self._env.num_steps += 1  # Physics that diverged has set it to the horizon.
            if solved and not state.success:
                state.success, self._succeeded_at = True, state.step
            is_over = state.success and state.step - self._succeeded_at >= self._env.steps_after_success
            state.done = is_over or self._env.num_steps >= state.horizon
            if state.done:
                self._outcome.publish("success" if state.success else "failure")
        self._publish(self._env.observe())

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
        from geometry_msgs.msg import PoseStamped
        from sensor_msgs.msg import CompressedImage, JointState

        self._state.stamp = time.time_ns()
        now = self._rospy.Time(*divmod(self._state.stamp, 10**9))
        self._episode.publish(json.dumps(asdict(self._state)))
        self._instruction.publish(self._state.instruction)
        pose = PoseStamped()
        pose.header.stamp, pose.header.frame_id = now, FRAME
        position, orientation = observation.state[:3], to_quaternion(observation.state[3:6].astype(np.float64))
        pose.pose.position.x, pose.pose.position.y, pose.pose.position.z = map(float, position)
        for axis, value in zip("xyzw", orientation, strict=True):
            setattr(pose.pose.orientation, axis, float(value))
        self._pose.publish(pose)
        joints = JointState(name=list(FINGERS), position=[float(v) for v in observation.state[6:8]])
        joints.header.stamp = now
        self._joints.publish(joints)
        for camera, picture in observation.images.items():
            data = encode_image(picture, self.config.image_format, self.config.jpeg_quality)
            image = CompressedImage(format=self.config.image_format, data=data)
            image.header.stamp, image.header.frame_id = now, camera
            self._image[camera].publish(image)
        if self._expert is not None and not self._state.done:
            self._publish_expert(self._expert)

    def _publish_expert(self, publisher: Any) -> None:
        from std_msgs.msg import Float64MultiArray

        action = self._env.expert_action().astype(np.float64)
        action[:6] *= self._scales
        publisher.publish(Float64MultiArray(data=[*action.tolist(), float(self._env.expert_remaining())]))


def _spec_fields(wanted: dict[str, Any]) -> dict[str, Any]:
    return {"task": str(wanted["task"]), "split": str(wanted["split"]), "index": int(wanted["index"])}


def run_sim_robot(config: SimRobotConfig, master: str) -> None:
    """Run the node until SIGINT or SIGTERM; with `master` "new", also a ROS master."""
    import os
    import signal

    own = Master(11311) if master == "new" else None
    os.environ["ROS_MASTER_URI"] = own.uri if own else master
    os.environ.setdefault("ROS_IP", "127.0.0.1")
    try:
        if master_pid(os.environ["ROS_MASTER_URI"]) is None:
            raise RosInstallError(
                f"no ROS master answers at {master}; start one with `vla-rl ros master`, or --master new"
            )
        robot = SimRobot(config)
        print(f"sim_robot: on the ROS master {os.environ['ROS_MASTER_URI']}; Ctrl-C ends it", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: robot.stop())
        robot.run()
    finally:
        if own is not None:
            own.close()
