"""`run: offline` of kind ppo: updates by the critic on the policy's own chunks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from reach_policy import log_episodes
from tiny_run import metrics, save_policy, tiny_values

from sim.dummy import DummyConfig
from vla_rl.algorithms.offpolicy.transitions import logged_transitions
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import BCDataset, DataNeeds, open_dataset
from vla_rl.evaluation.verdict import outcome
from vla_rl.methods.offline.ppo import OfflinePPOConfig, own_chunks, update
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import Recipe, read_recipe
from vla_rl.training.checkpoint import list_checkpoints
from vla_rl.workflows.offline import improve_offline

ENV = DummyConfig.model_validate({"num_envs": 4, "image_size": 32, "horizon": 11, "tasks": ["reach_red"]})
SMALL = {"steps": 5, "hidden": 16, "batch_size": 16, "members": 2}
GRPO = {
    "kind": "grpo",
    "optim": {"lr": 2e-3, "warmup_steps": 0},
    "minibatch_size": 16,
    "micro_batch_size": 16,
    "epochs": 2,
}
CONFIG = OfflinePPOConfig.model_validate({"algo": GRPO, "candidates": 4, "critic": SMALL, "decisions": 16})


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("offline_ppo") / "base")


@pytest.fixture(scope="module")
def logged(base: Path) -> Path:
    return log_episodes(ENV, base.parent / "logged", 20)


class Planted:
    """A critic for which a chunk is as good as its first number, or as bad."""

    def __init__(self, folder: Path, sign: float = 1.0) -> None:
        needs = DataNeeds(cameras=("agentview",), action_dim=7, state_dim=8)
        self.data = BCDataset([open_dataset(DatasetConfig(path=str(folder)), needs)], 4)
        self.transitions = logged_transitions(None, self.data)
        self.fold, self.sign = self.transitions.folds(2, 0), sign

    def values(self, rows: np.ndarray, chunks: np.ndarray) -> np.ndarray:
        return self.sign * np.stack([chunks[:, :, 0, 0]] * 2)


def test_a_chunk_starts_at_ratio_one(base: Path, logged: Path) -> None:
    policy, critic = load_policy(base), Planted(logged)
    batch = own_chunks(CONFIG, policy, critic.data, critic, 0, 0)  # type: ignore[arg-type]
    assert batch.size == 16 * 4 and batch.valid.all()
    out = policy.evaluate(batch.observations(np.arange(batch.size)), batch.chunks, 1.0)
    np.testing.assert_allclose(out.log_prob.detach().numpy(), batch.old_log_prob, atol=1e-5)
    each = batch.advantage[:, 0].reshape(16, 4)
    np.testing.assert_allclose(each.mean(1), 0, atol=1e-5)
    first = batch.chunks.actions[:, 0, 0].reshape(16, 4)
    assert all(np.corrcoef(a, b)[0, 1] > 0.99 for a, b in zip(each, first, strict=True) if b.std() > 0.1)
    again = own_chunks(CONFIG, policy, critic.data, critic, 0, 0)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again.chunks.actions, batch.chunks.actions)


def test_updates_make_what_the_critic_likes_likelier(base: Path, logged: Path) -> None:
    policy, critic = load_policy(base), Planted(logged)
    obs = own_chunks(CONFIG, policy, critic.data, critic, 0, 9).observations(np.arange(64))  # type: ignore[arg-type]

    def liked() -> float:
        return float(policy.act(obs, torch.Generator().manual_seed(0)).actions[:, 0, 0].mean())

    before = liked()
    for number in range(3):
        batch = own_chunks(CONFIG, policy, critic.data, critic, 0, number)  # type: ignore[arg-type]
        assert update(CONFIG, policy, batch, 0, number)["update/ratio"] == pytest.approx(1, abs=0.3)
    assert liked() > before + 0.1


def recipe_of(base: Path, logged: Path, **offline: object) -> Recipe:
    values = tiny_values(base, "run=offline")
    values["env"] |= {"horizon": 11, "num_envs": 4}
    algo = {"kind": "grpo", "optim": {"lr": 1e-3}, "minibatch_size": 16}
    section = CONFIG.model_dump(mode="json") | {"evaluate": "never", "iterations": 2, "algo": algo}
    return read_recipe(values | {"sft": {"datasets": [str(logged)]}, "offline": section | offline})


def test_a_killed_run_goes_on(base: Path, logged: Path, tmp_path: Path) -> None:
    recipe = recipe_of(base, logged)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    summary = improve_offline(recipe, open_run(recipe, whole, False), lambda _: None)
    assert summary["policy"] == str(whole / "policy") and summary["steps"] == 2  # What the command prints.
    rows, final = metrics(whole), load_policy(whole / "policy").state_dict()
    assert len(rows) == 2 and "critic/auc" in json.loads((whole / "examples" / "found.json").read_text())
    assert any(not torch.equal(final[name], value) for name, value in load_policy(base).state_dict().items())

    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "policy")
    shutil.rmtree(list_checkpoints(killed / "checkpoints")[-1])
    improve_offline(recipe, open_run(recipe, killed, True), lambda _: None)
    again = load_policy(killed / "policy").state_dict()
    assert all(torch.equal(final[name], again[name]) for name in final)
    assert metrics(killed) == rows


def test_no_figure_of_a_run_admits_an_update(base: Path, logged: Path, tmp_path: Path) -> None:
    """Where no action matters the critic's Q had let 19 of 20 updates pass: now none is judged by it, and that is said.

    Outcomes are shuffled, so that nothing is to be learned; both updates are made and kept all the same.
    """
    recipe = recipe_of(base, logged, control="shuffled_outcomes")
    folder = open_run(recipe, tmp_path / "run", False)
    summary = improve_offline(recipe, folder, lambda _: None)
    assert summary["steps"] == 2
    named = {name for row in (summary, *metrics(folder)) for name in row if name.startswith("ppo/")}
    assert named == {"ppo/q_of_own", "ppo/spread_of_own"}, "a figure of what an update is worth needs a null test"
    said = outcome(folder)
    command = f"vla-rl eval {folder / 'config.yaml'} policy.path={folder}"
    assert said[0] == f"next, nothing here says whether it is better: {command}"
    assert not any("better" in line or "worse" in line for line in said[1:])


@pytest.mark.parametrize("name", ["kl_coef", "bc_coef", "decay_iterations"])
def test_options_that_do_nothing_are_refused(name: str, base: Path, logged: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^offline: algo\.{name}: got 4, which kind ppo makes no use of"):
        recipe_of(base, logged, algo={"kind": "grpo", name: 4})


def test_another_algorithm_is_refused(base: Path, logged: Path) -> None:
    with pytest.raises(ConfigError, match=r"^offline: algo\.kind: got 'ppo', .* allowed: grpo"):
        recipe_of(base, logged, algo={"kind": "ppo"})
