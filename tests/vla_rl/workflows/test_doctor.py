"""`vla-rl doctor`: what each fault is called, what to do about it, and when it counts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vla_rl.common.tables import Check, report
from vla_rl.config import ConfigError
from vla_rl.workflows import doctor

HAS_LIBERO = importlib.util.find_spec("libero") is not None
needs_libero = pytest.mark.skipif(not HAS_LIBERO, reason="the libero extra is not installed")


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch):
    """Makes modules look uninstalled."""
    real = importlib.util.find_spec

    def hide_modules(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in names else real(name, *a))

    return hide_modules


@pytest.fixture
def quick_gl(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rendering, for tests of something else."""
    monkeypatch.setattr(doctor, "find_gl", lambda: ("egl", "stand-in"))


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


# ---------------------------------------------------------------- rendering


def test_a_frame_is_really_rendered_here() -> None:
    backend, detail = doctor.find_gl()
    if backend is None:
        pytest.skip(f"no GL on this machine: {detail}")
    assert backend in doctor.gl_backends() and detail


def test_a_bad_back_end_is_an_answer_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    check = doctor.check_gl(needed=True)
    assert check.is_fault and "nonsense" in check.found
    assert "unset MUJOCO_GL" in check.fix and "libegl1" in check.fix


def test_a_crashing_driver_kills_only_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RENDER_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert doctor.probe_gl("egl") == (False, "crashed with signal 11")


def test_a_hanging_driver_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RENDER_PROBE", "import time; time.sleep(60)")
    works, reason = doctor.probe_gl("egl", timeout=0.2)
    assert not works and "no frame" in reason


def test_a_black_frame_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    if doctor.find_gl()[0] is None:
        pytest.skip("no GL on this machine")
    monkeypatch.setattr(doctor, "RENDER_PROBE", doctor.RENDER_PROBE.replace("rgba='1 0 0 1'", "rgba='0 0 0 1'"))
    works, reason = doctor.probe_gl(doctor.gl_backends()[0])
    assert not works and "the picture is wrong" in reason


def test_osmesa_is_the_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(doctor, "probe_gl", lambda backend: (backend == "osmesa", f"{backend} says"))
    check = doctor.check_gl(needed=True)
    assert check.status == "warning" and check.fix == "export MUJOCO_GL=osmesa" and not check.is_fault


def test_set_up_reads_the_back_end_from_the_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vla_rl.workflows.doctor", "--gl"], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == (done.stdout.strip() in ("egl", "osmesa", "glfw", "cgl"))
    assert done.returncode == 0 or done.stderr.strip()


# ---------------------------------------------------------------- LIBERO


def test_without_libero_only_a_libero_recipe_fails(hide, quick_gl: None) -> None:
    hide("libero")
    needed = by_name(doctor.run_checks({"env": {"kind": "libero"}}))
    assert needed["hf-libero"].is_fault and needed["LIBERO assets"].is_fault
    assert "'.[libero]'" in needed["hf-libero"].fix
    other = doctor.run_checks({"env": {"kind": "tabletop"}})
    assert not any(check.is_fault for check in other)


@needs_libero
def test_beside_a_world_model_the_real_environment_is_needed(hide, monkeypatch: pytest.MonkeyPatch) -> None:
    hide("libero")
    monkeypatch.setattr(doctor, "find_gl", lambda: (None, "no driver"))
    imagined = {"kind": "world_model", "first_frames": {"kind": "tabletop"}}
    for recipe, faults in (
        ({"env": {"kind": "world_model"}, "real_env": {"kind": "libero"}}, {"GL", "hf-libero", "LIBERO assets"}),
        ({"env": imagined}, {"GL"}),
        ({"env": {"kind": "sim.dummy:DummyConfig"}}, set()),
        ({"env": {"kind": "metaworld"}, "device": "cpu"}, {"GL"}),
    ):
        found = {check.name for check in doctor.run_checks(recipe) if check.is_fault}
        assert found & {"GL", "hf-libero", "LIBERO assets"} == faults, recipe


def test_assets_by_recipe_then_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.libero.library import ASSET_FOLDERS

    good = tmp_path / "assets"
    for name in ASSET_FOLDERS:
        (good / name).mkdir(parents=True)
    monkeypatch.setenv("LIBERO_ASSETS", str(tmp_path / "nothing"))
    assert doctor.check_libero_assets(str(good), needed=True).found == str(good)
    by_variable = doctor.check_libero_assets(None, needed=True)
    assert by_variable.is_fault and "LIBERO_ASSETS is" in by_variable.found and "nothing" in by_variable.found
    assert "env.assets_path" in by_variable.fix
    monkeypatch.setenv("LIBERO_ASSETS", str(good))
    assert doctor.check_libero_assets(None, needed=True).status == "ok"


