"""Several chunks of one observation: those that `act` would draw, whether in one pass of the network or in several."""

from __future__ import annotations

import numpy as np
import torch

from vla_rl.algorithms.offpolicy.value_guided import SeveralChunksPolicy, embed_and_draw
from vla_rl.common.row_noise import RowGenerator
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.openvla.config import OpenVLAConfig

SPEC = fake_env_spec(image_size=32)


def policy_of(decoder: str):
    options = {"decoder": decoder, "chunk_size": 2, "image_size": 32, "precision": "fp32"}
    config = OpenVLAConfig.model_validate(options)
    policy = config.build(SPEC)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy.eval()


def test_one_pass_draws_what_several_would() -> None:
    policy, obs = policy_of("parallel"), fake_observation(SPEC, 3)
    assert isinstance(policy, SeveralChunksPolicy) and policy.draws_at_once
    features, chunks = embed_and_draw(policy, obs, 3, torch.Generator().manual_seed(5), 1.3)
    torch.testing.assert_close(features, policy.embed(obs))
    assert chunks.shape == (3, 3, 2, 7) and chunks.dtype == np.float32
    np.testing.assert_array_equal(chunks[:, 0], policy.act(obs, None, 0.0).actions)
    again = torch.Generator().manual_seed(5)
    for number in (1, 2):
        np.testing.assert_array_equal(chunks[:, number], policy.act(obs, again, 1.3).actions)


def test_a_policy_of_one_chunk_a_pass_is_asked_for_more_rows() -> None:
    policy, obs = policy_of("autoregressive"), fake_observation(SPEC, 2)
    assert not policy.draws_at_once
    noise = RowGenerator()
    noise.rows = [torch.Generator().manual_seed(row) for row in (1, 2)]
    features, chunks = embed_and_draw(policy, obs, 3, noise, 1.0)
    assert chunks.shape == (2, 3, 2, 7) and len(features) == 2
    np.testing.assert_array_equal(chunks[:, 0], policy.act(obs, None, 0.0).actions)
    other = RowGenerator()
    other.rows = [torch.Generator().manual_seed(2)]
    np.testing.assert_array_equal(embed_and_draw(policy, obs.select([1]), 3, other, 1.0)[1][0], chunks[1])
    assert not np.array_equal(chunks[:, 1], chunks[:, 2])
