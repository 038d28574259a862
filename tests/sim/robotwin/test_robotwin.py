"""RoboTwin's adapter: the record of seeds, the options; and, where a checkout is named, RoboTwin's real code.

ROBOTWIN_ROOT (a checkout with assets) and ROBOTWIN_PYTHON (its interpreter) say where it is. With stand-in assets also
ROBOTWIN_PYTHON_PATH (a folder to import from) and ROBOTWIN_FIRST_IMPORTS (a module to import first).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sim.robotwin.config as robotwin
from sim.robotwin import RoboTwinConfig
from vla_rl.config import ConfigError, build_component
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

TASK = "stack_blocks_two"
sys.path.append(str(robotwin.INSIDE))
from robotwin_env import BLOCK, FIRST, SeedRecord  # noqa: E402  it runs in RoboTwin's Python, which has no vla-rl

ABOUT = {"task": "t", "robotwin": "abc"}


def odd(seed: int) -> bool:
    return seed % 2 == 1


def recording(record: SeedRecord, checked: list[int]):
    def check(seed: int) -> bool:
        checked.append(seed)
        record.add(seed, odd(seed), why="" if odd(seed) else "unstable")
        return odd(seed)

    return check


def test_eval_states_are_the_feasible_seeds_in_order(tmp_path: Path) -> None:
    record, checked = SeedRecord(tmp_path / "a.json", ABOUT), []
    check = recording(record, checked)
    assert [record.find("eval", i, 100_000, check) for i in (0, 2, 1)] == [100_001, 100_005, 100_003]
    assert checked == list(range(100_000, 100_006)), "each seed is checked once"
    stored = json.loads((tmp_path / "a.json").read_text())
    assert stored["seeds"]["100002"] == {"feasible": False, "why": "unstable", "info": {}}


def test_training_states_share_no_seed_with_one_another(tmp_path: Path) -> None:
    record = SeedRecord(tmp_path / "a.json", ABOUT)
    found = {(split, i): record.find(split, i, 0, odd) for split in FIRST for i in (0, 1, 2, 10**6)}
    assert len(set(found.values())) == len(found)
    assert all(seed >= FIRST["train"] for seed in found.values()), "RoboTwin's own seeds are below"
    with pytest.raises(ValueError, match="no initial state -1"):
        record.find("train", -1, 0, odd)


def test_no_feasible_seed_says_where_the_reasons_are(tmp_path: Path) -> None:
    record, checked = SeedRecord(tmp_path / "a.json", ABOUT), []
    with pytest.raises(RuntimeError, match=r"no feasible seed for initial state 3 of train; see .*a\.json"):
        record.find("train", 3, 0, lambda seed: bool(checked.append(seed)))
    assert len(checked) == BLOCK


def test_records_of_several_processes_are_joined(tmp_path: Path) -> None:
    first, second = (SeedRecord(tmp_path / "a.json", ABOUT) for _ in range(2))
    first.add(1, True, info={"{A}": "block"})
    second.add(2, False, why="unstable")
    third = SeedRecord(tmp_path / "a.json", ABOUT)
    assert {seed: entry["feasible"] for seed, entry in third.seeds.items()} == {1: True, 2: False}
    with pytest.raises(ValueError, match=r"set env\.seeds_folder to another folder"):
        SeedRecord(tmp_path / "a.json", {**ABOUT, "robotwin": "def"})


def test_a_recorded_seed_is_believed(tmp_path: Path) -> None:
    SeedRecord(tmp_path / "a.json", ABOUT).add(100_000, True)

    def check(seed: int) -> bool:
        raise AssertionError(f"{seed} was checked again")

    assert SeedRecord(tmp_path / "a.json", ABOUT).find("eval", 0, 100_000, check) == 100_000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"root": "/no/such/folder"}, "env.root: '/no/such/folder' is no RoboTwin checkout.*set ROBOTWIN_ROOT"),
        ({"root": "{here}", "python": "/no/python"}, "env.python: there is no '/no/python'; set ROBOTWIN_PYTHON"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, values: dict[str, str], message: str) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "_base_task.py").touch()
    config = RoboTwinConfig(**{k: v.replace("{here}", str(tmp_path)) for k, v in values.items()})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        config.build()


def test_wrong_cameras_are_named() -> None:
    with pytest.raises(ConfigError, match=r"env.cameras.*head, left_wrist, right_wrist, front"):
        build_component("env", {"kind": "robotwin", "cameras": ["agentview"]})


def checkout(tmp_path: Path, **options: object) -> RoboTwinConfig:
    """The environment of the checkout that the machine names; skips where none is."""
    for name in ("ROBOTWIN_ROOT", "ROBOTWIN_PYTHON"):
        if not os.environ.get(name):
            pytest.skip(f"needs a RoboTwin checkout: {name} is not set")
    stand_in = {
        name.lower(): [os.environ[f"ROBOTWIN_{name}"]]
        for name in ("PYTHON_PATH", "FIRST_IMPORTS")
        if os.environ.get(f"ROBOTWIN_{name}")
    }
    return RoboTwinConfig.model_validate(
        {"tasks": [TASK], "cameras": ["head"], "seeds_folder": str(tmp_path / "seeds"), **stand_in, **options}
    )


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["demo_clean", "demo_randomized"])
def test_the_real_simulator(tmp_path: Path, setting: str) -> None:
    env = checkout(tmp_path, setting=setting).build(1)
    try:
        assert env.spec.action_dim == env.spec.state_dim == 14 and env.spec.horizon == {TASK: 800}
        first = env.reset([EpisodeSpec(TASK, "eval", 0)])
        assert first.instruction[0] and "{" not in first.instruction[0]
        chunk = np.repeat(first.state[:, None], 4, 1)
        chunk[:, :, 1] += np.linspace(0.0, 0.3, 4, dtype=np.float32)
        moved = env.step(chunk)
        assert moved.num_steps[0] == 4 and not moved.done[0]
        assert moved.obs.state[0, 1] == pytest.approx(first.state[0, 1] + 0.3, abs=0.02)
        frame = env.save_state()[0]
        other = env.reset([EpisodeSpec(TASK, "train", 0)])
        assert (other.images["head"] != first.images["head"]).any()
        again = env.reset([EpisodeSpec(TASK, keyframe=frame)])
        np.testing.assert_array_equal(again.images["head"], moved.obs.images["head"])
        same = env.reset([EpisodeSpec(TASK, "eval", 0)])
        assert same.instruction == first.instruction
        np.testing.assert_array_equal(same.images["head"], first.images["head"])
    finally:
        env.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_expert_episodes_become_a_dataset(tmp_path: Path) -> None:
    config = checkout(tmp_path, num_envs=1, image_size=(64, 64))
    target = tmp_path / "demos"
    summary = collect_dataset(config, CollectConfig(dataset=str(target), episodes_per_task=1))
    assert summary["episodes"] == 1 and summary["success_rate"] == {TASK: 1.0}
    assert (target / "meta" / "info.json").is_file()


@pytest.mark.slow
def test_the_check_of_an_installation(tmp_path: Path) -> None:
    config = checkout(tmp_path)
    options = [
        f"{key}={json.dumps(value)}" for key, value in config.model_dump(mode="json", exclude_defaults=True).items()
    ]
    command = [sys.executable, "-m", "sim.robotwin.check", *options, "--seeds", "2", "--chunks", "2", "--episodes", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "2 resets, 2 different first images" in done.stdout and "the same: yes" in done.stdout
