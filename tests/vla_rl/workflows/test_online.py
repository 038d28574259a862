"""`run: online`: rounds of episodes and updates; what was embedded once is kept; killed and resumed to the bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from reach_policy import log_episodes
from safetensors.numpy import load_file
from tiny_run import metrics, save_policy, tiny_values

from sim.dummy import DummyConfig
from vla_rl.algorithms.offpolicy.config import OnlineCriticConfig
from vla_rl.algorithms.offpolicy.features import FILE
from vla_rl.algorithms.offpolicy.learner import OffPolicyLearner
from vla_rl.algorithms.offpolicy.noise import SteeredPolicy
from vla_rl.algorithms.offpolicy.replay import ReplayBatch
from vla_rl.algorithms.offpolicy.value_guided import ValueGuidedPolicy
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError, build_component
from vla_rl.data.config import DatasetError
from vla_rl.policies.fake_input import fake_observation, fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.load import describe, load_policy
from vla_rl.recipe.recipe import Recipe, load_recipe, read_recipe
from vla_rl.rollout.runner import collect
from vla_rl.training.checkpoint import list_checkpoints
from vla_rl.types import Episode
from vla_rl.workflows import online
from vla_rl.workflows.online import improve_online
from vla_rl.workflows.replay_learning import ReplayLearning

ENV = DummyConfig.model_validate({"num_envs": 4, "image_size": 32, "horizon": 11, "tasks": ["reach_red"]})
CRITIC = {"hidden": 8, "batch_size": 16, "members": 2}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("online") / "base")


@pytest.fixture(scope="module")
def flow(tmp_path_factory) -> Path:
    """A fresh tiny SmolVLA, whose chunks start from noise."""
    pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    config = LeRobotConfig(type="smolvla", preset="tiny", image_size=32, chunk_size=4, cameras=["agentview"])
    policy = config.build(ENV.env_spec())
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    folder = tmp_path_factory.mktemp("online") / "flow"
    policy.save(folder)
    return folder


@pytest.fixture(scope="module")
def logged(base: Path) -> Path:
    """20 episodes of a policy that is too slow for half of the states."""
    return log_episodes(ENV, base.parent / "logged", 20)


def recipe_of(base: Path, logged: Path | None, **online: object) -> Recipe:
    values = tiny_values(base, "run=online")
    values["env"] |= {"horizon": 11, "num_envs": 4}
    if base.name == "flow":
        values["policy"] = {"kind": "lerobot", "path": str(base)}
    section = {"rounds": 3, "episodes_per_round": 4, "updates_per_round": 3, "warm_updates": 4, "candidates": 3}
    section |= {"critic": CRITIC, "evaluate": "never"}
    sft = None if logged is None else {"datasets": [str(logged)]}
    return read_recipe(values | {"sft": sft, "online": section | online})


def run(recipe: Recipe, folder: Path, resume: bool = False) -> list[str]:
    said: list[str] = []
    improve_online(recipe, open_run(recipe, folder, resume), said.append)
    return said


def test_nothing_after_success_is_learned_from(base: Path, logged: Path, tmp_path: Path) -> None:
    recipe = recipe_of(base, logged, rounds=1, episodes_per_round=12)
    longer = recipe.model_copy(update={"env": recipe.env.model_copy(update={"steps_after_success": 6})})
    run(recipe, tmp_path / "to_success")
    run(longer, tmp_path / "longer")
    learned, again = (metrics(tmp_path / name)[0] for name in ("to_success", "longer"))
    assert learned["rollout/success_rate"] > 0 and again["replay/decisions"] == learned["replay/decisions"]


NOISE = {"method": "noise", "noise": {"scale": 1.5}, "critic": CRITIC | {"targets": "actor"}}
EDITS = {"method": "edits", "critic": CRITIC | {"targets": "best_of_n"}}


@pytest.mark.parametrize("options", [{}, EDITS, NOISE], ids=["best_of_n", "edits", "noise"])
def test_it_resumes_to_the_bit_and_no_episode_is_run_again(
    base: Path, logged: Path, tmp_path: Path, options: dict, monkeypatch: pytest.MonkeyPatch, request
) -> None:
    if options.get("method") == "noise":
        base = request.getfixturevalue("flow")
    recipe = recipe_of(base, logged, **options)
    run(recipe, tmp_path / "whole")
    assert (tmp_path / "whole" / "report.html").is_file()
    assert [row["rollout/episodes"] for row in metrics(tmp_path / "whole")] == [4, 8, 12]

    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed)
    shutil.rmtree(killed / "policy")
    for path in list_checkpoints(killed / "checkpoints")[1:]:  # Killed while round 3 learned: its episodes are there.
        shutil.rmtree(path)

    def fails(*_: object, **__: object) -> None:
        raise AssertionError("an episode was run though those of every round are there")

    with monkeypatch.context() as patch:
        patch.setattr("vla_rl.workflows.online.collect", fails)
        run(recipe, killed, resume=True)
    first, second = (load_policy(folder / "policy").state_dict() for folder in (tmp_path / "whole", killed))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert metrics(killed) == metrics(tmp_path / "whole")

    shutil.rmtree(killed / "replay" / "segment-00000002")  # Killed before: the round's episodes are run again, alike.
    shutil.rmtree(killed / "policy")
    shutil.rmtree(list_checkpoints(killed / "checkpoints")[-1])
    run(recipe, killed, resume=True)
    again = load_policy(killed / "policy").state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_edits_learn_on_the_policys_own_chunks_whatever_the_targets(
    base: Path, logged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, ...]] = []
    update = OffPolicyLearner.update

    def spied(learner: OffPolicyLearner, batch: ReplayBatch) -> dict[str, float]:
        drawn.append(batch.candidates.shape)
        return update(learner, batch)

    monkeypatch.setattr(OffPolicyLearner, "update", spied)
    run(recipe_of(base, logged, rounds=1, **EDITS | {"critic": CRITIC | {"targets": "td"}}), tmp_path / "run")
    assert set(drawn) == {(16, 3, 28)}, "logged and fresh decisions alike"


@pytest.mark.parametrize("control", ["none", "shuffled_outcomes"])
def test_what_it_tells_of_episodes_is_how_they_ended(
    base: Path, tmp_path: Path, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 episodes a round one breaks, which counts as none; the control learns from other outcomes than it tells."""
    asked: list[list[bool]] = []
    judge = online.judged

    def ended_otherwise(*arguments: Any, **options: Any) -> list[Episode]:
        ends = ({"success": True}, {"success": False}, {"success": False}, {"success": False, "lost": True})
        return [replace(e, **end) for e, end in zip(collect(*arguments, **options), ends, strict=True)]

    def judged(learner: Any, fresh: Any, discount: float) -> Any:
        asked.append(fresh.success.tolist())
        return judge(learner, fresh, discount)

    monkeypatch.setattr("vla_rl.workflows.online.collect", ended_otherwise)
    monkeypatch.setattr(online, "judged", judged)
    recipe = recipe_of(base, None, prior="none", warm_updates=0, control=control)
    run(recipe, tmp_path / "run")
    assert asked == [[True, False, False]] * 3
    assert [row["rollout/episodes"] for row in metrics(tmp_path / "run")] == [3, 6, 9]
    learned = [load_file(file)["success"].tolist() for file in (tmp_path / "run").rglob("decisions.safetensors")]
    assert (learned != asked) == (control == "shuffled_outcomes")

    before = metrics(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "policy")
    shutil.rmtree(list_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    run(recipe, tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == before


def test_the_metrics_of_updates_are_there_when_the_last_one_was_skipped() -> None:
    """Its loss was not finite: it says that alone, and what it lacks is asked for by name."""
    made = [{"critic/loss": 1.0, "critic/q": 0.5}, {"critic/loss": 3.0, "critic/q": 0.3}, {"critic/bad_step": 1.0}]
    learner = SimpleNamespace(num_updates=0, update=lambda _: made.pop(0))
    section = SimpleNamespace(critic=OnlineCriticConfig())
    run = SimpleNamespace(learner=learner, config=section, recipe=SimpleNamespace(seed=0), replay=Mock())
    found = ReplayLearning.learn(run, 3)  # type: ignore[arg-type]
    assert found == {"critic/loss": 2.0, "critic/q": 0.4, "critic/bad_step": 1.0}


def test_what_was_embedded_once_is_read_from_the_disk(base: Path, logged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "logged"
    shutil.copytree(logged, folder, ignore=shutil.ignore_patterns("features-*"))
    recipe = recipe_of(base, folder, rounds=1)
    first, second = run(recipe, tmp_path / "a"), run(recipe, tmp_path / "b")
    assert sum("embedding" in line for line in first) == 1 and not any("embedding" in line for line in second)
    one, other = (load_policy(tmp_path / name / "policy").state_dict() for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in one)
    drawn = recipe_of(base, folder, rounds=1, **EDITS)
    assert any("embedding" in line for line in run(drawn, tmp_path / "c")), "chunks were not drawn before"
    other_policy = recipe_of(save_policy(tmp_path / "other", seed=1), folder, rounds=1)
    assert any("embedding" in line for line in run(other_policy, tmp_path / "d")), "another policy sees otherwise"

    for kept in folder.rglob(FILE):
        kept.write_bytes(kept.read_bytes()[:50])
    with pytest.raises(DatasetError, match=r"features-.*not readable.*Delete the folder"):
        run(recipe, tmp_path / "e")


@pytest.mark.parametrize(
    ("options", "has_data"),
    [
        pytest.param({"prior": "none"}, True, id="wsrl"),
        pytest.param({"prior": "none", "warm_updates": 0}, False, id="from scratch"),
        pytest.param({"control": "shuffled_outcomes"}, True, id="control"),
    ],
)
def test_its_settings_run(base: Path, logged: Path, tmp_path: Path, options: dict, has_data: bool) -> None:
    recipe = recipe_of(base, logged if has_data else None, rounds=2, evaluate="after", **options)
    said = run(recipe, tmp_path / "run")
    assert (tmp_path / "run" / "evaluations" / "final.json").is_file()
    assert any("logged decisions" in line for line in said) == has_data
    assert len(metrics(tmp_path / "run")) == 2


def test_the_improved_policy_loads_like_any_other(base: Path, logged: Path, tmp_path: Path) -> None:
    run(recipe_of(base, logged, rounds=1, **EDITS), tmp_path / "run")
    policy = load_policy(tmp_path / "run" / "policy")
    assert isinstance(policy, ValueGuidedPolicy) and policy.editor is not None
    obs = fake_observation(ENV.env_spec(), 3)
    greedy = policy.act(obs, None, 0.0)
    assert greedy.actions.shape == (3, 4, 7) and greedy.value is not None
    alone = policy.act(obs.select([2]), None, 0.0)
    np.testing.assert_allclose(alone.actions[0], greedy.actions[2], rtol=1e-5, atol=1e-6)
    found = policy.judge(obs, torch.Generator().manual_seed(0), 1.0)
    assert found.chunks.shape == (3, 6, 4, 7), "three of the base's, and three changed"
    values = policy.critic.q_values(
        policy.critic.place_of(torch.from_numpy(found.features)),
        policy.critic.normal_chunk(torch.from_numpy(found.chunks).flatten(2)),
    )
    lead = (values - values[..., :1]).min(0).values
    np.testing.assert_allclose(found.value, values.min(0).values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lead[np.arange(3), found.best], lead.max(1).values, atol=1e-5)
    drawn = policy.act(obs, torch.Generator().manual_seed(0), 1.0)
    np.testing.assert_array_equal(drawn.actions, found.chunks[np.arange(3), found.best])
    policy.save(tmp_path / "copy")
    options = {"kind": "value_guided", "path": str(tmp_path / "copy"), "candidates": 2, "choose_by": "value"}
    again = build_component("policy", options).build(ENV.env_spec())  # type: ignore[attr-defined]
    assert (again.candidates, again.choose_by) == (2, "value")
    again.candidates, again.choose_by = 3, "lead"
    np.testing.assert_array_equal(again.act(obs, None, 0.0).actions, greedy.actions)
    kept = load_policy(tmp_path / "copy")
    assert isinstance(kept, ValueGuidedPolicy) and kept.choose_by == "lead"


def test_a_steered_policy_is_its_base_and_an_actor(flow: Path, logged: Path, tmp_path: Path) -> None:
    run(recipe_of(flow, logged, rounds=2, evaluate="after", **NOISE), tmp_path / "run")
    folder = tmp_path / "run" / "policy"
    policy, obs = load_policy(folder), fake_observation(ENV.env_spec(), 3)
    assert isinstance(policy, SteeredPolicy) and (tmp_path / "run" / "evaluations" / "final.json").is_file()
    before, after = load_policy(flow).state_dict(), load_policy(folder / "base").state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    greedy = policy.act(obs, None, 0.0)
    np.testing.assert_array_equal(policy.act(obs, None, 0.0).actions, greedy.actions)
    drawn = policy.act(obs, torch.Generator().manual_seed(0), 1.0)
    assert drawn.value is not None and not np.allclose(drawn.actions, greedy.actions)
    info = describe(folder)
    assert info.kind == "value_guided" and info.facts["starting noise"] == "4 x 7 numbers within 1.5"
    segment = load_file(tmp_path / "run" / "replay" / "segment-00000001" / "decisions.safetensors")
    np.testing.assert_array_equal(segment["candidates"][:, 0, 0], segment["chunk"][:, 0])
    assert segment["noise"][:, 0].any(), "a round's own noise teaches too"


def test_what_it_cannot_do_is_refused_before_any_work(base: Path, logged: Path, tmp_path: Path) -> None:
    values = recipe_of(base, logged).model_dump(mode="json")
    for change, message in (
        ({"sft": None}, r"name them in sft\.datasets.*online\.prior=none"),
        ({"sft": {"datasets": ["nowhere"]}}, r"nowhere"),
        ({"online": values["online"] | {"method": "noise"}}, r"chunks start from none.*best_of_n or edits"),
        ({"policy": {"kind": "openvla"}}, r"policy\.path: the run improves a checkpoint"),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            improve_online(read_recipe(values | change), tmp_path / "run", lambda _: None)
    with pytest.raises(ValueError, match="candidates: got 1"):
        recipe_of(base, logged, candidates=1)
    with pytest.raises(ConfigError, match="policy is made by `run: online`"):
        build_component("policy", {"kind": "value_guided"}).build(ENV.env_spec())  # type: ignore[attr-defined]


def test_the_shipped_recipe_runs_in_the_tabletop(tmp_path: Path) -> None:
    small = ["env.num_envs=5", "env.num_workers=0", "online.rounds=1", "online.episodes_per_round=5", "num_threads=1"]
    less = ["online.updates_per_round=2", "online.evaluate=never", "online.prior=none", "online.warm_updates=0"]
    run(load_recipe("tabletop_online", [*small, *less]), tmp_path / "run")
    [row] = metrics(tmp_path / "run")
    assert row["rollout/episodes"] == 5 and 5 <= row["replay/decisions"] <= 5 * 20
    info = describe(tmp_path / "run" / "policy")
    assert info.kind == "value_guided" and info.facts["candidates"] == "8"
