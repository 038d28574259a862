"""Episodes imagined by members of a posterior: who shares one, how long it is kept, and what members disagree on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from toy import ToyInitialFrames, push, through_a_file, toy_env

from vla_rl.config import ConfigError
from vla_rl.types import EpisodeSpec, Observation
from world_model.config import ImaginationConfig
from world_model.env.env import WorldModelEnv
from world_model.interfaces import PosteriorConfig
from world_model.model.world_model import WorldModel

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))
from test_model import small_world_model

SPEC = EpisodeSpec("reach", "train", 3)


class Images(ToyInitialFrames):
    """Images of 16 x 16 pixels, of the same state alike."""

    def observe(self, specs: Sequence[EpisodeSpec]) -> Observation:
        """See `InitialFrames`."""
        obs = super().observe(specs)
        return replace(obs, images={name: image.repeat(2, 1).repeat(2, 2) for name, image in obs.images.items()})


def members(count: int = 4, spread: float = 0.3) -> WorldModel:
    world_model = small_world_model()
    world_model.set_posterior(PosteriorConfig(members=count, rank=2))
    torch.manual_seed(1)
    torch.nn.init.normal_(world_model.dynamics.posterior.up, std=spread)
    return world_model


def env_of(world_model: WorldModel, num_envs: int, **options: Any) -> WorldModelEnv:
    config = ImaginationConfig.model_validate({"posterior": True, "dual_noise": 0, **options})
    return WorldModelEnv(world_model, Images(), config, num_envs)


def drawn(env: WorldModelEnv) -> list[int]:
    """The member of each environment's episode."""
    return cast(Any, env._memory).context.member.tolist()


def test_a_group_shares_a_member() -> None:
    env = env_of(members(), 16)
    groups = env.deal([replace(SPEC, index=i) for i in range(4)], 4)
    env.reset([spec.member(number) for spec in groups for number in range(4)])
    found = np.array(drawn(env)).reshape(4, 4)
    assert len(np.unique(found)) > 1
    assert (found == found[:, :1]).all()
    apart = env_of(env.world_model, 2)  # Which other episodes there are does not matter.
    apart.reset([groups[3].member(2), groups[1].member(1)])
    assert drawn(apart) == [found[3, 2], found[1, 1]]
    again = env_of(env.world_model, 1)
    again.load_state(env.state())
    lap = [again.deal([SPEC], 4)[0] for _ in range(12)]
    seen = set()
    for spec in lap:
        again.reset([spec])
        seen.update(drawn(again))
    assert len(seen) > 1, "the same state draws another member when it comes again"


def test_an_episode_keeps_its_member_also_from_a_keyframe_on() -> None:
    world_model = members()
    env = env_of(world_model, 3)
    env.reset([replace(SPEC, index=i) for i in range(3)])
    before = drawn(env)
    env.step(push(0.3, 3, 4))
    assert drawn(env) == before
    keyframe = through_a_file(env.save_state([1])[0])
    expected = env.step(push(0.3, 1, 4), [1]).obs.state[0]
    other = env_of(world_model, 2)
    other.reset([replace(SPEC, index=1, keyframe=keyframe)] * 2)
    assert drawn(other) == [before[1]] * 2
    found = other.step(push(0.3, 2, 4)).obs.state
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    assert not np.allclose(found[0], found[1]), "its noise is another"
    plain = env_of(world_model, 1, posterior=False)
    with pytest.raises(ValueError, match="keyframe: is of another world model"):
        plain.reset([replace(SPEC, index=1, keyframe=keyframe)])


def test_members_disagree_by_what_they_are_and_not_by_noise() -> None:
    alike = env_of(members(spread=0.0), 2, ensemble=3)
    alike.reset([SPEC, replace(SPEC, index=5)])
    assert alike.step(push(0.3, 2, 4)).info["disagreement"].max() < 1e-6
    env = env_of(members(), 2, ensemble=3)
    env.reset([SPEC, replace(SPEC, index=5)])
    assert env.step(push(0.3, 2, 4)).info["disagreement"].min() > 1e-3


def test_a_world_model_without_members_or_with_too_few_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.imagination\.ensemble: got 5 with posterior=true.* has 4 members"):
        env_of(members(4), 1, ensemble=5)
    assert env_of(members(4), 1, ensemble=4).config.futures == "members"
    with pytest.raises(ConfigError, match=r"env\.imagination\.posterior: got true, but the world model has no members"):
        toy_env(posterior=True)
