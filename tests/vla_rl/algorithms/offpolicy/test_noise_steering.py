"""A frozen policy steered by its starting noise: the noise that succeeds is found, from logs that know no noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from vla_rl.algorithms.offpolicy.config import OnlineConfig
from vla_rl.algorithms.offpolicy.critic import new_networks
from vla_rl.algorithms.offpolicy.learner import OffPolicyLearner
from vla_rl.algorithms.offpolicy.noise import NoiseActor, SteeredPolicy, embed_and_steer, noise_shape
from vla_rl.algorithms.offpolicy.replay import Replay
from vla_rl.algorithms.offpolicy.transitions import Transitions
from vla_rl.config import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.types import ActionChunk, Observation

SPEC = fake_env_spec()
CRITIC = {"hidden": 32, "batch_size": 128, "optim": {"lr": 6e-3}, "members": 2, "discount": 1.0}
NOISE = {"optim": {"lr": 6e-3}, "scale": 2.0}


class Twice(nn.Module, Policy):
    """A planted flow policy: its chunk is twice the noise that it starts from, wherever it is."""

    chunk_size, action_dim, cameras, uses_state, noise_shape = 2, 1, (), True, (2, 1)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def act(self, obs: Observation, generator=None, temperature: float = 1.0) -> ActionChunk:
        raise AssertionError("steered, it is never asked for a chunk of its own")

    @torch.no_grad()
    def steer(self, obs: Observation, choose):
        features = torch.from_numpy(obs.state[:, :2]).float()
        noise = choose(features)
        return features, (self.weight * noise.expand(*noise.shape[:2], 2, 1)).numpy()


def logged(region: tuple[float, float], count: int = 1200) -> Transitions:
    """Single decisions of the planted policy, whose first number decides: .9 succeed in the region, .05 elsewhere."""
    rng = np.random.default_rng(0)
    chunk = 2 * rng.standard_normal((count, 2, 1))
    made_of = rng.standard_normal((count, 4, 2, 1))
    right = (chunk[:, 0, 0] > region[0]) & (chunk[:, 0, 0] < region[1])
    rows = np.arange(count)
    return Transitions(
        embedding=np.tile(np.float32([0, 1]), (count, 1)),
        chunk=chunk.astype(np.float32),
        num_steps=np.full(count, 2),
        following=np.full(count, -1),
        elapsed=np.zeros(count, np.int64),
        remaining=np.full(count, 2),
        episode=rows,
        success=rng.random(count) < np.where(right, 0.9, 0.05),
        task=np.zeros(count, np.int64),
        initial_state=rows,
        candidates=(2 * made_of).astype(np.float32),
        noise=made_of.astype(np.float32),
    )


def learner_of(data: Transitions, **critic: object) -> OffPolicyLearner:
    config = OnlineConfig.model_validate({"method": "noise", "critic": CRITIC | critic, "noise": NOISE})
    networks = new_networks(config.critic, data.embedding, data.chunk.reshape(len(data), -1), 1)
    return OffPolicyLearner(config, networks, 1, (2, 1))


def learn(learner: OffPolicyLearner, data: Transitions, folder: Path, updates: int) -> dict[str, float]:
    replay, found = Replay(folder, data, 0.5, 10, "p"), {}
    for _ in range(updates):
        found = learner.update(replay.draw(128, 1.0, np.random.default_rng(learner.num_updates)))
    return found


@pytest.mark.parametrize("region", [(1.0, 3.0), (-3.0, -1.0)])
def test_the_noise_that_succeeds_is_found_and_the_policy_stays_as_it_was(region, tmp_path) -> None:
    data, base = logged(region), Twice()
    learner, before = learner_of(data), {k: v.clone() for k, v in base.state_dict().items()}
    found = learn(learner, data, tmp_path, 150)
    assert learner.noise is not None
    policy = SteeredPolicy(base, learner.networks, learner.noise.actor)
    obs = fake_observation(SPEC, 40)
    obs.state[:, :2] = [0, 1]
    greedy = policy.act(obs, None, 0.0)
    assert ((greedy.actions[:, 0, 0] > region[0]) & (greedy.actions[:, 0, 0] < region[1])).all()
    np.testing.assert_array_equal(policy.act(obs, None, 0.0).actions, greedy.actions)
    drawn = policy.act(obs, torch.Generator().manual_seed(0), 1.0)
    assert drawn.path is not None and np.abs(drawn.path).max() <= NOISE["scale"]
    np.testing.assert_array_equal(drawn.actions, 2 * drawn.path[:, 0])
    inside = (drawn.actions[:, 0, 0] > region[0]) & (drawn.actions[:, 0, 0] < region[1])
    assert inside.mean() > 0.7 > 0.25 + inside.std(), "the policy's own draws are there in one of seven cases"
    assert found["noise/gain"] > 0.3 and found["noise_q/gap"] < 0.1
    assert all(torch.equal(before[name], value) for name, value in base.state_dict().items())


def test_the_actor_begins_as_the_policys_own_noise_and_stays_within_bounds() -> None:
    actor = NoiseActor(3, (4, 2), 16, 2.0)
    chosen = actor.choose(torch.randn(2000, 3), torch.Generator().manual_seed(0))
    assert chosen.shape == (2000, 4, 2) and chosen.abs().max() <= 2
    assert 0.75 < chosen.std() < 1.05 and abs(chosen.mean()) < 0.05
    assert not actor.choose(torch.randn(5, 3), None, 0.0).any()


def test_an_earlier_decision_is_worth_what_the_actor_will_make_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two decisions: the first means nothing, the second one's noise decides; SAC's target knows the better one."""
    second = logged((0.0, 20.0), 800)
    rows = np.arange(1600)
    late = rows % 2 == 1
    data = Transitions(
        **{n: np.repeat(getattr(second, n), 2, 0) for n in ("chunk", "candidates", "noise", "num_steps", "elapsed")},
        embedding=np.stack([late, ~late], 1).astype(np.float32),
        following=np.where(late, -1, rows + 1),
        remaining=np.where(late, 2, 4),
        episode=rows // 2,
        success=second.success,
        task=second.task,
        initial_state=second.initial_state,
    )
    value = {}
    for module in ("learner", "noise"):
        monkeypatch.setattr(f"vla_rl.algorithms.offpolicy.{module}.TARGET_DECAY", 0.95)
    for targets in ("td", "actor"):
        learner = learner_of(data, targets=targets)
        learn(learner, data, tmp_path / targets, 150)
        value[targets] = learner.values(data)[~late].mean()
    assert value["td"] == pytest.approx(0.475, abs=0.1), "the mean of .9 and .05"
    assert value["actor"] > 0.75


