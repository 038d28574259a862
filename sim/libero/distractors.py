"""The axis `distractors` of `sim.perturb` in LIBERO: more of its own objects in the scene, which no task names.

They are solid and fixed where they stand. So the model has the same joints, official initial states fit, and while
nothing touches one, physics is that of the clean scene to the last bit. A scene has all that a task may meet; an
episode's are put in place, and the others out of sight, without building anything.
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np

from sim.libero.clearance import Shape, Surroundings
from sim.libero.scene import PHYSICS, InitialState, Scene, check_arrays, numpy_seed
from vla_rl.common.tables import libero_instruction

NUMBER = (0, 2, 4, 7)  # by level of `sim.perturb`
KINDS = 10  # that a task's scene holds, of those that may stand in it
# LIBERO's names of what is small enough to stand beside a task's things.
POOL = (
    "alphabet_soup", "bbq_sauce", "butter", "chocolate_pudding", "cookies", "cream_cheese", "ketchup",
    "macaroni_and_cheese", "milk", "new_salad_dressing", "orange_juice", "popcorn", "salad_dressing", "tomato_sauce",
    "akita_black_bowl", "glazed_rim_porcelain_ramekin", "plate", "white_bowl", "black_book", "moka_pot",
    "porcelain_mug", "red_coffee_mug", "white_yellow_mug", "wine_bottle",
)  # fmt: skip
TRIES = 200  # of placing one; then the next kind is tried
HIDDEN = np.array([0.0, 0.0, 10.0])  # meters, over everything, where no camera looks
GAP = 0.001  # meters above the surface


class CrowdedScene(Scene):
    """A task's scene with distractors, hidden until `scatter`. Its states and keyframes are those of the clean one.

    A keyframe has the distractors' poses besides; the clean scene passes over them, and one without them hides all.
    """

    def __init__(self, bddl_file: Path, official: np.ndarray) -> None:
        super().__init__(bddl_file, official)
        model = self.model
        things = self.env.distractors
        self._bodies = np.array([model.body(thing.root_body).id for thing in things])
        self._added = np.isin(model.body_rootid, self._bodies)  # with their parts
        self.kinds = [thing.name.removeprefix("distractor_") for thing in things]
        self._upright = np.array([_upright(thing) for thing in things])
        self._hide()
        mujoco.mj_kinematics(model, self.data)
        of_body = model.body_rootid[model.geom_bodyid]
        solid = model.geom_contype != 0
        shapes = [Shape(model, np.flatnonzero(solid & (of_body == body)).tolist()) for body in self._bodies]
        self._points = [shape.points(self.data, 3) - HIDDEN for shape in shapes]
        self._to_default_pose()

    @staticmethod
    def problem(stock: type) -> type:
        """See `Scene.problem`."""

        class Crowded(stock):
            def _assert_problem_name(self) -> None:
                """It was looked up by the file's problem name, which is not this class's."""

            def _load_model(self) -> None:
                super()._load_model()
                self.distractors = _loaded(kinds_beside(self))
                self.model.merge_objects(self.distractors)

        return Crowded

    def _hide(self) -> None:
        self.model.body_pos[self._bodies], self.model.body_quat[self._bodies] = HIDDEN, self._upright

    def start(self, state: InitialState) -> None:
        """See `Scene.start`; all distractors are hidden."""
        self.model.body_pos[:], self.model.body_quat[:] = state.body_pos, state.body_quat
        self._hide()
        super().start(replace(state, body_pos=self.model.body_pos.copy(), body_quat=self.model.body_quat.copy()))

    def scatter(self, level: int, rng: np.random.Generator) -> list[str]:
        """Put this level's distractors around what is in the scene; their kinds. Fewer where there is no room.

        Those of a lower level are the first of them, in the same places.
        """
        self._hide()
        around = Surroundings(self, hidden=self._bodies)
        order, seeds = rng.permutation(len(self._bodies)), rng.integers(2**32, size=len(self._bodies))
        placed: list[str] = []
        for number in order:
            if len(placed) == NUMBER[level]:
                break
            draws = np.random.default_rng(seeds[number])
            for _ in range(TRIES):
                center, yaw = around.anywhere(draws), draws.uniform(-np.pi, np.pi)
                turned = self._points[number] @ _about_z(yaw).T
                low, high = turned.min(0), turned.max(0)
                offset = np.array([*(center - (low + high)[:2] / 2), around.surface + GAP - low[2]])
                if around.take(turned + offset):
                    body = self._bodies[number]
                    self.model.body_pos[body] = offset
                    spin = np.array([np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)])
                    mujoco.mju_mulQuat(self.model.body_quat[body], spin, self._upright[number])
                    placed.append(self.kinds[number])
                    break
        super().restore(super().save())  # what follows from positions
        return placed

    def save(self) -> dict[str, np.ndarray]:
        """See `Scene.save`; with distractors (kinds, 7), position and quaternion."""
        arrays = super().save()
        poses = np.concatenate([arrays["body_pos"], arrays["body_quat"]], 1)[self._bodies]
        for name in ("body_pos", "body_quat"):
            arrays[name] = arrays[name][~self._added]
        arrays["physics"] = arrays["physics"][~self._forces()]
        return {**arrays, "distractors": poses}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """See `Scene.restore`."""
        hidden = np.concatenate([np.tile(HIDDEN, (len(self._bodies), 1)), self._upright], 1)
        arrays = {"distractors": hidden, **arrays}
        check_arrays(arrays, self.save())
        wide = {**arrays, "physics": np.zeros(len(self._last_substep))}
        wide["physics"][~self._forces()] = arrays["physics"]
        for name, columns in (("body_pos", slice(3)), ("body_quat", slice(3, 7))):
            wide[name] = getattr(self.model, name).copy()
            wide[name][~self._added] = arrays[name]
            wide[name][self._bodies] = arrays["distractors"][:, columns]
        super().restore(wide)

    def _forces(self) -> np.ndarray:
        """bool, which of the physics state's values are forces on distractors, which are always zero."""
        before = int(mujoco.mjtState.mjSTATE_XFRC_APPLIED) - 1  # what stands before them: all lower bits
        first = mujoco.mj_stateSize(self.model, PHYSICS & before)
        mask = np.zeros(len(self._last_substep), bool)
        mask[first : first + 6 * self.model.nbody] = np.repeat(self._added, 6)
        return mask


