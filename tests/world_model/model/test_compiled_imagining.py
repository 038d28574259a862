"""Compiled imagining: the same numbers; and, where graphs are replayed into the same places, results that last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_dynamics import make_clip, make_dynamics
from test_dynamics_conformance import INPUTS

from vla_rl.config import validate
from world_model.config import WorldModelConfig
from world_model.interfaces import Dynamics
from world_model.model.compiled import compiled
from world_model.noise import NoiseStream
from world_model.types import Frames

CUDA = torch.device("cuda")  # Named only; nothing runs there.


def imagined(dynamics: Dynamics) -> Frames:
    """Two frames after the first two of two clips, the first of which is then remembered."""
    clip, noise = make_clip(2, 4), NoiseStream([1, 2])
    context = dynamics.begin(clip.frames.at(slice(0, 1)), noise)
    context = dynamics.extend(context, clip.frames.at(slice(1, 2)), clip.actions.at(slice(1, 2)), noise)
    return dynamics.imagine(context, clip.actions.at(slice(2, 4)), noise)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("aot_eager", torch.device("cpu")),
        ("inductor", torch.device("cpu")),
        ("inductor", CUDA),  # What CUDA is called with; on a CPU it makes no graph.
    ],
)
@torch.no_grad()
def test_compiled_it_imagines_the_same(backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    dynamics = make_dynamics(depth=1)
    names = list(dynamics.state_dict())
    expected = imagined(dynamics)
    monkeypatch.setattr(
        "world_model.model.dynamics.compiled", lambda function, _, backend: compiled(function, device, backend)
    )
    dynamics.compile_imagining(backend)
    found, again = imagined(dynamics), imagined(dynamics)
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 2, "an imagined frame and a remembered one are compiled"
    assert not torch._dynamo.utils.counters["graph_break"], "each is one graph"
    for frames in (found, again):
        torch.testing.assert_close(frames.latents, expected.latents, rtol=0, atol=1e-4)
        torch.testing.assert_close(frames.states, expected.states, rtol=0, atol=1e-4)
    assert list(dynamics.state_dict()) == names
    torch.compiler.reset()


def test_a_replay_does_not_overwrite_what_was_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` gives what a graph is: a function that writes each result to the same place."""
    modes, begun = [], []

    def as_graph(function: Any, mode: str | None, backend: str) -> Any:
        modes.append(mode)
        place = Frames(torch.zeros(3), torch.zeros(2))

        def replay(*args: Any) -> Frames:
            result = function(*args)
            place.latents.copy_(result.latents)
            place.states.copy_(result.states)
            return place

        return replay

    monkeypatch.setattr(torch, "compile", as_graph)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(True))
    call = compiled(lambda x: Frames(x + torch.arange(3), x * torch.ones(2)), CUDA)
    one, two = call(torch.tensor(1.0)), call(torch.tensor(5.0))
    assert one.latents.tolist() == [1, 2, 3] and one.states.tolist() == [1, 1]
    assert two.latents.tolist() == [5, 6, 7] and two.states.tolist() == [5, 5]
    assert modes == ["reduce-overhead"] and len(begun) == 2
    compiled(lambda x: x, torch.device("cpu"))
    assert modes[1] is None


def test_a_dynamics_that_cannot_be_compiled_says_so() -> None:
    config = validate(WorldModelConfig, {"dynamics": {"kind": "my_dynamics:DriftConfig"}})
    with pytest.raises(ValueError, match=r"env\.imagination\.compile: not for DriftDynamics"):
        config.dynamics.build(INPUTS).compile_imagining()
