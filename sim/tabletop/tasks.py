"""Tabletop tasks: initial states and knocks drawn from a seed, and success.

Every task adds two conditions to its own: the gripper touches no object, and all that the task
names is at rest (slower than `REST_SPEED`). All of them must hold for `hold_steps` control steps
in a row. Distances are horizontal, between centers, in meters.

- push_to_zone: the red block within `ZONE_RADIUS` of the zone's center, on the table.
- pick_place: the red block within `PLACE_RADIUS` of the plate's center, lying flat on it.
- pick_colour: the same for the named block, and no other block on the plate.
- stack: the red block within `STACK_RADIUS` of the blue one, lying flat on it.
- bowl_push: the bowl upright within `ZONE_RADIUS` of the zone's center, and the red block inside
  (within `BOWL_RADIUS` of its center, and lower than its rim).
- take_off: the red block lying flat on the table, no part of it over the plate, on which it started.
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import mujoco
import numpy as np
from pydantic import Field

from sim.base import check_known
from sim.perturb import Perturbation
from sim.tabletop import scene as sc
from vla_rl.config import Config
from vla_rl.types import SPLITS, EpisodeSpec

# task -> instruction; {colour} is filled in by the initial state. In order of rising difficulty.
INSTRUCTIONS: dict[str, str] = {
    "push_to_zone": "push the red block to the green zone",
    "pick_place": "put the red block on the plate",
    "pick_colour": "put the {colour} block on the plate",
    "stack": "stack the red block on the blue block",
    "bowl_push": "put the red block into the bowl and push the bowl to the zone",
    "take_off": "take the red block off the plate",
}
# task that undoes another one -> that one, whose scene it shares; not among the tasks of a section that names none.
RESET_TASKS: dict[str, str] = {"take_off": "pick_place"}
# task -> the same in other words: a polite frame, other words, another sentence.
PARAPHRASES: dict[str, tuple[str, str, str]] = {
    "push_to_zone": (
        "please push the red block to the green zone",
        "shove the red cube onto the green circle",
        "the green circle is where the red cube belongs, slide it there",
    ),
    "pick_place": (
        "please put the red block on the plate",
        "set the red cube down on the white dish",
        "the white dish is empty, the red cube should end up on it",
    ),
    "pick_colour": (
        "please put the {colour} block on the plate",
        "set the {colour} cube down on the white dish",
        "the white dish is empty, the {colour} cube should end up on it",
    ),
    "stack": (
        "please stack the red block on the blue block",
        "set the red cube on top of the blue cube",
        "build a tower with the blue cube below and the red cube above",
    ),
    "bowl_push": (
        "please put the red block into the bowl and push the bowl to the zone",
        "drop the red cube in the orange dish and shove the dish onto the green circle",
        "the orange dish should carry the red cube to the green circle, load it and slide it there",
    ),
    "take_off": (
        "please take the red block off the plate",
        "lift the red cube from the white dish and set it down on the table",
        "the white dish should be empty, the red cube belongs beside it",
    ),
}
# task -> control steps before truncation; multiples of 8, about twice what the expert needs on average.
HORIZONS: dict[str, int] = {
    "push_to_zone": 32, "pick_place": 32, "pick_colour": 32, "stack": 32, "bowl_push": 56, "take_off": 32,
}  # fmt: skip
CONTROL_HZ = 20.0


def scene_of(task: str) -> str:
    """The task whose scene a task plays in: its own, or that of the task which it undoes."""
    return RESET_TASKS.get(task, task)


def check_tasks(names: tuple[str, ...]) -> tuple[str, ...]:
    """`names`, if all are tasks of the tabletop.

    Raises:
        ValueError: an unknown name; the message lists the tasks and the nearest.
    """
    for name in names:
        check_known("tabletop task", name, INSTRUCTIONS)
    return names


# What counts as done: horizontal distances between centers, meters.
PLACE_RADIUS = 0.045  # block from the plate
ZONE_RADIUS = 0.04  # pushed object from the zone
STACK_RADIUS = 0.042  # upper block from the lower block
BOWL_RADIUS = 0.045  # block from the bowl that holds it
REST_SPEED = 0.05  # below which an object is at rest, m/s
REST_HEIGHT_ERROR = 0.008  # a block lying flat is this close to its height, meters
_STREAMS = {"layout": 0, "appearance": 1, "habit": 2, "knock": 3}


class SuccessConfig(Config):
    """How long success must last."""

    hold_steps: int = Field(default=3, ge=1, description="Control steps in a row for which all conditions must hold.")


def episode_rng(spec: EpisodeSpec, stream: str) -> np.random.Generator:
    """The generator of one aspect of an initial state, from (task, split, index) alone.

    Splits differ in the seed's entropy, so no two splits share a stream.
    """
    task = list(INSTRUCTIONS).index(spec.task)
    return np.random.default_rng([_STREAMS[stream], task, SPLITS.index(spec.split), spec.index])


@dataclass(frozen=True)
class Knock:
    """When the block is knocked (the control step; -1 is never), and its velocity then, m/s (x, y)."""

    step: int
    velocity: tuple[float, float]


KNOCK_STEPS = (4, 12)  # Earliest and latest control step of a knock; an episode may be over before.
KNOCK_SPEED = 3.0  # The block's speed just after it, m/s: it slides about 6 cm, unless the hand is in its way.
_MIDDLE = ((-0.08, 0.08), (-0.09, 0.09))  # a block beyond these (x, y; meters) is knocked back


def draw_knock(spec: EpisodeSpec, probability: float) -> Knock:
    """The knock of the episode that (task, split, index) names; never, but with that probability."""
    rng = episode_rng(spec, "knock")
    happens = rng.uniform() < probability
    step, angle = int(rng.integers(KNOCK_STEPS[0], KNOCK_STEPS[1] + 1)), rng.uniform(-math.pi, math.pi)
    return Knock(step if happens else -1, (KNOCK_SPEED * math.cos(angle), KNOCK_SPEED * math.sin(angle)))


def knocked_velocity(knock: Knock, position: np.ndarray) -> tuple[float, float]:
    """The velocity of a block knocked at `position`, meters (3,): not further out where it is near the edge, m/s."""
    x, y = (
        -speed if (at < low and speed < 0) or (at > high and speed > 0) else speed
        for at, speed, (low, high) in zip(position[:2], knock.velocity, _MIDDLE, strict=True)
    )
    return x, y


@dataclass(frozen=True)
class Layout:
    """An initial state: body -> (x, y, yaw), the gripper's position, and each block's color name."""

    places: dict[str, tuple[float, float, float]]
    gripper: tuple[float, float, float]
    colors: dict[str, str]

    def instruction(self, task: str, perturbation: Perturbation | None = None) -> str:
        """What the robot is told; in other words, if the perturbation is of these."""
        said = perturbation.rephrased(INSTRUCTIONS[task], PARAPHRASES[task]) if perturbation else INSTRUCTIONS[task]
        return said.format(colour=self.colors["block"])


# task -> body -> (x low, x high, y low, y high) where its center may start. A block without one lies on the plate.
_WIDE = (-0.13, 0.15, -0.16, 0.16)
_REGIONS: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "push_to_zone": {"block": (-0.11, -0.03, -0.13, 0.13), "zone": (0.09, 0.15, -0.15, 0.15)},
    "pick_place": {"block": _WIDE, "plate": (-0.08, 0.13, -0.14, 0.14)},
    "pick_colour": {"plate": (-0.06, 0.11, -0.12, 0.12), "block": _WIDE, "block_b": _WIDE, "block_c": _WIDE},
    "stack": {"block": _WIDE, "base": (-0.08, 0.13, -0.14, 0.14)},
    "bowl_push": {
        "bowl": (-0.06, -0.02, -0.11, 0.11),
        "zone": (0.10, 0.125, -0.14, 0.14),
        "block": (-0.15, 0.15, -0.16, 0.16),
    },
    "take_off": {"plate": (-0.08, 0.13, -0.14, 0.14)},
}
# Where `start_spread` draws the starts together: a layout of each task that is apart and straight, meters.
_TYPICAL: dict[str, dict[str, tuple[float, float]]] = {
    "push_to_zone": {"block": (-0.07, 0.0), "zone": (0.12, 0.0)},
    "pick_place": {"block": (-0.06, -0.08), "plate": (0.03, 0.07)},
    "pick_colour": {"plate": (0.02, 0.0), "block": (-0.09, -0.1), "block_b": (-0.09, 0.1), "block_c": (0.1, -0.13)},
    "stack": {"block": (-0.06, -0.08), "base": (0.03, 0.07)},
    "bowl_push": {"bowl": (-0.04, 0.0), "zone": (0.112, 0.0), "block": (0.05, -0.14)},
    "take_off": {"plate": (0.03, 0.07)},
}
HOME = (-0.165, 0.0, 0.135)  # where the gripper is about when an episode begins, meters
_MAX_SIDEWAYS = {"push_to_zone": 0.08, "bowl_push": 0.03}  # of the zone from what is pushed there, meters
_GAP = 0.12  # smallest distance between two centers, meters: the open gripper fits between
_BOWL_GAP = 0.15  # of the block from the bowl
_OFF_CENTER = 0.02  # largest offset of a block from the center of the plate on which it starts, along x and y, meters
CLEAR_OF_PLATE = sc.PLATE_RADIUS + math.sqrt(2) * sc.HALF  # between centers: no part of a flat block is over it, meters


def draw_layout(spec: EpisodeSpec, block_yaw: float, spread: float) -> Layout:
    """The initial state that (task, split, index) names: reachable, apart, and never already solved.

    Args:
        block_yaw, spread: the options `block_yaw` and `start_spread` of the tabletop.
    """
    rng = episode_rng(spec, "layout")
    regions, gap = _REGIONS[spec.task], _BOWL_GAP if spec.task == "bowl_push" else _GAP
    typical = _TYPICAL[spec.task]
    points: dict[str, tuple[float, float]] = {}
    while not points:
        uniform = {n: (rng.uniform(x0, x1), rng.uniform(y0, y1)) for n, (x0, x1, y0, y1) in regions.items()}
        drawn = {n: (_near(typical[n][0], x, spread), _near(typical[n][1], y, spread)) for n, (x, y) in uniform.items()}
        names = [name for name in drawn if name != "zone"]  # flat: the block may start on it
        apart = all(math.dist(drawn[a], drawn[b]) >= gap for i, a in enumerate(names) for b in names[:i])
        pushed = "bowl" if "bowl" in drawn else "block"
        straight = "zone" not in drawn or abs(drawn["zone"][1] - drawn[pushed][1]) <= _MAX_SIDEWAYS[spec.task]
        if apart and straight:
            points = drawn
    if spec.task in RESET_TASKS:
        x, y = (at + spread * rng.uniform(-_OFF_CENTER, _OFF_CENTER) for at in points["plate"])
        points["block"] = (x, y)
    places = {n: (x, y, rng.uniform(-block_yaw, block_yaw) if _turns(n) else 0.0) for n, (x, y) in points.items()}
    gripper = (rng.uniform(-0.18, -0.15), rng.uniform(-0.04, 0.04), rng.uniform(0.12, 0.15))
    x, y, z = (_near(center, value, spread) for center, value in zip(HOME, gripper, strict=True))
    return Layout(places, (x, y, z), _draw_colors(spec.task, rng))


def spread_out(layout: Layout, task: str, margin: float, turn: float) -> Layout:
    """The layout as drawn from regions wider by `margin` (meters) on each side, with turns `turn` times as large.

    Where that brought two things too near one another, they move less.
    """
    places, regions = dict[str, tuple[float, float, float]](), _REGIONS[task]
    for name, (x, y, yaw) in layout.places.items():
        x0, x1, y0, y1 = regions.get(name) or regions["plate"]
        off = [margin * (2 * at - low - high) / (high - low) for at, low, high in ((x, x0, x1), (y, y0, y1))]
        places[name] = (x + off[0], y + off[1], yaw * turn)
    names = [name for name in regions if name != "zone"]
    gap = _BOWL_GAP if task == "bowl_push" else _GAP
    if any(math.dist(places[a][:2], places[b][:2]) < gap for i, a in enumerate(names) for b in names[:i]):
        return spread_out(layout, task, margin / 2, turn) if margin > 0.001 else layout
    return replace(layout, places=places)


def _near(center: float, value: float, spread: float) -> float:
    """`value` drawn towards `center`; itself, to the bit, at a spread of 1."""
    return (1 - spread) * center + spread * value


def _turns(name: str) -> bool:
    return name.startswith("block") or name == "base"


def _draw_colors(task: str, rng: np.random.Generator) -> dict[str, str]:
    if task == "pick_colour":
        names = rng.permutation(list(sc.COLORS))[:3]
        return dict(zip(("block", "block_b", "block_c"), map(str, names), strict=True))
    return {"block": "red"} | ({"base": "blue"} if task == "stack" else {})


class View:
    """Privileged state of a running episode, read straight from the simulator's position vector."""

    def __init__(self, scene: sc.Scene, data: mujoco.MjData) -> None:
        self.scene, self.data = scene, data

    @property
    def eef(self) -> np.ndarray:
        """Gripper position, meters (3,)."""
        return self.data.qpos[:3]

    @property
    def opening(self) -> float:
        """Distance between the fingers, meters."""
        return float(self.data.qpos[6] + self.data.qpos[7])

    def position(self, name: str) -> np.ndarray:
        """Center of a body, meters (3,). The bowl's and fixed bodies' lie at their foot."""
        if name in self.scene.qpos:
            address = self.scene.qpos[name]
            return self.data.qpos[address : address + 3]
        return self.data.mocap_pos[self.scene.mocap[name]]

    def speed(self, name: str) -> float:
        """Speed of a movable body, m/s."""
        address = self.scene.qvel[name]
        return float(np.linalg.norm(self.data.qvel[address : address + 3]))

    def upright(self, name: str) -> float:
        """Cosine of a movable body's tilt."""
        address = self.scene.qpos[name]
        _, x, y, _ = self.data.qpos[address + 3 : address + 7]
        return float(1 - 2 * (x * x + y * y))

    def yaw(self, name: str) -> float:
        """Turn of a body about the vertical, radians; 0 for fixed ones, which are round."""
        if name not in self.scene.qpos:
            return 0.0
        address = self.scene.qpos[name]
        w, x, y, z = self.data.qpos[address + 3 : address + 7]
        return math.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))

    def apart(self, a: str, b: str) -> float:
        """Horizontal distance between two bodies' centers, meters."""
        pa, pb = self.position(a), self.position(b)
        return math.hypot(pa[0] - pb[0], pa[1] - pb[1])

    def gripper_touches(self) -> bool:
        """Whether the hand or a finger is in contact with any object."""
        return self.data.ncon > 0 and bool(self.scene.gripper_geom[self.data.contact.geom].any())


