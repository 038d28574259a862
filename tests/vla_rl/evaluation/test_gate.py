"""The gate: a gain made in an environment that is not real is confirmed, or taken back, by real episodes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny_run import make_recipe, metrics, save_policy

from sim.dummy import DummyConfig
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError
from vla_rl.evaluation.gate import Gate, GateConfig
from vla_rl.evaluation.sequential import PairedSequentialTest
from vla_rl.policies.load import load_policy
from vla_rl.training.train import train

REAL = "real_env={kind: dummy, num_envs: 8, tasks: [reach_red], horizon: 8}"


class DreamConfig(DummyConfig):
    """Stands for a world model: the dummy environment, said to be imagined."""

    is_imagined: ClassVar[bool] = True
    kind: str = ""  # type: ignore[assignment]


def dream(**options: Any) -> str:
    values = {"num_envs": 8, "tasks": ["reach_red"], "horizon": 8, **options}
    return f"env={json.dumps({'kind': f'{__name__}:DreamConfig', **values})}"


@pytest.fixture(scope="module")
def wanderer(tmp_path_factory) -> Path:
    """A policy that moves at random."""
    return save_policy(tmp_path_factory.mktemp("gate") / "wanderer")


@pytest.fixture(scope="module")
def stone(wanderer, tmp_path_factory) -> Path:
    """The same, but whatever it decides, it does not move."""
    policy = load_policy(wanderer)
    policy.set_norm_stats({"q01": [-1e-6] * 7, "q99": [1e-6] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    folder = tmp_path_factory.mktemp("gate") / "stone"
    policy.save(folder)
    return folder


def checked(tmp_path: Path, first: Path, second: Path, is_last: bool, **options: Any):
    """A gate that has confirmed `first`, and its check of `second` at iteration 5."""
    gate = Gate(GateConfig(every=1, **options), tmp_path / "confirmed", load_policy(first))
    with closing(DummyConfig(num_envs=8, horizon=32).build()) as env:
        check = gate.check(
            load_policy(second), env, iteration=5, imagined=0.9, temperature=1.0, seed=0, is_last=is_last
        )
    return gate, check


def same_weights(a: Path, b: Path) -> bool:
    first, second = load_policy(a).state_dict(), load_policy(b).state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_real_gain_moves_the_mark(tmp_path, stone, wanderer):
    gate, check = checked(tmp_path, stone, wanderer, is_last=False)
    assert (check.verdict, check.rolled_back) == ("confirmed", False) and check.comparison.interval.low > 0
    assert gate.mark == 5 and not gate.is_closed and same_weights(gate.confirmed, wanderer)
    assert "confirmed; real success" in check.text() and "imagined 90 %" in check.text()


def test_a_loss_is_rolled_back(tmp_path, stone, wanderer):
    gate, check = checked(tmp_path, wanderer, stone, is_last=False)
    assert (check.verdict, check.rolled_back) == ("refuted", True) and check.comparison.decision in ("worse", "no_gain")
    assert gate.mark == 0 and gate.is_closed and same_weights(gate.confirmed, wanderer)
    assert "gate at iteration 5: refuted, rolled back; real success" in check.text()


def test_the_undecided_are_called_so_and_rolled_back_by_the_last_check_alone(tmp_path, wanderer):
    for is_last, consequence in (
        (False, "undecided, RL continues"),
        (True, "undecided at the last check, rolled back"),
    ):
        gate, check = checked(tmp_path / str(is_last), wanderer, wanderer, is_last=is_last, pairs=8)
        assert check.comparison.decision == "undecided" and check.verdict == "undecided"
        assert check.rolled_back == gate.is_closed == is_last
        assert f"gate at iteration 5: {consequence}; real success" in check.text()


@pytest.mark.parametrize(
    ("outcome", "decision", "verdict"),
    [
        ("confirmed", "better", "confirmed"),
        ("open", "undecided", "undecided"),
        ("rolled back", "undecided", "undecided"),
        ("rolled back", "worse", "refuted"),
        ("rolled back", "no_gain", "refuted"),
    ],
)
def test_checks_written_before_verdicts_still_load(tmp_path, wanderer, outcome, decision, verdict):
    comparison = {
        "decision": decision, "gained": 5, "lost": 4, "tied": 11, "num_pairs": 20, "max_pairs": 20, "num_lost_pairs": 0,
        "num_episodes": 40, "rate_a": 0.4, "rate_b": 0.45, "interval": [-0.3, 0.4], "p_value": 1.0, "alpha": 0.05,
    }  # fmt: skip
    check = {"iteration": 2, "mark": 0, "comparison": comparison, "imagined": 0.5, "outcome": outcome}
    gate = Gate(GateConfig(every=1), tmp_path / "confirmed", load_policy(wanderer))
    gate.load_state({"mark": 0, "checks": [check]})
    assert gate.checks[0].verdict == verdict
    assert gate.is_closed == gate.checks[0].rolled_back == (outcome == "rolled back")


def test_the_power_of_one_check_of_200_pairs():
    """What the docstring says, at 45 differing pairs of 100: a gain of 9 points is mostly left undecided."""
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(150):
        test, draws = PairedSequentialTest(0.05, 0.02), rng.random(200)
        for draw in draws:
            test.update(draw >= 0.27 and draw < 0.45, draw < 0.27)
            if test.decision != "undecided":
                break
        verdicts.append(test.decision)
    assert 0.12 <= verdicts.count("better") / 150 <= 0.28
    assert verdicts.count("undecided") / 150 > 0.6


def test_later_checks_use_fresh_states_and_a_checkpoint_remembers_them(tmp_path, stone, wanderer):
    gate, first = checked(tmp_path, stone, wanderer, is_last=False)
    state = json.loads(json.dumps(gate.state()))
    again = Gate(gate.config, gate.folder, load_policy(stone))
    again.load_state(state)
    assert again.mark == 5 and again.checks == gate.checks and same_weights(again.confirmed, wanderer)
    seen = []
    with closing(DummyConfig(num_envs=8, horizon=8).build()) as env:
        reset = env.reset
        env.reset = lambda specs, ids=None: (seen.extend(specs), reset(specs, ids))[1]
        again.check(load_policy(wanderer), env, iteration=6, imagined=0.9, temperature=1.0, seed=0, is_last=False)
    assert min(spec.index for spec in seen) == gate.config.start_index + first.comparison.num_pairs


def test_a_run_without_a_real_gain_goes_back_to_its_base_policy(tmp_path, wanderer):
    """RL with a rate that wrecks the policy; the real episodes say so."""
    recipe = make_recipe(
        wanderer, dream(), REAL, "gate.every=2", "gate.pairs=16", "train.validate_every=4", "algo.lr=0.05"
    )
    folder = tmp_path / "run"
    train(recipe, open_run(recipe, folder, resume=False))
    gate = json.loads((folder / "gate.json").read_text())
    assert gate["checks"][-1]["rolled_back"] and gate["mark"] == 0
    assert same_weights(folder / "policy", wanderer) and not same_weights(folder / "rejected", wanderer)
    last = gate["checks"][-1]
    logged: dict[str, float] = {}
    for row in metrics(folder):
        logged |= row if row["step"] == last["iteration"] else {}
    assert last["imagined"] == logged["train/success"] and last["comparison"]["rate_b"] == logged["gate/real"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([dream(), "train.evaluate=after"], "real_env: the recipe has none"),
        ([dream(), "gate.every=2"], "real_env: the recipe has none"),
        ([dream(), REAL, "gate.every=2", "train.keep=best", "train.validate_every=1"], "train.keep: got 'best'"),
        ([dream(), REAL.replace("8}", "8, image_size: 48}"), "gate.every=2"], "real_env: its image_size is"),
        ([dream(tasks=["reach_blue"]), REAL, "gate.every=2"], "real_env.tasks: lacks reach_blue"),
        (["gate.every=2"], "gate.every: env is no world model"),
        ([REAL], "real_env: is for a recipe whose env is a world model"),
        ([dream(), f"real_env={dream().removeprefix('env=')}"], "and is itself a simulator or robot"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path, wanderer, overrides, message):
    with pytest.raises(ConfigError, match=message):
        recipe = make_recipe(wanderer, *overrides)
        train(recipe, tmp_path / "run")
