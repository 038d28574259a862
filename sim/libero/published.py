"""Tasks of LIBERO-Plus (arXiv 2510.13626) and LIBERO-PRO (arXiv 2510.03827), from a user's copy of their repositories.

Their files are read as data and none of their code is run. Loads no simulator.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from sim.libero.library import ASSET_FOLDERS, bddl_path, load_init_states, package_root, suite_tasks
from sim.libero.suites import NUM_OFFICIAL_STATES
from vla_rl.common.tables import libero_instruction
from vla_rl.config import Config, ConfigError

# What LIBERO-Plus hangs on a task's name. A number in `view`: degrees around the table, degrees up, percent of the
# distance, degrees that the camera itself turns, and tilts.
_PLUS = re.compile(
    r"(?P<task>.+?)(?P<said>_language_\d+)?(?:_view_(?P<view>\d+_\d+_\d+_\d+_\d+)_initstate_(?P<arm>\d+)"
    r"(?:_noise_(?P<noise>\d+))?|_(?:table|tb|light)_\d+|(?P<moved>_add_\d+|(?:_moved)?_level\d+_sample\d+))?"
)
# LIBERO-PRO's ending of a suite's folder -> the dimension
PRO = {"object": "Object", "swap": "Position", "lan": "Semantic", "task": "Task", "env": "Environment"}
GET = {
    "LIBERO-Plus": "assets.zip of huggingface.co/datasets/Sylvest/LIBERO-plus belongs in its libero/libero",
    "LIBERO-PRO": "its bddl_files, init_files and assets are in the repository and in "
    "huggingface.co/datasets/zhouxueyang/LIBERO-Pro",
}
_ARRAY_WORDS = {"numpy", "numpy.core.multiarray", "numpy._core.multiarray", "_reconstruct", "ndarray", "dtype"}


class PublishedConfig(Config):
    """The published perturbed tasks in place of LIBERO's own."""

    path: Path = Field(description="Folder of a copy of the LIBERO-Plus or LIBERO-PRO repository.")
    dimensions: tuple[str, ...] = Field(
        default=(), description="Of the perturbations, as the benchmark names them; empty means all."
    )
    leave_out: bool = Field(
        default=False,
        description="Leave out, and count, tasks whose files or assets are missing; else they are refused.",
    )


@dataclass(frozen=True)
class PublishedTask:
    """One task. dimension and level (1 to 5; 0: none given) are the benchmark's; view, arm, noise: see `_PLUS`."""

    name: str
    benchmark: str
    dimension: str
    level: int
    root: Path
    bddl: Path
    states: Path
    base: Path  # LIBERO's own file of the task
    instruction: str
    view: tuple[int, ...] = ()
    arm: int = 0
    noise: int = 0

    @property
    def num_states(self) -> int:
        """Initial states that the benchmark runs."""
        return 1 if self.benchmark == "LIBERO-Plus" else NUM_OFFICIAL_STATES

    def init_states(self) -> np.ndarray:
        """float64 (`num_states`, values).

        Raises:
            ValueError: unusable file, or too few.
        """
        states = np.atleast_2d(_load_states(self.states))
        if len(states) < self.num_states:
            raise ValueError(f"{self.states}: {len(states)} initial states; {self.benchmark} runs {self.num_states}")
        return states[: self.num_states]

    def missing(self, assets: Path) -> str:
        """The first file that the task needs and that is not there; empty if none."""
        if lacking := [file for file in (self.bddl, self.states) if not file.is_file()]:
            return str(lacking[0])
        text, variant = self.bddl.read_text(), self.variant
        if variant is None:
            return f"the problem {problem_of(text)!r}, which neither LIBERO nor the copy defines"
        places = [[variant["scene_xml"]]] if "scene_xml" in variant else []
        places += [[f"textures/{picture}"] for picture in self.pictures(variant).values()]
        places += [self.models(category) for category in new_categories(text)]
        return next(
            (str(assets / any_of[0]) for any_of in places if not any((assets / p).is_file() for p in any_of)), ""
        )

    @functools.cached_property
    def variant(self) -> dict[str, str] | None:
        """What LIBERO-Plus's variant of a LIBERO scene sets: base, and perhaps scene_xml, floor_style, wall_style.

        Empty for LIBERO's own scenes; None for an unknown one.
        """
        problem = problem_of(self.bddl.read_text())
        return {} if problem in _stock("problems") else _variants(self.root).get(problem)

    def pictures(self, variant: Mapping[str, str]) -> dict[tuple[str, str], str]:
        """("floor" or "wall", name of the look) -> its picture, of those that LIBERO lacks."""
        wanted = {kind: variant.get(f"{kind}_style", "") for kind in ("floor", "wall")}
        return {
            (kind, look): picture
            for kind, look in wanted.items()
            if (picture := _styles(self.root)[kind].get(look)) and look not in _styles(package_root())[kind]
        }

    def models(self, category: str) -> list[str]:
        """Where in the assets a category that LIBERO lacks may have its model."""
        known = _new_objects(self.root).get(category)
        folders = [f"{folder}/{category}/{category}.xml" for folder in ASSET_FOLDERS[3:]]
        return [known] if known else [*folders, f"articulated_objects/{category}.xml"]


