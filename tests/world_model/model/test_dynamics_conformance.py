"""What every dynamics must do, those that ship and one from outside, named as package:Class."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.config import ConfigError, validate
from world_model.config import WorldModelConfig
from world_model.fit.config import FitConfig
from world_model.interfaces import Dynamics
from world_model.model.dynamics import TransformerConfig
from world_model.model.wan import WanConfig
from world_model.noise import NoiseStream
from world_model.types import Actions, Clip, DynamicsInputs, Frames

INPUTS = DynamicsInputs((2, 4, 4), ("front", "wrist"), 5, 3, 4, np.zeros(5, np.float32), np.ones(5, np.float32))
WAN_SIZES = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 2,
    "out_channels": 2,
    "text_dim": 8,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 1,
    "rope_max_seq_len": 32,
}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "transformer": {"width": 32, "depth": 1, "heads": 2, "memory": 2},
    "wan": {"kind": "wan", "transformer": WAN_SIZES, "dtype": "float32", "memory": 2, "sampling_steps": 2},
    "outside": {"kind": "my_dynamics:DriftConfig", "spread": 0.5},
}


@pytest.fixture(params=list(VARIANTS))
def dynamics(request: pytest.FixtureRequest) -> Dynamics:
    torch.manual_seed(0)
    config = validate(WorldModelConfig, {"dynamics": VARIANTS[request.param]})
    network = config.dynamics.build(INPUTS).eval()
    for parameter in network.parameters():  # Also the layers that start at zero, so that everything has its effect.
        parameter.data += 0.05 * torch.randn_like(parameter)
    return network


def make_clip(size: int = 3, length: int = 4) -> Clip:
    generator = torch.Generator().manual_seed(1)
    views, steps = (len(INPUTS.cameras), *INPUTS.latent_shape), (INPUTS.frame_steps, INPUTS.action_dim)
    frames = Frames(
        torch.randn(size, length, *views, generator=generator),
        torch.randn(size, length, INPUTS.state_dim, generator=generator),
    )
    executed = torch.ones(size, length, steps[0], dtype=torch.bool)
    executed[:, 0] = False
    values = torch.randn(size, length, *steps, generator=generator) * executed[..., None]
    valid = torch.ones(size, length, dtype=torch.bool)
    first = torch.ones(size, dtype=torch.int64)
    return Clip(frames, Actions(values, executed), first, valid, torch.zeros_like(valid), ["reach"] * size)


def imagined(dynamics: Dynamics, clip: Clip, seeds: list[int], actions: Actions | None = None) -> Frames:
    """Two frames after the first two of each clip."""
    noise = NoiseStream(seeds)
    context = dynamics.begin(clip.frames.at(slice(0, 1)), noise)
    context = dynamics.extend(context, clip.frames.at(slice(1, 2)), clip.actions.at(slice(1, 2)), noise)
    return dynamics.imagine(context, actions or clip.actions.at(slice(2, 4)), noise)


def assert_same(a: Frames, b: Frames) -> None:
    torch.testing.assert_close(a.latents, b.latents, rtol=0, atol=1e-5)
    torch.testing.assert_close(a.states, b.states, rtol=0, atol=1e-5)


def test_it_learns_from_a_clip(dynamics: Dynamics) -> None:
    loss, metrics = dynamics.loss(make_clip(), torch.Generator().manual_seed(0))
    loss.backward()
    assert loss.isfinite() and loss.ndim == 0 and "latent_error" in metrics
    assert all(math.isfinite(float(value)) for value in metrics.values())
    assert any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in dynamics.parameters())
    if not dynamics.config.learns_from_own_frames:
        with pytest.raises(ValueError, match=r"clip_source: not for"):
            dynamics.loss(make_clip(), torch.Generator(), make_clip().frames)


def test_imagining_follows_the_noise_handed_in_and_nothing_else(dynamics: Dynamics) -> None:
    clip = make_clip()
    found = imagined(dynamics, clip, [0, 1, 2])
    assert found.latents.shape == (3, 2, 2, 2, 4, 4) and found.states.shape == (3, 2, 5)
    assert found.latents.dtype == found.states.dtype == torch.float32 and not found.latents.requires_grad
    assert_same(imagined(dynamics, clip, [0, 1, 2]), found)
    assert not torch.allclose(imagined(dynamics, clip, [3, 4, 5]).latents, found.latents)


def test_a_frame_depends_on_its_actions_and_on_no_later_ones(dynamics: Dynamics) -> None:
    clip = make_clip()
    actions = clip.actions.at(slice(2, 4))
    values = actions.values.clone()
    values[:, 1] += 1
    plain, changed = (imagined(dynamics, clip, [0, 1, 2], a) for a in (actions, Actions(values, actions.executed)))
    assert_same(plain.at(slice(0, 1)), changed.at(slice(0, 1)))
    assert not torch.allclose(plain.latents[:, 1], changed.latents[:, 1])


def test_an_episode_is_the_same_beside_any_others_and_after_a_keyframe(dynamics: Dynamics) -> None:
    clip, noise = make_clip(), NoiseStream([0, 1, 2])
    context = dynamics.begin(clip.frames.at(slice(0, 1)), noise)
    action = clip.actions.at(slice(1, 2))
    whole = dynamics.imagine(context, action, NoiseStream([5, 6, 7]))
    rows = torch.tensor([2, 0])
    assert_same(dynamics.imagine(context.select(rows), action.select(rows), NoiseStream([7, 5])), whole.select(rows))
    restored = type(context).from_tensors(context.put(rows, context.select(rows)).tensors())
    assert all(tensor.shape[0] == 3 for tensor in restored.tensors().values())
    assert_same(dynamics.imagine(restored, action, NoiseStream([5, 6, 7])), whole)


def test_its_config_and_weights_make_the_same_again(dynamics: Dynamics) -> None:
    saved = WorldModelConfig(dynamics=dynamics.config).model_dump(mode="json")
    config = validate(WorldModelConfig, json.loads(json.dumps(saved)))
    assert config.dynamics == dynamics.config
    again = config.dynamics.build(INPUTS).eval()
    again.load_state_dict(dynamics.state_dict())
    assert_same(imagined(again, make_clip(), [0, 1, 2]), imagined(dynamics, make_clip(), [0, 1, 2]))


def test_what_is_no_dynamics_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dynamics\.kind: .* extends world_model\.interfaces\.DynamicsConfig"):
        validate(WorldModelConfig, {"dynamics": {"kind": "vla_rl.rollout.recording_plan:CollectConfig"}})
    with pytest.raises(ConfigError, match=r"world_model\.model\.dynamics\.spred: unknown key .* Did you mean 'spread'"):
        validate(FitConfig, {"model": {"dynamics": {**VARIANTS["outside"], "spred": 1}}}, prefix="world_model")


def test_the_known_kinds_are_those_of_always() -> None:
    assert isinstance(validate(WorldModelConfig, {}).dynamics, TransformerConfig)
    assert isinstance(validate(WorldModelConfig, {"dynamics": VARIANTS["wan"]}).dynamics, WanConfig)
    old = json.loads(Path("world_model/pretrained/tabletop/world_model.json").read_text())["config"]
    assert isinstance(validate(WorldModelConfig, old).dynamics, TransformerConfig)
