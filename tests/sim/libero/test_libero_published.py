"""LIBERO-Plus's and LIBERO-PRO's own task files, in small copies written here in their format."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from libero_setup import ASSETS, needs_assets, needs_library
from test_libero_suites import save_policy
from typer.testing import CliRunner

from sim.libero import LiberoConfig
from sim.libero.corruptions import corrupted
from sim.libero.library import bddl_path, init_states_path, load_init_states, suite_tasks
from sim.libero.published import PublishedTask, categories
from vla_rl.cli.app import app
from vla_rl.common.tables import libero_instruction
from vla_rl.config import ConfigError
from vla_rl.types import EpisodeSpec

SUITE = "libero_spatial"
TASK = "pick_up_the_black_bowl_next_to_the_plate_and_place_it_on_the_plate"
SAID = "seize the dark bowl beside the dish and put it onto the dish"
PLUS = {  # what hangs on the task's name -> dimension, level
    "_view_20_10_120_5_355_initstate_0": ("Camera Viewpoints", 3),
    "_view_0_0_100_0_0_initstate_2": ("Robot Initial States", 1),
    "_view_0_0_100_0_0_initstate_0_noise_13": ("Sensor Noise", 2),
    "_language_4_view_0_0_100_0_0_initstate_0": ("Language Instructions", 5),
    "_light_7": ("Light Conditions", None),
    "_table_3": ("Background Textures", 2),
    "_tb_9": ("Background Textures", 1),
    "_add_2": ("Objects Layout", 4),
    "_level1_sample2": ("Objects Layout", 1),
    "_moved_level2_sample1": ("Objects Layout", 2),
}
LIGHT, TABLE = "Libero_Tabletop_Manipulation_light_dim", "Libero_Tabletop_Manipulation_table_other"
CLASS = """
class {name}(Libero_Tabletop_Manipulation):
    def __init__(self, *args, **kwargs):
        kwargs.update({{"scene_xml": "scenes/{scene}.xml", "scene_properties": {{
            "floor_style": "light-gray", "wall_style": "{wall}"}}}})
"""
ARM = [0.3, -0.2, 0.1, -2.3, 0.0, 2.2, 0.8]
BOX = """<mujoco model="box"><worldbody><body name="object">
  <geom name="box" type="box" size=".02 .02 .02" density="300" group="0"/>
  <geom type="box" size=".02 .02 .02" rgba="1 0 0 1" contype="0" conaffinity="0" group="1"/>
  <site name="bottom_site" pos="0 0 -.02" rgba="0 0 0 0"/><site name="top_site" pos="0 0 .02" rgba="0 0 0 0"/>
  <site name="horizontal_radius_site" pos=".02 .02 0" rgba="0 0 0 0"/></body></worldbody></mujoco>"""


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def plus_copy(path: Path, assets: Path | None = None) -> Path:
    """A copy of LIBERO-Plus's repository with one task of each kind; its assets are LIBERO's, if given, and three."""
    root, own = path / "libero" / "libero", bddl_path(SUITE, TASK).read_text()
    index = [
        {"id": n, "name": TASK + end, "category": where, **({} if level is None else {"difficulty_level": level})}
        for n, (end, (where, level)) in enumerate(PLUS.items(), 1)
    ]
    write(root / "benchmark" / "task_classification.json", json.dumps({SUITE: index}))
    added = own.replace("(:objects", "(:objects\n red_box__1_1 - red_box__1").replace(
        "(:init", "(:init (On red_box__1_1 main_table_new_region)"
    )
    added = added.replace(
        "(:regions", "(:regions (new_region (:target main_table) (:ranges ((0.24 -0.16 0.26 -0.14))))"
    )
    texts = {"": own, "_language_4": re.sub(r"(:language )[^)]*", rf"\g<1>{SAID}", own), "_add_2": added}
    texts |= {end: own.replace("LIBERO_Tabletop_Manipulation", LIGHT) for end in ("_light_7",)}
    texts |= {end: own.replace("LIBERO_Tabletop_Manipulation", TABLE) for end in ("_table_3", "_tb_9")}
    texts |= dict.fromkeys(("_level1_sample2", "_moved_level2_sample1"), own)
    for end, text in texts.items():
        write(root / "bddl_files" / SUITE / f"{TASK}{end}.bddl", text)
    states = load_init_states(init_states_path(SUITE, TASK))
    for folder, end, array in (
        (SUITE, "", states),
        *((f"libero_newobj/{SUITE}", end, states[1]) for end in ("_level1_sample2", "_moved_level2_sample1")),
        (f"libero_newobj/{SUITE}", "_add_2", with_box(states[0])),
    ):
        file = root / "init_files" / folder / f"{TASK}{end}.pruned_init"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(array, file)
    envs = root / "envs"
    classes = CLASS.format(name=LIGHT, scene="dim", wall="gray-plaster") + CLASS.format(
        name=TABLE, scene="other", wall="checked"
    )
    write(envs / "problems" / "libero_tabletop_manipulation.py", classes)
    write(envs / "arenas" / "style.py", 'WALL_STYLE = {\n  "checked": "checked.png",\n}\n')
    arm = f"class MountedPanda2(MountedPanda):\n    def init_qpos(self):\n        return np.array({ARM})\n"
    write(envs / "robots" / "mounted_panda.py", arm)
    model = 'class RedBox_1(CustomObjects):\n    path = f"assets/new_objects/red_box/box.xml"\n'
    write(envs / "objects" / "custom_objects.py", model)
    if assets is not None:
        link_assets(root / "assets", assets)
    return path


def with_box(state: np.ndarray) -> np.ndarray:
    """The state with a free body after the arm's nine joint positions, where the scene has its first object."""
    nq = 1 + 48
    box = [0.25, -0.15, 0.92, 1, 0, 0, 0]
    return np.concatenate([state[:10], box, state[10:nq], state[nq : nq + 9], np.zeros(6), state[nq + 9 :]])


