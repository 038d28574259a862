"""`run: offline`: logged episodes become decisions, these examples, these a policy; it resumes to the bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from reach_policy import ReachPolicy, log_episodes
from tiny_run import save_policy, tiny_values

from sim.dummy import DummyConfig
from vla_rl.algorithms.offpolicy.features import NO_DRAWS, FeatureCache
from vla_rl.algorithms.offpolicy.logged import BestOfNConfig, CloningConfig, Examples, FilteredConfig, WeightedDataset
from vla_rl.algorithms.offpolicy.offline import LoggedRun
from vla_rl.algorithms.offpolicy.transitions import Transitions, choose, draw, logged_transitions
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError, dump_yaml
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import BCDataset, DataNeeds, open_dataset
from vla_rl.evaluation.statistics import SEEDS_ALIKE
from vla_rl.methods.offline.recap import RecapConfig, WordedDataset
from vla_rl.methods.policy.advantage_conditioned import AdvantageConditionedPolicy
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import Recipe, read_recipe
from vla_rl.training.checkpoint import latest_checkpoint
from vla_rl.training.config import SFTConfig
from vla_rl.types import CONTROL_SOURCES
from vla_rl.workflows import offline
from vla_rl.workflows.offline import improve_offline

ROOT = Path(__file__).parents[3]
ENV = DummyConfig(num_envs=4, image_size=32, horizon=11)
SMALL = {"steps": 5, "hidden": 16, "batch_size": 16, "members": 2}
# What a choice of examples asks of a run.
RUN = LoggedRun(
    Path("run"), SFTConfig.model_validate({"datasets": ["x"]}), 0, ENV.env_spec(), lambda *_: None, lambda _: None
)


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> Path:
    """12 episodes a task of a policy that is too slow for half of the states; decisions of 4 steps."""
    return log_episodes(ENV, tmp_path_factory.mktemp("offline") / "logged", 12)


class Seeing(ReachPolicy):
    """Embeds the state, and draws one of two chunks."""

    def embed(self, obs) -> torch.Tensor:
        return torch.from_numpy(obs.state)


def opened(folder: Path) -> BCDataset:
    needs = DataNeeds(cameras=("agentview",), action_dim=7, state_dim=8)
    return BCDataset([open_dataset(DatasetConfig(path=str(folder)), needs)], 4)


def transitions(folder: Path) -> Transitions:
    return logged_transitions(Seeing(), opened(folder))


def test_decisions_of_an_episode_follow_one_another(logged: Path) -> None:
    data, part = transitions(logged), opened(logged).parts[0]
    assert len(data) == len(part.rows) and len(data.success) == 24
    assert 0 < data.success.sum() < 24
    for number, length in enumerate(part.lengths):
        own = np.flatnonzero(data.episode == number)
        assert list(data.elapsed[own]) == list(range(0, length, 4))
        assert list(data.following[own]) == [*own[1:], -1]
        assert list(data.num_steps[own]) == [min(4, length - at) for at in range(0, length, 4)]
        assert list(data.remaining[own] + data.elapsed[own]) == [length] * len(own)
        value = 0.9 ** data.remaining[own] if data.success[number] else 0 * data.remaining[own]
        np.testing.assert_allclose(data.returns(0.9)[own], value, rtol=1e-5)
    np.testing.assert_array_equal(data.embedding, part.state[part.rows])
    assert len(np.unique(data.task)) == 2


def test_examples_are_drawn_as_often_as_their_weights_say(logged: Path) -> None:
    data = opened(logged)
    rows = len(data.parts[0].rows)
    weight = np.where(np.arange(rows) % 3 == 0, 0.0, 1.0 + np.arange(rows) % 2)
    chunk = np.arange(rows, dtype=np.float32)[:, None, None] * np.ones((1, 4, 7), np.float32)
    weighted = WeightedDataset(data, Examples(weight, chunk))
    drawn = np.concatenate([weighted.batch(500, 0, step).actions[:, 0, 0].astype(int) for step in range(20)])
    counts = np.bincount(drawn, minlength=rows)
    assert not counts[weight == 0].any()
    assert counts[weight == 2].mean() / counts[weight == 1].mean() == pytest.approx(2, rel=0.1)
    batch = weighted.batch(50, 1, 2)
    np.testing.assert_array_equal(batch.actions, weighted.batch(50, 1, 2).actions)
    states = data.parts[0].state[data.parts[0].rows]
    np.testing.assert_array_equal(batch.obs.state, states[batch.actions[:, 0, 0].astype(int)])
    assert batch.valid.all()


def test_each_dataset_keeps_its_share_of_a_batch(logged: Path) -> None:
    part = opened(logged).parts[0]
    few = part.keep_episodes(np.arange(len(part.starts)) < 3)
    data = BCDataset([part, few], 4)
    sizes = [len(part.rows), len(few.rows)]
    chunk = np.repeat([0.0, 1.0], sizes).astype(np.float32)[:, None, None] * np.ones((1, 4, 7), np.float32)
    drawn = WeightedDataset(data, Examples(np.ones(sum(sizes)), chunk)).batch(4000, 0, 0).actions[:, 0, 0]
    assert drawn.mean() == pytest.approx(0.5, abs=0.04)


def test_a_critic_draws_datasets_by_their_episodes_and_weights_however_many_decisions_they_have(logged: Path) -> None:
    part = opened(logged).parts[0]
    dense = replace(part, rows=np.arange(len(part.actions)))  # A decision at each control step.
    data = logged_transitions(None, BCDataset([part, dense], 4))
    is_dense = np.arange(len(data)) >= len(part.rows)
    assert is_dense.mean() > 0.7 and data.weight is not None
    assert data.weight.mean() == pytest.approx(1) and len(np.unique(data.weight)) == 2
    drawn = draw(data.weight, len(data), 4000, np.random.default_rng(0))
    assert is_dense[drawn].mean() == pytest.approx(0.5, abs=0.04)
    few = replace(part, weight=3.0).keep_episodes(np.arange(len(part.starts)) < 8)  # 24 episodes once, 8 three times.
    weight = logged_transitions(None, BCDataset([dense, few], 4)).weight
    assert weight is not None and weight[len(dense.rows) :].sum() == pytest.approx(weight.sum() / 2)
    assert transitions(logged).weight is None, "of one dataset all are alike, as they were"


def test_decisions_are_chosen_by_weight_and_none_twice() -> None:
    """Of a dataset of many decisions, each of a tenth of the weight, as many as of a small one."""
    weight = np.repeat([1.0, 0.1], [500, 5000])
    chosen = choose(weight, np.arange(5500), 200, np.random.default_rng(0))
    assert len(np.unique(chosen)) == 200 and (np.diff(chosen) > 0).all()
    assert 70 < (chosen < 500).sum() < 130
    inside = choose(weight, np.arange(450, 600), 100, np.random.default_rng(0))
    assert len(np.unique(inside)) == 100 and set(inside) <= set(range(450, 600))
    np.testing.assert_array_equal(choose(weight, np.arange(7), 100, np.random.default_rng(0)), np.arange(7))


def test_filtered_cloning_takes_decisions_of_successes_alone(logged: Path) -> None:
    data = opened(logged)
    found = transitions(logged)
    examples, _ = FilteredConfig().examples(Seeing(), data, RUN)
    np.testing.assert_array_equal(examples.weight > 0, found.success[found.episode])
    with pytest.raises(ValueError, match="control: got 'shuffled_outcomes', but cloning asks for no outcomes"):
        CloningConfig(control="shuffled_outcomes")
    other, _ = FilteredConfig(control="shuffled_outcomes").examples(Seeing(), data, RUN)
    assert (other.weight != examples.weight).any()


def test_best_of_n_clones_what_the_critic_thinks_best(logged: Path) -> None:
    data = opened(logged)
    config = BestOfNConfig.model_validate({"candidates": 3, "decisions": 20, "critic": SMALL | {"steps": 50}})
    examples, found = config.examples(Seeing(noise=0.5), data, RUN)
    assert (examples.weight > 0).sum() == 20 and examples.chunk is not None
    logged_chunks = transitions(logged).chunk
    changed = (examples.chunk != logged_chunks).any((1, 2))
    assert changed.any() and not changed[examples.weight == 0].any()
    assert found["best_of_n/own"] == pytest.approx(changed.sum() / 20)
    assert found["best_of_n/gain"] > 0


def test_a_dataset_of_a_policy_without_outcomes_is_refused(logged: Path, tmp_path: Path) -> None:
    """Beside one that records them: its failures would count as successes."""
    blind = tmp_path / "blind"
    shutil.copytree(logged, blind)
    [file] = (blind / "meta" / "episodes").rglob("*.parquet")
    pq.write_table(pq.read_table(file).drop_columns(["success"]), file)
    data = BCDataset([*opened(logged).parts, *opened(blind).parts], 4)
    with pytest.raises(DatasetError, match=r"blind: does not record which.*frames of policy.*allowed.*demo and expert"):
        FilteredConfig().examples(Seeing(), data, RUN)
    CloningConfig().examples(Seeing(), data, RUN)
    for name in ("demo", "expert"):
        data.parts[1].source[:] = CONTROL_SOURCES.index(name)
        assert logged_transitions(None, data).success[24:].all()


def test_where_nothing_is_logged_at_the_ends_of_chunks_it_says_so(logged: Path) -> None:
    policy = Seeing()
    policy.chunk_size = 3
    with pytest.warns(UserWarning, match=r"executes 3 actions.*every 4 control steps.*policy\.num_actions"):
        found = logged_transitions(policy, BCDataset(opened(logged).parts, 3))
    assert (found.following == -1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transitions(logged)


@pytest.mark.parametrize("method", ["best_of_n", "recap", "advantage_weighted"])
def test_a_policy_that_executes_fewer_actions_than_it_clones(method: str, logged: Path, tmp_path: Path) -> None:
    values = recipe_of(logged, save_policy(tmp_path / "policy")).model_dump(mode="json")
    values["policy"]["num_actions"] = 2
    values["offline"] = {"kind": method, "critic": SMALL, "evaluate": "never"}
    values["offline"] |= {"candidates": 2, "decisions": 20} if method == "best_of_n" else {}
    with pytest.warns(UserWarning, match="no logged decision follows another"):
        run_offline(read_recipe(values), tmp_path / "run")
    assert (tmp_path / "run" / "policy").is_dir()


def test_what_was_seen_by_other_cameras_is_embedded_anew(logged: Path, tmp_path: Path) -> None:
    """The decoded images are the same ones where a camera_map is corrected; what the policy sees is not."""
    part = opened(logged).parts[0]
    assert part.cameras == {"agentview": "agentview"}
    part, computed = replace(part, cache=tmp_path / part.cache.name), []
    for cameras in ({"agentview": "agentview"}, {"agentview": "wrist"}, {"agentview": "agentview"}):
        policy = Seeing()
        FeatureCache("hash", "", computed.append).of_dataset(policy, replace(part, cameras=cameras), 4, NO_DRAWS)
    assert len(computed) == 2


def test_of_a_chunk_as_executed_nothing_is_learned_beyond_it(logged: Path) -> None:
    data = opened(logged)
    rows = len(data.parts[0].rows)
    chunk = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2, 1) * np.ones((1, 1, 7), np.float32)
    batch = WeightedDataset(data, Examples(np.ones(rows), chunk)).batch(9, 0, 0)
    assert batch.actions.shape == (9, 4, 7) and batch.valid.tolist() == [[True, True, False, False]] * 9
    np.testing.assert_array_equal(batch.actions[:, 2:], batch.actions[:, [1, 1]])


def test_a_logged_chunk_that_stays_the_best_is_cloned_to_its_episodes_end_and_no_further(logged: Path) -> None:
    data, found = opened(logged), transitions(logged)
    own = np.arange(len(found)) % 2 == 0
    batch = WeightedDataset(data, Examples(np.ones(len(found)), np.full_like(found.chunk, 9), own)).batch(400, 0, 0)
    plain = WeightedDataset(data, Examples(np.ones(len(found)))).batch(400, 0, 0)
    replaced = (batch.actions == 9).all((1, 2))
    assert plain.valid is not None and not plain.valid.all() and 100 < replaced.sum() < 300
    assert batch.valid is not None and batch.valid[replaced].all()
    np.testing.assert_array_equal(batch.actions[~replaced], plain.actions[~replaced])
    np.testing.assert_array_equal(batch.valid[~replaced], plain.valid[~replaced])


def run_offline(recipe: Recipe, folder: Path) -> None:
    improve_offline(recipe, open_run(recipe, folder, False), lambda _: None)


def recipe_of(logged: Path, policy: Path, *overrides: str) -> Recipe:
    sections = {
        "sft": {"datasets": [str(logged)], "steps": 4, "batch_size": 4, "save_every": 2, "log_every": 1},
        "offline": {"kind": "advantage_weighted", "critic": SMALL, "evaluate": "after"},
    }
    base = tiny_values(policy, "run=offline", *overrides)
    base["env"]["horizon"] = 11
    return read_recipe(base | sections)


def test_a_run_improves_reports_and_resumes_to_the_bit(logged: Path, tmp_path: Path) -> None:
    recipe = recipe_of(logged, save_policy(tmp_path / "policy"))
    said: list[str] = []
    whole = open_run(recipe, tmp_path / "whole", False)
    summary = improve_offline(recipe, whole, said.append)
    assert summary["steps"] == 4 and (whole / "report.html").is_file()
    assert any(line.startswith("critic/auc") for line in said)
    assert (whole / "evaluations" / "final.json").is_file()
    found = json.loads((whole / "examples" / "found.json").read_text())
    assert 0 < found["weights/effective_share"] <= 1

    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    for folder in (killed / "policy", killed / "evaluations", latest_checkpoint(killed / "checkpoints")):
        shutil.rmtree(folder)
    assert latest_checkpoint(killed / "checkpoints") is not None, "the one of step 2"
    improve_offline(recipe, open_run(recipe, killed, True), said.append)
    first, second = (load_policy(folder / "policy").state_dict() for folder in (whole, killed))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_recap_says_of_every_decision_whether_it_was_better_than_expected(logged: Path, tmp_path: Path) -> None:
    data, policy = opened(logged), load_policy(save_policy(tmp_path / "policy"))
    config = RecapConfig.model_validate({"critic": SMALL})
    examples, found = config.examples(policy, data, RUN)
    assert (examples.weight == 1).all()
    assert found["recap/positive"] == pytest.approx(0.4, abs=0.05)
    assert found["recap/positive_of_successes"] > found["recap/positive_of_failures"]
    batch = WordedDataset(data, examples).batch(600, 0, 0)
    plain = WeightedDataset(data, Examples(examples.weight)).batch(600, 0, 0)
    np.testing.assert_array_equal(batch.actions, plain.actions)
    ends = [text.removeprefix(old) for text, old in zip(batch.obs.instruction, plain.obs.instruction, strict=True)]
    counts = {end: ends.count(end) for end in set(ends)}
    assert set(counts) == {"", ". Advantage: positive", ". Advantage: negative"}
    assert counts[""] / 600 == pytest.approx(0.3, abs=0.06)
    assert counts[". Advantage: positive"] / (600 - counts[""]) == pytest.approx(found["recap/positive"], abs=0.08)


def test_a_policy_that_cannot_read_the_words_is_refused(logged: Path) -> None:
    class Deaf(Seeing):
        def bc_loss(self, obs, actions, valid=None, keyframe=None):
            return torch.tensor(1.0), {}

    with pytest.raises(ValueError, match=r"does the same whether its instruction ends in 'negative' or in 'positive'"):
        RecapConfig().examples(Deaf(), opened(logged), RUN)


def test_guidance_that_the_policy_cannot_have_is_refused_before_it_learns(
    logged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(logged, save_policy(tmp_path / "policy"))
    section = RecapConfig(guidance=2, evaluate="never")
    policy = load_policy(tmp_path / "policy")
    policy.no_guidance_reason = "for a test"  # type: ignore[attr-defined]
    monkeypatch.setattr(offline, "build_policy", lambda *_: policy)
    with pytest.raises(ConfigError, match="guidance: got 2, but OpenVLAPolicy cannot be guided: for a test"):
        run_offline(recipe.model_copy(update={"offline": section}), tmp_path / "run")
    assert not (tmp_path / "run" / "examples").exists() and not (tmp_path / "run" / "policy").exists()


@pytest.mark.parametrize("method", ["recap", "preferences"])
def test_a_killed_run_of_other_methods_ends_as_one_that_was_not(method: str, logged: Path, tmp_path: Path) -> None:
    options = {"recap": {"critic": SMALL}, "preferences": {"pairs": 1}}
    section = {"kind": method, "evaluate": "after", **options[method]}
    values = recipe_of(logged, save_policy(tmp_path / "policy")).model_dump(mode="json")
    recipe = read_recipe(values | {"offline": section})
    whole = open_run(recipe, tmp_path / "whole", False)
    improve_offline(recipe, whole, lambda _: None)
    assert (whole / "evaluations" / "final.json").is_file() and (whole / "report.html").is_file()
    found = json.loads((whole / "examples" / "found.json").read_text())
    assert {"recap": "recap/positive", "preferences": "pairs"}[method] in found

    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    for folder in (killed / "policy", killed / "evaluations", latest_checkpoint(killed / "checkpoints")):
        shutil.rmtree(folder)
    improve_offline(recipe, open_run(recipe, killed, True), lambda _: None)
    first, second = (load_policy(folder / "policy") for folder in (whole, killed))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    start = load_policy(tmp_path / "policy").state_dict()
    assert any(not torch.equal(start[name.removeprefix("base.")], value) for name, value in second.state_dict().items())
    assert isinstance(first, AdvantageConditionedPolicy) == (method == "recap")
    if method == "recap":  # Another round begins with what it learned; the word is not said twice.
        again = read_recipe(
            values | {"offline": section, "policy": {"kind": "advantage_conditioned", "path": str(whole / "policy")}}
        )
        improve_offline(again, open_run(again, tmp_path / "again", False), lambda _: None)
        assert not isinstance(load_policy(tmp_path / "again" / "policy").base, AdvantageConditionedPolicy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offline": None}, r"^offline: got None"),
        ({"sft": {"datasets": ["nowhere"]}}, r"nowhere"),
        ({"sft": {"datasets": ["x"], "validation_fraction": 0.1}}, r"sft\.validation_fraction: got 0\.1"),
        (
            {"offline": {"kind": "preferences"}, "sft": {"datasets": ["x"], "augment": {"shift": 2}}},
            r"leave out sft\.precision and sft\.augment",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_before_any_work(logged: Path, tmp_path: Path, change: dict, message: str) -> None:
    recipe = recipe_of(logged, save_policy(tmp_path / "policy")).model_dump(mode="json")
    with pytest.raises((ConfigError, ValueError), match=message):
        improve_offline(read_recipe(recipe | change), tmp_path / "run", lambda _: None)


@pytest.mark.slow
def test_methods_over_seeds_in_one_table(logged: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(dump_yaml(recipe_of(logged, save_policy(tmp_path / "policy"))))
    options = ["--recipe", str(recipe), "--methods", "filtered", "--output", str(tmp_path / "runs")]
    command = [sys.executable, str(ROOT / "scripts/offline_rerun.py"), *options, "sft.steps=4"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert "| `filtered` | " in told and SEEDS_ALIKE in told