def test_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    data = logged((1.0, 3.0), 200)
    whole, first, second = (learner_of(data, targets="actor") for _ in range(3))
    learn(whole, data, tmp_path, 6)
    learn(first, data, tmp_path, 3)
    tensors, state = first.state()
    second.load_state({name: tensor.clone() for name, tensor in tensors.items()}, state)
    learn(second, data, tmp_path, 3)
    one, other = whole.state()[0], second.state()[0]
    assert any(name.startswith("actor.") for name in one) and any(name.startswith("slow_noise_q.") for name in one)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def lerobot(kind: str, **options: object):
    pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    values = {"type": kind, "preset": "tiny", "image_size": 32, "chunk_size": 4, "precision": "fp32"}
    policy = LeRobotConfig.model_validate(values | options).build(SPEC)
    mean = {"mean": [0.0] * 7, "std": [1.0] * 7}, {"mean": [0.0] * 8, "std": [1.0] * 8}
    policy.set_norm_stats({**fake_statistics(7), **mean[0]}, {**fake_statistics(8, gripper=False), **mean[1]})
    return policy.eval()


@pytest.mark.parametrize("kind", ["smolvla", "pi0", "xvla", "diffusion"])
def test_a_flow_policys_chunk_is_a_function_of_the_noise(kind: str) -> None:
    ddim = {"options": {"noise_scheduler_type": "DDIM"}, "chunk_size": 8} if kind == "diffusion" else {}
    policy, obs = lerobot(kind, **ddim), fake_observation(SPEC, 2)
    shape = noise_shape(policy)
    features, noise, chunks = embed_and_steer(policy, obs, 3, shape, torch.Generator().manual_seed(0))
    torch.testing.assert_close(features, policy.embed(obs))
    assert noise.shape == (2, 3, *shape) and not noise[:, 0].any()
    assert chunks.shape == (2, 3, policy.chunk_size, 7)
    again = policy.steer(obs, lambda _: torch.from_numpy(noise[:, 1:2]))[1]
    np.testing.assert_array_equal(again[:, 0], chunks[:, 1])
    assert not np.allclose(chunks[:, 1], chunks[:, 2])
    same = policy.steer(obs, lambda _: torch.ones(2, 1, 1, shape[1]))[1]
    np.testing.assert_array_equal(same, policy.steer(obs, lambda _: torch.ones(2, 1, *shape))[1])


def test_the_odes_own_noise_makes_its_own_chunk() -> None:
    """Steered by the noise that `act` would draw, a policy without padded dimensions gives the chunk that it gives."""
    policy, obs = (
        lerobot("diffusion", options={"noise_scheduler_type": "DDIM"}, chunk_size=8),
        fake_observation(SPEC, 2),
    )
    noise = torch.randn((2, *policy.noise_shape), generator=torch.Generator().manual_seed(7))
    own: ActionChunk = policy.act(obs, torch.Generator().manual_seed(7), 0.0)
    np.testing.assert_allclose(policy.steer(obs, lambda _: noise[:, None])[1][:, 0], own.actions, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("act", r"start from none. Use online\.method=best_of_n or edits"), ("diffusion", r"noise_scheduler_type=DDIM")],
)
def test_a_policy_without_a_starting_noise_is_refused(kind: str, message: str) -> None:
    options = {"options": {"noise_scheduler_type": "DDPM"}} if kind == "diffusion" else {}
    with pytest.raises(ConfigError, match=message):
        noise_shape(lerobot(kind, chunk_size=8, **options))


def test_targets_of_the_actor_need_one() -> None:
    with pytest.raises(ValueError, match=r"critic\.targets: got 'actor'.*set td"):
        OnlineConfig.model_validate({"critic": {"targets": "actor"}})
