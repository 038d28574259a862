"""What a policy prepares of an observation travels with its episode: once for each image, bounded, equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sim.dummy import DummyConfig
from vla_rl.algorithms import batch
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.data.augment import cropped_at_random
from vla_rl.data.config import AugmentConfig
from vla_rl.policies.openvla import inputs
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.inputs import apply_chain, prepare_images
from vla_rl.policies.openvla.options import OPENVLA_CHAIN, ImageChain
from vla_rl.rollout import runner
from vla_rl.rollout.runner import collect
from vla_rl.types import Episode, EpisodeSpec, Observation

SIDE = 40
CPU, GPU = torch.device("cpu"), torch.device("cuda")  # Nothing runs on the second: it is only asked what it would do.


def seen(number: int, side: int = 64) -> Observation:
    images = np.random.default_rng(0).integers(0, 256, (2, number, side, side, 3), dtype=np.uint8)
    return Observation(
        dict(zip(("front", "wrist"), images, strict=True)), np.zeros((number, 1), np.float32), ["go"] * number
    )


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("chain", [OPENVLA_CHAIN, ImageChain(), ImageChain(crop_area=0.5)])
def test_several_threads_prepare_what_one_does_and_only_what_is_read(two_threads, chain):
    obs = seen(5)
    inputs = prepare_images(obs, ("wrist",), SIDE, chain, CPU)
    assert inputs.is_prepared and list(inputs.images) == ["wrist"]
    np.testing.assert_array_equal(inputs.images["wrist"], apply_chain(obs.images["wrist"], chain, SIDE))
    assert prepare_images(inputs, ("wrist",), SIDE, chain, CPU) is inputs


def test_random_crops_are_not_cropped_again():
    obs, without = seen(2), OPENVLA_CHAIN.model_copy(update={"crop_area": None})
    with cropped_at_random(AugmentConfig(crop_area=0.9)):
        inputs = prepare_images(obs, ("front",), SIDE, OPENVLA_CHAIN, CPU)
    np.testing.assert_array_equal(inputs.images["front"], apply_chain(obs.images["front"], without, SIDE))


def test_images_that_fit_and_a_gpu_that_resizes_leave_the_observation_as_it_is():
    obs = seen(2)
    assert prepare_images(obs, ("front",), 64, ImageChain(), CPU) is obs
    assert prepare_images(obs, ("front",), SIDE, ImageChain(), GPU) is obs


class Run:
    """Two iterations of rollout and update of a tiny OpenVLA behind the published chain.

    Attributes:
        counts: images prepared in each rollout and in each update by turns. episodes: the last. weights: learned.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, algo: Any, change: Callable[[list[Episode]], list[Episode]] = list
    ) -> None:
        counted = 0

        def counting(images: np.ndarray, *arguments: Any) -> np.ndarray:
            nonlocal counted
            counted += len(images)
            return apply_chain(images, *arguments)

        monkeypatch.setattr(inputs, "apply_chain", counting)
        env = DummyConfig(num_envs=2, tasks=("reach_red",), image_size=64, horizon=4).build()
        config = OpenVLAConfig(
            image_size=32, action_bins=5, chunk_size=2, precision="fp32", images=OPENVLA_CHAIN, value_head=True
        )
        policy = config.build(env.spec)
        policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
        learner, counts = algo.build(policy, temperature=1.0), [0]
        for iteration in range(2):
            specs = [EpisodeSpec("reach_red", "train", iteration)] * 4
            episodes = change(collect(policy, env, specs, seed=iteration, groups=[0] * 4, keep_inputs=True))
            counts.append(counted)
            for number, episode in enumerate(episodes):  # Outcomes are made up, so that the group has both.
                episode.success = number % 2 == 0
                episode.reward[-1, 0] = float(episode.success)
            learner.update(learner.prepare(episodes))
            counts.append(counted)
        self.counts, self.episodes, self.weights = np.diff(counts).tolist(), episodes, policy.state_dict()

    @property
    def num_decisions(self) -> int:
        return sum(episode.num_chunks for episode in self.episodes)

    def assert_learned_the_same(self, other: Run) -> None:
        for name, weight in self.weights.items():
            torch.testing.assert_close(weight, other.weights[name], rtol=0, atol=0)


GRPO = GRPOConfig(optim={"lr": 1e-3}, epochs=2, kl_coef=0.1)


def bound(monkeypatch: pytest.MonkeyPatch, num_images: int) -> None:
    for module in (runner, batch):
        monkeypatch.setattr(module, "MAX_INPUT_BYTES", num_images * 32 * 32 * 3)


def test_an_update_takes_what_its_rollout_prepared_and_learns_the_same(monkeypatch):
    run = Run(monkeypatch, GRPO)
    assert run.counts == [run.num_decisions, 0] * 2
    for episode in run.episodes:
        assert episode.inputs is not None and episode.inputs.images["agentview"].shape[1:] == (32, 32, 3)
        assert not episode.obs.is_prepared and episode.obs.images["agentview"].shape[1:] == (64, 64, 3)
    bound(monkeypatch, 0)
    without = Run(monkeypatch, GRPO)
    passes = 4  # Old log-probabilities, reference, two epochs.
    assert without.counts == [run.num_decisions, passes * run.num_decisions] * 2
    assert all(episode.inputs is None for episode in without.episodes)
    run.assert_learned_the_same(without)


def test_what_does_not_fit_is_prepared_again(monkeypatch):
    whole = Run(monkeypatch, GRPO)
    bound(monkeypatch, 5)
    run = Run(monkeypatch, GRPO)
    kept = [episode.inputs.batch_size for episode in run.episodes if episode.inputs is not None]
    assert 0 < sum(kept) <= 6 < run.num_decisions, "the one that passes the bound is the last"
    run.assert_learned_the_same(whole)


def test_episodes_from_another_process_are_prepared_once(monkeypatch):
    def sent(episodes: list[Episode]) -> list[Episode]:
        return [replace(episode, inputs=None) for episode in episodes]

    run = Run(monkeypatch, GRPO, sent)
    assert run.counts == [run.num_decisions, run.num_decisions] * 2
    run.assert_learned_the_same(Run(monkeypatch, GRPO))


def test_ppo_prepares_the_last_observations_for_its_bootstrap(monkeypatch):
    run = Run(monkeypatch, PPOConfig(optim={"lr": 1e-3}, epochs=2))
    cut = sum(not episode.terminated.any() for episode in run.episodes)
    assert cut and run.counts[2:] == [run.num_decisions, cut]


def test_those_who_only_act_keep_nothing():
    env = DummyConfig(num_envs=2, tasks=("reach_red",), image_size=64, horizon=4).build()
    policy = OpenVLAConfig(image_size=32, action_bins=5, precision="fp32", images=OPENVLA_CHAIN).build(env.spec)
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    assert all(episode.inputs is None for episode in collect(policy, env, [EpisodeSpec("reach_red")] * 2))