def tasks_of(config: PublishedConfig, suite: str, assets: Path | None) -> dict[str, PublishedTask]:
    """The suite's tasks by name, in the benchmark's order, without those left out. assets: in place of the copy's.

    Raises:
        ConfigError: no such benchmark, suite or dimension; or files or assets missing, naming one and its source.
    """
    tasks = _all_tasks(config.path.expanduser().resolve(), suite)
    known = list(dict.fromkeys(task.dimension for task in tasks))
    if unknown := [dimension for dimension in config.dimensions if dimension not in known]:
        raise ConfigError(f"env.published.dimensions: got {unknown[0]!r}; {suite} there has: {', '.join(known)}")
    chosen = [task for task in tasks if task.dimension in (config.dimensions or known)]
    lacking = {task.name: file for task in chosen if (file := _missing(task, assets or task.root / "assets"))}
    if lacking and not (config.leave_out and len(lacking) < len(chosen)):
        benchmark, (name, file) = tasks[0].benchmark, next(iter(lacking.items()))
        raise ConfigError(
            f"env.published: {name} lacks {file}, and so do others, {len(lacking)} of {len(chosen)} tasks in all. "
            f"{benchmark}: {GET[benchmark]}. Or choose other env.published.dimensions ({', '.join(known)}), or "
            "leave such tasks out by env.published.leave_out=true"
        )
    return {task.name: task for task in chosen if task.name not in lacking}


def assets_of(config: PublishedConfig | None, assets: Path | None) -> Path | None:
    """The folder of meshes and textures: as given, else the copy's where it is whole; None: LIBERO's."""
    if config is None or assets is not None:
        return assets
    own = _root(config.path.expanduser().resolve()) / "assets"
    return own if all((own / folder).is_dir() for folder in ASSET_FOLDERS) else None


def left_out(config: PublishedConfig, suite: str, found: Mapping[str, PublishedTask]) -> str:
    """What `tasks_of` has not found of the benchmark's suite: "left out: 3 of 292 Light Conditions"; empty: nothing."""
    tasks = _all_tasks(config.path.expanduser().resolve(), suite)
    there, all_of = (Counter(task.dimension for task in some) for some in (found.values(), tasks))
    if tasks[0].benchmark == "LIBERO-PRO":
        all_of |= dict.fromkeys(PRO.values(), len(suite_tasks(suite)))
    lacking = [f"{n - there[name]} of {n} {name}" for name, n in all_of.items() if there[name] < n]
    return f"left out: {', '.join(lacking)}" if lacking else ""


@functools.cache
def _missing(task: PublishedTask, assets: Path) -> str:
    return task.missing(assets)


@functools.cache
def _all_tasks(path: Path, suite: str) -> tuple[PublishedTask, ...]:
    root = _root(path)
    index = root / "benchmark" / "task_classification.json"
    return _plus_tasks(root, index, suite) if index.is_file() else _pro_tasks(root, suite)


def _root(path: Path) -> Path:
    for root in (path, path / "libero" / "libero", path / "liberopro" / "liberopro"):
        if (root / "bddl_files").is_dir():
            return root
    raise ConfigError(f"env.published.path: {path} has no bddl_files; give the folder of the cloned repository")


