"""What stands beside the loop: imagined datasets, ranking in both worlds, evaluation with planning."""

# ruff: noqa: F811  (fixtures of the file beside this one)

from __future__ import annotations

import json

import numpy as np
import pytest
from test_loop import recipe  # noqa: F401  (fixtures)
from tiny_run import save_policy

from vla_rl.config import ConfigError, validate
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import DataNeeds, open_dataset
from vla_rl.evaluation.evaluate import EvalConfig, evaluate
from vla_rl.evaluation.results import Evaluation
from vla_rl.policies.load import load_policy
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.workflows.collect import collect
from vla_rl.workflows.world_model import rank_policies


def test_imagined_episodes_become_a_dataset_that_says_so(recipe, tmp_path):
    config = CollectConfig(source="policy", imagined=True, dataset=str(tmp_path / "dreams"), episodes_per_task=4)
    collect(recipe, config, lambda _: None)
    spec = recipe.env.env_spec()
    needs = DataNeeds(spec.cameras, spec.action_dim, spec.state_dim, spec.image_size[0], spec.control_hz)
    dataset = open_dataset(DatasetConfig(path=config.dataset), needs)
    step = dataset.rows - dataset.starts[np.searchsorted(dataset.starts, dataset.rows, side="right") - 1]
    assert not (step % 4).any() and len(dataset.rows) == -(-dataset.lengths // 4).sum(), (
        "rows with an image of their own"
    )
    assert dataset.batch(dataset.rows[:2], 4).valid.all()
    with pytest.raises(DatasetError, match=r"frames=hg_dagger; the dataset holds \['imagined'\]"):
        open_dataset(DatasetConfig(path=config.dataset, frames="hg_dagger"), needs)
    real = recipe.model_copy(update={"env": recipe.real_env, "real_env": None})
    with pytest.raises(ConfigError, match="env is no world model"):
        collect(real, config, lambda _: None)
    for options in ({"source": "expert"}, {"source": "policy", "keyframes": True}):
        with pytest.raises(ConfigError, match=r"collect\.imagined"):
            validate(CollectConfig, {"imagined": True, **options})


def test_policies_are_ranked_in_both_worlds(recipe, tmp_path):
    other = save_policy(tmp_path / "other", seed=1)
    few = recipe.model_copy(update={"world_model": recipe.world_model.model_copy(update={"compare_episodes": 5})})
    policies = [str(recipe.policy.path), str(other)]  # type: ignore[attr-defined]
    ranking = rank_policies(few, recipe.env.path, policies, tmp_path / "ranking.json", lambda _: None)
    written = json.loads((tmp_path / "ranking.json").read_text())
    assert {policy["name"] for policy in written["policies"]} == set(policies) and written["num_states"] == 5
    assert set(written["imagined"]) == {"pearson", "spearman", "mmrv", "policy_gap"} == set(written["judged"])
    assert all(name in ranking.text() for name in policies)
    with pytest.raises(ConfigError, match="ranking needs at least two, each once"):
        rank_policies(few, recipe.env.path, policies[:1], tmp_path / "ranking.json")


def test_an_evaluation_can_plan(recipe, tmp_path):
    """In the real environment, with the real world model: recorded with what it took."""
    policy = load_policy(recipe.policy.path)  # type: ignore[attr-defined]
    plan = {"world_model": str(recipe.env.path), "candidates": 3}
    config = EvalConfig.model_validate({"episodes_per_task": 2, "temperatures": [0, 1], "plan": plan})
    found = [evaluate(policy, recipe.real_env, config) for _ in range(2)]
    assert found[0].episodes == found[1].episodes and len(found[0].episodes) == 4
    assert found[0].meta.latency["decision_ms"] > 0 and "best of 3 chunks imagined" in found[0].meta.protocol
    found[0].save(tmp_path / "planned.json")
    assert Evaluation.load(tmp_path / "planned.json").meta.config["plan"]["candidates"] == 3
