"""One RoboTwin 2.0 environment, Gymnasium-style, for the environment host. Runs in RoboTwin's Python (3.10).

RoboTwin's classes are used as they are; what they need to be told, and what they leave open, is decided here:
which seeds are feasible, the instruction, when an episode ends. The working folder is the checkout.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import yaml

CAMERAS = {  # our name -> RoboTwin's
    "head": "head_camera",
    "left_wrist": "left_camera",
    "right_wrist": "right_camera",
    "front": "front_camera",
}
OFFICIAL_START = 100_000  # where RoboTwin's evaluation with seed 0 begins
NUM_EVAL_STATES = 100  # of RoboTwin's evaluation
PHYSICS_HZ = 250.0
DEFAULT_LIMIT = 1000  # steps, of a task that RoboTwin's table lacks
ACTION_TYPES = {"joint": "qpos", "end_effector": "ee"}  # our name -> RoboTwin's
MAX_TEXTS = 100  # instructions drawn for one episode, of which one is taken
# Seeds that belong together: (train, validation) have blocks of their own above RoboTwin's seeds.
BLOCK = 16  # candidates for one initial state
FIRST = {"train": 2**29, "validation": 2 * 2**29}
MAX_INDEX = 2**29 // BLOCK
MAX_WALK = 10_000  # official seeds looked at before giving up


class RoboTwinEnv:
    """RoboTwin's tasks, one episode at a time.

    Action, float32, absolute targets: for each arm, left first, its joints in radians and its gripper from 0 (closed)
    to 1 (open): (14,) with two arms of six joints. In end-effector mode for each arm x, y, z in meters, a quaternion
    w, x, y, z in the world's frame, and the gripper: (16,); it needs RoboTwin's planner.
    State: the joints' and grippers' present targets, in the same order.

    Args:
        tasks: names of RoboTwin's tasks. setting: name of a config in its task_config folder, such as demo_clean.
        cameras: of `CAMERAS`. image_size: (height, width) to resize to; None keeps the camera's.
        instructions: "seen" or "unseen" templates; "auto" takes seen ones, and in eval those that the setting names.
        expert_check: seeds whose expert fails are not feasible either, as in RoboTwin's own evaluation.
        first_imports: modules imported before RoboTwin's; their `install()` is called where they have one.
    """

    def __init__(
        self,
        tasks: list[str],
        setting: str,
        cameras: list[str],
        image_size: list[int] | None,
        action: str,
        instructions: str,
        expert_check: bool,
        horizons: dict[str, int],
        seeds_folder: str,
        first_imports: list[str],
    ) -> None:
        for name in first_imports:
            module = importlib.import_module(name)
            getattr(module, "install", lambda: None)()
        self._configs = _task_configs()
        self._arguments = _task_arguments(self._configs, setting)
        self._limits = _read_yaml(self._configs / "_eval_step_limit.yml")
        self.tasks = tasks or sorted(name for name in self._limits if Path(f"envs/{name}.py").is_file())
        for name in self.tasks:
            if not Path(f"envs/{name}.py").is_file():
                raise ValueError(f"env.tasks: RoboTwin in {os.getcwd()} has no task {name!r} (no envs/{name}.py)")
        self.setting, self.cameras, self.image_size = setting, cameras, image_size
        self.action_type, self.expert_check = ACTION_TYPES[action], expert_check
        self.instructions, self.horizons = instructions, horizons
        self._folder = Path(seeds_folder).expanduser()
        self._tasks: dict[str, Any] = {}
        self._records: dict[str, SeedRecord] = {}
        self._open: Any = None  # the task instance whose scene exists
        self._resets = 0

    # --- what the environment host asks ---

    def env_facts(self) -> dict[str, Any]:
        """See `sim.remote.client.EnvFacts`."""
        low, high = self._bounds()
        return {
            "name": "robotwin",
            "tasks": {name: name.replace("_", " ") for name in self.tasks},
            "horizon": {n: self.horizons.get(n) or self._limits.get(n, DEFAULT_LIMIT) for n in self.tasks},
            "cameras": {name: f"images.{name}" for name in self.cameras},
            "state": "state",
            "instruction": "instruction",
            "control_hz": PHYSICS_HZ / self._arguments["save_freq"],
            "action_low": low,
            "action_high": high,
            "eval_seeds": list(range(NUM_EVAL_STATES)),
        }

    def reset(self, seed: int, options: dict[str, Any]) -> tuple[None, dict[str, Any]]:
        """Start the episode of options' task, split and index; the seed follows from these."""
        del seed
        self._name, split, index = options["task"], options["split"], options["index"]
        record = self._record(self._name)
        self._seed = record.find(split, index, OFFICIAL_START, lambda candidate: self._check(self._name, candidate))
        info = record.seeds[self._seed]["info"]
        self._setup(self._name, self._seed)
        self._expert: list[np.ndarray] | None = None
        self._steps = 0
        return None, {"seed": self._seed, "instruction": self._instruction(split, info)}

    def step(self, action: np.ndarray) -> tuple[None, float, bool, bool, dict[str, Any]]:
        """One action, which RoboTwin's trajectory planner turns into as many physics steps as it takes."""
        self._steps += 1
        self._open.take_action(np.asarray(action, np.float64), self.action_type)
        success = bool(self._open.eval_success)
        return None, float(success), success, False, {"success": success}

    def observe(self) -> dict[str, Any]:
        """Render all of RoboTwin's cameras; returns those asked for."""
        seen = self._open.get_obs()
        images = {name: self._image(seen["observation"][CAMERAS[name]]["rgb"]) for name in self.cameras}
        return {"images": images, "state": np.asarray(seen["joint_action"]["vector"], np.float32)}

    def expert_action(self) -> np.ndarray:
        """The next action of RoboTwin's own expert, which plans a whole episode at its first step.

        Raises:
            NotImplementedError: asked for first in mid-episode, or in end-effector mode.
        """
        if self.action_type != "qpos":
            raise NotImplementedError("RoboTwin's expert is recorded as joint targets: set env.action to joint")
        if self._expert is None:
            if self._steps:
                raise NotImplementedError("RoboTwin's expert plans whole episodes: ask it from the first step on")
            self._expert = self._record_expert()
            self._setup(self._name, self._seed)
        return self._expert[min(self._steps, len(self._expert) - 1)].astype(np.float32)

    def close(self) -> None:
        """Drop the scene."""
        self._close_scene()
        self._tasks = {}

    # --- scenes ---

    def _task(self, name: str) -> Any:
        if name not in self._tasks:
            self._tasks[name] = getattr(importlib.import_module(f"envs.{name}"), name)()
        return self._tasks[name]

    def _setup(self, name: str, seed: int) -> None:
        """Build the scene of a seed. Raises RoboTwin's UnStableError where its objects do not come to rest."""
        self._close_scene()
        task = self._task(name)
        self._open = task
        arguments = deepcopy(self._arguments)
        task.setup_demo(now_ep_num=0, seed=seed, task_name=name, eval_mode=True, is_test=True, **arguments)
        task.step_lim = None  # the horizon is the host's to keep; at its own limit RoboTwin ignores actions in silence

    def _close_scene(self) -> None:
        if self._open is not None:
            self._resets += 1
            self._open.close_env(clear_cache=self._resets % self._arguments.get("clear_cache_freq", 5) == 0)
        self._open = None

    def _check(self, name: str, seed: int) -> bool:
        """Whether the seed is feasible; the record is told, with what the instruction's templates need."""
        record = self._record(name)
        try:
            self._setup(name, seed)
        except Exception as error:
            if type(error).__name__ != "UnStableError":
                raise
            record.add(seed, False, why=str(error))
            return False
        task = self._open
        if self.expert_check:
            info = task.play_once()
            if not (task.plan_success and task.check_success()):
                record.add(seed, False, why="the expert fails")
                return False
        elif hasattr(task, "get_info"):
            info = task.get_info()
        else:
            task.plan_success = False  # then play_once names the objects and moves nothing
            info = task.play_once()
        record.add(seed, True, info={key: str(value) for key, value in info["info"].items()})
        return True

    def _record(self, name: str) -> SeedRecord:
        if name not in self._records:
            commit = _commit()
            file = self._folder / f"{name}.{self.setting}{'.expert' if self.expert_check else ''}.json"
            about = {"task": name, "setting": self.setting, "expert_check": self.expert_check, "robotwin": commit}
            self._records[name] = SeedRecord(file, about)
        return self._records[name]

    def _record_expert(self) -> list[np.ndarray]:
        """The expert's joint targets, as often as RoboTwin's own datasets have them."""
        task = self._open
        targets: list[np.ndarray] = []

        def note() -> None:
            robot = task.robot
            targets.append(np.array(robot.get_left_arm_jointState() + robot.get_right_arm_jointState()))

        task._take_picture = note
        try:
            task.play_once()
        finally:
            del task._take_picture
        note()
        return targets[1:] or targets

    # --- what is shown and said ---

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest action."""
        if self.action_type == "ee":
            low, high = [-2.0] * 3 + [-1.0] * 4 + [0.0], [2.0] * 3 + [1.0] * 4 + [1.0]
            return np.array(low * 2, np.float32), np.array(high * 2, np.float32)
        name = self.tasks[0]
        first = self._record(name).find("train", 0, OFFICIAL_START, lambda seed: self._check(name, seed))
        self._setup(name, first)
        bounds = []
        for joints in (self._open.robot.left_arm_joints, self._open.robot.right_arm_joints):
            bounds += [np.asarray(joint.get_limits(), np.float64).reshape(2) for joint in joints]
            bounds.append(np.array([0.0, 1.0]))  # the gripper
        limits = np.clip(np.stack(bounds), -np.pi, np.pi).astype(np.float32)
        return limits[:, 0], limits[:, 1]

    def _image(self, image: np.ndarray) -> np.ndarray:
        if self.image_size is None or list(image.shape[:2]) == self.image_size:
            return np.ascontiguousarray(image)
        import cv2

        return cv2.resize(image, (self.image_size[1], self.image_size[0]), interpolation=cv2.INTER_AREA)

    def _instruction(self, split: str, info: dict[str, str]) -> str:
        """One of RoboTwin's own instructions for this episode; the same one every time."""
        utilities = str(Path("description/utils").resolve())
        if utilities not in sys.path:
            sys.path.append(utilities)
        generate = importlib.import_module("generate_episode_instructions").generate_episode_descriptions
        kind = self.instructions
        if kind == "auto":
            kind = self._arguments.get("eval_instruction", "unseen") if split == "eval" else "seen"
        before = random.getstate()
        random.seed(self._seed)
        try:
            found = generate(self._name, [info], MAX_TEXTS)
            texts = found[0][kind] if found else []
            return random.choice(texts) if texts else self._name.replace("_", " ")
        finally:
            random.setstate(before)


