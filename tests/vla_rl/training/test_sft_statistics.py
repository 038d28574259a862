"""Statistics of a checkpoint that is cloned on: kept, doubted where the data are another robot's, or forgotten."""

# ruff: noqa: F811  (fixtures of the file beside this one)

from __future__ import annotations

import json
import shutil
import warnings

import numpy as np
import pytest
from test_sft import ENV, Log, demos, make_policy, options  # noqa: F401  (fixtures)

from vla_rl.common.distributed.tensor_files import CheckpointError
from vla_rl.policies.fake_input import fake_observation
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.load import load_policy
from vla_rl.training.bc_loop import train_bc
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset


def scaled(factor: float, size: int) -> dict[str, np.ndarray]:
    """Statistics of numbers from -factor to factor."""
    one = np.full(size, factor)
    return {"q01": -one, "q99": one, "min": -one, "max": one, "mean": 0 * one, "std": one / 2}


@pytest.mark.parametrize(("factor", "kind"), [(1.0, "openvla"), (0.01, "openvla"), (100.0, "openvla"), (0.01, "act")])
def test_actions_far_from_a_checkpoints_statistics_are_told(factor, kind, demos, tmp_path):
    policy = make_policy() if kind == "openvla" else act_policy()
    policy.set_norm_stats(scaled(factor, 7), scaled(1.0, 8), name="old")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_bc(policy, options(demos, steps=1), tmp_path, Log(), progress=False)
    told = [str(each.message) for each in caught if "policy.norm_key=from_data" in str(each.message)]
    assert len(told) == (factor != 1.0), told


def act_policy(**changed):
    options = {"type": "act", "preset": "tiny", "chunk_size": 2, "precision": "fp32"}
    return LeRobotConfig(**(changed or options)).build(ENV.env_spec())


def test_a_lerobot_checkpoint_takes_the_datas_statistics_in_place_of_its_own(demos, tmp_path):
    policy = act_policy()
    policy.set_norm_stats(scaled(100.0, 7), scaled(50.0, 8))
    policy.save(tmp_path / "other")
    assert act_policy(path=str(tmp_path / "other")).norm_stats["std"].tolist() == [50.0] * 7
    fresh = act_policy(path=str(tmp_path / "other"), norm_key="from_data")
    assert fresh.norm_stats is None
    with pytest.raises(ValueError, match="no action statistics yet"):
        fresh.act(fake_observation(ENV.env_spec(), 1))
    train_bc(fresh, options(demos, steps=1), tmp_path / "run", Log(), progress=False)
    assert max(fresh.norm_stats["std"]) <= 1
    saved = load_policy(tmp_path / "run" / "policy")
    assert json.loads((tmp_path / "run" / "policy" / "vla_rl.json").read_text())["config"]["norm_key"] is None
    obs = fake_observation(ENV.env_spec(), 2)
    np.testing.assert_array_equal(saved.act(obs, None, 0.0).actions, fresh.act(obs, None, 0.0).actions)


def test_every_normalization_of_lerobots_finds_its_statistics(demos, tmp_path):
    def normalizing(mode: str):
        mapping = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
        return act_policy(type="act", preset="tiny", chunk_size=2, options={"normalization_mapping": mapping})

    for mode in ("MIN_MAX", "QUANTILES", "QUANTILE10"):  # MEAN_STD is ACT's own.
        policy = normalizing(mode)
        train_bc(policy, options(demos, steps=1), tmp_path / mode, Log(), progress=False)
        assert np.isfinite(policy.act(fake_observation(ENV.env_spec(), 1), None, 0.0).actions).all()
    with pytest.raises(ValueError, match=r"\['q10', 'q90'\] missing, which .*QUANTILE10 needs"):
        normalizing("QUANTILE10").set_norm_stats(scaled(1.0, 7), scaled(1.0, 8))


def test_a_run_does_not_go_on_with_a_dataset_that_has_changed(demos, tmp_path):
    data = shutil.copytree(demos, tmp_path / "data")
    train_bc(make_policy(), options(data, steps=3), tmp_path / "run", Log(), progress=False)
    shutil.rmtree(data / ".cache")  # A cache is not what it is of.
    train_bc(make_policy(), options(data, steps=3), tmp_path / "run", Log(), progress=False)
    shutil.rmtree(data)
    collect_dataset(ENV, CollectConfig(dataset=str(data), episodes_per_task=3))
    with pytest.raises(CheckpointError, match=r"step_00000003 was made of other data: .*data has changed since"):
        train_bc(make_policy(), options(data, steps=3), tmp_path / "run", Log(), progress=False)
