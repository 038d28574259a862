"""ManiSkill 3's PushCube, PickCube and StackCube with the Panda arm, one environment at a time on the CPU's physics.

Rendering is SAPIEN's, through Vulkan: on a GPU, or on a CPU with a software driver such as SwiftShader or lavapipe.
"""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from sim.base import SimConfig, check_horizons, check_known
from sim.single_env import SingleEnv, SingleObservation
from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec, Keyframe

INSTRUCTIONS = {
    "PushCube": "push the blue cube to the red and white target",
    "PickCube": "pick up the red cube and move it to the green ball",
    "StackCube": "stack the red cube on the green cube",
}
HORIZON = 50  # ManiSkill's own, of all three
CAMERAS = {"agentview": "base_camera", "wrist": "hand_camera"}  # our name -> ManiSkill's
CONTROL_HZ = 20.0
MAX_INDEX = 2**29  # initial states in each split: the seed is (place of the split + 1) * 2**29 + index


class ManiSkillConfig(SimConfig):
    """ManiSkill's tasks with a Panda arm under pd_ee_delta_pose control, 20 Hz."""

    known_cameras: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    kind: Literal["maniskill"] = "maniskill"
    image_size: int = Field(default=128, ge=16, le=1024, description="Height and width of the rendered images, pixels.")
    horizons: dict[str, int] = Field(default={}, description="Control steps before truncation, for tasks that differ.")
    shader: Literal["minimal", "default", "rt"] = Field(
        default="default", description="ManiSkill's shader pack: minimal is the fastest, rt traces rays (GPU)."
    )

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            check_known("ManiSkill task", name, INSTRUCTIONS)
        return value

    @field_validator("horizons")
    @classmethod
    def _known_horizons(cls, value: dict[str, int]) -> dict[str, int]:
        check_horizons("ManiSkill task", value, INSTRUCTIONS)
        return value

    def env_spec(self) -> EnvSpec:
        """Tasks, horizons, cameras and action bounds; does not import ManiSkill."""
        tasks = self.tasks or tuple(INSTRUCTIONS)
        return self._arm_spec(
            "maniskill",
            {task: INSTRUCTIONS[task] for task in tasks},
            {task: self.horizons.get(task, HORIZON) for task in tasks},
            CONTROL_HZ,
        )

    def make(self, record_frames: bool = False) -> ManiSkillEnv:
        """One environment; a task's scene is built at its first reset.

        Raises:
            ImportError: ManiSkill is not installed. RuntimeError: no Vulkan device renders here.
        """
        return ManiSkillEnv(self, render_device(), record_frames)


class _WholeName(str):
    """A device's name that ManiSkill must not split at its colons, as it does: it would ask SAPIEN for "pci"."""

    __slots__ = ()

    def split(self, sep: object = None, maxsplit: object = -1) -> list[Any]:
        return [str(self), None]


def render_device() -> str:
    """The name, for ManiSkill, of the device that SAPIEN renders on.

    Raises:
        ImportError: ManiSkill is not installed. RuntimeError: there is no Vulkan device.
    """
    if importlib.util.find_spec("mani_skill") is None:
        raise ImportError("the ManiSkill environments need the package: pip install '.[maniskill]'")
    render = importlib.import_module("sapien.render")
    try:
        device = render.RenderSystem().device
    except RuntimeError as error:
        raise RuntimeError(
            f"SAPIEN finds no Vulkan device to render on ({error}). Install a GPU's Vulkan driver, or a software one "
            "(Debian: mesa-vulkan-drivers; or chromium's: VK_ICD_FILENAMES=/usr/lib/chromium/vk_swiftshader_icd.json)"
        ) from error
    return "cuda" if device.is_cuda() else _WholeName(f"pci:{device.pci_string}")


