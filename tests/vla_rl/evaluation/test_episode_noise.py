"""A sampled episode's actions depend on its own seed alone: not on how many run at a time, which, or in what order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sim.dummy import DummyConfig
from vla_rl.evaluation.evaluate import EvalConfig, evaluate
from vla_rl.interfaces import Policy
from vla_rl.policies.fake_input import fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.rollout.runner import collect
from vla_rl.types import EpisodeSpec

ENV = DummyConfig.model_validate({"num_envs": 8, "tasks": ["reach_red"], "horizon": 8})
TINY = {"image_size": 32, "action_bins": 5, "chunk_size": 4, "precision": "fp32", "cameras": ["agentview"]}
SPECS = [EpisodeSpec("reach_red", "eval", index) for index in range(4)]
SEEDS = [100 + index for index in range(4)]


def openvla(**options: Any) -> Policy:
    policy = OpenVLAConfig.model_validate({**TINY, **options}).build(ENV.env_spec(), seed=0)
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    return policy


def smolvla(**options: Any) -> Policy:
    values = {
        "type": "smolvla",
        "preset": "tiny",
        "image_size": 32,
        "chunk_size": 4,
        "cameras": ["agentview"],
        **options,
    }
    policy = LeRobotConfig.model_validate(values).build(ENV.env_spec(), seed=0)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy


def actions(policy: Policy, num_envs: int, order: list[int]) -> list[np.ndarray]:
    env = ENV.build(num_envs=num_envs)
    try:
        episodes = collect(policy, env, [SPECS[i] for i in order], temperature=1.0, seed=[SEEDS[i] for i in order])
    finally:
        env.close()
    found = dict(zip(order, episodes, strict=True))
    return [found[i].chunks.actions for i in sorted(order)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"decoder": "autoregressive"},
        {"decoder": "l1", "laplace": {}},
        {"sampling": {"joint": True}},
        {"sampling": {"joint": False}},
    ],
    ids=["tokens at once", "token by token", "laplace", "flow", "flow, one noisy step"],
)
def test_a_policys_sampled_actions_are_the_same_in_any_batch(options: dict[str, Any]) -> None:
    policy = (smolvla if "sampling" in options else openvla)(**options)
    alone = actions(policy, 1, list(range(4)))
    assert len({chunk.tobytes() for chunk in alone}) == 4, "episodes differ from one another"
    for num_envs, order in ((3, list(range(4))), (4, list(range(4))), (2, [3, 0, 2])):
        expected = [alone[i] for i in sorted(order)]
        for ours, theirs in zip(actions(policy, num_envs, order), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_an_evaluation_is_the_same_whatever_runs_at_a_time_and_beside_it() -> None:
    policy, longer = openvla(), ENV.model_copy(update={"horizon": 12})  # So that some episodes succeed.

    def outcomes(num_envs: int, **options: Any) -> dict[tuple[int, int], tuple[bool, int]]:
        values = {"episodes_per_task": 6, "samples_per_state": 2, "temperatures": [1.0], "videos": 0}
        env = longer.model_copy(update={"num_envs": num_envs})
        found = evaluate(policy, env, EvalConfig.model_validate({**values, **options})).episodes
        return {(e.index, e.sample): (e.success, e.steps) for e in found}

    alone = outcomes(1)
    assert len(alone) == 12 and outcomes(3) == alone == outcomes(8)
    fewer = outcomes(8, start_index=2, episodes_per_task=3)
    assert fewer == {key: value for key, value in alone.items() if 2 <= key[0] < 5}
    assert outcomes(8, seed=1) != alone
