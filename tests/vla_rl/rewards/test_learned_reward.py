"""A reward learned from logged episodes of the dummy environment: what it knows, what it is worth, its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reach_policy import ReachPolicy

from sim.dummy import DummyConfig
from vla_rl.config import dump_yaml
from vla_rl.data.config import DatasetError
from vla_rl.evaluation.probability import CalibrationError
from vla_rl.recipe.recipe import read_recipe
from vla_rl.rewards.base import judge_episodes
from vla_rl.rewards.config import RewardFitConfig
from vla_rl.rewards.fit import data_needs, fit_reward, highest, progress_target
from vla_rl.rewards.frames import RewardFrames, open_frames
from vla_rl.rewards.kinds import LearnedRewardConfig
from vla_rl.rewards.measure import ALL, judge_frames, measure, progress_rank
from vla_rl.rewards.model import FACTS_FILE, WEIGHTS_FILE, LearnedReward, RewardError
from vla_rl.types import ActionChunk, Observation
from vla_rl.workflows import reward as workflow
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

ENV = DummyConfig(num_envs=8, image_size=32, horizon=10, steps_after_success=4)
SETTINGS = {
    "every": 4, "image_size": 32, "steps": 60, "batch_size": 32, "optim": {"lr": 3e-3, "warmup_steps": 10},
    "holdout": 0.4, "min_failures": 10, "max_false_success": 0.95, "width": 16,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def no_dropout() -> Iterator[None]:
    """Of 16 channels none can be spared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vla_rl.rewards.fit.DROPOUT", 0.0)
        yield


class Torn(ReachPolicy):
    """At each decision it may go to the wrong square, so that the first frame hardly tells how an episode ends.

    Args:
        wrong: how likely.
    """

    def __init__(self, wrong: float, speed: float) -> None:
        super().__init__(speed=speed, noise=0.2)
        self.wrong = wrong

    def act(self, obs: Observation, generator=None, temperature: float = 1.0) -> ActionChunk:
        draws = torch.rand(obs.batch_size, generator=generator).numpy()
        other = {"red": "blue", "blue": "red"}
        told = [
            " ".join(other.get(word, word) for word in text.split()) if draw < self.wrong else text
            for text, draw in zip(obs.instruction, draws, strict=True)
        ]
        return super().act(replace(obs, instruction=told), generator, temperature)


def record(folder: Path, start: int, policy: ReachPolicy, version: str, count: int = 80, env: DummyConfig = ENV) -> str:
    config = CollectConfig.model_validate(
        {"source": "policy", "dataset": str(folder), "episodes_per_task": count, "start_index": start,
         "every_frame": False}
    )  # fmt: skip
    collect_dataset(env, config, policy=policy, policy_version=version)
    return str(folder)


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> str:
    """Of a policy that goes wrong half of the time."""
    folder = tmp_path_factory.mktemp("reward") / "logged"
    return record(folder, 0, Torn(0.5, 1.0), "wild 0123")


@pytest.fixture(scope="module")
def unseen(tmp_path_factory) -> str:
    """Of another, slower and surer policy, from other states."""
    folder = tmp_path_factory.mktemp("reward") / "unseen"
    return record(folder, 500, Torn(0.3, 0.7), "slow 4567", 60)


def section(path: str, **changes) -> RewardFitConfig:
    return RewardFitConfig.model_validate({**SETTINGS, "datasets": path, **changes})


def opened(path: str, **changes) -> RewardFrames:
    config = section(path, **changes)
    return open_frames(config.datasets, data_needs(config, ENV.env_spec()), config.every)


@pytest.fixture(scope="module")
def learned(logged: str, tmp_path_factory) -> tuple[LearnedReward, Path]:
    frames = opened(logged)
    model = fit_reward(section(logged), frames, seed=0)
    folder = tmp_path_factory.mktemp("reward") / "reward"
    model.save(folder, frames.starts.tolist())
    return model, folder


