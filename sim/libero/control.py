"""robosuite's OSC_POSE arm controller and Panda gripper, without the redundant work of its Python classes.

The arithmetic is robosuite 1.4's, in its order and with its compiled functions, so torques are equal
to the last bit (Khatib 1987, operational space control; tests compare whole trajectories). What is
left out: two of three `mj_forward` calls a substep, buffers nobody reads, and lookups by name.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import math

import mujoco
import numpy as np
from robosuite.environments.base import MujocoEnv
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error, set_goal_orientation

GRIPPER_SPEED = 0.01  # change of the finger command a substep


class ArmControl:
    """Turns a 7-D action into actuator commands, one substep at a time.

    Use: `reset` at the robot's default pose; at a control step's first substep `set_goal`; in every
    substep, with positions and velocities in `data` up to date, `command`.
    """

    def __init__(self, env: MujocoEnv, arm: int = 0) -> None:
        robot = env.robots[arm]
        controller = robot.controller
        self.model: mujoco.MjModel = env.sim.model._model
        self.data: mujoco.MjData = env.sim.data._data
        self.site = env.sim.model.site_name2id(controller.eef_name)
        self.qpos_index = np.array(controller.qpos_index)
        self.qvel_index = np.array(controller.qvel_index)
        self.kp, self.kd = controller.kp, controller.kd
        self.scale = abs(controller.output_max - controller.output_min) / abs(
            controller.input_max - controller.input_min
        )
        self.torque_low, self.torque_high = robot.torque_limits
        self.arm_actuators = np.array(robot._ref_joint_actuator_indexes)
        fingers = [env.sim.model.actuator_name2id(name) for name in robot.gripper.actuators]
        self.finger_actuators = np.array(fingers, int)  # two, or none
        limits = self.model.actuator_ctrlrange[self.finger_actuators]
        self.finger_bias = 0.5 * (limits[:, 1] + limits[:, 0])
        self.finger_weight = 0.5 * (limits[:, 1] - limits[:, 0])
        self.default_qpos = np.array(robot.init_qpos) + 0.0
        self._jacobian = np.zeros((6, self.model.nv))
        self._mass = np.zeros((self.model.nv, self.model.nv))
        self.reset()

    def reset(self) -> None:
        """Forget the goal. `data` must be at the robot's default pose, with `mj_forward` done."""
        self._read()
        self.initial_joint = self.joint_pos
        self.goal_pos, self.goal_ori = self.ee_pos, self.ee_ori
        self.finger_command = np.zeros(len(self.finger_actuators))
        # robosuite uses what its controller read at its creation for the first substep of an episode.
        self._is_fresh = True

    def restore(self, goal_pos: np.ndarray, goal_ori: np.ndarray, finger_command: np.ndarray) -> None:
        """Continue from a saved goal. `reset` must have been called."""
        self.goal_pos, self.goal_ori, self.finger_command = goal_pos.copy(), goal_ori.copy(), finger_command.copy()
        self._is_fresh = False

    def _read(self) -> None:
        """Pose, velocity, Jacobian and mass matrix of the arm, from up-to-date `data`."""
        model, data, jacobian = self.model, self.data, self._jacobian
        self.ee_pos = data.site_xpos[self.site].copy()
        self.ee_ori = data.site_xmat[self.site].reshape(3, 3).copy()
        mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], self.site)
        self.ee_pos_vel = np.dot(jacobian[:3], data.qvel)
        self.ee_ori_vel = np.dot(jacobian[3:], data.qvel)
        self.joint_pos = data.qpos[self.qpos_index]
        self.joint_vel = data.qvel[self.qvel_index]
        # Indexed as robosuite does: the memory order of the result decides how BLAS rounds.
        self.jacobian_pos = np.array(jacobian[:3][:, self.qvel_index])
        self.jacobian_ori = np.array(jacobian[3:][:, self.qvel_index])
        self.jacobian_arm = np.vstack([self.jacobian_pos, self.jacobian_ori])
        mujoco.mj_fullM(model, self._mass, data.qM)
        self.mass = self._mass[self.qvel_index, :][:, self.qvel_index]

    def set_goal(self, action: np.ndarray) -> None:
        """A new goal from the current pose and an action's six deltas (meters/0.05, radians/0.5)."""
        if not self._is_fresh:
            self._read()
        self._is_fresh = True
        delta = np.clip(action[:6], -1.0, 1.0) * self.scale
        if not all(math.isclose(turn, 0.0) for turn in delta[3:]):
            self.goal_ori = set_goal_orientation(delta[3:], self.ee_ori)
        self.goal_pos = self.ee_pos + delta[:3]

    def command(self, gripper: float) -> None:
        """Write this substep's torques and finger targets into `data.ctrl`. `gripper`: -1 open, +1 closed."""
        if not self._is_fresh:
            self._read()
        self._is_fresh = False
        error = orientation_error(self.goal_ori, self.ee_ori)
        force = np.multiply(self.goal_pos - self.ee_pos, self.kp[:3]) + np.multiply(-self.ee_pos_vel, self.kd[:3])
        torque = np.multiply(error, self.kp[3:]) + np.multiply(-self.ee_ori_vel, self.kd[3:])
        _, lambda_pos, lambda_ori, nullspace = opspace_matrices(
            self.mass, self.jacobian_arm, self.jacobian_pos, self.jacobian_ori
        )
        wrench = np.concatenate([np.dot(lambda_pos, force), np.dot(lambda_ori, torque)])
        torques = np.dot(self.jacobian_arm.T, wrench) + self.data.qfrc_bias[self.qvel_index]
        torques += nullspace_torques(self.mass, nullspace, self.initial_joint, self.joint_pos, self.joint_vel)
        self.data.ctrl[self.arm_actuators] = np.clip(torques, self.torque_low, self.torque_high)
        direction = GRIPPER_SPEED * np.sign(gripper)
        turn = np.array([-direction, direction])[: len(self.finger_command)]
        self.finger_command = np.clip(self.finger_command + turn, -1.0, 1.0)
        self.data.ctrl[self.finger_actuators] = self.finger_bias + self.finger_weight * self.finger_command
