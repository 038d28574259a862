"""Autoencoders: shapes, scaling, learning, precision, pretrained folders, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from world_model.config import AutoencoderConfig, StageConfig
from world_model.fit.stage import stage_trainer
from world_model.model import autoencoder
from world_model.model.autoencoder import PretrainedAutoencoder, TinyAutoencoder, build_autoencoder

diffusers = pytest.importorskip("diffusers")

SMALL = AutoencoderConfig(channels=(8, 16), blocks=(1, 1), latent_channels=4)


def make_tiny(config: AutoencoderConfig = SMALL, size: tuple[int, int] = (16, 24)) -> TinyAutoencoder:
    torch.manual_seed(0)
    return TinyAutoencoder(config, size)


def squares(count: int, seed: int, size: tuple[int, int] = (16, 24)) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of a red square of four pixels somewhere on a gray ramp, and the ramp."""
    ramp = torch.linspace(60, 180, size[1]).expand(*size)[..., None].expand(-1, -1, 3)
    images = ramp.repeat(count, 1, 1, 1)
    g = torch.Generator().manual_seed(seed)
    for i in range(count):
        y, x = (int(torch.randint(side - 4, (1,), generator=g)) for side in size)
        images[i, y : y + 4, x : x + 4] = torch.tensor([230.0, 20.0, 20.0])
    return images.to(torch.uint8), ramp[None]


def decibels(images: torch.Tensor, others: torch.Tensor) -> float:
    return float(-10 * torch.log10((images.float() - others.float()).square().mean() / 255**2))


def fit(autoencoder: TinyAutoencoder, steps: int, low_precision: bool = False) -> list[float]:
    def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        images, background = squares(16, step)
        return autoencoder.loss(images, background, torch.Generator().manual_seed(step))

    losses: list[float] = []
    config = StageConfig(steps=steps, optim={"lr": 1.5e-2, "warmup_steps": 5})
    trainer = stage_trainer(autoencoder, config, "autoencoder", low_precision)
    trainer.run(loss, lambda _, metrics: losses.append(metrics["loss"]))
    return losses


def test_shapes_need_not_be_square() -> None:
    tiny = make_tiny()
    assert tiny.latent_shape == (4, 8, 12) and tiny.image_size == (16, 24)
    images, _ = squares(3, 0)
    latents = tiny.encode(images)
    assert latents.shape == (3, 4, 8, 12) and latents.dtype == torch.float32 and not latents.requires_grad
    decoded = tiny.decode(latents)
    assert decoded.shape == images.shape and decoded.dtype == torch.uint8
    assert TinyAutoencoder(AutoencoderConfig(), (64, 64)).latent_shape == (8, 16, 16)


def test_many_images_are_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, (images, _) = make_tiny(), squares(5, 0)
    whole = tiny.encode(images)
    assert torch.allclose(torch.cat([tiny.encode(images[i : i + 1]) for i in range(5)]), whole, atol=1e-5)
    monkeypatch.setitem(autoencoder.PIXELS_AT_ONCE, "cpu", 2 * 16 * 24)
    assert torch.allclose(tiny.encode(images), whole, atol=1e-5)
    assert tiny.decode(whole).shape == images.shape


def test_calibrated_latents_have_mean_0_and_variance_1() -> None:
    tiny, (images, _) = make_tiny(), squares(64, 0)
    assert not torch.allclose(tiny.encode(images).std((0, 2, 3)), torch.ones(4), atol=0.1)
    tiny.calibrate(images)
    latents = tiny.encode(images)
    assert torch.allclose(latents.mean((0, 2, 3)), torch.zeros(4), atol=1e-4)
    assert torch.allclose(latents.std((0, 2, 3)), torch.ones(4), atol=1e-4)
    assert {"shift", "scale"} <= set(tiny.state_dict())
    other = TinyAutoencoder(SMALL, (16, 24))
    other.load_state_dict(tiny.state_dict())
    assert torch.equal(other.encode(images), latents)


