"""Options of MetaWorld, and its 50 tasks. Imports no simulator."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from sim.base import SimConfig, check_horizons, check_known
from sim.rendering.devices import check_backend
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    from sim.metaworld.env import MetaWorldEnv

# What the robot is told. The names are MetaWorld's own, without their version.
INSTRUCTIONS = {
    "assembly": "pick up the ring and put it over the peg",
    "basketball": "drop the ball into the basket",
    "bin-picking": "move the cube from its bin to the other bin",
    "box-close": "put the lid on the box",
    "button-press-topdown": "press the button from above",
    "button-press-topdown-wall": "reach over the wall and press the button from above",
    "button-press": "press the button",
    "button-press-wall": "reach around the wall and press the button",
    "coffee-button": "press the button of the coffee machine",
    "coffee-pull": "pull the mug away from the coffee machine",
    "coffee-push": "push the mug under the coffee machine",
    "dial-turn": "turn the dial",
    "disassemble": "lift the ring off the peg",
    "door-close": "close the door",
    "door-lock": "lock the door",
    "door-open": "open the door",
    "door-unlock": "unlock the door",
    "hand-insert": "put the gripper into the hole",
    "drawer-close": "close the drawer",
    "drawer-open": "open the drawer",
    "faucet-open": "open the faucet",
    "faucet-close": "close the faucet",
    "hammer": "drive the nail in with the hammer",
    "handle-press-side": "press the handle down from the side",
    "handle-press": "press the handle down",
    "handle-pull-side": "pull the handle up from the side",
    "handle-pull": "pull the handle up",
    "lever-pull": "pull the lever up",
    "peg-insert-side": "put the peg into the hole in the side of the box",
    "pick-place-wall": "carry the puck over the wall to its goal",
    "pick-out-of-hole": "pick the puck out of the hole",
    "reach": "move the gripper to the goal",
    "push-back": "push the puck back to its goal",
    "push": "push the puck to its goal",
    "pick-place": "carry the puck to its goal",
    "plate-slide": "slide the plate into the net",
    "plate-slide-side": "slide the plate into the net at the side",
    "plate-slide-back": "slide the plate back out of the net",
    "plate-slide-back-side": "slide the plate back out of the net at the side",
    "peg-unplug-side": "pull the peg out of the side of the box",
    "soccer": "kick the ball into the net",
    "stick-push": "push the box with the stick",
    "stick-pull": "pull the box with the stick",
    "push-wall": "push the puck around the wall to its goal",
    "reach-wall": "move the gripper around the wall to the goal",
    "shelf-place": "put the puck on the shelf",
    "sweep-into": "sweep the puck into the hole",
    "sweep": "sweep the puck off the table",
    "window-open": "open the window",
    "window-close": "close the window",
}
HORIZON = 500  # MetaWorld's own, of every task
CONTROL_HZ = 80.0
# Our name -> MetaWorld's, and whether its picture stands on its head.
CAMERAS = {
    "agentview": ("corner2", True),
    "wrist": ("gripperPOV", False),
    "corner": ("corner", True),
    "corner3": ("corner3", True),
    "corner4": ("corner4", True),
    "topview": ("topview", False),
    "behind": ("behindGripper", False),
}


class MetaWorldConfig(SimConfig):
    """MetaWorld's tasks (version 3 of its environments) with the Sawyer arm, 80 Hz."""

    known_cameras: ClassVar[tuple[str, ...]] = tuple(CAMERAS)
    kind: Literal["metaworld"] = "metaworld"
    image_size: int = Field(default=128, ge=16, le=1024, description="Height and width of the rendered images, pixels.")
    horizon: PositiveInt = Field(default=HORIZON, le=HORIZON, description="Control steps before truncation.")
    horizons: dict[str, int] = Field(default={}, description="Control steps before truncation, for tasks that differ.")
    exact_rendering: bool = Field(
        default=False, description="Shadows, reflections and antialiasing as MetaWorld draws them; slower on a CPU."
    )

    @field_validator("tasks")
    @classmethod
    def _known_tasks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            check_known("MetaWorld task", name, INSTRUCTIONS)
        return value

    @field_validator("horizons")
    @classmethod
    def _known_horizons(cls, value: dict[str, int]) -> dict[str, int]:
        check_horizons("MetaWorld task", value, INSTRUCTIONS)
        if above := {task: steps for task, steps in value.items() if steps > HORIZON}:
            raise ValueError(f"MetaWorld ends an episode after {HORIZON} control steps; got {above}")
        return value

    def check_machine(self) -> None:
        """Refuse a MUJOCO_GL that is no back end."""
        check_backend()

    def env_spec(self) -> EnvSpec:
        """Tasks, horizons, cameras and action bounds; does not import MetaWorld."""
        tasks = self.tasks or tuple(INSTRUCTIONS)
        return EnvSpec(
            kind="metaworld",
            tasks={task: INSTRUCTIONS[task] for task in tasks},
            horizon={task: self.horizons.get(task, self.horizon) for task in tasks},
            cameras=self.cameras,
            image_size=(self.image_size, self.image_size),
            state_dim=4,
            action_dim=4,
            action_low=-np.ones(4, np.float32),
            action_high=np.ones(4, np.float32),
            control_hz=CONTROL_HZ,
        )

    def make(self, record_frames: bool = False) -> MetaWorldEnv:
        """One environment; a task's scene is loaded at its first reset.

        Raises:
            ImportError: MetaWorld is not installed.
        """
        if importlib.util.find_spec("metaworld") is None:
            raise ImportError(
                "the MetaWorld environments need the package: pip install --no-deps metaworld==3.1.1; or "
                "env.kind=remote with a Python of its own (docs/metaworld.md)"
            )
        from sim.metaworld.env import MetaWorldEnv

        return MetaWorldEnv(self.env_spec(), CAMERAS, self.exact_rendering, record_frames)
