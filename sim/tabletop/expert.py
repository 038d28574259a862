"""A scripted expert for the tabletop: a short state machine on privileged state, and its bad habits.

Pick tasks: approach above the block, grasp, carry, lower, release, retreat. Push tasks: go behind,
push, back off. A stage that finds its block lost goes back to the start, so that executed noise
does not defeat it. A habit displaces the intended point towards -x; the expert then believes that
it has succeeded there, and does not try again.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
from pydantic import Field

from sim.tabletop import scene as sc
from sim.tabletop.tasks import View, taken_off
from vla_rl.config import Config

STEP = 0.05  # meters of travel for an action of 1
TURN = 0.5  # radians for an action of 1
GRASP_ABOVE = 0.004  # the pads' center above the block's center when grasping, meters
HOVER = 0.075  # above a block's center, fingers clear of it, meters
CLOSE_ENOUGH = np.array([0.015, 0.015, 0.012])  # of the hand to the block before grasping, meters
PUSH_SIDEWAYS = 0.018  # largest sideways error of the hand behind what it is about to push, meters
CLOSED = 0.072  # between fingers that hold a block or nothing, meters
ASIDE = 0.14  # between the plate's center and where a block that is taken off it is put, meters
GRASP_STEPS, RELEASE_STEPS = 3, 5  # control steps that these take the expert
OPEN, CLOSE = -1.0, 1.0
SPEED = 1.0  # largest action component in free travel


class ExpertConfig(Config):
    """The scripted expert, and the habit of a sloppy one: the same mistake each time, which a small shift undoes.

    Its actions are clean labels; whoever collects may execute them with noise.
    """

    place_short: float = Field(
        default=0.0, ge=0, le=0.15, description="How far short (towards -x) it places or pushes, m."
    )
    place_short_std: float = Field(
        default=0.0, ge=0, le=0.05, description="Spread of place_short between episodes, meters."
    )

    @property
    def sloppy(self) -> bool:
        """Whether it has the habit."""
        return self.place_short > 0 or self.place_short_std > 0


class Stage(IntEnum):
    """Where the expert is in its task."""

    APPROACH = 0
    GRASP = 1
    CARRY = 2
    RELEASE = 3
    RETREAT = 4
    BEHIND = 5
    PUSH = 6
    BACK_OFF = 7
    DONE = 8
    OPEN = 9


class Expert:
    """The expert of one episode. `act` is called once per control step."""

    def __init__(self, task: str, config: ExpertConfig, rng: np.random.Generator) -> None:
        self.task = task
        self.sloppy = config.sloppy
        spread = rng.normal()
        self.short = max(0.0, config.place_short + config.place_short_std * spread) if self.sloppy else 0.0
        self.stage = Stage.BEHIND if task == "push_to_zone" else Stage.APPROACH
        self.timer = 0
        self.way = (1.0, 0.0)  # direction of the push

    def memory(self) -> np.ndarray:
        """float64 (7,): all that `restore` needs."""
        return np.array([self.stage, self.timer, *self.way, self.short, self.sloppy], np.float64)

    def restore(self, memory: np.ndarray) -> None:
        self.stage, self.timer = Stage(int(memory[0])), int(memory[1])
        self.way = (float(memory[2]), float(memory[3]))
        self.short, self.sloppy = float(memory[4]), bool(memory[5])

    def act(self, view: View, command: np.ndarray, rotation: np.ndarray) -> np.ndarray:
        """The next action, float32 (7,).

        Args:
            view: the true state.
            command: commanded gripper position, meters (3,); deltas add to it.
            rotation: commanded yaw, pitch, roll away from pointing down, radians (3,).
        """
        self._advance(view, command)
        goal, grip, limit = self._goal(view, command)
        action = np.empty(7)
        action[:3] = np.clip((goal - command) / STEP, -limit, limit)
        action[3:6] = np.clip(-rotation[[2, 1, 0]] / TURN, -1, 1)
        action[6] = grip
        return action.astype(np.float32)

    # --- an episode that somebody else has begun ------------------------------------------------

    def take_over(self, view: View, command: np.ndarray) -> None:
        """Begin at the stage that fits what another driver has left, rather than at the first one.

        A block that is held is carried on; fingers that hold something else, or are closed on nothing, open where they
        are; what is placed already is left alone. What is done can be told from the state alone, as far as possible: a
        policy without memory cannot learn to rise from a block between its open fingers in one case (it was let go)
        and to close on it in the other.
        """
        self.timer = 0
        self.stage = self._fitting(view, command)

    def _fitting(self, view: View, command: np.ndarray) -> Stage:
        if self.task != "push_to_zone":
            if view.opening < CLOSED and self._holds(view):
                return Stage.CARRY
            if self.sloppy or not self._let_go_well(view):
                return Stage.OPEN if self._closed_low(view) else Stage.APPROACH
            if math.dist(view.position("block"), view.eef) < 0.06:
                return Stage.RELEASE
            if self.task != "bowl_push":
                return Stage.DONE
        if not self.sloppy and self._pushed_well(view):
            return Stage.BACK_OFF
        return Stage.BEHIND

    @staticmethod
    def _closed_low(view: View) -> bool:
        """Whether the fingers must open before they go anywhere: closed, and on something or low over the table."""
        return view.opening < 0.08 and (view.opening > 0.01 or view.eef[2] < 2 * sc.HALF)

    def remaining(self, view: View, command: np.ndarray) -> float:
        """About how many control steps the expert would need from here: privileged progress, whoever drives.

        Infinite where it cannot help, since what it has to handle is out of the hand's reach.
        """
        steps, hand, above = 0.0, command, np.array([0, 0, GRASP_ABOVE])
        if self.task != "push_to_zone" and not self._let_go_well(view):
            block = view.position("block")
            grasp = block + above
            if not reaches(block, CLOSE_ENOUGH[0]):
                return math.inf
            if not (view.opening < CLOSED and self._holds(view)):
                steps += _travel(hand, grasp, block[2] + HOVER) + GRASP_STEPS
            hand = np.array(self._destination(view)) + above
            steps += _travel(grasp, hand, max(grasp[2], self._carry_height())) + RELEASE_STEPS
        if "zone" in sc.FIXED[self.task] and not self._pushed_well(view):
            body, radius, tx, ty = self._pushed(view)
            far = math.hypot(tx - body[0], ty - body[1])
            back = (radius + 0.034) / max(far, 1e-6)
            behind = np.array([body[0] - (tx - body[0]) * back, body[1] - (ty - body[1]) * back, 0.022])
            if not reaches(behind, PUSH_SIDEWAYS):
                return math.inf
            low = math.dist(hand[:2], behind[:2]) < 0.03
            steps += _travel(hand, behind, 0.022 if low else 0.1) + far / (0.7 * STEP)
        return steps

    # --- what is wanted -----------------------------------------------------------------------

    def _destination(self, view: View) -> tuple[float, float, float]:
        """Where the held block's center should be let go, meters."""
        if self.task == "bowl_push":  # dropped from above the rim; the habit concerns the push
            x, y, _ = view.position("bowl")
            return float(x), float(y), sc.BOWL_HEIGHT + sc.HALF + 0.004
        if self.task == "stack":
            x, y, _ = view.position("base")
            surface = 2 * sc.BASE_HALF[2]
        elif self.task == "take_off":  # beside the plate, on the side where the table's middle is
            x, y, _ = view.position("plate")
            y, surface = y + (-ASIDE if y > 0 else ASIDE), 0.0
        else:
            x, y, _ = view.position("plate")
            surface = sc.PLATE_HEIGHT
        return float(x) - self.short, float(y), surface + sc.HALF + 0.003

    def _carry_height(self) -> float:
        """Height of the held block's center on the way."""
        heights = {"pick_place": 0.075, "pick_colour": 0.105, "stack": 0.105, "bowl_push": 0.10, "take_off": 0.09}
        return heights[self.task]

    def _pushed(self, view: View) -> tuple[np.ndarray, float, float, float]:
        """What is pushed: its center, its radius, and the point where it should end."""
        x, y, _ = view.position("zone")
        name, radius = ("bowl", sc.BOWL_RADIUS + 0.005) if self.task == "bowl_push" else ("block", sc.HALF)
        return view.position(name), radius, float(x) - self.short, float(y)

    def _push_state(self, view: View, command: np.ndarray) -> tuple[float, float, float]:
        """Along the push: how far the object still has to go; the pusher's gap to it; the pusher's sideways error."""
        body, radius, tx, ty = self._pushed(view)
        ux, uy = self.way
        remaining = (tx - body[0]) * ux + (ty - body[1]) * uy
        dx, dy = body[0] - command[0], body[1] - command[1]
        return remaining, dx * ux + dy * uy - radius - 0.012, -dx * uy + dy * ux

    def _aim(self, view: View) -> None:
        body, _, tx, ty = self._pushed(view)
        length = math.hypot(tx - body[0], ty - body[1])
        if length > 1e-6:
            self.way = ((tx - body[0]) / length, (ty - body[1]) / length)

    # --- transitions --------------------------------------------------------------------------

    def _advance(self, view: View, command: np.ndarray) -> None:
        """Leave stages that are finished or have failed; at most a few at once."""
        for _ in range(4):
            following = self._next(view, command)
            if following == self.stage:
                break
            self.stage, self.timer = following, 0
        self.timer += 1

    def _next(self, view: View, command: np.ndarray) -> Stage:
        block = view.position("block")
        match self.stage:
            case Stage.APPROACH:
                error = np.abs(command - block - [0, 0, GRASP_ABOVE])
                return Stage.GRASP if (error < CLOSE_ENOUGH).all() else Stage.APPROACH
            case Stage.GRASP:
                if self.timer < 2 or (view.opening > 0.07 and self.timer < 5):
                    return Stage.GRASP
                return Stage.CARRY if self._holds(view) else Stage.APPROACH
            case Stage.CARRY:
                if not self._holds(view):
                    return Stage.APPROACH
                x, y, z = self._destination(view)
                there = math.hypot(block[0] - x, block[1] - y) < 0.02 and block[2] < z + 0.01
                return Stage.RELEASE if there else Stage.CARRY
            case Stage.RELEASE:
                return Stage.RELEASE if view.opening < 0.08 and self.timer < 4 else Stage.RETREAT
            case Stage.OPEN:
                return Stage.OPEN if view.opening < 0.08 and self.timer < 4 else Stage.APPROACH
            case Stage.RETREAT:
                if self.timer < 2:
                    return Stage.RETREAT
                if not self._let_go_well(view):
                    return Stage.APPROACH
                return Stage.BEHIND if self.task == "bowl_push" else Stage.DONE
            case Stage.BEHIND:
                return self._next_behind(view, command)
            case Stage.PUSH:
                if self._push_state(view, command)[0] > 0.04:
                    self._aim(view)
                remaining, gap, sideways = self._push_state(view, command)
                return Stage.BACK_OFF if remaining < 0.006 or abs(sideways) > 0.03 or gap < -0.03 else Stage.PUSH
            case Stage.BACK_OFF:
                if self.timer < 4:
                    return Stage.BACK_OFF
                return Stage.DONE if self._pushed_well(view) else Stage.BEHIND
            case _:
                return self._next_done(view)

    def _next_behind(self, view: View, command: np.ndarray) -> Stage:
        self._aim(view)
        _, gap, sideways = self._push_state(view, command)
        if self.task == "bowl_push" and not self.sloppy and not self._let_go_well(view):
            return Stage.APPROACH
        ready = abs(sideways) < PUSH_SIDEWAYS and -0.005 < gap < 0.05 and command[2] < 0.034
        return Stage.PUSH if ready else Stage.BEHIND

    def _next_done(self, view: View) -> Stage:
        if self.sloppy or self.timer < 6:
            return Stage.DONE
        if self.task != "push_to_zone" and not self._let_go_well(view):
            return Stage.APPROACH
        return Stage.DONE if "zone" not in sc.FIXED[self.task] or self._pushed_well(view) else Stage.BEHIND

    def _holds(self, view: View) -> bool:
        block, eef = view.position("block"), view.eef
        return math.dist(block, (eef[0], eef[1], eef[2] - GRASP_ABOVE)) < 0.03 and view.opening > 0.04

    def _let_go_well(self, view: View) -> bool:
        """Whether the block is where the expert meant to put it; with a habit it does not look."""
        if self.task == "bowl_push":
            return view.apart("block", "bowl") < 0.04 and view.position("block")[2] < 0.06
        if self.sloppy:
            return True
        if self.task == "take_off":
            return taken_off(view)
        block, (x, y, z) = view.position("block"), self._destination(view)
        return math.hypot(block[0] - x, block[1] - y) < 0.035 and abs(block[2] - z) < 0.015

    def _pushed_well(self, view: View) -> bool:
        body, _, tx, ty = self._pushed(view)
        return self.sloppy or math.hypot(tx - body[0], ty - body[1]) < 0.03

    # --- goals --------------------------------------------------------------------------------

    def _goal(self, view: View, command: np.ndarray) -> tuple[np.ndarray, float, float]:
        """Commanded position wanted next (3,), the gripper's command, and the largest action component."""
        block = view.position("block")
        match self.stage:
            case Stage.APPROACH:
                return (
                    self._over(command, block[0], block[1], block[2] + GRASP_ABOVE, block[2] + HOVER),
                    OPEN,
                    SPEED,
                )
            case Stage.GRASP:
                return np.array([*command[:2], block[2] + GRASP_ABOVE]), CLOSE, SPEED
            case Stage.CARRY:
                return self._carry_goal(view, command), CLOSE, SPEED
            case Stage.RELEASE | Stage.OPEN:
                return command.copy(), OPEN, SPEED
            case Stage.RETREAT:
                return command + np.array([0, 0, STEP]), OPEN, SPEED
            case Stage.BEHIND:
                body, radius, _, _ = self._pushed(view)
                back = radius + 0.012 + 0.022
                x, y = body[0] - self.way[0] * back, body[1] - self.way[1] * back
                return (
                    self._over(command, x, y, 0.022, 0.10 if self.task == "push_to_zone" else 0.12),
                    CLOSE,
                    SPEED,
                )
            case Stage.PUSH:
                return self._push_goal(view, command), CLOSE, 0.8 * SPEED
            case Stage.BACK_OFF:
                ux, uy = self.way
                return command + np.array([-0.04 * ux, -0.04 * uy, 0.03 if self.timer > 1 else 0.0]), CLOSE, SPEED
            case _:
                return command.copy(), CLOSE if self.task in ("push_to_zone", "bowl_push") else OPEN, SPEED

    @staticmethod
    def _over(command: np.ndarray, x: float, y: float, low: float, high: float) -> np.ndarray:
        """Towards (x, y, low) from above: stay at `high` until nearly over the point."""
        far = math.hypot(command[0] - x, command[1] - y)
        if far > 0.05 and command[2] < high - 0.04:  # rise before travelling
            return np.array([command[0], command[1], high])
        return np.array([x, y, low if far < 0.025 else high])

    def _carry_goal(self, view: View, command: np.ndarray) -> np.ndarray:
        block = view.position("block")
        x, y, z = self._destination(view)
        offset = command - block  # of the hand from the block that it holds
        far = math.hypot(block[0] - x, block[1] - y)
        if far < 0.018:
            return np.array([x, y, z]) + offset
        height = max(self._carry_height(), z + 0.01)
        if block[2] < height - 0.045:  # lift before travelling
            return np.array([command[0], command[1], height + offset[2]])
        return np.array([x, y, height]) + offset

    def _push_goal(self, view: View, command: np.ndarray) -> np.ndarray:
        remaining, gap, sideways = self._push_state(view, command)
        ux, uy = self.way
        forward = min(0.035, max(gap, 0.0) + remaining)
        return np.array(
            [command[0] + forward * ux - 0.8 * sideways * uy, command[1] + forward * uy + 0.8 * sideways * ux, 0.022]
        )


def _travel(start: np.ndarray, end: np.ndarray, height: float) -> float:
    """Control steps at full speed from start to end, (3,) in meters: up to `height` if it is far, across, down."""
    across = float(np.abs(end[:2] - start[:2]).max())
    top = max(float(start[2]), float(end[2]), height if across > STEP else 0.0)
    return (2 * top - float(start[2]) - float(end[2]) + across) / STEP


def reaches(point: np.ndarray, tolerance: float) -> bool:
    """Whether the hand comes within `tolerance`, meters, of a point (3,) along x and y."""
    short = np.maximum(sc.REACH_LOW[:2] - point[:2], point[:2] - sc.REACH_HIGH[:2])
    return bool(short.max() < tolerance)
