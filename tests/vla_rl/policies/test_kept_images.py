"""OpenVLA's image chain runs once for each image: kept from the rollout for its update, bounded, equal to the bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from sim.dummy import DummyConfig
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.image_chain import apply_chain
from vla_rl.policies.openvla.inputs import ChainedImages
from vla_rl.policies.openvla.options import OPENVLA_CHAIN, ImageChain
from vla_rl.rollout.runner import collect
from vla_rl.types import Episode, EpisodeSpec

SIDE = 40
IMAGE_BYTES = SIDE * SIDE * 3


def pictures(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (number, 64, 64, 3), dtype=np.uint8)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def learning(mib: int = 1) -> ChainedImages:
    """What a policy that has learned once keeps its images in: none so far."""
    kept = ChainedImages(mib)
    with torch.enable_grad():
        kept.apply(pictures(1, seed=99), OPENVLA_CHAIN, SIDE)
    kept.num_chained = 0
    return kept


@torch.no_grad()
def test_kept_images_and_those_of_several_threads_are_equal_to_the_bit(two_threads):
    images, kept = pictures(5), learning()
    expected = apply_chain(images, OPENVLA_CHAIN, SIDE)
    for _ in range(2):
        np.testing.assert_array_equal(kept.apply(images, OPENVLA_CHAIN, SIDE), expected)
    assert kept.num_chained == 5
    np.testing.assert_array_equal(kept.apply(images[[3, 3, 0]], OPENVLA_CHAIN, SIDE), expected[[3, 3, 0]])
    assert kept.num_chained == 5 and kept.num_bytes == 5 * IMAGE_BYTES


@torch.no_grad()
def test_another_chain_or_size_is_another_image():
    images, kept = pictures(2), learning()
    turned = OPENVLA_CHAIN.model_copy(update={"rotate": True})
    for chain, size in ((OPENVLA_CHAIN, SIDE), (turned, SIDE), (OPENVLA_CHAIN, 32), (ImageChain(crop_area=0.5), SIDE)):
        np.testing.assert_array_equal(kept.apply(images, chain, size), apply_chain(images, chain, size))


@torch.no_grad()
def test_the_image_not_asked_for_the_longest_goes_first(monkeypatch):
    kept = learning()
    kept.max_bytes = 3 * IMAGE_BYTES
    images = pictures(4)
    for row in (0, 1, 2, 0, 3):  # The last takes the place of image 1.
        kept.apply(images[[row]], OPENVLA_CHAIN, SIDE)
    assert (kept.num_chained, kept.num_bytes) == (4, kept.max_bytes)
    kept.apply(images[[0, 2, 3]], OPENVLA_CHAIN, SIDE)
    assert kept.num_chained == 4
    kept.apply(images[[1]], OPENVLA_CHAIN, SIDE)
    assert kept.num_chained == 5


def test_nothing_is_kept_without_memory_or_by_who_only_acts():
    images = pictures(2)
    for kept, learns in ((ChainedImages(0), True), (ChainedImages(1), False)):
        with torch.set_grad_enabled(learns):
            for _ in range(2):
                kept.apply(images, OPENVLA_CHAIN, SIDE)
        assert kept.num_chained == 4 and kept.num_bytes == 0
    assert copy.deepcopy(kept) is kept


def test_images_seen_with_gradients_alone_are_not_kept():
    kept, images = learning(), pictures(2)
    for _ in range(2):  # As cloning sees demonstrations, each augmented anew.
        kept.apply(images, OPENVLA_CHAIN, SIDE)
    assert kept.num_chained == 4 and kept.num_bytes == 0
    with torch.no_grad():
        kept.apply(images, OPENVLA_CHAIN, SIDE)
    kept.apply(images, OPENVLA_CHAIN, SIDE)
    assert kept.num_chained == 6 and kept.num_bytes == 2 * IMAGE_BYTES


def run(kept_images: int) -> tuple[list[int], list[Episode], dict[str, torch.Tensor]]:
    """Images chained in each rollout and in each update by turns, the last episodes, and the learned weights."""
    env = DummyConfig(num_envs=2, tasks=("reach_red",), horizon=4).build()
    config = OpenVLAConfig(
        image_size=32, action_bins=5, chunk_size=2, precision="fp32", images=OPENVLA_CHAIN, kept_images=kept_images
    )
    policy = config.build(env.spec)
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    learner, counts = GRPOConfig(lr=1e-3, epochs=2, kl_coef=0.1).build(policy, temperature=1.0), [0]
    episodes: list[Episode] = []
    for iteration in range(2):
        specs = [EpisodeSpec("reach_red", "train", iteration)] * 4
        episodes = collect(policy, env, specs, seed=iteration, groups=[0] * 4)
        counts.append(policy.images.num_chained)
        for number, episode in enumerate(episodes):  # Outcomes are made up, so that the group has both.
            episode.success = number % 2 == 0
            episode.reward[-1, 0] = float(episode.success)
        learner.update(learner.prepare(episodes))
        counts.append(policy.images.num_chained)
    return np.diff(counts).tolist(), episodes, policy.state_dict()


def test_an_update_takes_the_images_of_its_rollout_and_learns_the_same():
    counts, episodes, weights = run(kept_images=16)
    num_decisions = sum(episode.num_chunks for episode in episodes)
    assert counts[2] <= num_decisions and counts[3] == 0, "from the second rollout on"
    again, same_episodes, same_weights = run(kept_images=0)
    assert again[2] == num_decisions and again[3] >= 3 * num_decisions, "reference, and two epochs"
    for one, other in zip(episodes, same_episodes, strict=True):
        np.testing.assert_array_equal(one.chunks.actions, other.chunks.actions)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, same_weights[name], rtol=0, atol=0)
