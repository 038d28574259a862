"""The smallest world models: of the dummy environment, fitted in a few updates; and Wan with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sim.dummy import DummyConfig
from vla_rl.config import validate
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset
from world_model.env.config import WorldModelEnvConfig
from world_model.env.env import WorldModelEnv
from world_model.fit.config import FitConfig
from world_model.noise import NoiseStream
from world_model.types import Frames

ENV = DummyConfig(num_envs=8, tasks=("reach_red",), horizon=12, steps_after_success=4)
_MODEL = {
    "autoencoder": {"channels": [4, 8], "blocks": [1, 1], "latent_channels": 4},
    "dynamics": {"width": 32, "depth": 1, "heads": 2, "patch": 4, "memory": 2},
    "success": {"width": 32, "depth": 1},
    "frame_steps": 4,
}
_STAGE = {"steps": 3, "batch_size": 4, "optim": {"warmup_steps": 1}}


def collect(folder: Path, start_index: int = 0, objects: bool = False) -> Path:
    """Episodes of a noisy expert, which fails now and then."""
    options = {"dataset": str(folder), "episodes_per_task": 24, "noise": 1.5, "noise_hold": 4, "keep": "all"}
    collect_dataset(ENV, validate(CollectConfig, options | {"start_index": start_index, "objects": objects}))
    return folder


def fit_config(episodes: Path) -> FitConfig:
    """A few updates of each stage."""
    values = {"model": _MODEL, "datasets": str(episodes), "clip_frames": 4, "holdout": 0.5, "precision": "fp32"}
    values |= {"autoencoder": _STAGE, "dynamics": _STAGE, "success": _STAGE}
    return validate(FitConfig, values | {"max_false_success": 0.99, "min_failures": 1})


def more_parts(episodes: Path, start: Path) -> FitConfig:
    """On top of a fit: all that may be added, a few updates each."""
    values = fit_config(episodes).model_dump(exclude={"model"}) | {"start_from": str(start), "sampling_steps": 2}
    values |= {name: {"steps": 0} for name in ("autoencoder", "dynamics", "success")}
    network = {"slots": [["red"], ["blue"]], "width": 16, "probe_width": 8, "end_effector": "learned"}
    values |= {"inverse": _STAGE, "objects": _STAGE | {"network": network}}
    return validate(FitConfig, values)


def make_env(world_model: Path, device: str, num_envs: int = 4, **imagination: Any) -> WorldModelEnv:
    """The world model as an environment, which imagines in float32 from the dummy environment's first frames."""
    options = {"path": str(world_model), "device": device, "num_envs": num_envs, "trust": {"ignore": True}}
    options |= {"first_frames": {"kind": ENV.kind, **ENV.model_dump(exclude_defaults=True, exclude={"kind"})}}
    return validate(WorldModelEnvConfig, options | {"imagination": {"precision": "fp32", **imagination}}).build()


@torch.no_grad()
def wan_frames(device: str) -> Frames:
    """Two frames that a tiny Wan imagines."""
    from test_wan import make_clip, make_dynamics

    dynamics, clip = make_dynamics(views=2).to(device).eval(), make_clip(2, 3, views=2).to(device)
    noise = NoiseStream([1, 2], device)
    context = dynamics.begin(clip.frames.at(slice(0, 1)), noise)
    return dynamics.imagine(context, clip.actions.at(slice(1, 3)), noise)