def test_frames_are_where_it_judges_with_what_is_known_of_each(logged: str) -> None:
    frames = opened(logged)
    data = frames.parts[0]
    assert len(frames) == 160 and 0 < frames.success.sum() < 160
    assert frames.policies == ("wild 0123",) and set(frames.tasks) == {"reach_red", "reach_blue"}
    for number in range(0, 160, 7):
        own = np.flatnonzero(frames.owner == number)
        length = int(data.lengths[number])
        assert list(frames.step[own]) == [*range(0, length, 4), length]
        seen = frames.episode(number)
        np.testing.assert_array_equal(seen.images["agentview"][-1], data.final_images["agentview"][number])
        np.testing.assert_array_equal(seen.state[0], data.state[data.starts[number]])
        if not frames.success[number]:
            assert not frames.reached[own].any() and (frames.remaining[own] == -1).all()
            continue
        at = int(frames.steps_to_success[number])
        np.testing.assert_array_equal(frames.reached[own], frames.step[own] >= at)
        np.testing.assert_array_equal(frames.remaining[own], np.maximum(at - frames.step[own], 0))
    target = progress_target(frames, {text: 10 for text in np.unique(frames.instructions)})
    assert (target[~frames.success[frames.owner]] == 0).all() and (target[frames.reached] == 1).all()
    first = frames.first[np.flatnonzero(frames.success)[0]]
    assert target[first] == pytest.approx(1 - frames.remaining[first] / 10)


def test_initial_states_are_held_out_whole(logged: str) -> None:
    frames = opened(logged)
    doubled = RewardFrames.concatenate([frames, frames])
    train, held = doubled.hold_out(0.4, 0)
    assert len(train) + len(held) == 320 and not set(train.starts) & set(held.starts)
    assert {len(np.unique(held.starts[held.tasks == task])) for task in np.unique(held.tasks)} == {32}


