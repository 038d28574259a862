"""ManiSkill's adapter: options and errors; the contract is checked in tests/test_conformance.py."""

import importlib.util
import os

import numpy as np
import pytest

from sim import maniskill
from sim.maniskill import INSTRUCTIONS, ManiSkillConfig
from vla_rl.config import ConfigError, build_component


def test_the_spec_needs_no_maniskill() -> None:
    spec = ManiSkillConfig(horizons={"StackCube": 80}).env_spec()
    assert spec.tasks == INSTRUCTIONS and spec.horizon == {"PushCube": 50, "PickCube": 50, "StackCube": 80}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": ["StackCubes"]}, "unknown ManiSkill task 'StackCubes'. Did you mean 'StackCube'"),
        ({"horizons": {"PushCube": 0}}, "the horizon of 'PushCube' must be at least 1"),
        ({"cameras": ["front"]}, "agentview, wrist"),
    ],
)
def test_bad_options_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_component("env", {"kind": "maniskill", **values})


def test_a_device_name_is_not_cut_at_its_colons() -> None:
    name = maniskill._WholeName("pci:0000:01:00.0")
    assert ":" in name and name.split(":") == ["pci:0000:01:00.0", None]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install '\.\[maniskill\]'"):
        ManiSkillConfig().make()


@pytest.mark.slow
def test_a_chunk_of_each_task() -> None:
    if importlib.util.find_spec("mani_skill") is None:
        pytest.skip("mani_skill is not installed")
    if not os.environ.get("VK_ICD_FILENAMES"):
        try:
            maniskill.render_device()
        except RuntimeError as error:
            pytest.skip(str(error))
    env = ManiSkillConfig(image_size=32, shader="minimal").build(1)
    try:
        from vla_rl.types import EpisodeSpec

        for task in INSTRUCTIONS:
            first = env.reset([EpisodeSpec(task)])
            down = np.tile(np.array([0, 0, -0.5, 0, 0, 0, 1], np.float32), (1, 4, 1))
            moved = env.step(down)
            assert moved.obs.state[0, 2] < first.state[0, 2] - 0.03, "it moves down"
            assert first.instruction == [INSTRUCTIONS[task]]
    finally:
        env.close()