def test_it_starts_as_principal_components() -> None:
    """Latents as many as pixels draw every image exactly; fewer draw it as numpy's best projection does."""
    images, _ = squares(64, 0)
    exact = make_tiny(AutoencoderConfig(channels=(8, 16), blocks=(1, 1), latent_channels=12))
    exact.start(images)
    exact.calibrate(images)
    assert decibels(exact.decode(exact.encode(images)), images) > 45
    tiny = make_tiny()
    tiny.start(images)
    tiny.calibrate(images)
    assert torch.allclose(tiny.scale**2 + tiny.shift**2, torch.ones(4, 1, 1), atol=0.01)
    patches = images.view(64, 8, 2, 12, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 12).numpy().astype(np.float64)
    mean = patches.reshape(-1, 4, 3).mean((0, 1))[None].repeat(4, 0).reshape(-1)
    _, _, directions = np.linalg.svd(patches - mean, full_matrices=False)
    error = (patches - mean) @ directions[4:].T @ directions[4:]
    best = (patches - error).round().clip(0, 255)
    expected = -10 * np.log10(((best - patches) ** 2).mean() / 255**2)
    assert decibels(tiny.decode(tiny.encode(images)), images) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("low_precision", [False, True])
def test_it_learns_to_draw_the_square(low_precision: bool) -> None:
    tiny, (images, background) = make_tiny(), squares(16, 10**6)
    losses = fit(tiny, 40, low_precision)
    tiny.calibrate(images)
    drawn = tiny.decode(tiny.encode(images))
    assert losses[-1] < 0.4 * losses[0]
    assert decibels(drawn, images) > 2 + decibels(background.expand_as(images), images)
    assert all(p.dtype == torch.float32 for p in tiny.parameters())


def test_the_loss_by_hand() -> None:
    """With a decoder that answers gray: the square's pixels weigh ten times as much as the others."""
    tiny = make_tiny()
    last = tiny.decoder[-1]
    assert isinstance(last, nn.Conv2d) and last.bias is not None
    for parameter in (*last.parameters(), *tiny.draw.parameters()):
        nn.init.zeros_(parameter)
    images = torch.full((1, 16, 24, 3), 255, dtype=torch.uint8)
    images[0, :4, :4] = 0
    background = torch.full((1, 16, 24, 3), 255.0)
    loss, metrics = tiny.loss(images, background, torch.Generator())
    assert float(loss.detach()) == pytest.approx(2)  # |1| + 1 everywhere.
    assert float(metrics["psnr"]) == pytest.approx(20 * torch.log10(torch.tensor(2.0)).item(), abs=1e-3)
    nn.init.ones_(last.bias)  # White: right but for the square, whose error is 2 (2 + 4).
    loss, metrics = tiny.loss(images, background, torch.Generator())
    assert float(loss.detach()) == pytest.approx(6 * 160 / (160 + 368))
    assert float(metrics["psnr_moving"]) == pytest.approx(0, abs=1e-3)


def test_bfloat16_encodes_nearly_the_same() -> None:
    tiny, (images, _) = make_tiny(), squares(8, 0)
    tiny.calibrate(images)
    latents, drawn = tiny.encode(images), tiny.decode(tiny.encode(images))
    for parameter in tiny.parameters():
        parameter.data = parameter.data.bfloat16()
    rough = tiny.encode(images)
    assert rough.dtype == torch.float32 and (rough - latents).abs().mean() < 0.05 and not torch.equal(rough, latents)
    assert decibels(tiny.decode(rough), drawn) > 30


# --- diffusers' -------------------------------------------------------------------------------------

WIDTHS = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 3}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "tiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        (4, 8, 16),
    ),
    "kl": (
        "AutoencoderKL",
        WIDTHS
        | {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "scaling_factor": 0.5,
            "shift_factor": 0.25,
        },
        (3, 8, 16),
    ),
    "dc": (
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), ()),
            "decoder_qkv_multiscales": ((), ()),
            "scaling_factor": 0.4,
        },
        (4, 8, 16),
    ),
    "wan": (
        "AutoencoderKLWan",
        {
            "base_dim": 4,
            "z_dim": 4,
            "dim_mult": [1, 1],
            "num_res_blocks": 1,
            "temperal_downsample": [True],
            "latents_mean": [0.1, 0.2, 0.3, 0.4],
            "latents_std": [2.0, 1.0, 0.5, 1.0],
            "scale_factor_spatial": 2,
        },
        (4, 8, 16),
    ),
}