@needs_libero
def test_the_check_neither_asks_nor_writes(tmp_path: Path, quick_gl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
    doctor.run_checks({"env": {"kind": "libero"}})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the rest


def test_robotwin_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROBOTWIN_ROOT", raising=False)
    assert "ROBOTWIN_ROOT is not set" in doctor.check_robotwin(needed=True).found
    monkeypatch.setenv("ROBOTWIN_ROOT", str(tmp_path))
    assert "holds no envs/" in doctor.check_robotwin(needed=True).found
    (tmp_path / "envs").mkdir()
    assert doctor.check_robotwin(needed=True).status == "ok"


def test_ros_names_what_it_looked_for(hide) -> None:
    hide("rclpy", "rospy", "roslibpy", "websockets")
    check = doctor.check_ros()
    assert check.status == "missing" and not check.is_fault and "rclpy" in check.found


def test_a_recipe_that_wants_cuda_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.check_device("cuda:1").is_fault
    assert not doctor.check_device("auto").is_fault and "CPU" in doctor.check_device("cpu").found


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        ({"preset": "7b"}, 7),
        ({"path": "openvla/openvla-7b-finetuned-libero-goal"}, 7),
        ({"kind": "lerobot", "path": "lerobot/pi0_libero_base"}, 3),
        ({"preset": "tiny"}, 0),
        ({"path": "runs/7bowls/policy"}, 0),
    ],
)
def test_a_policy_of_billions_needs_a_gpu(policy: dict, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.billions(policy) == size
    (device,) = [
        c for c in doctor.run_checks({"env": {"kind": "sim.dummy:DummyConfig"}, "policy": policy}) if c.name == "device"
    ]
    assert device.is_fault == bool(size)
    assert not size or f"no GPU, and the policy has {size} billion parameters" in device.found


def test_little_disk_and_memory_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_DISK_GB", 1e9)
    assert doctor.check_disk(tmp_path).status == "warning"
    monkeypatch.setattr(doctor, "total_ram_gb", lambda: 2.0)
    assert "2 GiB" in doctor.check_ram().found and "num_envs" in doctor.check_ram().fix


def test_the_recipe_is_read_without_its_packages(tmp_path: Path, hide) -> None:
    hide("libero")
    path = tmp_path / "r.yaml"
    path.write_text("name: r\nenv: {kind: libero}\n")
    assert doctor.read_recipe(path, ["device=cuda"])["device"] == "cuda"
    path.write_text("name: r\n")
    with pytest.raises(ConfigError, match="no env section"):
        doctor.read_recipe(path)


def test_the_report_fails_only_for_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    optional = Check("ROS", "missing", "no [rclpy]", "source it")
    fault = Check("GL", "missing", "no libEGL", "install [egl]", needed=True)
    assert report([optional], as_json=False) == 0
    assert report([optional, fault], as_json=False) == 1
    shown = capsys.readouterr().out
    assert "Missing and needed: GL" in shown and "[rclpy]" in shown and "[egl]" in shown

    written: list[str] = []
    assert report([optional, fault], as_json=True, write=written.append) == 1
    found = json.loads(written[0])
    assert found["ok"] is False and found["checks"][1]["fix"] == "install [egl]"


# ---------------------------------------------------------------- what a recipe names


@pytest.mark.parametrize(
    ("recipe", "name", "is_fault"),
    [
        ({"policy": {"path": "pretrained:tabletop_base"}}, "", False),
        ({"policy": {"path": "pretrained:nosuch"}}, "policy.path", True),
        ({"policy": {"path": "runs/nosuch/policy"}}, "policy.path", True),
        ({"policy": {"path": "checkpoints/nosuch"}}, "policy.path", True),
        ({"policy": {"path": "openvla/openvla-7b"}}, "", False),
        ({"sft": {"datasets": "datasets/tabletop_habit"}}, "dataset", True),
        ({"sft": {"datasets": ["d"]}, "collect": {"dataset": "d"}}, "", False),
        ({"sft": {"datasets": [{"path": "d"}]}, "algo": {"kind": "grpo"}}, "", False),
        ({"sft": {"datasets": [{"path": "d"}]}, "algo": {"kind": "grpo", "bc_coef": 0.1}}, "dataset", True),
        ({"env": {"kind": "maniskill"}}, "mani_skill", True),
        ({"env": {"kind": "world_model"}, "real_env": {"kind": "maniskill"}}, "mani_skill", True),
        ({"env": {"kind": "metaworld"}}, "metaworld", True),
        ({"algo": {"kind": "grpo", "optim": {"name": "adamw_8bit"}}}, "torchao", True),
        ({"policy": {"kind": "lerobot", "path": "lerobot/smolvla_base"}}, "num2words", True),
    ],
)
def test_what_a_recipe_names_is_looked_for(recipe, name, is_fault, hide, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    hide("mani_skill", "metaworld", "torchao", "num2words")
    faults = [check for check in doctor.recipe_checks(recipe) if check.is_fault]
    assert [check.name for check in faults] == ([name] if is_fault else [])
    assert all(check.fix for check in faults)


def test_a_missing_dataset_names_the_recipe_that_collects_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "vla-rl collect tabletop_habit" in doctor.check_dataset("datasets/tabletop_habit", needed=True).fix


def test_a_recipe_with_a_wrong_option_is_wrong_also_to_doctor() -> None:
    assert doctor.check_recipe("tabletop_grpo").status == "ok"
    found = doctor.check_recipe("tabletop_grpo", ["algo.lrr=1"])
    assert found.is_fault and found.found.startswith("algo.lrr: unknown key (value 1). Did you mean 'algo.optim.lr'?")
    assert doctor.check_recipe("tabletop_grpo", ["env={kind: 'no.such:Env'}"]).status == "warning"


@pytest.mark.parametrize(
    ("recipe", "command"),
    [("tabletop_grpo", "train"), ("libero_object_bc", "collect"), ("tabletop_world_model", "world-model fit")],
)
def test_doctor_names_what_a_recipe_begins_with(
    recipe: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor.first_command(doctor.read_recipe(recipe)) == command