def link_assets(folder: Path, assets: Path) -> None:
    for file in assets.rglob("*"):
        place = folder / file.relative_to(assets)
        if file.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file)
    scene = (assets / "scenes" / "libero_tabletop_base_style.xml").read_text()
    write(
        folder / "scenes" / "dim.xml",
        scene.replace('diffuse=".8 .8 .8"', 'diffuse=".1 .1 .1"'),
    )
    write(folder / "scenes" / "other.xml", scene)
    (folder / "textures" / "checked.png").symlink_to(assets / "textures" / "ceramic.png")
    write(folder / "new_objects" / "red_box" / "box.xml", BOX)


def config(path: Path, tasks: tuple[str, ...] = (), **published: object) -> LiberoConfig:
    values = {"suite": SUITE, "tasks": tasks, "image_size": 64, "published": {"path": path, **published}}
    return LiberoConfig.model_validate(values)


@needs_library
def test_the_robot_is_told_the_task_and_nothing_of_the_perturbation(tmp_path: Path) -> None:
    spec = config(plus_copy(tmp_path), leave_out=True).env_spec()
    whole = config(plus_copy(tmp_path), dimensions=("Language Instructions",)).env_spec()
    assert set(whole.tasks.values()) == {SAID}
    for task, told in spec.tasks.items():
        assert told == (SAID if "_language_" in task else libero_instruction(TASK)), task
        for leak in ("view", "light", "table ", " tb", "language", "initstate", "level", "sample", "noise", "add", "_"):
            assert leak not in told


@needs_library
def test_dimension_and_level_are_the_index_files(tmp_path: Path) -> None:
    spec = config(plus_copy(tmp_path), leave_out=True).env_spec()
    assert spec.groups == {
        TASK + end: (where, level or 0)
        for end, (where, level) in PLUS.items()
        if end not in ("_light_7", "_table_3", "_tb_9", "_add_2")
    }
    assert spec.title == f"libero/LIBERO-Plus/{SUITE}" and set(spec.num_eval_states.values()) == {1}
    assert spec.official["tasks"][0] == (
        "6 (left out: 1 of 1 Light Conditions, 2 of 2 Background Textures, 1 of 3 Objects Layout)"
    )


