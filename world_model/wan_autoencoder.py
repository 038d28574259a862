"""Wan's video autoencoder: the first image alone, then groups of four images, one latent frame each.

How latents, images and control steps go together, P = images_per_frame (4), k control steps from an image to the next:

    image         0 | 1 2 3 4 | 5 6 7 8 | ...       image i is seen after control step i k
    latent frame  0 |    1    |    2    | ...       frame f is frame f of world_model.types, with G = P k

So frame 0, the reference, is the episode's first image; the last image of each group is what the policy sees after the
frame's G control steps. An episode whose end does not fill its last group repeats its last image. Both directions are
causal: a latent depends on the images of its group and earlier ones, an image on its latent and earlier ones.

For use from Python: a world model's recipe encodes each frame as a still image instead (see docs/wan.md), which needs
no images between the frames and no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from world_model.wan_model import load_model, model_folder

NUM_ROWS = 4  # Videos at a time through the network, which bounds its memory.


class WanAutoencoder(nn.Module):
    """diffusers' `AutoencoderKLWan`: images of an episode to latent frames and back. Frozen.

    Encode an episode from its first image on, as long as it is: that keeps two images a layer in memory. To decode the
    F frames that were imagined, put the reference and the last remembered frames before them (`WanContext.frames`
    where filled) and take the last P F images: earlier frames reach the images through the decoder's causal layers.

    Attributes:
        latent_shape: (C, h, w) of a frame.
        images_per_frame: P, of every frame but the first, which is one image.

    Args:
        vae: an `AutoencoderKLWan`. image_size: (height, width), pixels.

    Raises:
        ValueError: an image size that does not divide into latents.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, vae: Any, image_size: tuple[int, int]) -> None:
        super().__init__()
        factor = vae.config.scale_factor_spatial
        if image_size[0] % factor or image_size[1] % factor:
            raise ValueError(
                f"autoencoder: images of {image_size[0]} x {image_size[1]} pixels; both sides must be multiples of "
                f"{factor}"
            )
        self.vae = vae.eval().requires_grad_(False)
        self.image_size = image_size
        self.latent_shape = (vae.config.z_dim, image_size[0] // factor, image_size[1] // factor)
        self.images_per_frame: int = vae.config.scale_factor_temporal
        mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    @classmethod
    def load(
        cls, path: Path, image_size: tuple[int, int], dtype: Literal["float32", "bfloat16"] = "float32"
    ) -> WanAutoencoder:
        """From the folder of a pipeline, with the autoencoder in `vae/`, or of the autoencoder itself.

        Raises:
            ValueError: no AutoencoderKLWan there, or an image size that does not divide into latents.
        """
        from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

        folder = model_folder(Path(path), "vae", "AutoencoderKLWan")
        vae = load_model(AutoencoderKLWan, folder, getattr(torch, dtype))
        return cls(vae, image_size)

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (N, 1 + P F, height, width, 3) -> the most likely scaled latents, float32 (N, 1 + F, C, h, w).

        Raises:
            ValueError: another image size, or a number of images that leaves a group unfilled.
        """
        length, size = images.shape[1], tuple(images.shape[2:4])
        if size != self.image_size:
            raise ValueError(f"images: got {size[0]} x {size[1]} pixels, the autoencoder is for {self.image_size}")
        if length % self.images_per_frame != 1:
            raise ValueError(
                f"images: got {length} in a video; must be 1 + a multiple of {self.images_per_frame} "
                "(repeat an episode's last image to fill the last group)"
            )
        encoded = []
        for rows in images.split(NUM_ROWS):
            scaled = (rows.to(self.mean.device).permute(0, 4, 1, 2, 3) / 127.5 - 1).to(self.vae.dtype)
            encoded.append((self.vae.encode(scaled).latent_dist.mode().float() - self.mean) / self.std)
        return torch.cat(encoded).transpose(1, 2)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Scaled latents float32 (N, 1 + F, C, h, w) -> uint8 (N, 1 + P F, height, width, 3)."""
        decoded = []
        for rows in latents.split(NUM_ROWS):
            raw = (rows.transpose(1, 2) * self.std + self.mean).to(self.vae.dtype)
            images = self.vae.decode(raw).sample.float()
            decoded.append(((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 4, 1))
        return torch.cat(decoded)
