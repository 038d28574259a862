"""An algorithm from outside the packages: one file that says what a batch and a loss are, named in `kind`."""

from __future__ import annotations

import numpy as np
import pytest
from toy_problem import ToyPolicy, roll_out, success_rate

from vla_rl.algorithms.base import AlgoConfig
from vla_rl.config import ConfigError, build_component

SOURCE = '''
"""REINFORCE with a fixed baseline, and no ratio in its loss."""

import numpy as np

from vla_rl.algorithms.base import AlgoConfig, episode_batch


class PlainConfig(AlgoConfig):
    kind: str = "own_algorithm:PlainConfig"
    baseline: float = 0.5

    def make_batch(self, episodes, evaluate, shuffle, world):
        advantage = np.array([e.total_reward - self.baseline for e in episodes])
        return episode_batch(self, episodes, advantage, np.ones(len(episodes), bool), evaluate, world)

    def loss(self, batch, rows, weight, out, *, num_rows, only_critic):
        log_prob = out.log_prob.mean(-1)
        gain = log_prob.new_tensor(weight * batch.advantage[rows]) * log_prob
        return -gain.sum(), {"loss/gain": -gain.sum(), "log_prob": (log_prob * log_prob.new_tensor(weight)).sum()}
'''


@pytest.fixture
def config(tmp_path, monkeypatch) -> AlgoConfig:
    (tmp_path / "own_algorithm.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    values = {"kind": "own_algorithm:PlainConfig", "baseline": 0.3, "optim": {"lr": 0.02}, "minibatch_size": 256}
    made = build_component("algo", values)
    assert isinstance(made, AlgoConfig)
    return made


def test_it_learns(config):
    policy = ToyPolicy()
    learner = config.build(policy)
    before = success_rate(policy)
    for seed in range(20):
        metrics = learner.update(learner.prepare(roll_out(policy, 96, 1, seed)))
    assert success_rate(policy) > before + 0.3
    assert metrics["loss/gain"] != 0 and metrics["update/log_prob"] < 0
    assert metrics["update/num_bad_steps"] == 0 and np.isfinite(list(metrics.values())).all()


def test_its_options_are_checked(config):
    with pytest.raises(ConfigError, match=r"algo\.baselin: unknown key.*Did you mean 'baseline'"):
        build_component("algo", {"kind": config.kind, "baselin": 1.0})