class ManiSkillEnv(SingleEnv):
    """One episode at a time. Holds one scene per task that was asked for.

    Action (7,), each in [-1, 1]: dx, dy, dz (10 cm at 1), axis-angle turn (0.1 rad at 1), gripper (1 opens, -1 closes:
    ManiSkill's sign, not LIBERO's). State (8,): see `vla_rl.types.Observation`. PickCube's goal is drawn, which
    ManiSkill hides from cameras. A stored state is the actions so far, which are replayed.
    """

    def __init__(self, config: ManiSkillConfig, device: str, record_frames: bool = False) -> None:
        self.config, self.spec, self.record_frames = config, config.env_spec(), record_frames
        self._device = device
        self._scenes: dict[str, Any] = {}
        self._task = ""

    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        """Start the episode.

        Raises:
            ValueError: an unknown task or split, an index out of range, or a keyframe of another environment or task.
        """
        check_known("ManiSkill task", spec.task, INSTRUCTIONS)
        split, index, actions = spec.split, spec.index, np.zeros((0, 7), np.float32)
        if spec.keyframe is not None:
            found = f"{spec.keyframe.env}/{spec.keyframe.task}"
            if found != f"maniskill/{spec.task}":
                raise ValueError(f"this keyframe is of {found}, the episode asked for is of maniskill/{spec.task}")
            arrays = spec.keyframe.arrays
            split, index, actions = SPLITS[int(arrays["split"])], int(arrays["index"]), arrays["actions"]
        if split not in SPLITS or not 0 <= index < MAX_INDEX:
            raise ValueError(f"no initial state {index} in split {split!r}: indices are below {MAX_INDEX}")
        if spec.task not in self._scenes:
            self._scenes[spec.task] = self._build(spec.task)
        self._scene, self._task, self._start = self._scenes[spec.task], spec.task, (SPLITS.index(split), index)
        self._scene._obs_mode = "none"
        # Rebuilt each time: PhysX keeps contacts of the last episode, and the same seed would go another way.
        self._scene.reset(seed=(self._start[0] + 1) * MAX_INDEX + index, options={"reconfigure": True})
        self._scene._hidden_objects.clear()
        self._actions: list[np.ndarray] = []
        for action in actions:
            self.apply(action)
        self._instruction = spec.instruction or INSTRUCTIONS[spec.task]
        self.horizon, self.num_steps = self.spec.horizon[spec.task], len(self._actions)
        return self.observe()

    def _build(self, task: str) -> Any:
        importlib.import_module("mani_skill.envs")
        size = self.config.image_size
        made = importlib.import_module("gymnasium").make(
            f"{task}-v1",
            obs_mode="rgb",
            control_mode="pd_ee_delta_pose",
            robot_uids="panda_wristcam",
            sim_backend="physx_cpu",
            render_backend=self._device,
            sensor_configs={"width": size, "height": size, "shader_pack": self.config.shader},
        )
        return made.unwrapped

    def apply(self, action: np.ndarray) -> bool:
        """One control step, without rendering. Returns ManiSkill's own success check."""
        self._actions.append(np.array(action, np.float32))
        self._scene._obs_mode = "none"
        *_, info = self._scene.step(self._actions[-1])
        return bool(info["success"].item())

    def observe(self) -> SingleObservation:
        """Render the cameras and read the state."""
        self._scene._obs_mode = "rgb"
        seen = self._scene.get_obs()["sensor_data"]
        images = {name: seen[CAMERAS[name]]["rgb"][0].cpu().numpy() for name in self.spec.cameras}
        return SingleObservation(images, self._state(), self._instruction)

    def _state(self) -> np.ndarray:
        agent = self._scene.agent
        x, y, z, w, a, b, c = (float(v) for v in agent.tcp.pose.raw_pose[0])
        axis = np.array([a, b, c])
        length = float(np.linalg.norm(axis))
        angle = 2 * np.arctan2(length, abs(w)) * (1 if w >= 0 else -1)
        turn = axis / length * angle if length > 1e-9 else np.zeros(3)
        return np.concatenate([[x, y, z], turn, agent.robot.get_qpos()[0, -2:].cpu().numpy()]).astype(np.float32)

    def save_state(self) -> Keyframe:
        """The initial state's place and the actions so far."""
        actions = np.array(self._actions, np.float32).reshape(-1, 7)
        arrays = {"split": np.array(self._start[0]), "index": np.array(self._start[1]), "actions": actions}
        return Keyframe("maniskill", self._task, self.num_steps, arrays)

    def close(self) -> None:
        """Drop the simulators."""
        for scene in self._scenes.values():
            scene.close()
        self._scenes, self._task = {}, ""