def save_model(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    name, options, _ = MODELS[kind]
    getattr(diffusers, name)(**options).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", list(MODELS))
def test_diffusers_autoencoders_by_path(kind: str, tmp_path: Path) -> None:
    folder = save_model(kind, tmp_path / "vae")
    autoencoder = build_autoencoder(AutoencoderConfig(path=tmp_path), (16, 32))
    assert isinstance(autoencoder, PretrainedAutoencoder) and autoencoder.latent_shape == MODELS[kind][2]
    images, _ = squares(3, 0, (16, 32))
    latents = autoencoder.encode(images)
    decoded = autoencoder.decode(latents)
    assert latents.shape == (3, *MODELS[kind][2]) and latents.dtype == torch.float32
    assert decoded.shape == images.shape and decoded.dtype == torch.uint8
    assert not any(p.requires_grad for p in autoencoder.parameters())
    alone = PretrainedAutoencoder.load(folder, (16, 32))
    assert torch.allclose(alone.encode(images[1:2]), latents[1:2], atol=1e-4)


def test_each_model_has_its_own_scaling(tmp_path: Path) -> None:
    images, _ = squares(2, 0, (16, 32))
    signed = images.permute(0, 3, 1, 2) / 127.5 - 1
    kl = PretrainedAutoencoder.load(save_model("kl", tmp_path / "kl"), (16, 32))
    with torch.no_grad():
        raw = kl.model.encode(signed).latent_dist.mean
    assert torch.allclose(kl.encode(images), (raw - 0.25) * 0.5, atol=1e-5)
    dc = PretrainedAutoencoder.load(save_model("dc", tmp_path / "dc"), (16, 32))
    with torch.no_grad():
        raw = dc.model.encode(signed).latent
    assert torch.allclose(dc.encode(images), raw * 0.4, atol=1e-5)
    wan = PretrainedAutoencoder.load(save_model("wan", tmp_path / "wan"), (16, 32))
    with torch.no_grad():
        raw = wan.model.encode(signed[:, :, None]).latent_dist.mean[:, :, 0]
        drawn = wan.model.decode(raw[:, :, None]).sample[:, :, 0]
    mean, std = (torch.tensor(x)[:, None, None] for x in ([0.1, 0.2, 0.3, 0.4], [2.0, 1.0, 0.5, 1.0]))
    assert torch.allclose(wan.encode(images), (raw - mean) / std, atol=1e-5)
    expected = ((drawn.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255)
    assert (wan.decode(wan.encode(images)).float() - expected).abs().max() <= 1


# --- bad input ---------------------------------------------------------------------------------


def test_sizes_that_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"height and width must be multiples of 4; got 64 x 66"):
        TinyAutoencoder(AutoencoderConfig(), (64, 66))
    with pytest.raises(ValueError, match=r"AutoencoderKL: .* multiples of 2; got 15 x 32"):
        PretrainedAutoencoder.load(save_model("kl", tmp_path / "kl"), (15, 32))
    with pytest.raises(ValueError, match=r"autoencoder.blocks: got 2 numbers for 3 levels"):
        TinyAutoencoder(AutoencoderConfig(blocks=(1, 1)), (64, 64))
    with pytest.raises(ValueError, match=r"images: got torch.uint8 \(1, 16, 16, 3\); .*uint8 \(N, 16, 24, 3\)"):
        make_tiny().encode(torch.zeros(1, 16, 16, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"images: got torch.float32"):
        make_tiny().encode(torch.zeros(1, 16, 24, 3))


def test_folders_without_an_autoencoder(tmp_path: Path) -> None:
    allowed = "AutoencoderTiny, AutoencoderKL, AutoencoderDC, AutoencoderKLWan"

    def load() -> None:
        PretrainedAutoencoder.load(tmp_path, (16, 32))

    with pytest.raises(ValueError, match=rf"no config.json and no vae/config.json; .*{allowed}"):
        load()
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not the config of a diffusers model \(JSONDecodeError"):
        load()
    file.write_text(json.dumps({"_class_name": "VQModel"}))
    with pytest.raises(ValueError, match=rf"config.json: is the config of 'VQModel'; allowed: {allowed}"):
        load()
    file.write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"has no \*.safetensors; other weights are not read"):
        load()


def test_damaged_weights(tmp_path: Path) -> None:
    file = next(save_model("kl", tmp_path).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"cannot be loaded as AutoencoderKL .*Copy the folder again"):
        PretrainedAutoencoder.load(tmp_path, (16, 32))
