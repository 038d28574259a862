"""LIBERO without its simulator: options, files, errors, and an import that asks nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import libero_experts
import numpy as np
import pytest
import torch
import yaml
from libero_setup import ASSETS, needs_assets, needs_library
from rich.console import Console
from typer.testing import CliRunner

from sim.libero import LiberoConfig, library
from sim.libero.suites import measured_experts
from vla_rl.cli.app import app
from vla_rl.common.tables import libero_instruction
from vla_rl.config import ConfigError, build_component
from vla_rl.evaluation.compare import compare
from vla_rl.evaluation.evaluate import EvalConfig
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.results import EpisodeRecord, Evaluation, EvaluationMeta
from vla_rl.recipe.recipe import read_recipe
from vla_rl.types import EnvSpec

pytestmark = needs_library
OFFICIAL_HORIZONS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        stdin=subprocess.DEVNULL,
    )


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("suite", OFFICIAL_HORIZONS)
def test_a_suite_has_openvlas_protocol(suite: str) -> None:
    spec: EnvSpec = LiberoConfig(suite=suite).env_spec()
    assert len(spec.tasks) == (90 if suite == "libero_90" else 10)
    assert set(spec.horizon.values()) == {OFFICIAL_HORIZONS[suite]}
    assert set(spec.num_eval_states.values()) == {50}
    assert spec.image_size == (256, 256) and spec.state_dim == 8 and spec.action_dim == 7
    assert spec.action_low.tolist() == [-1] * 7 and spec.action_high.tolist() == [1] * 7


@pytest.mark.parametrize("suite", OFFICIAL_HORIZONS)
def test_labels_tell_a_suites_tasks_apart_by_the_numbers_that_recipes_use(suite: str) -> None:
    names = library.suite_tasks(suite)
    spec = LiberoConfig(suite=suite).env_spec()
    assert spec.title == f"libero/{suite}"
    assert [int(spec.labels[name].split()[0]) for name in names] == list(range(len(names)))
    short = [spec.labels[name].split(maxsplit=1)[1] for name in names]
    assert len(set(short)) == len(names), "without their numbers too"
    assert max(map(len, short)) <= 56 and sorted(map(len, short))[len(short) // 2] <= 36
    chosen = LiberoConfig(suite=suite, tasks=("3", "7")).env_spec()
    assert chosen.labels == {names[i]: spec.labels[names[i]] for i in (3, 7)}, "whatever else is chosen"


def test_labels_by_hand() -> None:
    def label(suite: str, number: int) -> str:
        return list(LiberoConfig(suite=suite).env_spec().labels.values())[number]

    assert label("libero_spatial", 0) == "0 between plate and ramekin"
    assert label("libero_object", 7) == "7 milk"
    assert label("libero_goal", 4) == "4 put bowl on top of cabinet"
    assert label("libero_10", 8) == "8 put both moka pots on stove"
    assert label("libero_90", 53) == "53 LR2 orange juice in basket"


def test_an_evaluation_says_suite_number_and_short_name_everywhere(tmp_path: Path) -> None:
    spec = LiberoConfig(tasks=("3", "7")).env_spec()
    episodes = tuple(
        EpisodeRecord(mode="greedy", task=task, split="eval", index=i, sample=0, success=i % 2 == 0, steps=9)
        for task in spec.tasks
        for i in range(4)
    )
    meta = EvaluationMeta(
        name="base", env="libero", suite=spec.suite, labels=spec.labels, split="eval", seed=0,
        temperatures={"greedy": 0.0}, horizon=spec.horizon, cameras=spec.cameras, image_size=spec.image_size,
        num_envs=1, protocol="", config={}, created="", wall_seconds=1.0,
    )  # fmt: skip
    evaluation = Evaluation(meta=meta, episodes=episodes)
    evaluation.save(tmp_path / "evaluations/base.json")
    compared = compare(evaluation, evaluation)
    for table in (evaluation.table(), compared.table()):
        text = shown(table)
        assert "libero/libero_spatial" in text and "3 on cookie box" in text and "7 on stove" in text
        assert "pick_up" not in text and max(map(len, text.splitlines())) <= 80
    assert "greedy, 3 on cookie box: 50.0 %" in compared.text()
    rates = json.loads((tmp_path / "evaluations/base.json").read_text())["rates"]
    assert {rate["task"]: rate["label"] for rate in rates} == {**spec.labels, "all": "all"}
    page = write_report(tmp_path).read_text()
    full = next(iter(spec.tasks))
    assert f"<title>{full}</title>3 on cookie box</text>" in page, "the full name on hover"
    assert "Success by task, libero/libero_spatial" in page
    before = evaluation.model_copy(update={"meta": meta.model_copy(update={"labels": {}, "suite": ""})})
    assert before.labels == dict(zip(spec.tasks, ("cookie box", "stove"), strict=True)), "of older files"
    old = before.meta.model_copy(update={"env_config": {"suite": "libero_goal"}})
    assert old.env_title == "libero/libero_goal"


def shown(table: object) -> str:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=80, record=True, file=nowhere)
        console.print(table)
        return console.export_text()


def test_an_expert_is_offered_where_it_was_measured_to_solve_enough() -> None:
    measured = measured_experts()
    assert set(measured) == set(OFFICIAL_HORIZONS)
    for suite, tasks in measured.items():
        assert set(tasks) <= set(library.suite_tasks(suite)) and all(0 <= s <= n >= 5 for s, n in tasks.values())
        lacking = LiberoConfig(suite=suite).without_expert()
        offered = [task for task in library.suite_tasks(suite) if task not in lacking]
        assert all(tasks[task][0] >= 0.6 * tasks[task][1] for task in offered)
    lacking = LiberoConfig(suite="libero_goal").without_expert()
    drawer, stove = "open_the_top_drawer_and_put_the_bowl_inside", "turn_on_the_stove"
    assert "solves 0 of 5 episodes" in lacking[drawer] and "no scripted expert" in lacking[stove]
    assert not LiberoConfig(suite="libero_object").without_expert()


def test_the_docs_table_is_the_measured_one() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs/libero.md"
    assert libero_experts.markdown() in docs.read_text()


def test_list_tasks_shows_the_numbers() -> None:
    lines = CliRunner().invoke(app, ["list", "tasks", "libero", "suite=libero_goal"]).output.splitlines()
    assert lines[7].split(maxsplit=1)[0] == "7" and lines[7].endswith("  turn_on_the_stove")


def test_instructions_are_the_names_without_scene_and_underscores() -> None:
    words = "put both the alphabet soup and the tomato sauce in the basket"
    assert libero_instruction("LIVING_ROOM_SCENE2_" + words.replace(" ", "_")) == words
    assert libero_instruction("KITCHEN_SCENE10_close_the_top_drawer") == "close the top drawer"
    assert libero_instruction("turn_on_the_stove") == "turn on the stove"


def test_tasks_by_name_or_number() -> None:
    names = library.suite_tasks("libero_goal")
    config = LiberoConfig(suite="libero_goal", tasks=("3", names[0]))
    assert config.task_names() == (names[3], names[0])
    assert LiberoConfig(suite="libero_goal", horizon=40).env_spec().horizon == dict.fromkeys(names, 40)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"suite": "libero_spacial"}, "Did you mean 'libero_spatial'"),
        ({"tasks": ["10"]}, "env.tasks: libero_spatial has tasks 0 to 9, got 10"),
        ({"tasks": ["pick_up_the_black_bowl_on_the_oven_and_place_it_on_the_plate"]}, "bowl_on_the_stove"),
        ({"tasks": ["black bowl ramekin"]}, "between_the_plate_and_the_ramekin"),
        ({"cameras": ["frontview"]}, "agentview, wrist"),
        ({"cameras": []}, "got none"),
        ({"image_size": 0}, "env.image_size"),
        ({"horizon": -1}, "env.horizon"),
        ({"asset_path": "x"}, "assets_path"),
    ],
)
def test_wrong_options_say_what_is_allowed(values: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_component("env", {"kind": "libero", **values})


def test_light_pictures_are_for_training_alone() -> None:
    light = LiberoConfig(rendering="light", suite="libero_goal")
    assert light.exact() == LiberoConfig(suite="libero_goal") and not light.exact().env_spec().approximation
    assert light.env_spec().approximation == "light rendering, not LIBERO's pictures"
    policy = {"kind": "openvla", "preset": "tiny"}
    recipe = read_recipe({"run": "eval", "name": "x", "env": light.model_dump(), "policy": policy})
    assert recipe.env == light and recipe.acting_env == light.exact()
    asked = recipe.model_copy(update={"eval": EvalConfig(approximate=True)})
    assert asked.acting_env is asked.env


def test_options_load_no_simulator() -> None:
    result = run(
        "import sys; from sim.libero import LiberoConfig; LiberoConfig().env_spec(); "
        "print(sorted({'mujoco', 'torch', 'robosuite', 'libero.libero', 'OpenGL'} & set(sys.modules)))"
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_without_the_package_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    library.suite_tasks.cache_clear()
    with pytest.raises(ImportError, match=r"\.\[libero\]"):
        LiberoConfig().env_spec()


# ---------------------------------------------------------------- initial states


@pytest.mark.parametrize("suite", OFFICIAL_HORIZONS)
def test_official_states_load_without_pickles_freedom(suite: str) -> None:
    for task in library.suite_tasks(suite)[:10]:
        states = library.load_init_states(library.init_states_path(suite, task))
        assert states.shape[0] == 50 and states.dtype == np.float64


class Evil:
    """Writes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_malicious_file_runs_nothing(tmp_path: Path) -> None:
    torch.save(Evil(tmp_path / "ran"), tmp_path / "evil.pruned_init")
    with pytest.raises(ValueError, match=r"evil\.pruned_init: not a usable file"):
        library.load_init_states(tmp_path / "evil.pruned_init")
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "task.pruned_init"
    good = library.init_states_path("libero_goal", library.suite_tasks("libero_goal")[0]).read_bytes()
    for content in (good[: len(good) // 2], b"", b"not an archive"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"task\.pruned_init: not a usable file.*Reinstall"):
            library.load_init_states(path)
    with pytest.raises(FileNotFoundError, match="missing"):
        library.load_init_states(tmp_path / "none")
    for content, said in (
        (np.zeros(3), r"found float64 \(3,\)"),
        (torch.zeros(2, 2), "found Tensor"),
        (np.full((2, 2), np.nan), "NaN"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=said):
            library.load_init_states(path)


# ---------------------------------------------------------------- assets and the library's own config


def test_missing_assets_name_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(library.AssetsError, match=r"env\.assets_path is .*LIBERO_ASSETS.*download"):
        library.find_assets(tmp_path)
    monkeypatch.setenv("LIBERO_ASSETS", str(tmp_path / "nowhere"))
    with pytest.raises(library.AssetsError, match=r"\$LIBERO_ASSETS is .*nowhere.*assets_path"):
        library.find_assets(None)


@needs_library
def test_assets_whose_copy_or_download_was_cut_off_are_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIBERO_ASSETS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "libero" / "assets"
    for name in ("articulated_objects", "scenes", "stable_scanned_objects", "textures"):
        (folder / name).mkdir(parents=True)
    with pytest.raises(library.AssetsError, match="has no stable_hope_objects, turbosquid_objects"):
        library.find_assets(folder)
    assert library.find_assets(None) is None or library.find_assets(None) != folder, "the library goes on downloading"


@needs_assets
def test_the_configured_folder_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBERO_ASSETS", "/nonexistent")
    assert library.find_assets(ASSETS) == ASSETS


def test_processes_that_start_together_agree_on_the_librarys_config(tmp_path: Path) -> None:
    code = (
        "import os; from sim.libero import library; library.point_to_config(); print(os.environ['LIBERO_CONFIG_PATH'])"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path / "home")}
    environment.pop("LIBERO_CONFIG_PATH", None)
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    folders = {process.communicate()[0].strip() for process in started}
    assert len(folders) == 1
    (folder,) = folders
    assert Path(folder).parent == tmp_path and os.listdir(folder) == ["config.yaml"]
    paths = yaml.safe_load((Path(folder) / "config.yaml").read_text())
    assert Path(paths["bddl_files"]).is_dir() and Path(paths["init_states"]).is_dir()
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
@needs_assets
def test_importing_the_library_asks_nothing_and_leaves_home_alone(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from sim.libero.library import import_library\n"
        f"import_library(Path({str(ASSETS)!r}))\n"
        "from libero.libero import get_assets_path, get_libero_path\n"
        "print(get_assets_path(), get_libero_path('bddl_files'))"
    )
    (tmp_path / "home").mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "LIBERO_CONFIG_PATH"}
    environment.update(HOME=str(tmp_path / "home"), TMPDIR=str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False, input=""
    )
    assert result.returncode == 0 and str(ASSETS) in result.stdout, result.stdout + result.stderr
    assert "Do you want" not in result.stdout + result.stderr
    assert not list((tmp_path / "home").glob(".libero*"))


@pytest.mark.slow
@needs_assets
def test_dead_gl_names_the_packages() -> None:
    code = (
        "from sim.rendering.gl import RenderError; from sim.libero import LiberoConfig\n"
        "from vla_rl.types import EpisodeSpec\n"
        "config = LiberoConfig(tasks=('0',))\n"
        "try: config.make().reset(EpisodeSpec(config.task_names()[0], 'eval'))\n"
        "except RenderError as error: print(error)"
    )
    environment = {"LIBERO_ASSETS": str(ASSETS), "MUJOCO_GL": "egl"}
    vendors = {"__EGL_VENDOR_LIBRARY_DIRS": "/nonexistent", "__EGL_VENDOR_LIBRARY_FILENAMES": "/none"}
    result = run(code, **environment, **vendors)
    assert "libegl1 libegl-mesa0 libgl1-mesa-dri" in result.stdout, result.stdout + result.stderr
