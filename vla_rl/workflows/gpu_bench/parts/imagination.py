"""Imagined episodes: the world model against the CPU, and frames per second as a rollout has them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from vla_rl.policies.fake_input import fake_env_spec
from vla_rl.types import EpisodeSpec, Observation
from vla_rl.workflows.gpu_bench.record import Target
from vla_rl.workflows.gpu_bench.sheet import Attempt, LeftOutError, Sheet
from vla_rl.workflows.gpu_bench.timing import exact_float32, synchronize
from world_model.config import ImaginationConfig, WorldModelConfig
from world_model.env.env import WorldModelEnv
from world_model.env.recorded import RecordedImagining
from world_model.imagination.chunk import imagine_chunk
from world_model.metadata import WorldModelMetadata
from world_model.model.parts import build_parts
from world_model.model.world_model import WorldModel, load_world_model

SHIPPED = "pretrained:tabletop"  # 64 pixels.
H200 = "H200"
TARGETS = {64: Target(40_000.0, at_least=True, device=H200), 256: Target(1_000.0, at_least=True, device=H200)}
SAME = Target(1e-3, required=True)
ACTIONS = 8  # Of a chunk.
COMPARED = 4  # Chunks: a graph is warmed up, then captured, then replayed.
EAGER, GRAPHS, COMPILED = "eager", "graphs", "compiled"  # Compiled: as graphs too, as in a run.
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
    """Eager first, as compiling takes a minute each time and time may run out."""
    small, large = ((40, 512, 2048), (64, 256, 1024)) if sheet.is_full else ((2,), (2,))
    names, compiled_large = (list(MODELS_256), (256,)) if sheet.is_full else (list(MODELS_256)[:1], ())
    attempts: list[Attempt] = [("against the CPU", lambda: _against_the_cpu(sheet, EAGER))]
    attempts.append(("graphs, against the CPU", lambda: _against_the_cpu(sheet, GRAPHS)))
    attempts += [_shipped(sheet, count, form) for count in small for form in (EAGER, GRAPHS)]
    attempts += [_large(sheet, name, count, form) for name in names for count in large for form in (EAGER, GRAPHS)]
    attempts.append(("compiled, against the CPU", lambda: _against_the_cpu(sheet, COMPILED)))
    attempts += [_shipped(sheet, count, COMPILED) for count in reversed(small)]
    attempts += [_large(sheet, names[0], count, COMPILED) for count in compiled_large]
    sheet.run(attempts)


@contextmanager
def _as(form: str, sheet: Sheet, world_model: WorldModel) -> Iterator[WorldModel]:
    """The world model, its dynamics compiled for the block where the form says so."""
    if form != COMPILED:
        yield world_model
        return
    if sheet.device.type not in ("cuda", "cpu"):
        raise LeftOutError(f"torch.compile knows no device {sheet.device.type!r}")
    torch.compiler.reset()  # Each size as the first one met, which is how a run meets its own.
    world_model.dynamics.compile_imagining("inductor" if sheet.is_full else "aot_eager")
    try:
        yield world_model
    finally:
        torch.compiler.reset()  # A graph keeps its memory.


def _against_the_cpu(sheet: Sheet, form: str) -> None:
    with exact_float32():
        with _as(form, sheet, load_world_model(SHIPPED, sheet.device)) as world_model:
            here = _on_the_host(_imagined(world_model, form))
        there = _on_the_host(_imagined(load_world_model(SHIPPED, "cpu")))
    for what in here:
        gap = max(float(np.abs(a - b).max()) for a, b in zip(here[what], there[what], strict=True))
        sheet.add(f"imagined {what}{_suffix(form)}", gap, "from the CPU", SAME)


def _imagined(world_model: WorldModel, form: str = EAGER, batch: int = 3) -> dict[str, list[torch.Tensor]]:
    """Latents and both scores of some chunks, one after the other, of made-up first frames; the same at each call."""
    known = world_model.metadata
    specs = [EpisodeSpec(next(iter(known.tasks)), "train", i) for i in range(batch)]
    obs, rng = MadeUpFrames(world_model).observe(specs), np.random.default_rng(0)
    images = np.stack([obs.images[camera] for camera in known.cameras], 1)[:, None]
    memory = world_model.begin(world_model.encode(images, obs.state[:, None]), obs.instruction, range(batch))
    found: dict[str, list[torch.Tensor]] = {"latents": [], "success score": [], "clip score": []}
    config = ImaginationConfig(dual_noise=0)
    recorded = None if form == EAGER else RecordedImagining(world_model, config)
    for _ in range(COMPARED):
        actions = rng.uniform(-1, 1, (batch, ACTIONS, known.action_dim)).astype(np.float32)
        chunk = world_model.actions(actions, np.full(batch, ACTIONS))
        if recorded is None:
            made = imagine_chunk(world_model, memory, chunk, config)
        else:
            made, _ = recorded.imagine(memory, chunk)
        memory = (recorded or world_model).extend(memory, made.frames, chunk)
        for kept, value in zip(found.values(), (made.frames.latents, made.success_score, made.clip_score), strict=True):
            kept.append(value)
    return found


def _on_the_host(found: dict[str, list[torch.Tensor]]) -> dict[str, list[np.ndarray]]:
    """After all chunks, so that one that overwrote another's result is found."""
    return {what: [x.float().cpu().numpy() for x in values] for what, values in found.items()}


def _suffix(form: str) -> str:
    return "" if form == EAGER else f", {form}"


def _shipped(sheet: Sheet, count: int, form: str) -> Attempt:
    what = f"64 pixels, {count} environments{_suffix(form)}"

    def attempt() -> None:
        with _as(form, sheet, load_world_model(SHIPPED, sheet.device).compute_in("auto")) as world_model:
            _frames_per_second(sheet, world_model, count, what, 64, form)

    return what, attempt


def _large(sheet: Sheet, name: str, count: int, form: str) -> Attempt:
    what = f"256 pixels, {name}, {count} environments{_suffix(form)}"

    def attempt() -> None:
        made = _random_world_model(MODELS_256[name], 256 if sheet.is_full else 64, sheet.device)
        with _as(form, sheet, made) as world_model:
            _frames_per_second(sheet, world_model, count, what, 256, form)

    return what, attempt


def _random_world_model(dynamics: dict[str, object], image_size: int, device: torch.device) -> WorldModel:
    """A world model that was never fitted, for its speed."""
    spec = fake_env_spec(image_size=image_size)
    metadata = WorldModelMetadata.of(spec, np.zeros(spec.state_dim), np.ones(spec.state_dim))
    config = WorldModelConfig.model_validate({"dynamics": dynamics})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return WorldModel(config, metadata, build_parts(config, metadata)).to(device).eval().compute_in("auto")


def _frames_per_second(sheet: Sheet, world_model: WorldModel, count: int, what: str, pixels: int, form: str) -> None:
    env = WorldModelEnv(world_model, MadeUpFrames(world_model), ImaginationConfig(compile=form != EAGER), count)
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