def _task_configs() -> Path:
    """RoboTwin's folder of settings."""
    sys.path[:0] = [] if os.getcwd() in sys.path else [os.getcwd()]
    try:
        configs = importlib.import_module("envs._GLOBAL_CONFIGS").CONFIGS_PATH
    except ImportError as error:
        raise ImportError(f"RoboTwin cannot be imported from {os.getcwd()} (env.root): {error}") from error
    return Path(configs)


def _read_yaml(file: Path) -> dict[str, Any]:
    with open(file, encoding="utf-8") as text:
        return yaml.safe_load(text)


def _task_arguments(configs: Path, setting: str) -> dict[str, Any]:
    """What `setup_demo` must be given for a setting: the setting's own values, and its robot's.

    Raises:
        ValueError: there is no such setting.
    """
    file = configs / f"{setting}.yml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in configs.glob("demo_*.yml")))
        raise ValueError(f"env.setting: RoboTwin has no {file}; it has {known}")
    arguments = _read_yaml(file)
    known = _read_yaml(configs / "_embodiment_config.yml")
    robots = arguments["embodiment"]
    if len(robots) not in (1, 3):
        raise ValueError(f"{file}: embodiment must be one robot, or two and their distance; got {robots}")
    left, right = (robots[0], robots[0]) if len(robots) == 1 else robots[:2]
    for side, robot in (("left", left), ("right", right)):
        folder = known[robot]["file_path"]
        arguments[f"{side}_robot_file"] = folder
        arguments[f"{side}_embodiment_config"] = _read_yaml(Path(folder) / "config.yml")
    arguments["dual_arm_embodied"] = len(robots) == 1
    if len(robots) == 3:
        arguments["embodiment_dis"] = robots[2]
    wanted = {key: key in ("rgb", "qpos") for key in arguments["data_type"]}
    return {**arguments, "data_type": wanted, "render_freq": 0, "save_data": False, "eval_video_log": False}