def _plus_tasks(root: Path, index: Path, suite: str) -> tuple[PublishedTask, ...]:
    listed = json.loads(index.read_text())
    if suite not in listed:
        raise ConfigError(f"env.suite: LIBERO-Plus has no {suite}; it has: {', '.join(listed)}")
    return tuple(_plus_task(root, suite, **entry) for entry in listed[suite])


def _plus_task(root: Path, suite: str, name: str, category: str, difficulty_level: int | None = None, **_: object):
    found = _PLUS.fullmatch(name)
    if found is None or (task := found["task"]) not in suite_tasks(suite):
        raise ConfigError(f"env.published: {root}: {name!r} is no perturbed task of {suite} that is known here")
    bddl = root / "bddl_files" / suite / f"{task}{found['said'] or ''}.bddl" if found["view"] else None
    bddl = bddl or root / "bddl_files" / suite / f"{name}.bddl"
    states = Path("libero_newobj", suite, name) if found["moved"] else Path(suite, task)
    return PublishedTask(
        name=name,
        benchmark="LIBERO-Plus",
        dimension=category,
        level=difficulty_level or 0,
        root=root,
        bddl=bddl,
        states=root / "init_files" / states.parent / f"{states.name}.pruned_init",
        base=bddl_path(suite, task),
        instruction=_language(bddl) if found["said"] else libero_instruction(task),
        view=tuple(map(int, found["view"].split("_"))) if found["view"] else (),
        arm=int(found["arm"] or 0),
        noise=int(found["noise"] or 0),
    )


def _pro_tasks(root: Path, suite: str) -> tuple[PublishedTask, ...]:
    there = {ending: root / "bddl_files" / f"{suite}_{ending}" for ending in PRO}
    there = {ending: folder for ending, folder in there.items() if folder.is_dir()}
    if not there:
        names = ", ".join(f"{suite}_{ending}" for ending in PRO)
        raise ConfigError(
            f"env.published.path: {root / 'bddl_files'} has none of {names}. LIBERO-PRO: {GET['LIBERO-PRO']}"
        )
    return tuple(
        PublishedTask(
            name=f"{task}_{ending}",
            benchmark="LIBERO-PRO",
            dimension=PRO[ending],
            level=0,
            root=root,
            bddl=folder / f"{task}.bddl",
            states=root / "init_files" / folder.name / f"{task}.pruned_init",
            base=bddl_path(suite, task),
            instruction=_language(folder / f"{task}.bddl"),
        )
        for ending, folder in there.items()
        for task in suite_tasks(suite)
    )


def _language(bddl: Path) -> str:
    """What the file says the robot is told, in lower case as LIBERO's reader gives it; empty without a file."""
    found = re.search(r"\(:language\s+([^()]+)\)", bddl.read_text().lower() if bddl.is_file() else "")
    return " ".join(found[1].split()) if found else ""


def problem_of(text: str) -> str:
    """The scene's class, in lower case, that a BDDL file names."""
    found = re.search(r"\(problem\s+(\w+)\s*\)", text.lower())
    return found[1] if found else ""


def categories(text: str) -> list[str]:
    """Categories of a BDDL file's fixtures and objects, in its order.

    Raises:
        ValueError: a rotation that is no number, which LIBERO's reader would run as code.
    """
    numbers = re.findall(r":yaw_rotation\s*\(\s*(?:\((?:[-+*/\d.e\s]|np\.pi)*\)\s*)*\)", text)
    if len(numbers) != text.count(":yaw_rotation"):
        raise ValueError("a BDDL file's :yaw_rotation holds something else than numbers, which alone are allowed")
    sections = re.findall(r"\(:(?:fixtures|objects)([^()]*)\)", text)
    return [category for section in sections for category in re.findall(r"\s-\s+(\w+)", section.lower())]


def new_categories(text: str) -> list[str]:
    """Those that LIBERO lacks."""
    return [category for category in dict.fromkeys(categories(text)) if category not in _stock("objects")]


@functools.cache
def _stock(what: str) -> frozenset[str]:
    """LIBERO's own problems, or its categories of objects and the surfaces they stand on, in lower case."""
    folder = package_root() / "envs" / what
    names = [name for file in folder.glob("*.py") for name in re.findall(r"^class (\w+)\(", file.read_text(), re.M)]
    if what == "problems":
        return frozenset(name.lower() for name in names)
    surfaces = {"floor", "table", *(f"{room}_table" for room in ("kitchen", "living_room", "study", "coffee"))}
    return frozenset(category_of(name) for name in names) | surfaces