@needs_library
def test_missing_assets_are_refused_by_task_file_and_source(tmp_path: Path) -> None:
    path = plus_copy(tmp_path)
    with pytest.raises(ConfigError, match=rf"{TASK}_light_7 lacks .*scenes/dim\.xml.*4 of 10 tasks.*huggingface"):
        config(path).env_spec()
    with pytest.raises(ConfigError, match=r"Objects Layout|red_box/box\.xml"):
        config(path, dimensions=("Objects Layout",)).env_spec()
    with pytest.raises(ConfigError, match=r"got 'Weather'.*has: Camera Viewpoints, Robot"):
        config(path, dimensions=("Weather",)).env_spec()
    with pytest.raises(ConfigError, match=r"no libero_goal; it has: libero_spatial"):
        config(path).model_copy(update={"suite": "libero_goal"}).env_spec()
    with pytest.raises(ConfigError, match="no bddl_files; give the folder of the cloned repository"):
        config(tmp_path / "none").env_spec()
    with pytest.raises(ValueError, match="not together with env"):
        config(path).perturbed("camera", 1)


@needs_library
def test_a_name_that_is_not_understood_is_refused(tmp_path: Path) -> None:
    path = plus_copy(tmp_path)
    index = path / "libero" / "libero" / "benchmark" / "task_classification.json"
    index.write_text(json.dumps({SUITE: [{"id": 1, "name": f"{TASK}_weather_1", "category": "Weather"}]}))
    with pytest.raises(ConfigError, match="weather_1' is no perturbed task of libero_spatial"):
        config(path).env_spec()
    with pytest.raises(ValueError, match="yaw_rotation holds"):
        categories("(a (:yaw_rotation ((exit() 0))))")


def saved_as_protocol_4(file: Path, value: object) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=4))
    return file


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def pro_copy(path: Path) -> Path:
    """A copy of LIBERO-PRO's repository with two of its five dimensions, states as it saves them."""
    for ending in ("lan", "swap"):
        for task in suite_tasks(SUITE):
            text = bddl_path(SUITE, task).read_text()
            said = text.replace("Pick", "Seize", 1) if ending == "lan" else text
            write(path / "bddl_files" / f"{SUITE}_{ending}" / f"{task}.bddl", said)
            file = path / "init_files" / f"{SUITE}_{ending}" / f"{task}.pruned_init"
            file.parent.mkdir(parents=True, exist_ok=True)
            saved_as_protocol_4(file, load_init_states(init_states_path(SUITE, task)))
    return path


@needs_library
def test_libero_pro_by_dimension_with_its_states(tmp_path: Path) -> None:
    chosen = config(pro_copy(tmp_path))
    spec, tasks = chosen.env_spec(), chosen.published_tasks()
    assert len(spec.tasks) == 20 and {group for group in spec.groups.values()} == {("Position", 0), ("Semantic", 0)}
    assert spec.tasks[f"{TASK}_lan"].startswith("seize the akita black bowl next to the plate")
    assert "10 of 10 Object, 10 of 10 Task, 10 of 10 Environment" in spec.official["tasks"][0]
    states = tasks[f"{TASK}_swap"].init_states()
    np.testing.assert_array_equal(states, load_init_states(init_states_path(SUITE, TASK)))


@needs_library
def test_states_of_protocol_4_run_nothing(tmp_path: Path) -> None:
    task: PublishedTask = config(pro_copy(tmp_path)).published_tasks()[f"{TASK}_swap"]
    for value in (Evil(tmp_path / "ran"), [np.zeros((2, 2)), Evil(tmp_path / "ran")], np.zeros((2, 2), np.float32), {}):
        saved_as_protocol_4(task.states, value)
        with pytest.raises(ValueError, match="not one float64 array"):
            task.init_states()
    assert not (tmp_path / "ran").exists()
    saved_as_protocol_4(task.states, np.zeros((2, 5)))
    with pytest.raises(ValueError, match="2 initial states; LIBERO-PRO runs 50"):
        task.init_states()


