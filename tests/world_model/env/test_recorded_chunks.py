"""Imagining as recorded passes: the same episodes as without, where a pass is replayed without its Python."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from toy import METADATA, ToyInitialFrames, toy_world_model

from vla_rl.config import validate
from vla_rl.types import EpisodeSpec
from world_model.config import ImaginationConfig, ObjectsConfig, WorldModelConfig
from world_model.env import recorded
from world_model.env.env import WorldModelEnv
from world_model.env.recorded import RecordedImagining
from world_model.model.parts import build_parts
from world_model.model.world_model import WorldModel

SLOW = pytest.mark.slow
NUM_ENVS, FRAME_STEPS, ACTION_DIM = 5, 4, 7
SMALL = {
    "frame_steps": FRAME_STEPS,
    "autoencoder": {"channels": [4, 8], "blocks": [1, 1], "latent_channels": 4},
    "dynamics": {"width": 32, "depth": 2, "heads": 2, "patch": 2, "memory": 2},
    "success": {"width": 32, "depth": 1},
}
NUMBERS = {
    "state_mean": (0.0,) * 3, "state_std": (1.0,) * 3, "action_low": (-1.0,) * ACTION_DIM,
    "action_high": (1.0,) * ACTION_DIM, "objects_probability": (1.0, 0.0), "inverse_errors": (-1.0, 1.0),
    "tasks": {"reach": "reach the goal", "reach_back": "now go back to where the goal was", "turn": "turn"},
    "horizon": {"reach": 60, "reach_back": 16, "turn": 60},
}  # fmt: skip


class TracedPass:
    """What a CUDA graph is, on a CPU: operations on tensors where they lay when it was recorded, without Python."""

    num_recorded = 0

    def __init__(self, function: Any, _: Any) -> None:
        self.function, self.graphs = function, {}

    def __call__(self, *inputs: torch.Tensor | None) -> Any:
        key = tuple(None if x is None else (x.shape, x.dtype) for x in inputs)
        given = [x for x in inputs if x is not None]
        if key not in self.graphs:
            TracedPass.num_recorded += 1

            def plain(*tensors: torch.Tensor) -> Any:
                rest = iter(tensors)
                made = self.function(*(None if x is None else next(rest) for x in inputs))
                self.is_made = [x is not None for x in made]
                return [x for x in made if x is not None]

            with torch.no_grad():
                plain(*given)  # Warms up.
                self.graphs[key] = make_fx(plain)(*(x.clone() for x in given)), self.is_made
        graph, is_made = self.graphs[key]
        made = iter(graph(*given))
        return tuple(next(made).clone() if there else None for there in is_made)


class ThreeStates(ToyInitialFrames):
    """The toy's, with states of three numbers and the tasks here."""

    def observe(self, specs: Any) -> Any:
        obs = super().observe([replace(spec, task="reach", instruction=NUMBERS["tasks"][spec.task]) for spec in specs])
        return replace(obs, state=np.pad(obs.state, ((0, 0), (0, 1))))


def make_env(**options: Any) -> WorldModelEnv:
    torch.manual_seed(0)
    config, metadata = validate(WorldModelConfig, SMALL), METADATA.model_copy(update=NUMBERS)
    world_model = WorldModel(config, metadata, build_parts(config, metadata))
    parts = {"slots": [["block"], ["plate"]], "width": 16, "probe_width": 8, "end_effector": "learned"}
    world_model.set_objects(validate(ObjectsConfig, parts))
    world_model.add_inverse()
    for parameter in world_model.parameters():  # Also those that start at zero.
        parameter.data += 0.1 * torch.randn(parameter.shape)
    imagination = validate(ImaginationConfig, {"precision": "fp32", **options})
    return WorldModelEnv(world_model.eval(), ThreeStates(), imagination, NUM_ENVS)


def episodes(env: WorldModelEnv, length: int) -> list[np.ndarray]:
    """What is seen and paid in some chunks, some of part of the environments, some begun anew with other tasks."""
    tasks = list(NUMBERS["tasks"])
    specs = [EpisodeSpec(tasks[i % 2], "train", i) for i in range(NUM_ENVS)]
    obs, rng, found = env.reset(specs), np.random.default_rng(0), []
    found += [obs.images["wrist"], obs.state]
    running = set(range(NUM_ENVS))
    for number in range(6):
        ids = sorted(running) if number % 3 else [i for i in sorted(running) if i != 1]
        actions = rng.uniform(-1, 1, (NUM_ENVS, length, ACTION_DIM)).astype(np.float32)
        step = env.step(actions[ids], ids)
        found += [step.obs.images["agentview"], step.obs.state, step.reward, step.num_steps, step.done]
        found += [step.info[name] for name in ("discarded", "disagreement")]
        ended = [i for i, done in zip(ids, step.done, strict=True) if done]
        running -= set(ended)
        if ended and number % 2:
            env.reset([EpisodeSpec("turn", "train", 10 * number + i) for i in ended], ended)
            running |= set(ended)
        if not running:
            break
    keyframe = env.save_state(sorted(running)[:1])[0]
    return [*found, *keyframe.arrays.values()]


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({"dual_noise": 2}, 8),
        pytest.param({"dual_noise": 0}, 4, marks=SLOW),
        pytest.param({"dual_noise": 1, "ensemble": 3}, 4, marks=SLOW),
        pytest.param(
            {"dual_noise": 0, "reward": "objects", "action_penalty": 0.3, "stop_probability": 0.99}, 8, marks=SLOW
        ),
    ],
)
def test_replayed_episodes_are_those_without(options, length, monkeypatch):
    monkeypatch.setattr(recorded, "ReplayedPass", TracedPass)
    monkeypatch.setattr(TracedPass, "num_recorded", 0)
    plain, replayed = make_env(**options), make_env(**options)
    replayed._recorded = RecordedImagining(replayed.world_model, replayed.config)
    expected, found = episodes(plain, length), episodes(replayed, length)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        tolerance = 1 if one.dtype == np.uint8 else 1e-4
        np.testing.assert_allclose(one.astype(float), other.astype(float), atol=tolerance, rtol=0)
    if options["dual_noise"]:
        assert any(array.dtype == bool and array.any() for array in found), "something was verified"
    assert TracedPass.num_recorded <= 3 + 2, "at each longest instruction that there is, and no more"


def test_a_dynamics_that_cannot_be_recorded_says_so():
    with pytest.raises(ValueError, match=r"env\.imagination\.compile: not for ToyDynamics"):
        RecordedImagining(toy_world_model(), ImaginationConfig())
