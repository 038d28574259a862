"""`vla-rl plan --fit`: how many updates of a world model fit into some minutes of a card; computed, not measured.

One update of each stage, as `world-model fit` makes it, runs on torch's meta device under the roofline counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
from torch import nn

from vla_rl.common.precision import wants_bf16
from vla_rl.config import ConfigError
from vla_rl.recipe.recipe import Recipe
from vla_rl.training.trainer import Loss
from vla_rl.types import EnvSpec
from vla_rl.workflows.gpu_bench.roofline import H100, H200, Gpu, Roofline
from world_model.config import FitStage, WorldModelConfig
from world_model.fit.config import FitConfig
from world_model.fit.stage import stage_trainer
from world_model.fit.start import for_env
from world_model.interfaces import SuccessHead
from world_model.metadata import WorldModelMetadata, read_metadata, resolve_path
from world_model.model.autoencoder import TinyAutoencoder
from world_model.model.dynamics import TransformerConfig
from world_model.model.parts import Parts, build_parts
from world_model.types import Actions, Clip, Frames

COMPUTED = ("autoencoder", "dynamics", "success")
PRESETS = get_args(TransformerConfig.model_fields["preset"].annotation)[:3]


@dataclass(frozen=True)
class StageCost:
    """What one update of a stage takes at best; `steps`: how many the recipe asks for."""

    name: str
    parameters: int
    batch_size: int
    steps: int
    work: Roofline

    def row(self, minutes: float) -> str:
        """A line of the table."""
        work, seconds = self.work, self.work.eager_seconds
        cells = (
            self.name,
            f"{self.parameters / 1e6:,.2f} M",
            f"{self.batch_size}",
            f"{work.flops / 1e12:,.4f}",
            f"{work.bytes / 1e9:,.2f}",
            f"{work.kernels:,}",
            f"{1000 * work.seconds:,.2f}",
            f"{1000 * seconds:,.2f}",
            f"{60 * minutes / seconds:,.0f}",
            f"{work.flops / seconds / work.gpu.bf16:.3f}",
            work.limit,
            f"{self.steps:,} in {self.steps * seconds / 60:,.2f}" if self.steps else "",
        )
        return f"| {' | '.join(cells)} |"


def fit_text(recipe: Recipe, minutes: float) -> str:
    """Tables for people, one a card.

    Raises:
        ConfigError: the recipe fits no world model.
    """
    config = getattr(recipe, "world_model", None)
    if not isinstance(config, FitConfig):
        raise ConfigError(
            f"--fit: recipe {recipe.name} of run {recipe.run!r} has no section world_model of kind latent_video, so it "
            "fits no world model; `vla-rl plan tabletop_world_model --fit` is of one that does"
        )
    if not any(getattr(config, name).steps for name in COMPUTED):
        raise ConfigError(
            f"--fit: recipe {recipe.name} makes no update of {', '.join(COMPUTED)}; set world_model.dynamics.steps and "
            "others above 0"
        )
    spec = recipe.env.env_spec()
    return "\n\n".join(_table(config, spec, gpu, minutes) for gpu in (H200, H100))


def stage_costs(config: FitConfig, spec: EnvSpec, gpu: Gpu) -> list[StageCost]:
    """Of the stages that have updates to make, in their order; then of the dynamics in other sizes, of none.

    The latter where it is a transformer that begins from scratch.
    """
    if config.start_from:
        return list(_costs(config, read_metadata(resolve_path(config.start_from))[0], spec, gpu))
    model = for_env(config.model or WorldModelConfig(), spec)
    costs = list(_costs(config, model, spec, gpu))
    if not isinstance(model.dynamics, TransformerConfig):
        return costs
    only = config.model_copy(update={name: _none(getattr(config, name)) for name in ("autoencoder", "success")})
    for preset in PRESETS:
        sizes = {"preset": preset, "width": None, "depth": None, "heads": None}
        sized = model.model_copy(update={"dynamics": model.dynamics.model_copy(update=sizes)})
        costs += [replace(one, name=f"dynamics: {preset}", steps=0) for one in _costs(only, sized, spec, gpu)]
    return costs


def _none(stage: FitStage) -> FitStage:
    return stage.model_copy(update={"steps": 0})


def _table(config: FitConfig, spec: EnvSpec, gpu: Gpu, minutes: float) -> str:
    costs = stage_costs(config, spec, gpu)
    whole = sum(cost.steps * cost.work.eager_seconds for cost in costs)
    head = ("stage", "parameters", "batch", "TFLOP", "GB moved", "launches", "ms at the roof", "ms with launches")
    head += (f"updates in {minutes:g} min", "share of matmul rate", "limit", "the recipe's, min")
    lines = [f"One update on an {gpu.name}, computed, not measured: kernels reach 50 to 90 % of it. "
             f"{gpu.bf16 / 1e12:,.0f} TFLOP/s, {gpu.bandwidth / 1e12:g} TB/s, 6 µs a launch."]  # fmt: skip
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [cost.row(minutes) for cost in costs]
    lines.append(
        f"The recipe's updates: {whole / 60:,.1f} min, encoding, imagining for the heads and disk not counted."
    )
    left_out = [name for name in ("value", "objects", "inverse") if getattr(config, name).steps]
    if left_out:
        lines.append(f"Not computed: {', '.join(left_out)}.")
    return "\n".join(lines)


def _costs(config: FitConfig, model: WorldModelConfig, spec: EnvSpec, gpu: Gpu) -> Iterator[StageCost]:
    numbers = np.zeros(spec.state_dim, np.float32)
    body = {"kind": "any"} if model.dynamics.needs_body else None
    metadata = WorldModelMetadata.of(spec, numbers, numbers + 1, body=body)
    with torch.device("meta"):
        parts = build_parts(model, metadata)
    bf16 = wants_bf16(config.precision, "cuda")
    for name, stage, network, loss in _stages(config, model, parts, metadata):
        trainer = stage_trainer(network, stage, "success" if name == "clip" else name, bf16)
        # On CUDA it is one kernel: weight, gradient and two moments are read, all but the gradient written.
        fused = [one for one in trainer.optimizers if isinstance(one, torch.optim.AdamW)]
        trainer.optimizers = [one for one in trainer.optimizers if one not in fused]
        with Roofline(gpu) as work:
            trainer.launch(loss)
        for one in fused:
            work.add(7 * 4 * sum(p.numel() for group in one.param_groups for p in group["params"]))
        yield StageCost(name, sum(p.numel() for p in network.parameters()), stage.batch_size, stage.steps, work)


def _stages(
    config: FitConfig, model: WorldModelConfig, parts: Parts, metadata: WorldModelMetadata
) -> Iterator[tuple[str, FitStage, nn.Module, Loss]]:
    """The stages with updates to make, each with a loss on inputs that have shapes alone."""
    views, actions = len(metadata.cameras), metadata.action_dim + metadata.body_dim

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def frames(size: int, length: int) -> Frames:
        return Frames(
            empty(size, length, views, *parts.autoencoder.latent_shape), empty(size, length, metadata.state_dim)
        )

    autoencoder, size = parts.autoencoder, config.autoencoder.batch_size
    if config.autoencoder.steps and isinstance(autoencoder, TinyAutoencoder):
        images = empty(size, *metadata.image_size, 3, dtype=torch.uint8)
        yield (
            "autoencoder",
            config.autoencoder,
            autoencoder,
            lambda _: autoencoder.loss(images, images.float(), torch.Generator()),
        )
    size, length, steps = config.dynamics.batch_size, config.clip_frames, model.frame_steps
    if config.dynamics.steps:
        taken = Actions(empty(size, length, steps, actions), empty(size, length, steps, dtype=torch.bool))
        flags, first = empty(size, length, dtype=torch.bool), empty(size, dtype=torch.int64)
        clip = Clip(frames(size, length), taken, first, flags, flags, _texts(metadata, size))
        yield "dynamics", config.dynamics, parts.dynamics, lambda _: parts.dynamics.loss(clip, torch.Generator())
    size = config.success.batch_size
    texts, outcome = _texts(metadata, size), empty(size, dtype=torch.bool)

    def judging(network: SuccessHead) -> Loss:
        seen, reference = frames(size, network.num_frames), frames(size, 1)
        return lambda _: network.loss(seen, reference, texts, outcome)

    if config.success.steps:
        yield "success", config.success, parts.success, judging(parts.success)
        yield "clip", config.success, parts.clip, judging(parts.clip)


def _texts(metadata: WorldModelMetadata, size: int) -> list[str]:
    texts: Sequence[str] = list(metadata.tasks.values())
    return [texts[i % len(texts)] for i in range(size)]
