"""Imagined episodes: the world model against the CPU, and frames per second as a rollout has them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vla_rl.policies.fake_input import fake_env_spec
from vla_rl.types import EpisodeSpec, Observation
from vla_rl.workflows.gpu_bench.record import Target
from vla_rl.workflows.gpu_bench.sheet import Attempt, Sheet
from vla_rl.workflows.gpu_bench.timing import exact_float32, synchronize

if TYPE_CHECKING:
    from world_model.env.env import WorldModelEnv
    from world_model.model.world_model import WorldModel

SHIPPED = "pretrained:tabletop"  # 64 pixels.
H200 = "H200"
TARGETS = {64: Target(40_000.0, at_least=True, device=H200), 256: Target(1_000.0, at_least=True, device=H200)}
SAME = Target(1e-3, required=True)
ACTIONS = 8  # Of a chunk.
# name -> dynamics of a world model of 256 pixels: the LIBERO recipe's, and a large one.
MODELS_256 = {
    "libero_world_model's": {"preset": "tiny", "width": 224, "heads": 7, "patch": 4},
    "preset base": {"preset": "base", "patch": 4},
}


class MadeUpFrames:
    """First frames without a simulator: noise, the same for the same index."""

    def __init__(self, world_model: WorldModel) -> None:
        self._metadata = world_model.metadata

    def observe(self, specs: Sequence[EpisodeSpec]) -> Observation:
        """See `world_model.data.initial_frames.InitialFrames`."""
        known = self._metadata
        shape, rng = (len(specs), *known.image_size, 3), np.random.default_rng(0)
        images = {camera: rng.integers(0, 256, shape, dtype=np.uint8) for camera in known.cameras}
        state = np.array(known.state_mean) + np.array(known.state_std) * rng.normal(size=(len(specs), known.state_dim))
        return Observation(images, state.astype(np.float32), [known.tasks[spec.task] for spec in specs])

    def close(self) -> None:
        """Nothing is held."""


def measure(sheet: Sheet) -> None:
    """Most environments last, since they may not fit."""
    attempts: list[Attempt] = [("against the CPU", lambda: _against_the_cpu(sheet))]
    for count in (40, 512, 2048) if sheet.is_full else (2,):
        attempts.append((f"64 pixels, {count} environments", lambda count=count: _shipped(sheet, count)))
    for name in list(MODELS_256)[: None if sheet.is_full else 1]:
        for count in (64, 256, 1024) if sheet.is_full else (2,):
            attempts.append(
                (f"256 pixels, {name}, {count} environments", lambda name=name, count=count: _large(sheet, name, count))
            )
    sheet.run(attempts)


def _against_the_cpu(sheet: Sheet) -> None:
    from world_model.model.world_model import load_world_model

    batch, found = 3, []
    with exact_float32():
        for device in (sheet.device, "cpu"):
            world_model = load_world_model(SHIPPED, device)
            known = world_model.metadata
            specs = [EpisodeSpec(next(iter(known.tasks)), "train", i) for i in range(batch)]
            obs = MadeUpFrames(world_model).observe(specs)
            images = np.stack([obs.images[camera] for camera in known.cameras], 1)[:, None]
            memory = world_model.begin(world_model.encode(images, obs.state[:, None]), obs.instruction, range(batch))
            rng = np.random.default_rng(0)
            actions = rng.uniform(-1, 1, (batch, ACTIONS, known.action_dim)).astype(np.float32)
            frames = world_model.dynamics.imagine(
                memory.context, world_model.actions(actions, np.full(batch, ACTIONS)), memory.noise
            )
            found.append([x.float().cpu().numpy() for x in (frames.latents, *world_model.scores(memory, frames))])
    for what, here, there in zip(("latents", "success score", "clip score"), *found, strict=True):
        sheet.add(f"imagined {what}", float(np.abs(here - there).max()), "from the CPU", SAME)


def _shipped(sheet: Sheet, count: int) -> None:
    from world_model.model.world_model import load_world_model

    world_model = load_world_model(SHIPPED, sheet.device).compute_in("auto")
    _frames_per_second(sheet, world_model, count, f"64 pixels, {count} environments", 64)


def _large(sheet: Sheet, name: str, count: int) -> None:
    world_model = _random_world_model(MODELS_256[name], 256 if sheet.is_full else 64, sheet.device)
    _frames_per_second(sheet, world_model, count, f"256 pixels, {name}, {count} environments", 256)


def _random_world_model(dynamics: dict[str, object], image_size: int, device: torch.device) -> WorldModel:
    """A world model that was never fitted, for its speed."""
    from world_model.config import WorldModelConfig
    from world_model.metadata import WorldModelMetadata
    from world_model.model.world_model import WorldModel, build_parts

    spec = fake_env_spec(image_size=image_size)
    metadata = WorldModelMetadata.of(spec, np.zeros(spec.state_dim), np.ones(spec.state_dim))
    config = WorldModelConfig.model_validate({"dynamics": dynamics})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return WorldModel(config, metadata, build_parts(config, metadata)).to(device).eval().compute_in("auto")


def _frames_per_second(sheet: Sheet, world_model: WorldModel, count: int, what: str, pixels: int) -> None:
    from world_model.config import ImaginationConfig
    from world_model.env.env import WorldModelEnv

    env = WorldModelEnv(world_model, MadeUpFrames(world_model), ImaginationConfig(), count)
    try:
        seconds, frames = _stepped(env, sheet, 10 if sheet.is_full else 2)
    finally:
        env.close()
    note = f"{1000 * seconds:,.4g} ms a chunk of {frames} frames; decoded, judged, on the host"
    sheet.add(what, count * frames / seconds, "frames/s", TARGETS[pixels], note)


def _stepped(env: WorldModelEnv, sheet: Sheet, repeats: int) -> tuple[float, int]:
    """Median seconds of `env.step`, episodes that end begun anew outside the clock; and frames of a chunk."""
    specs = [EpisodeSpec(next(iter(env.spec.tasks)), "train", i) for i in range(env.num_envs)]
    env.reset(specs)
    rng, times = np.random.default_rng(0), []
    for _ in range(repeats + 2):
        actions = rng.uniform(-0.3, 0.3, (env.num_envs, ACTIONS, env.spec.action_dim)).astype(np.float32)
        synchronize(sheet.device)
        started = time.perf_counter()
        done = env.step(actions).done
        synchronize(sheet.device)
        times.append(time.perf_counter() - started)
        if done.any():
            ended = np.flatnonzero(done).tolist()
            env.reset([specs[i] for i in ended], ended)
    return float(np.median(times[2:])), -(-ACTIONS // env.world_model.frame_steps)