def _commit() -> str:
    """The checkout's commit; "unknown" where it is no repository."""
    source = os.path.realpath("envs")
    done = subprocess.run(
        ["git", "-C", source, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


class SeedRecord:
    """A JSON file, seed -> {"feasible": bool, "why": text, "info": what the instruction's templates need}."""

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        self.file, self.about = file, about
        self.seeds: dict[int, dict[str, Any]] = {}
        self._read()

    def _read(self) -> None:
        if self.file.is_file():
            content = json.loads(self.file.read_text(encoding="utf-8"))
            if content["about"] != self.about:
                raise ValueError(
                    f"{self.file} was recorded with {content['about']}, this environment has {self.about}: "
                    "set env.seeds_folder to another folder"
                )
            self.seeds = {int(seed): entry for seed, entry in content["seeds"].items()} | self.seeds

    def add(self, seed: int, feasible: bool, why: str = "", info: dict[str, Any] | None = None) -> None:
        """Note a seed; other processes that write the same file lose nothing."""
        self.seeds[seed] = {"feasible": feasible, "why": why, "info": info or {}}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file.with_suffix(".lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            self._read()
            entries = {str(key): self.seeds[key] for key in sorted(self.seeds)}
            partial = self.file.with_suffix(".partial")  # Ours alone, by the lock.
            partial.write_text(json.dumps({"about": self.about, "seeds": entries}, indent=1), encoding="utf-8")
            os.replace(partial, self.file)

    def find(self, split: str, index: int, first_eval: int, check: Callable[[int], bool]) -> int:
        """The feasible seed of an initial state. Seeds not yet in the record are checked.

        eval: the `index`-th feasible seed from `first_eval` on, as RoboTwin's own evaluation counts. Others: the
        first feasible seed of the block that belongs to this initial state alone, so that any can be asked for.

        Raises:
            ValueError: an index out of range. RuntimeError: no feasible seed.
        """
        for seed in self._candidates(split, index, first_eval):
            entry = self.seeds.get(seed)
            if entry["feasible"] if entry is not None else check(seed):
                if split != "eval" or index == 0:
                    return seed
                index -= 1
        raise RuntimeError(f"no feasible seed for initial state {index} of {split}; see {self.file} for the reasons")

    def _candidates(self, split: str, index: int, first_eval: int) -> Iterator[int]:
        if split == "eval":
            return iter(range(first_eval, first_eval + MAX_WALK))
        if not 0 <= index < MAX_INDEX:
            raise ValueError(f"no initial state {index} in split {split!r}: indices are below {MAX_INDEX}")
        start = FIRST[split] + index * BLOCK
        return iter(range(start, start + BLOCK))
