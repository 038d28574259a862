"""The model posterior: members that begin as the dynamics, differ by row, and share what is remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_dynamics import make_clip, make_dynamics
from test_model import future, small_world_model
from toy import toy_world_model

from vla_rl.config import ConfigError
from world_model.interfaces import PosteriorConfig
from world_model.model.dynamics import VideoContext, VideoDynamics
from world_model.model.world_model import load_world_model
from world_model.noise import NoiseStream
from world_model.types import Clip

MEMBERS = PosteriorConfig(members=3, rank=2)


def with_posterior() -> Any:
    dynamics = make_dynamics()
    dynamics.set_posterior(MEMBERS)
    return dynamics


def different(dynamics: VideoDynamics) -> Any:
    """Its members are no longer what they began as."""
    assert dynamics.posterior is not None
    torch.nn.init.normal_(dynamics.posterior.up, std=0.2)
    return dynamics


def loss(dynamics: VideoDynamics, clip: Clip, member: torch.Tensor | None = None) -> torch.Tensor:
    return dynamics.loss(clip, torch.Generator().manual_seed(0), member=member)[0]


@torch.no_grad()
def test_members_begin_as_the_dynamics_and_learn_apart_from_it() -> None:
    dynamics, clip, member = with_posterior(), make_clip(4, 4), torch.tensor([0, 1, 2, 0])
    plain = loss(dynamics, clip)
    assert torch.equal(plain, loss(make_dynamics(), clip)), "without a member it is as it was"
    torch.testing.assert_close(loss(dynamics, clip, member), plain)
    with torch.enable_grad():
        value = loss(dynamics, clip, torch.zeros(4, dtype=torch.int64))
        value.backward(inputs=list(dynamics.posterior.parameters()))
    own = dynamics.posterior.up.grad.abs().sum(1) > 0
    assert own.tolist() == [True] * 2 + [False] * 4, "the other members have seen nothing"


@torch.no_grad()
def test_each_row_is_imagined_by_its_member_over_one_memory() -> None:
    dynamics, clip = different(with_posterior()), make_clip(1, 3)
    context = dynamics.begin(clip.frames.at(slice(0, 1)), NoiseStream([0]))
    actions = clip.actions.at(slice(1, 3))
    alone = [
        dynamics.imagine(dynamics.with_members(context, torch.tensor([m])), actions, NoiseStream([5])) for m in range(3)
    ]
    assert not torch.allclose(alone[0].latents, alone[1].latents)
    rows = torch.zeros(3, dtype=torch.int64)
    together = dynamics.with_members(context.select(rows), torch.tensor([2, 0, 1]))
    found = dynamics.imagine(together, actions.select(rows), NoiseStream([5, 5, 5]))
    for row, m in enumerate((2, 0, 1)):
        torch.testing.assert_close(found.latents[row], alone[m].latents[0], atol=1e-5, rtol=1e-4)
    plain = dynamics.imagine(context, actions, NoiseStream([5]))
    assert torch.equal(plain.latents, make_dynamics().imagine(context, actions, NoiseStream([5])).latents)
    here = slice(0, 1)
    seen = [dynamics.extend(c, clip.frames.at(slice(1, 2)), actions.at(here), NoiseStream([3])) for c in (
        context, dynamics.with_members(context, torch.tensor([1])))]  # fmt: skip
    assert torch.equal(seen[0].keys, seen[1].keys) and seen[1].member.tolist() == [1]
    after = dynamics.next_members(together.select(torch.tensor([0, 0, 1, 1])), 2)
    assert after.member.tolist() == [0, 1, 1, 2]
    kept = cast(Any, VideoContext.from_tensors(together.tensors()))
    assert kept.put(torch.tensor([1]), kept.select(torch.tensor([0]))).member.tolist() == [2, 2, 1]
    assert "member" not in context.tensors()


def test_members_are_kept_in_the_folder(tmp_path: Path) -> None:
    world_model = small_world_model()
    before = future(world_model)[0]
    world_model.set_posterior(MEMBERS)
    different(world_model.dynamics)  # type: ignore[arg-type]
    world_model.save(tmp_path / "model")
    loaded = load_world_model(tmp_path / "model")
    assert loaded.config.posterior == MEMBERS
    assert torch.equal(loaded.dynamics.posterior.up, world_model.dynamics.posterior.up)
    assert torch.equal(future(loaded)[0].latents, before.latents), "nobody has asked for a member"


def test_a_world_model_without_members_says_how_to_get_some() -> None:
    with pytest.raises(ConfigError, match=r"env\.imagination\.posterior: got true.*world_model\.posterior\.steps"):
        small_world_model().check_posterior()
    with pytest.raises(ConfigError, match=r"world_model\.posterior: not for ToyDynamics; set its steps to 0"):
        toy_world_model().set_posterior(MEMBERS)