def is_solved_now(task: str, view: View) -> bool:
    """Whether the task's conditions hold at this moment (see the module's docstring)."""
    in_place = {
        "push_to_zone": _pushed,
        "pick_place": _placed,
        "pick_colour": _placed,
        "stack": _stacked,
        "bowl_push": _bowl_pushed,
        "take_off": taken_off,
    }[task]
    if not in_place(view) or view.gripper_touches():
        return False
    return all(view.speed(name) < REST_SPEED for name in sc.MOVABLE[task])


def _lies_at(view: View, name: str, height: float) -> bool:
    return abs(view.position(name)[2] - height) < REST_HEIGHT_ERROR


def _pushed(view: View) -> bool:
    return view.apart("block", "zone") < ZONE_RADIUS and _lies_at(view, "block", sc.HALF)


def _placed(view: View) -> bool:
    others = [name for name in view.scene.qpos if name != "block"]
    return (
        view.apart("block", "plate") < PLACE_RADIUS
        and _lies_at(view, "block", sc.PLATE_HEIGHT + sc.HALF)
        and all(view.apart(name, "plate") > PLACE_RADIUS for name in others)
    )


def _stacked(view: View) -> bool:
    return view.apart("block", "base") < STACK_RADIUS and _lies_at(view, "block", 2 * sc.BASE_HALF[2] + sc.HALF)


def _bowl_pushed(view: View) -> bool:
    inside = view.apart("block", "bowl") < BOWL_RADIUS
    low = view.position("block")[2] - view.position("bowl")[2] < sc.BOWL_FLOOR + sc.HALF + 0.012
    return inside and low and view.upright("bowl") > 0.97 and view.apart("bowl", "zone") < ZONE_RADIUS


def taken_off(view: View) -> bool:
    """Whether the block lies flat on the table, clear of the plate."""
    return view.apart("block", "plate") > CLEAR_OF_PLATE and _lies_at(view, "block", sc.HALF)
