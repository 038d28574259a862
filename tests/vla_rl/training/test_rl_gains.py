"""Each family of policies that RL can train gains from GRPO and from PPO on a tabletop task. Slow: minutes a case.

A random-weight checkpoint in its published layout is written, cloned from an expert with a bad habit (it pushes the
block too short of the zone), saved, and post-trained. The claim is about sampled success on `eval` states, before and
after, paired.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sim.tabletop import TabletopConfig
from vla_rl.common.run_folder import open_run
from vla_rl.config import validate
from vla_rl.evaluation.compare import PairedResult, compare
from vla_rl.evaluation.evaluate import EvalConfig, evaluate
from vla_rl.evaluation.results import Evaluation
from vla_rl.policies.load import load_policy
from vla_rl.policies.openvla.files.fake_checkpoint import Variant, write_checkpoint
from vla_rl.recipe.collect_config import CollectConfig
from vla_rl.recipe.recipe import Recipe
from vla_rl.training.train import train
from vla_rl.workflows.clone import clone
from vla_rl.workflows.online import improve_online
from vla_rl.workflows.record_dataset import collect_dataset

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ENV: dict[str, Any] = {
    "kind": "tabletop",
    "tasks": ["push_to_zone"],
    "num_envs": 32,
    "image_size": 56,
    "start_spread": 0.1,
    "block_yaw": 0.05,
    "horizons": {"push_to_zone": 16},
    "expert": {"habit": {"place_short": 0.05, "place_short_std": 0.01}},
}
EVAL = EvalConfig(split="eval", episodes_per_task=200, temperatures=(1.0,), videos=0)
SFT = {"optimizer": "muon", "lr": 1.5e-3, "batch_size": 48, "warmup_steps": 20, "final_lr_fraction": 0.05}
GRPO = {"kind": "grpo", "lr": 2e-4, "warmup_steps": 5, "epochs": 2, "minibatch_size": 256, "micro_batch_size": 64}
# 160 episodes beside the 200 that were cloned: the critic, and the actor of starting noises, learn from both.
STEERING: dict[str, Any] = {
    "method": "noise",
    "rounds": 4,
    "episodes_per_round": 40,
    "updates_per_round": 200,
    "candidates": 4,
    "warm_updates": 600,
    "evaluate": "never",
    "critic": {"hidden": 128, "batch_size": 128, "targets": "actor"},
    "noise": {"scale": 1.5, "lr": 1e-3},
}
PPO = {**GRPO, "kind": "ppo", "value_lr": 1e-3, "gamma": 1.0, "critic_warmup": 1, "bootstrap_truncated": False}


@dataclass(frozen=True)
class Family:
    """How a family's random checkpoint is made, cloned and post-trained.

    Attributes:
        variant: OpenVLA's published layout to write; None: LeRobot's, made by the recipe.
        policy: the recipe's policy section. sft, algo: on top of SFT, and of GRPO and PPO.
    """

    variant: Variant | None
    policy: dict[str, Any]
    sft: dict[str, Any]
    algo: dict[str, Any]


def _openvla(variant: Variant, steps: int, algo: dict[str, Any] | None = None, **policy: Any) -> Family:
    # The simulator's own images and gripper; statistics from the demonstrations.
    given = {"kind": "openvla", "norm_key": "from_data", "gripper": "environment", "images": {}, "precision": "fp32"}
    return Family(variant, given | policy, {"steps": steps, "action_scale": "environment"}, algo or {})


def _lerobot(policy_type: str, steps: int, ratio_level: str = "action") -> Family:
    given = {"kind": "lerobot", "type": policy_type, "preset": "tiny", "image_size": 32, "chunk_size": 4}
    return Family(None, given, {"steps": steps}, {"ratio_level": ratio_level, "lr": 1e-4})


FAMILIES: dict[str, Family] = {
    "openvla": _openvla("base", 400),
    "oft_discrete": _openvla("discrete", 500, chunk_size=4),
    # A floor below which scales would make small changes of the actions large ones of the ratio.
    "oft_l1_laplace": _openvla(
        "l1", 400, {"lr": 1e-4}, chunk_size=4, cameras=["agentview"], laplace={"min_scale": 0.03}
    ),
    "smolvla": _lerobot("smolvla", 500),
    "pi0": _lerobot("pi0", 450),
    "xvla": _lerobot("xvla", 500),
    "pi0_fast": _lerobot("pi0_fast", 500, ratio_level="chunk"),
}


@dataclass(frozen=True)
class Base:
    """A cloned policy: its family, folder, and success before RL."""

    family: Family
    path: Path
    before: Evaluation


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("demonstrations") / "push")
    collect = CollectConfig(dataset=folder, episodes_per_task=200, start_index=1000, noise=0.05, keep="all")
    collect_dataset(TabletopConfig.model_validate(ENV), collect)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def base(request, demonstrations, tmp_path_factory) -> Base:
    """One cloning for all algorithms."""
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    if request.param == "smolvla":
        pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install vla-rl[flow]")
    policy = dict(family.policy)
    if family.variant is not None:
        policy["path"] = str(write_checkpoint(folder / "fresh", family.variant))
    cloning = {"datasets": demonstrations, **SFT, **family.sft}
    clone(_recipe(policy, sft=cloning), folder)
    path = folder / "policy"
    before = _success(path)
    assert 0.05 < before.rate("sampled").rate < 0.5  # Else the task says nothing about RL.
    return Base(family, path, before)


def _recipe(policy: dict[str, Any], **sections: Any) -> Recipe:
    values = {"name": "gains", "device": "cpu", "num_threads": 1, "env": ENV, "policy": policy, **sections}
    return validate(Recipe, {**values, "log": {"tensorboard": False, "console": False}})


def _success(path: Path) -> Evaluation:
    return evaluate(load_policy(path), TabletopConfig.model_validate(ENV), EVAL, name=path.parent.name)


def _post_train(base: Base, algo: dict[str, Any], folder: Path, control: str = "none") -> Evaluation:
    policy = {"kind": base.family.policy["kind"], "path": str(base.path), "value_head": algo["kind"] == "ppo"}
    rounds = {"iterations": 8, "groups": 24, "group_size": 8, "evaluate": "never", "control": control}
    recipe = _recipe(policy, algo={**algo, **base.family.algo}, train=rounds)
    return _success(train(recipe, folder))


def _steer(base: Base, demonstrations: str, folder: Path, control: str = "none") -> Evaluation:
    policy = {"kind": "lerobot", "path": str(base.path)}
    recipe = _recipe(policy, sft={"datasets": demonstrations}, online={**STEERING, "control": control})
    improve_online(recipe, open_run(recipe, folder, False), print)
    return _success(folder / "policy")


def _gain(before: Evaluation, after: Evaluation) -> PairedResult:
    result = next(r for r in compare(before, after).results if r.task is None)
    print(f"{before.meta.name} -> {after.meta.name}: {result.text()}")
    return result


@pytest.mark.parametrize("algo", [GRPO, PPO], ids=["grpo", "ppo"])
def test_rl_raises_success(base, algo, tmp_path):
    gain = _gain(base.before, _post_train(base, algo, tmp_path / "rl"))
    assert gain.num_pairs == 200
    assert gain.difference > 0.1 and gain.p_value_by_state < 0.01


@pytest.mark.parametrize("base", ["oft_discrete", "xvla", "pi0_fast"], indirect=True)
def test_it_is_the_reward_that_raises_it(base, tmp_path):
    """The same run with advantages dealt to other episodes: what it gains is not RL's."""
    shuffled = _post_train(base, GRPO, tmp_path / "shuffled", control="shuffled_rewards")
    gain = _gain(shuffled, _post_train(base, GRPO, tmp_path / "true"))
    assert gain.difference > 0.1 and gain.p_value_by_state < 0.01


@pytest.mark.parametrize("base", ["smolvla"], indirect=True)
def test_steering_by_the_starting_noise_raises_success(base, demonstrations, tmp_path):
    """The policy stays frozen; with outcomes dealt to other episodes an actor finds nothing."""
    steered = _steer(base, demonstrations, tmp_path / "steered")
    gain = _gain(base.before, steered)
    assert gain.difference > 0.1 and gain.p_value_by_state < 0.01
    above = _gain(_steer(base, demonstrations, tmp_path / "shuffled", "shuffled_outcomes"), steered)
    assert above.difference > 0.1 and above.p_value_by_state < 0.01