def kinds_beside(env) -> list[str]:
    """The kinds of `POOL` that may stand in a LIBERO environment's scene: `KINDS` of them, always the same for a task.

    Not those that are in it already, nor those that share a word with its instruction: "the bowl" is then no other.
    """
    task = Path(env.bddl_file_name).stem
    present = {*env.parsed_problem["objects"], *env.parsed_problem["fixtures"]}
    said = set(libero_instruction(task).split()) - {"and"}
    free = [kind for kind in POOL if kind not in present and not said & set(kind.split("_"))]
    return np.random.default_rng(zlib.crc32(task.encode())).permutation(free)[:KINDS].tolist()


def _loaded(kinds: list[str]) -> list:
    """LIBERO's objects, without the joints that let them move, and without sites: of these a keyframe has colors."""
    from libero.libero.envs.base_object import OBJECTS_DICT

    things = [OBJECTS_DICT[kind](name=f"distractor_{kind}") for kind in kinds]
    for thing in things:
        body = thing.get_obj()
        for element in [*body.findall("joint"), *body.findall("site")]:
            body.remove(element)
    return things


def _upright(thing) -> np.ndarray:
    """A quaternion in which LIBERO's own sampler puts an object down, (w, x, y, z) as LIBERO gives it to MuJoCo."""
    from libero.libero.envs.regions import TableRegionSampler

    sampler = TableRegionSampler("table", None, [(0, 0)], [(0, 0)], thing.rotation, thing.rotation_axis)
    with numpy_seed(0):
        return sampler._sample_quat()


def _about_z(angle: float) -> np.ndarray:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
