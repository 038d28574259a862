"""Real-time chunking of SmolVLA, pi0 and pi0.5: LeRobot's own, and smooth where one chunk follows another."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from test_lerobot_flow import SPEC, make, old_crop  # noqa: F401  (a fixture)

from vla_rl.policies.fake_input import fake_observation
from vla_rl.policies.lerobot.options import CONTINUING_TYPES
from vla_rl.policies.load import load_policy
from vla_rl.types import ActionPrefix

STEPS = 10


@pytest.fixture(scope="module", params=CONTINUING_TYPES)
def policy(request):
    """10 denoising steps, as published checkpoints have: the guidance is made for that many."""
    return make(request.param, sampling={"num_steps": STEPS}, chunk_size=16)


def under_way(rows, length, seed=0):
    """The rest of a former chunk, in the environment's units: a smooth motion, another for each row and dimension."""
    rng = np.random.default_rng(seed)
    start, slope = rng.uniform(-0.6, 0.6, (2, rows, 1, 7))
    return (start + slope * np.arange(length)[None, :, None] / 16).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"execution_horizon": 6, "max_guidance_weight": 3.0, "prefix_attention_schedule": "EXP"},
        {"execution_horizon": 9, "prefix_attention_schedule": "ONES"},
        {"prefix_attention_schedule": "ZEROS"},
    ],
    ids=["defaults", "exp", "ones", "zeros"],
)
def test_it_is_lerobots(policy, options, old_crop):  # noqa: F811
    from lerobot.configs import RTCAttentionSchedule
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    obs, rest = fake_observation(SPEC, 2), under_way(2, 12)
    ours = policy.act_with_prefix(obs, ActionPrefix(rest, 4, **options), torch.Generator().manual_seed(3)).actions
    theirs = dict(options)
    if schedule := theirs.get("prefix_attention_schedule"):
        theirs["prefix_attention_schedule"] = RTCAttentionSchedule(schedule)
    core, noise = policy.core, torch.randn((2, 16, 7), generator=torch.Generator().manual_seed(3))
    name = "num_steps" if hasattr(core.config, "num_steps") else "num_inference_steps"
    own_steps = getattr(core.config, name)
    batch = policy._batch(obs, rest)
    leftover = batch.pop("action")
    try:
        setattr(core.config, name, STEPS)
        core.config.rtc_config = RTCConfig(**theirs)
        core.init_rtc_processor()
        expected = core.predict_action_chunk(batch, noise=noise, inference_delay=4, prev_chunk_left_over=leftover)
    finally:
        setattr(core.config, name, own_steps)
        core.config.rtc_config = None
        core.init_rtc_processor()
    np.testing.assert_allclose(ours, policy.postprocessor(expected.detach()).numpy(), atol=1e-5)


def test_the_new_chunk_begins_as_the_old_one_goes_on(policy):
    """Frozen actions are those under way, within a fraction of an action's deviation; then it comes away gradually."""
    frozen, deviation = 4, 0.5
    for seed in range(6):
        obs, rest = fake_observation(SPEC, 2, seed), under_way(2, 12, seed)
        generator = torch.Generator().manual_seed(seed)
        free = policy.act(obs, generator, 0.0).actions
        smooth = policy.act_with_prefix(obs, ActionPrefix(rest, frozen), generator.manual_seed(seed)).actions
        assert np.abs(smooth - np.pad(rest, ((0, 0), (0, 4), (0, 0))))[:, :frozen].max() < 0.15 * deviation
        # The new chunk takes over after the frozen actions, where the old one went to rest[:, frozen].
        jumps = [np.abs(chunk[:, frozen] - rest[:, frozen]).mean() for chunk in (smooth, free)]
        assert jumps[0] < 0.1 * jumps[1], seed
        change = np.abs(smooth - free).mean((0, 2))
        assert change[12:].max() < 0.5 * change[:frozen].mean(), "what lies beyond the prefix is left to the policy"


def test_without_weight_it_is_the_policys_own_chunk(policy):
    obs = fake_observation(SPEC, 2)
    prefix = ActionPrefix(under_way(2, 12), 0, prefix_attention_schedule="ZEROS")
    np.testing.assert_array_equal(policy.act_with_prefix(obs, prefix).actions, policy.act(obs, None, 0.0).actions)


def test_more_frozen_than_the_horizon_are_all_frozen(policy):
    """LeRobot freezes no more than its horizon; on a robot every one of them will have been played."""
    obs, rest = fake_observation(SPEC, 2), under_way(2, 12)
    actions = policy.act_with_prefix(obs, ActionPrefix(rest, 9, execution_horizon=2)).actions
    assert np.abs(actions[:, :9] - rest[:, :9]).max() < 0.15 * 0.5


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (ActionPrefix(under_way(1, 17)), "prefix: expected 1 to 16 actions"),
        (ActionPrefix(under_way(2, 4)), r"got shape \(2, 4, 7\)"),
        (ActionPrefix(under_way(1, 4)[..., :6]), r"got shape \(1, 4, 6\)"),
        (ActionPrefix(under_way(1, 4), 5), "num_frozen: got 5, must be 0 to 4"),
        (ActionPrefix(under_way(1, 4), 1, max_guidance_weight=0.0), "max_guidance_weight must be positive"),
        (ActionPrefix(under_way(1, 4), 1, prefix_attention_schedule=cast(Any, "linear")), "must be one of ZEROS, ONES"),
    ],
)
def test_what_it_cannot_use_is_refused(policy, prefix, message):
    with pytest.raises(ValueError, match=message):
        policy.act_with_prefix(fake_observation(SPEC, 1), prefix)


def test_a_checkpoints_own_options_hold_where_the_robot_says_nothing(tmp_path):
    from lerobot.configs import RTCAttentionSchedule
    from lerobot.policies.rtc.configuration_rtc import RTCConfig

    policy: Any = make(chunk_size=16)
    policy.core.config.rtc_config = RTCConfig(
        prefix_attention_schedule=RTCAttentionSchedule.ONES, max_guidance_weight=5.0, execution_horizon=6
    )
    policy.save(tmp_path / "policy")
    loaded: Any = load_policy(tmp_path / "policy")
    obs, rest = fake_observation(SPEC, 1), under_way(1, 12)
    told = {"execution_horizon": 6, "max_guidance_weight": 5.0, "prefix_attention_schedule": "ONES"}
    fresh: Any = make(chunk_size=16)
    expected = fresh.act_with_prefix(obs, ActionPrefix(rest, 3, **told)).actions
    np.testing.assert_array_equal(loaded.act_with_prefix(obs, ActionPrefix(rest, 3)).actions, expected)
    np.testing.assert_array_equal(loaded.act(obs, None, 0.0).actions, fresh.act(obs, None, 0.0).actions)
