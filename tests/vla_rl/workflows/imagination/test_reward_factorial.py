"""The factorial of observations and rewards: whose results a folder holds, and which states and policy a run takes."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_rl.policies.base import resolve_path
from vla_rl.types import EpisodeSpec, Observation, StepResult

ROOT = Path(__file__).parents[4]


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reward_factorial", ROOT / "scripts" / "reward_factorial.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def done(script, monkeypatch) -> list[Any]:
    """What is done with which policy; nothing is run."""
    calls: list[Any] = []

    def train(recipe: Any, arm: Any, seed: int, world_model: Any, policy: Any, judge: Any) -> dict[str, Any]:
        calls.append(("train", policy.name, judge["threshold"], recipe.train.iterations))
        assert recipe.algo.decay_iterations == recipe.train.iterations
        return {}

    def load(path: Path, device: str) -> SimpleNamespace:
        return SimpleNamespace(name=path.name, save=lambda folder: calls.append(("save", folder.parent.name)))

    monkeypatch.setattr(script, "load_policy", load)
    monkeypatch.setattr(
        script, "load_world_model", lambda path: SimpleNamespace(metadata=SimpleNamespace(objects_probability=None))
    )
    monkeypatch.setattr(
        script,
        "calibrate_real",
        lambda recipe, world_model, policy: calls.append(("judge", policy.name)) or {"threshold": 1},
    )
    monkeypatch.setattr(script, "outcomes", lambda recipe, policy: calls.append(("base", policy.name)) or [[True]])
    monkeypatch.setattr(script, "train", train)
    return calls


def start(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: Any, arm: str = "real_success") -> None:
    words = ["run", *map(str, arguments), "--arms", arm, "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", ["reward_factorial.py", *words])
    script.main()


def test_a_folder_holds_one_world_model_policy_and_number_of_iterations(script, done, tmp_path, monkeypatch):
    model, other = tmp_path / "model", tmp_path / "other_model"
    shutil.copytree(ROOT / "world_model" / "pretrained" / "tabletop", model)
    shutil.copytree(model, other)
    with (other / "world_model.json").open("a") as stream:
        stream.write(" ")
    policy = Path(shutil.copytree(resolve_path("pretrained:tabletop_base"), tmp_path / "mine"))
    folder = ("--output", tmp_path / "runs")
    start(script, monkeypatch, model, *folder)
    first = [("judge", "tabletop_base"), ("base", "tabletop_base"), ("train", "tabletop_base", 1, 16)]
    assert done == [*first, ("save", "real_success_0")]
    start(script, monkeypatch, model, *folder)
    start(script, monkeypatch, model, *folder, "--policy", policy)  # The same one elsewhere.
    assert len(done) == 4, "finished"
    (policy / "note").write_text("changed")
    for arguments, what in (
        ((other,), "another world_model"),
        ((model, "--iterations", 4), r"another iterations \(iterations there 16, here 4"),
        ((model, "--policy", policy), "another policy"),
        ((model, "--override", "train.groups=8"), "another overrides"),
    ):
        with pytest.raises(SystemExit, match=f"--output .*runs: holds results of {what}"):
            start(script, monkeypatch, *arguments, *folder)
    start(script, monkeypatch, model, "--output", tmp_path / "new", "--policy", policy, "--iterations", 4)
    assert done[4:7] == [("judge", "mine"), ("base", "mine"), ("train", "mine", 1, 4)]
    with pytest.raises(SystemExit, match="--recipe tabletop_grpo: must have an env of kind world_model"):
        start(script, monkeypatch, model, "--output", tmp_path / "grpo", "--recipe", "tabletop_grpo")


def test_results_that_do_not_say_of_what_are_not_taken(script, done, tmp_path, monkeypatch):
    (tmp_path / "judge.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"has judge\.json, but no subject\.json.*write into that file: {.*}") as e:
        start(script, monkeypatch, "pretrained:tabletop", "--output", tmp_path)
    facts = str(e.value).split("that file: ")[1]
    (tmp_path / "subject.json").write_text(json.dumps(json.loads(facts)))
    (tmp_path / "judge.json").write_text('{"threshold": 2}')
    start(script, monkeypatch, "pretrained:tabletop", "--output", tmp_path)
    assert done[:2] == [("base", "tabletop_base"), ("train", "tabletop_base", 2, 16)]
    with pytest.raises(SystemExit):
        start(script, monkeypatch, "pretrained:tabletop", "--output", tmp_path, arm="real_sucess")


def test_seeds_share_no_initial_state_however_many_iterations(script, monkeypatch):
    def collect(policy: Any, env: Any, specs: Any, **options: Any) -> list[Any]:
        taken.update((spec.task, spec.index) for spec in specs)
        env.log.append(("a", 0, 1.0, True))
        return []

    env = SimpleNamespace(spec=SimpleNamespace(tasks={"a": "", "b": ""}), log=[], close=lambda: None)
    learner = SimpleNamespace(prepare=lambda episodes: None, update=lambda batch: None)
    sizes = SimpleNamespace(iterations=script.ITERATIONS + 4, groups=40, group_size=8)
    recipe = SimpleNamespace(train=sizes, algo=SimpleNamespace(build=lambda policy, seed: learner))
    monkeypatch.setattr(script, "build_env", lambda *arguments: env)
    monkeypatch.setattr(script, "collect", collect)
    monkeypatch.setattr(script, "outcomes", lambda recipe, policy: [])
    states = []
    for seed in range(3):
        taken: set[tuple[str, int]] = set()
        script.train(recipe, ("real", "true"), seed, None, None, {})
        states.append(taken)
    assert [len(found) for found in states] == [20 * 40] * 3
    assert len(set.union(*states)) == 3 * 20 * 40


class TwoChunks:
    """Two environments of one color; each episode succeeds in its second chunk, if this one knows of success."""

    def __init__(self, color: int, knows: bool) -> None:
        self.spec, self.num_envs, self.color, self.knows, self.steps = None, 2, color, knows, np.zeros(2, int)

    def reset(self, specs: Any, ids: Any) -> Observation:
        self.steps[ids] = 0
        return self.observe(ids)

    def step(self, actions: Any, ids: Any) -> StepResult:
        self.steps[ids] += 1
        success = (self.steps[ids] > 1) & self.knows
        ends = np.stack([np.zeros(len(ids), bool), success], 1)
        paid, none = ends.astype(np.float32), np.zeros_like(ends)
        return StepResult(self.observe(ids), paid, ends, none, np.full(len(ids), 2), success, none[:, 0])

    def observe(self, ids: Any) -> Observation:
        images = np.full((len(ids), 4, 4, 3), self.color, np.uint8)
        return Observation({"top": images}, np.full((len(ids), 2), self.color, np.float32), ["do it"] * len(ids))


@pytest.mark.parametrize(("told", "image", "state"), [((), 1, 1), (("state",), 1, 2), (("images",), 2, 1)])
def test_half_of_what_is_seen_may_be_real_and_the_truth_pays(script, told, image, state):
    env = script.FactorialEnv(TwoChunks(1, False), TwoChunks(2, True), "true", from_truth=told)
    env.reset([EpisodeSpec("a", "train", i) for i in range(2)])
    env.step(np.zeros((2, 2, 3)))
    result = env.step(np.zeros((1, 2, 3)), [1])
    assert (result.obs.images["top"] == image).all() and (result.obs.state == state).all()
    assert result.done.all() and env.log == [("a", 1, 1.0, True)]


def test_a_simulator_may_be_what_is_seen_and_the_truth_and_steps_once(script):
    both = TwoChunks(2, True)
    env = script.FactorialEnv(both, both, "true")
    env.reset([EpisodeSpec("a", "train", i) for i in range(2)])
    env.step(np.zeros((2, 2, 3)))
    assert both.steps.tolist() == [1, 1]
