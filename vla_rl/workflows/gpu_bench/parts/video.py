"""Wan's video transformers at their published sizes, with random weights, as the world model's dynamics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vla_rl.workflows.gpu_bench.sheet import Attempt, Sheet
from vla_rl.workflows.gpu_bench.timing import count_flops, median_seconds
from world_model.model.wan import WanConfig, WanDynamics
from world_model.noise import NoiseStream
from world_model.types import Actions, Frames

FRAME_STEPS, NEW_FRAMES, STATE, ACTION = 4, 2, 8, 7  # A chunk of 8 actions makes 2 frames.
COMMON = {"num_layers": 30, "freq_dim": 256, "text_dim": 4096, "attention_head_dim": 128}
# name -> sizes of WanTransformer3DModel, pixels of an image to one of its latents
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Wan2.1-T2V-1.3B": (
        COMMON | {"num_attention_heads": 12, "ffn_dim": 8960, "in_channels": 16, "out_channels": 16},
        8,
    ),
    "Wan2.2-TI2V-5B": (
        COMMON | {"num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
        16,
    ),
}
TINY = {"num_layers": 2, "freq_dim": 16, "text_dim": 16, "attention_head_dim": 12, "num_attention_heads": 2,
        "ffn_dim": 48, "in_channels": 4, "out_channels": 4}  # fmt: skip


def measure(sheet: Sheet) -> None:
    """One view; four frames and the first remembered, five steps of the flow."""
    sizes = [(64, 256), (256, 32)] if sheet.is_full else [(64, 2)]
    attempts: list[Attempt] = [
        (f"{name}, {pixels} pixels", lambda name=name, pixels=pixels, batch=batch: _speed(sheet, name, pixels, batch))
        for name in list(PUBLISHED)[: None if sheet.is_full else 1]
        for pixels, batch in sizes
    ]
    sheet.run(attempts)


def _speed(sheet: Sheet, name: str, pixels: int, batch: int) -> None:
    published, scale = PUBLISHED[name]
    sizes = published if sheet.is_full else TINY
    shape = (sizes["in_channels"], pixels // scale, pixels // scale)
    config = WanConfig.model_validate({"transformer": sizes})
    own = sheet.device if sheet.device.type == "cuda" else torch.device("cpu")
    with torch.device(own), torch.random.fork_rng():
        torch.manual_seed(0)
        dynamics = WanDynamics(config, shape, 1, STATE, ACTION, FRAME_STEPS)
    dynamics = dynamics.to(sheet.device).eval()
    rng = torch.Generator().manual_seed(0)
    first = Frames(
        torch.randn(batch, 1, 1, *shape, generator=rng).to(sheet.device),
        torch.randn(batch, 1, STATE, generator=rng).to(sheet.device),
    )
    noise = NoiseStream(range(batch), sheet.device)
    context = dynamics.begin(first, noise)
    actions = Actions(
        torch.randn(batch, NEW_FRAMES, FRAME_STEPS, ACTION, generator=rng).to(sheet.device),
        torch.ones(batch, NEW_FRAMES, FRAME_STEPS, dtype=torch.bool, device=sheet.device),
    )

    def imagine() -> None:
        frames = dynamics.imagine(context, actions, noise)
        assert np.isfinite(float(frames.latents.float().abs().sum())), "imagined frames are not finite"

    flops = count_flops(imagine)
    seconds = median_seconds(imagine, sheet.device, 3 if sheet.is_full else 1, 1)
    rate = sheet.results.fact("rates", "flops_bf16")
    note = f"{batch} episodes; {1000 * seconds:,.4g} ms a chunk; {flops / seconds / 1e12:,.4g} TFLOP/s"
    if rate is not None:
        note += f", {100 * flops / seconds / rate:.0f} % of the measured rate"
    parameters = sum(p.numel() for p in dynamics.parameters()) / 1e9
    what = f"{name} ({parameters:.2f} billion parameters), {pixels} pixels"
    sheet.add(what, batch * NEW_FRAMES / seconds, "frames/s", note=note + "; not decoded")