def test_each_corruption_changes_the_picture_more_at_a_higher_severity() -> None:
    rng = np.random.default_rng(0)
    image = np.kron(rng.integers(0, 256, (8, 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    for first in (1, 11, 21, 31, 41):
        off = []
        for noise in (first, first + 4, first + 9):
            seen = corrupted(image, noise, np.random.default_rng(1))
            np.testing.assert_array_equal(seen, corrupted(image, noise, np.random.default_rng(1)))
            off.append(np.abs(seen.astype(float) - image).mean())
        assert 0 < off[0] < off[1] < off[2], (first, off)
    with pytest.raises(ValueError, match="1 to 50, got 51"):
        corrupted(image, 51, rng)


@pytest.mark.slow
@needs_assets
@pytest.mark.timeout(900)
def test_the_scenes_are_as_their_files_say(tmp_path: Path) -> None:
    assert ASSETS is not None
    env = config(plus_copy(tmp_path, ASSETS)).make()
    seen = {end: env.reset(EpisodeSpec(TASK + end, "eval", 0)) for end in ("_level1_sample2",)}
    still, plain = env.loaded.scene.model.camera("agentview").pos.copy(), env.loaded.scene.control.default_qpos.copy()
    for end in PLUS:
        seen[end] = env.reset(EpisodeSpec(TASK + end, "eval", 0))
        scene = env.loaded.scene
        assert seen[end].instruction == (SAID if "_language_" in end else libero_instruction(TASK))
        moved = not np.allclose(scene.model.camera("agentview").pos, still)
        assert moved == (PLUS[end][0] == "Camera Viewpoints"), end
        expected = ARM if PLUS[end][0] == "Robot Initial States" else plain
        np.testing.assert_allclose(scene.control.default_qpos, expected)
        if end == "_add_2":
            np.testing.assert_allclose(scene.data.body("red_box__1_1_main").xpos[:2], [0.25, -0.15], atol=0.01)
    clean = seen["_language_4_view_0_0_100_0_0_initstate_0"].images["agentview"].astype(float)
    for end in ("_light_7", "_table_3", "_view_0_0_100_0_0_initstate_0_noise_13"):
        assert np.abs(seen[end].images["agentview"] - clean).mean() > 1, end
    with pytest.raises(ValueError, match="own states alone"):
        env.reset(EpisodeSpec(TASK + "_light_7", "train", 0))
    with pytest.raises(ValueError, match="has 1 official states"):
        env.reset(EpisodeSpec(TASK + "_light_7", "eval", 1))
    env.close()


@pytest.mark.slow
@needs_assets
@pytest.mark.timeout(900)
def test_two_copies_share_no_scene(tmp_path: Path) -> None:
    assert ASSETS is not None
    scenes = []
    for copy in ("one", "other", "one"):
        if not (tmp_path / copy).exists():
            plus_copy(tmp_path / copy, ASSETS)
        env = config(tmp_path / copy).make()
        env.reset(EpisodeSpec(TASK + "_level1_sample2", "eval", 0))
        scenes.append(env.loaded.scene)
        env.close()
    assert scenes[0] is scenes[2] and scenes[1] is not scenes[0]


@pytest.mark.slow
@needs_assets
@pytest.mark.timeout(900)
def test_eval_prints_the_table_by_dimension_and_level(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy")
    dimensions = "[Robot Initial States,Sensor Noise]"
    options = [
        *(
            "eval.split=eval",
            "eval.episodes_per_task=1",
            "eval.temperatures=[0]",
            "eval.videos=0",
            "env.horizon=4",
            "env.num_envs=1",
        ),
        *("env.num_workers=0", "env.image_size=64", "env.tasks=[]", f"env.suite={SUITE}", f"policy.path={policy}"),
        f"env.published={{path: {plus_copy(tmp_path / 'copy')}, dimensions: {dimensions}}}",
    ]
    result = CliRunner().invoke(app, ["eval", "libero_object_bc", *options, "--output", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["greedy", "Robot", "Initial", "States", "1", "0.0", "%", "0.0", "-", "79.3", "1", "1"] in rows
    assert ["greedy", "Sensor", "Noise", "2", "0.0", "%", "0.0", "-", "79.3", "1", "1"] in rows
    assert ["greedy", "total", "0.0", "%", "0.0", "-", "65.8", "2", "2"] in rows
    assert "left out" in result.output