def category_of(name: str) -> str:
    """LIBERO's category of a class: WoodenCabinet is wooden_cabinet."""
    return "_".join(re.sub(r"([A-Z0-9])", r" \1", name).split()).lower()


@functools.cache
def _new_objects(root: Path) -> dict[str, str]:
    """Category -> its model in the assets, for the objects that LIBERO-Plus adds."""
    file = root / "envs" / "objects" / "custom_objects.py"
    text = file.read_text() if file.is_file() else ""
    found = re.findall(r"^class (\w+)\(CustomObjects\):.*?assets/([\w./-]+\.xml)", text, re.M | re.S)
    return {category_of(name): model for name, model in found}


@functools.cache
def _variants(root: Path) -> dict[str, dict[str, str]]:
    """Problem, in lower case -> its base and what it sets otherwise."""
    variants: dict[str, dict[str, str]] = {}
    for file in sorted((root / "envs" / "problems").glob("*.py")):
        for name, base, body in re.findall(r"^class (\w+)\((\w+)\):(.*?)(?=^\S|\Z)", file.read_text(), re.M | re.S):
            said = re.findall(r"\"(scene_xml|floor_style|wall_style)\":\s*\"([^\"]+)\"", body)
            variants[name.lower()] = {"base": base.lower(), **dict(said)}
    return variants


@functools.cache
def _styles(root: Path) -> dict[str, dict[str, str]]:
    """ "floor" and "wall" -> name of a look -> its picture, as LIBERO-Plus extends LIBERO's."""
    file = root / "envs" / "arenas" / "style.py"
    known: dict[str, dict[str, str]] = {"floor": {}, "wall": {}}
    for node in ast.parse(file.read_text() if file.is_file() else "").body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(name := node.targets[0], ast.Name)
            and name.id.endswith("_STYLE")
        ):
            known[name.id[:-6].lower()] = ast.literal_eval(node.value)
    return known


def arm_pose(root: Path, robot: str, number: int) -> np.ndarray:
    """Joint angles (7,), rad, of LIBERO-Plus's robot `number`.

    Raises:
        ValueError: no such robot.
    """
    file = root / "envs" / "robots" / ("mounted_panda.py" if robot.startswith("Mounted") else "on_the_ground_panda.py")
    text = file.read_text() if file.is_file() else ""
    found = re.search(rf"^class {robot}{number}\(.*?np\.array\(\s*\[([-\d.e,\s]+)\]", text, re.M | re.S)
    if found is None:
        raise ValueError(f"{file}: has no {robot}{number} with its joint angles; is the copy whole?")
    return np.array([float(word) for word in found[1].split(",")])


def _load_states(file: Path) -> np.ndarray:
    """See `load_init_states`; also a single state (values,), and what torch's safe loader cannot read: protocol 4.

    Of that, nothing is unpickled: it must hold an array's names alone, and its bytes are taken.
    """
    remedy = "Take the benchmark's own file; or, if you trust this one, save its array alone by torch.save"
    try:
        with zipfile.ZipFile(file) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            steps = [(step.name, value) for step, value, _ in pickletools.genops(archive.read(member))]
    except (zipfile.BadZipFile, ValueError):
        steps = []
    if ("PROTO", 4) not in steps:
        return load_init_states(file, (1, 2), remedy)  # Says what is wrong.
    words = {value for name, value in steps if name == "SHORT_BINUNICODE"}
    (data, *others) = [value for _, value in steps if isinstance(value, bytes) and len(value) > 1] or [b""]
    names = [name for name, _ in steps]
    first = names.index("TUPLE2") if "TUPLE2" in names else 2
    shape = [value for _, value in steps[first - 2 : first] if isinstance(value, int)]
    if words - _ARRAY_WORDS != {"f8", "<"} or others or len(shape) != 2 or len(data) != 8 * math.prod(shape):
        raise ValueError(f"{file}: not one float64 array (states, values) alone. {remedy}")
    return np.frombuffer(data, "<f8").reshape(shape).astype(np.float64)