def test_states_are_normalized_by_the_episodes_that_it_learns_from(learned, logged: str) -> None:
    frames = opened(logged)
    data, train = frames.parts[0], frames.hold_out(SETTINGS["holdout"], 0)[0]
    own = np.isin(frames.starts, train.starts)
    states = data.state[np.repeat(own, data.lengths)].astype(np.float64)
    network = learned[0].network
    np.testing.assert_allclose(network.state_mean, states.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(network.state_spread, np.maximum(states.std(0), 0.01), rtol=1e-5)
    assert not np.allclose(network.state_mean, data.state.mean(0), rtol=1e-5)


def test_figures_are_those_of_its_verdicts(learned, unseen: str) -> None:
    model, folder = learned
    frames = opened(unseen)
    result, judged = measure(folder, model, frames)
    found = result.figures[ALL]
    assert found["auc"].low <= found["auc"].value <= found["auc"].high
    assert found["false_success"].value == judged.counts[~frames.success].mean()
    assert found["missed_success"].value == pytest.approx(1 - judged.counts[frames.success].mean())
    assert set(result.figures) == {"reach_red", "reach_blue", ALL} and result.seen_policies == []
    assert judged.said.success.min() >= 0 and judged.said.success.max() <= 1


def test_a_stream_is_judged_as_whole_episodes_are(learned, unseen: str) -> None:
    model, folder = learned
    frames = opened(unseen).select(np.arange(120) % 20 == 0)
    together = judge_frames(model, frames).said
    streams = judge_episodes(LearnedReward.load(folder), [frames.episode(i) for i in range(len(frames))])
    for name in ("success", "progress", "counts"):
        joined = np.concatenate([getattr(judgement, name) for judgement in streams])
        np.testing.assert_allclose(joined, getattr(together, name), atol=1e-5)


def test_shuffling_keeps_each_tasks_share_of_successes(logged: str) -> None:
    frames = opened(logged)
    shuffled = frames.with_shuffled_outcomes(1)
    for task in np.unique(frames.tasks):
        assert frames.success[frames.tasks == task].sum() == shuffled.success[frames.tasks == task].sum()
    assert (frames.success != shuffled.success).any()
    assert shuffled.reached.sum() == shuffled.success.sum()


def test_the_highest_leaves_out_the_first_frame_and_rank_what_comes_after_success(logged: str) -> None:
    frames = opened(logged)
    assert (highest(np.where(frames.step == 0, 99.0, frames.step), frames) <= 10).all()
    assert (highest(frames.step.astype(float), frames) == frames.parts[0].lengths).all()
    perfect = progress_rank(frames.step.astype(float), frames, np.ones(160, bool))
    assert perfect.value == pytest.approx(1.0) and perfect.of == "successful episodes"


def test_it_is_refused_on_states_that_it_was_fitted_on(learned, logged: str) -> None:
    model, folder = learned
    with pytest.raises(ValueError, match=r"160 initial states, such as reach_blue/train/0, are among those"):
        measure(folder, model, opened(logged))


def test_too_few_failures_and_datasets_without_outcomes_are_refused(logged: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"400 are needed to bound .* 95%.*reward\.holdout"):
        fit_reward(section(logged, min_failures=400), opened(logged), seed=0)
    with pytest.raises(DatasetError, match=r"an image every 4 control steps, and reward\.every asks for one every 6"):
        opened(logged, every=6)
    with pytest.raises(DatasetError, match="dataset not found"):
        opened(str(tmp_path / "nothing"))


def test_a_batch_that_has_room_for_no_success_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch_size\n.*greater than or equal to 2"):
        section("anywhere", batch_size=1)


def test_a_damaged_reward_is_refused(learned, tmp_path: Path) -> None:
    model, _ = learned
    copy = tmp_path / "copy"
    facts = model.save(copy, [])
    assert LearnedReward.load(copy).facts == facts
    weights = (copy / WEIGHTS_FILE).read_bytes()
    (copy / WEIGHTS_FILE).write_bytes(weights[:-4] + bytes(4))
    with pytest.raises(RewardError, match="are not those of its facts"):
        LearnedReward.load(copy)
    (copy / WEIGHTS_FILE).write_bytes(weights)
    values = json.loads((copy / FACTS_FILE).read_text())
    for change in ({"format": 9}, {"threshold": float("nan")}, {"surprise": 1}):
        (copy / FACTS_FILE).write_text(json.dumps({**values, **change}))
        with pytest.raises(RewardError):
            LearnedReward.load(copy)
    with pytest.raises(RewardError, match=r"no readable learned reward .*vla-rl reward fit"):
        LearnedReward.load(tmp_path / "none")


def test_an_environment_that_it_cannot_read_is_refused(learned) -> None:
    _, folder = learned
    build: Callable = LearnedRewardConfig(path=folder).build
    spec = ENV.env_spec()
    build(spec)
    build(replace(spec, tasks={"reach": "move to the {colour} square"}))  # Filled in at each reset.
    with pytest.raises(RewardError, match=r"reads the cameras agentview; dummy shows wrist"):
        build(replace(spec, cameras=("wrist",)))
    with pytest.raises(RewardError, match="reads a state of 8 numbers"):
        build(replace(spec, state_dim=7))
    with pytest.raises(RewardError, match="no success of 'dance'"):
        build(replace(spec, tasks={**spec.tasks, "dance": "dance"}))
    obs = Observation({"agentview": np.zeros((1, 32, 32, 3), np.uint8)}, np.zeros((1, 8), np.float32), ["x"])
    with pytest.raises(ValueError, match="stream 3 never began"):
        build(spec).observe(obs, [3], [False])


def test_the_commands_fit_and_measure(logged: str, unseen: str, tmp_path: Path) -> None:
    values = {
        "run": "reward", "name": "tiny", "policy": {"kind": "openvla"},
        "env": {"kind": "sim.dummy:DummyConfig", "horizon": 10},
        "num_threads": 1,
        "reward": {**SETTINGS, "datasets": logged, "evaluate_on": unseen},
    }  # fmt: skip
    recipe = read_recipe(values)
    (tmp_path / "config.yaml").write_text(dump_yaml(recipe))
    said: list[str] = []
    folder = workflow.fit(recipe, tmp_path, said.append)
    assert LearnedReward.load(folder).facts.policies == ("wild 0123",)
    assert said[-1].startswith("held out: AUC")
    result, page = workflow.evaluate(recipe, tmp_path, said.append)
    written = json.loads((tmp_path / "reward.json").read_text())
    assert (
        written["num_episodes"] == 120 and written["figures"]["all"]["auc"]["value"] == result.figures[ALL]["auc"].value
    )
    text = page.read_text()
    assert "Worst false successes" in text and text.count("data:image/png") >= 5 and "http" not in text.split("<h1>")[1]
