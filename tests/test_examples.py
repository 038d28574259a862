"""The documentation's examples: each plug-in is one file from outside the packages, found by `module:Class` alone.

The dynamics goes through `tests/world_model/model/test_dynamics_conformance.py`, beside those that ship.
"""

from __future__ import annotations

import json
import math
import runpy
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_policy_conformance as conformance
from checks import check_vec_env
from processes import until
from test_messages import EXAMPLES as MESSAGES
from toy_problem import ToyPolicy, roll_out

from real_robot.transports.base import QosConfig
from real_robot.transports.messages import Bool, JointState, Message
from real_robot.transports.ros.master import free_port
from vla_rl.common.run_folder import open_run
from vla_rl.config import build_component
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import read_recipe
from vla_rl.training.train import train
from vla_rl.types import EpisodeSpec

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
PLUG_INS = ("my_env", "my_algorithm", "my_policy", "my_reward", "my_dynamics", "my_transport")


@pytest.mark.parametrize(("name", "most"), [*((name, 60) for name in PLUG_INS), ("grpo_from_scratch", 150)])
def test_examples_stay_short(name: str, most: int) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most


def test_the_environment_keeps_the_contract() -> None:
    config = build_component("env", {"kind": "my_env:SliderConfig", "image_size": 32})
    check_vec_env(lambda num_envs, record_frames=False: config.build(num_envs, record_frames))


def test_grpo_from_scratch_learns_in_one_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(**options: int) -> None:
        words = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        monkeypatch.setattr(sys, "argv", ["grpo_from_scratch.py", *words])
        runpy.run_path(str(EXAMPLES / "grpo_from_scratch.py"), run_name="__main__")

    monkeypatch.chdir(tmp_path)
    run(iterations=1, groups=5, group_size=3, epochs=1, episodes_per_task=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("before:") and lines[-1].startswith("after:") and "loss" in lines[1]
    with pytest.raises(SystemExit) as ended:  # A group of one has no spread: the loss would not be a number.
        run(group_size=1)
    assert ended.value.code == 2 and "--group-size: at least 2" in capsys.readouterr().err


def test_the_policy_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(conformance.VARIANTS, "mine", {"kind": "my_policy:BinsConfig"})
    policy = conformance.build("mine")
    for batch_size in (1, 3):
        conformance.test_shapes_dtypes_and_ranges(policy, batch_size)
    conformance.test_declares_what_it_reads(policy)
    conformance.test_same_generator_same_chunk_and_the_stream_moves_on(policy)
    conformance.test_acting_with_a_generator_leaves_the_global_stream_alone(policy)
    conformance.test_rows_of_a_batch_are_not_copies(policy)
    conformance.test_greedy_is_deterministic(policy)
    conformance.test_evaluate_agrees_with_act(policy)
    conformance.test_what_it_prepares_stands_for_the_observation_to_the_bit("mine", 64)
    conformance.test_bc_loss_falls_along_its_gradient_and_reports_numbers("mine")
    conformance.test_save_and_load_give_the_same_policy(policy, tmp_path)
    conformance.test_fresh_weights_depend_on_the_seed_alone("mine")


def test_the_algorithm_learns() -> None:
    algo = build_component(
        "algo", {"kind": "my_algorithm:SelfImitationConfig", "optim": {"lr": 0.03}, "minibatch_size": 64}
    )
    policy = ToyPolicy()
    learner = algo.build(policy, seed=0)
    rates = []
    for seed in range(12):
        episodes = roll_out(policy, 8, 8, seed=seed)
        rates.append(np.mean([e.success for e in episodes]))
        metrics = learner.update(learner.prepare(episodes))
    assert math.isfinite(metrics["loss/policy"]) and metrics["update/num_bad_steps"] == 0
    assert np.mean(rates[-3:]) > np.mean(rates[:3]) + 0.2


def test_a_recipe_with_all_of_ones_own_trains(tmp_path: Path) -> None:
    """Environment, reward, policy and algorithm from outside, in one run of `train`."""
    values: dict[str, Any] = {
        "run": "train",
        "name": "mine",
        "env": {"kind": "my_env:SliderConfig", "image_size": 32, "num_envs": 8},
        "policy": {"kind": "my_policy:BinsConfig"},
        "algo": {"kind": "my_algorithm:SelfImitationConfig", "optim": {"lr": 0.003}, "minibatch_size": 128},
        "train": {"iterations": 2, "groups": 8, "group_size": 2, "evaluate": "never", "allow_no_success": True},
        "log": {"tensorboard": False, "console": False},
    }
    values["env"]["reward"] = {"kind": "my_reward:NearConfig", "near": 0.25}
    recipe = read_recipe(values)
    folder = open_run(recipe, tmp_path / "run", False)
    policy = train(recipe, folder, False)
    assert load_policy(policy).chunk_size == 4
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    assert all(m["train/success"] > m["train/success_by_simulator"] for m in metrics), "paid for being near"


def test_the_environments_expert_solves_it() -> None:
    with closing(build_component("env", {"kind": "my_env:SliderConfig", "image_size": 32}).build(1)) as env:
        for index in range(4):
            env.reset([EpisodeSpec("slide", "train", index)])
            steps = (env.step(env.expert_action([0])[:, None]) for _ in range(5))
            assert next(result for result in steps if result.done[0]).success[0]


def test_the_transport_carries_messages_both_ways() -> None:
    ports = [free_port(), free_port()]
    here, robot = (
        build_component("transport", {"kind": "my_transport:UdpConfig", "listen": a, "robot": ["127.0.0.1", b]}).open()
        for a, b in (ports, reversed(ports))
    )
    try:
        sent = {type(message).__name__: message for message in MESSAGES}
        got: dict[str, Message] = {}
        for name, message in sent.items():
            robot.subscribe(f"/{name}", type(message), QosConfig(), lambda m, name=name: got.__setitem__(name, m))
        for name, message in sent.items():
            here.advertise(f"/{name}", type(message), QosConfig())(message)
        until(lambda: got.keys() == sent.keys(), "every message", 10)
        for name, message in sent.items():
            assert repr(got[name].tree()) == repr(type(message).from_tree(message.tree()).tree()), name
        robot.subscribe("/typed", JointState, QosConfig(), lambda m: None)
        here.advertise("/typed", Bool, QosConfig())(Bool(data=True))
        until(lambda: robot.unreadable["/typed"] == 1, "the unreadable message", 10)
        assert here.fault is None
    finally:
        here.close()
        robot.close()
    here.close()
