"""Wan's video autoencoder, on tiny random weights: groups of images, causality, files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from world_model.config import WanConfig
from world_model.types import Actions, Frames, NoiseStream
from world_model.wan import WanDynamics
from world_model.wan_autoencoder import WanAutoencoder

diffusers = pytest.importorskip("diffusers")


def save_vae(folder: Path) -> None:
    """A tiny autoencoder of Wan 2.2's kind: 16 x in space, 4 x in time."""
    torch.manual_seed(0)
    diffusers.AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[0.5, 1.0, 2.0, 4.0],
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory: pytest.TempPathFactory) -> WanAutoencoder:
    folder = tmp_path_factory.mktemp("pipeline")
    save_vae(folder / "vae")
    return WanAutoencoder.load(folder, (32, 48))


def random_images(length: int, rows: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(256, (rows, length, 32, 48, 3), generator=g, dtype=torch.uint8)


def test_autoencoder_makes_one_frame_of_the_first_image_and_of_each_group(autoencoder: WanAutoencoder) -> None:
    images = random_images(9, rows=5)  # More than go through at a time.
    latents = autoencoder.encode(images)
    assert latents.shape == (5, 3, *autoencoder.latent_shape) and autoencoder.latent_shape == (4, 2, 3)
    assert latents.dtype == torch.float32
    decoded = autoencoder.decode(latents)
    assert decoded.shape == images.shape and decoded.dtype == torch.uint8
    torch.testing.assert_close(autoencoder.encode(images[4:])[0], latents[4], atol=1e-4, rtol=1e-4)
    # Scaled by the model's own mean and deviation of each channel.
    video = images[:1].permute(0, 4, 1, 2, 3) / 127.5 - 1
    raw = autoencoder.vae.encode(video).latent_dist.mode()[0, :, 1]  # channels of frame 1
    mean, std = torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.tensor([0.5, 1.0, 2.0, 4.0])
    torch.testing.assert_close(latents[0, 1], (raw - mean[:, None, None]) / std[:, None, None], atol=1e-4, rtol=1e-4)
    shown = autoencoder.vae.decode(autoencoder.vae.encode(video).latent_dist.mode()).sample
    expected = ((shown + 1) * 127.5).permute(0, 2, 3, 4, 1)
    assert (decoded[:1].float() - expected).abs().max() <= 0.51


def test_autoencoder_is_causal_by_groups(autoencoder: WanAutoencoder) -> None:
    images = random_images(9)
    latents, changed = autoencoder.encode(images), images.clone()
    changed[:, 5] = 255 - changed[:, 5]
    after = autoencoder.encode(changed)
    assert torch.equal(after[:, :2], latents[:, :2]) and not torch.equal(after[:, 2], latents[:, 2])
    torch.testing.assert_close(autoencoder.encode(images[:, :5]), latents[:, :2])
    other = latents.clone()
    other[:, 2] = -other[:, 2]
    first, second = autoencoder.decode(latents), autoencoder.decode(other)
    assert torch.equal(first[:, :5], second[:, :5]) and not torch.equal(first[:, 5:], second[:, 5:])


def test_autoencoder_refuses_images_it_cannot_take(autoencoder: WanAutoencoder) -> None:
    with pytest.raises(ValueError, match="got 8 in a video; must be 1 \\+ a multiple of 4"):
        autoencoder.encode(random_images(8))
    with pytest.raises(ValueError, match="got 32 x 32 pixels"):
        autoencoder.encode(random_images(5)[:, :, :, :32])
    with pytest.raises(ValueError, match="multiples of 16"):
        WanAutoencoder(autoencoder.vae, (32, 40))


def test_imagined_frames_become_images(autoencoder: WanAutoencoder) -> None:
    """The way an environment goes: encode the first image, imagine, decode with what is remembered before it."""
    sizes = {
        "patch_size": (1, 1, 1),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 16,
        "ffn_dim": 48,
        "num_layers": 1,
    }
    config = WanConfig.model_validate({"dtype": "float32", "transformer": sizes})
    dynamics = WanDynamics(config, autoencoder.latent_shape, 1, 3, 2, 4)
    reference = Frames(autoencoder.encode(random_images(1))[:, :, None], torch.zeros(1, 1, 3))
    noise, actions = NoiseStream([0]), Actions(torch.zeros(1, 2, 4, 2), torch.ones(1, 2, 4, dtype=torch.bool))
    context = dynamics.begin(reference, noise)
    for _ in range(2):
        imagined = dynamics.imagine(context, actions, noise, num_steps=1)
        remembered = context.frames.latents[:, context.filled[0]]
        images = autoencoder.decode(torch.cat([remembered, imagined.latents], 1)[:, :, 0])[:, -8:]
        assert images.shape == (1, 8, 32, 48, 3)
        context = dynamics.extend(context, imagined, actions, noise)
    assert context.filled.sum() == 5


def test_wrong_and_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no vae/config\.json"):
        WanAutoencoder.load(tmp_path, (32, 48))
    save_vae(tmp_path / "vae")
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="vae: cannot be loaded as AutoencoderKLWan"):
        WanAutoencoder.load(tmp_path, (32, 48))
