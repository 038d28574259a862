"""Compiled imagining: the same numbers."""

from __future__ import annotations

import pytest
import torch
from test_dynamics import make_clip, make_dynamics
from test_dynamics_conformance import INPUTS

from vla_rl.common.cuda_graphs import KeptConstants
from vla_rl.config import validate
from world_model.config import WorldModelConfig
from world_model.interfaces import Dynamics
from world_model.noise import NoiseStream
from world_model.types import Frames


def imagined(dynamics: Dynamics) -> Frames:
    """Two frames after the first two of two clips, the first of which is then remembered."""
    clip, noise = make_clip(2, 4), NoiseStream([1, 2])
    context = dynamics.begin(clip.frames.at(slice(0, 1)), noise)
    context = dynamics.extend(context, clip.frames.at(slice(1, 2)), clip.actions.at(slice(1, 2)), noise)
    return dynamics.imagine(context, clip.actions.at(slice(2, 4)), noise)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_compiled_it_imagines_the_same(backend: str) -> None:
    torch.compiler.reset()
    dynamics = make_dynamics(depth=1)
    names = list(dynamics.state_dict())
    expected = imagined(dynamics)
    dynamics.compile_imagining(backend)
    with KeptConstants():  # As it is recorded.
        found, again = imagined(dynamics), imagined(dynamics)
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 2, "an imagined frame and a remembered one are compiled"
    assert not torch._dynamo.utils.counters["graph_break"], "each is one function"
    for frames in (found, again):
        torch.testing.assert_close(frames.latents, expected.latents, rtol=0, atol=1e-4)
        torch.testing.assert_close(frames.states, expected.states, rtol=0, atol=1e-4)
    assert list(dynamics.state_dict()) == names
    torch.compiler.reset()


def test_a_dynamics_that_cannot_be_compiled_says_so() -> None:
    config = validate(WorldModelConfig, {"dynamics": {"kind": "my_dynamics:DriftConfig"}})
    with pytest.raises(ValueError, match=r"env\.imagination\.compile: not for DriftDynamics"):
        config.dynamics.build(INPUTS).compile_imagining()
