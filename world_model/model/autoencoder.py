"""Autoencoder of images: an AutoencoderTiny trained on the run's own frames, or any of diffusers'.

Both are `world_model.interfaces.Autoencoder`s. Latents are about zero mean and unit variance per channel.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F

from world_model.config import AutoencoderConfig
from world_model.interfaces import Autoencoder

# It warns that it knows an older torchao, of which nothing is needed here.
logging.getLogger("diffusers.quantizers.torchao.torchao_quantizer").setLevel(logging.ERROR)

LATENT_NOISE = 0.1  # Standard deviation added while training, since imagined latents are a little off.
EMPHASIS = 9.0  # Additional weight of a pixel that differs from its camera's mean image by FULL_CHANGE or more.
FULL_CHANGE = 0.2  # Of full scale.
PIXELS_AT_ONCE = {"cpu": 2**17, "cuda": 2**21}  # Through the network: what caches hold, and what bounds memory.
CLASSES = ("AutoencoderTiny", "AutoencoderKL", "AutoencoderDC", "AutoencoderKLWan")


def build_autoencoder(config: AutoencoderConfig, image_size: tuple[int, int]) -> Autoencoder:
    """The autoencoder that a config describes: pretrained where it names a folder, else fresh.

    Args:
        image_size: (height, width), pixels.

    Raises:
        ValueError: no such autoencoder, or an image size that does not divide into latents.
    """
    if config.path is not None:
        return PretrainedAutoencoder.load(config.path, image_size)
    if config.pretrained is not None:
        return PretrainedAutoencoder.of(config.pretrained, image_size)
    return TinyAutoencoder(config, image_size)


def without_path(config: AutoencoderConfig) -> AutoencoderConfig:
    """The config with what the folder at `path` says in place of it; with the weights, all it takes to build the same.

    Raises:
        ValueError: no autoencoder there.
    """
    if config.path is None:
        return config
    values = _find_model(Path(config.path))[1]
    kept = {name: value for name, value in values.items() if name == "_class_name" or not name.startswith("_")}
    return config.model_copy(update={"path": None, "pretrained": kept})


class TinyAutoencoder(Autoencoder):
    """diffusers' AutoencoderTiny (TAESD) with levels of their own widths, to be trained from scratch.

    The blocks are diffusers'. AutoencoderTiny itself takes only levels of one width; here the fine levels, where most
    pixels are, are the narrow ones, and the decoder narrows before it enlarges. A linear map of squares of pixels is
    added on both sides: begun as principal components, it saves most of the training.

    Call `start` before training and `calibrate` after it. It computes in the precision of its parameters; images and
    latents stay uint8 and float32.

    Args:
        image_size: (height, width), pixels; multiples of 2^(levels - 1).

    Raises:
        ValueError: an image size that does not divide into latents, or as many widths as numbers of blocks missing.
    """

    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, config: AutoencoderConfig, image_size: tuple[int, int]) -> None:
        from diffusers.models.unets.unet_2d_blocks import AutoencoderTinyBlock

        super().__init__()
        channels, blocks = config.channels, config.blocks
        if len(channels) != len(blocks) or not channels:
            raise ValueError(
                f"autoencoder.blocks: got {len(blocks)} numbers for {len(channels)} levels (autoencoder.channels); "
                "give one for each level"
            )
        height, width = _latent_size(image_size, 2 ** (len(channels) - 1), "autoencoder.channels")
        self.image_size, self.latent_shape = image_size, (config.latent_channels, height, width)

        def conv(num_in: int, num_out: int, stride: int = 1) -> nn.Module:
            return nn.Conv2d(num_in, num_out, 3, stride, padding=1)

        def level(i: int) -> list[nn.Module]:
            return [AutoencoderTinyBlock(channels[i], channels[i], "relu") for _ in range(blocks[i])]

        encoder, decoder = [conv(3, channels[0]), *level(0)], [conv(config.latent_channels, channels[-1]), nn.ReLU()]
        for i in range(1, len(channels)):
            encoder += [conv(channels[i - 1], channels[i], stride=2), *level(i)]
        for i in range(len(channels) - 1, 0, -1):
            decoder += [*level(i), conv(channels[i], channels[i - 1]), nn.Upsample(scale_factor=2)]
        self.encoder = nn.Sequential(*encoder, conv(channels[-1], config.latent_channels))
        self.decoder = nn.Sequential(*decoder, *level(0), conv(channels[0], 3))
        # The linear part, from a square of pixels to a latent pixel and back, to which the above add.
        side = 2 ** (len(channels) - 1)
        self.embed = nn.Conv2d(3, config.latent_channels, side, side)
        self.draw = nn.ConvTranspose2d(config.latent_channels, 3, side, side)
        self.register_buffer("shift", torch.zeros(config.latent_channels, 1, 1))
        self.register_buffer("scale", torch.ones(config.latent_channels, 1, 1))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # A third faster on a CPU.

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """See `Autoencoder.encode`.

        Raises:
            ValueError: images of another size.
        """
        return (_in_parts(self._raw, _checked(images, self.image_size)) - self.shift) / self.scale

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See `Autoencoder.decode`."""
        return _in_parts(lambda part: _pixels(self._decoded(part * self.scale + self.shift)), latents, self.image_size)

    @torch.no_grad()
    def start(self, images: torch.Tensor) -> None:
        """Begin as the principal components of squares of pixels, before any training.

        The best linear autoencoder of such latents; training goes on from there with what is not linear.

        Args:
            images: uint8 (N, height, width, 3), some hundred or more.
        """
        side, num_channels = self.embed.kernel_size[0], self.embed.out_channels
        squares = F.unfold(_signed(_checked(images, self.image_size), torch.float32), side, stride=side)
        squares = squares.transpose(1, 2).flatten(0, 1)
        color = squares.unflatten(1, (3, -1)).mean((0, 2))  # One a channel, all that `draw` can add.
        mean = color.repeat_interleave(side**2)
        centered = squares - mean
        variance, directions = torch.linalg.eigh(centered.T @ centered / len(centered))  # Ascending, a column each.
        count = min(num_channels, len(mean))
        std, directions = variance[-count:].clamp_min(1e-8).sqrt()[:, None], directions[:, -count:].T
        for last in (self.encoder[-1], self.decoder[-1], self.embed, self.draw):
            for parameter in last.parameters():
                parameter.zero_()
        self.embed.weight[:count] = (directions / std).unflatten(1, (3, side, side))
        cast(torch.Tensor, self.embed.bias)[:count] = -(directions / std) @ mean
        self.draw.weight[:count] = (directions * std).unflatten(1, (3, side, side))
        cast(torch.Tensor, self.draw.bias).copy_(color)

    @torch.no_grad()
    def calibrate(self, images: torch.Tensor) -> None:
        """Measure each channel's mean and standard deviation on uint8 (N, height, width, 3), some hundred or more."""
        raw = _in_parts(self._raw, _checked(images, self.image_size))
        self.shift.copy_(raw.mean((0, 2, 3))[:, None, None])
        self.scale.copy_(raw.std((0, 2, 3)).clamp_min(1e-4)[:, None, None])

    def loss(
        self, images: torch.Tensor, background: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Weighted L1 + L2 of the reconstruction, in units of -1 .. 1; metrics: psnr, decibels, and of moving pixels.

        A five-pixel cube or gripper decides success, and is a hundredth of the pixels. What differs from its camera's
        mean image, which is what moves where the camera stands still, weighs up to ten times as much; the weights'
        mean is 1.

        Noise is added to the latents, in proportion to each channel's standard deviation, so that near ones look alike.

        Args:
            images: uint8 (N, height, width, 3). background: float32, likewise or (1, ...), 0 .. 255: the mean image.
            generator: for the noise, on any device.
        """
        images = _checked(images, self.image_size)
        raw = self._raw(images)
        noise = LATENT_NOISE * torch.randn(raw.shape, generator=generator, device=generator.device).to(raw.device)
        error = self._decoded(raw + raw.std((0, 2, 3), keepdim=True) * noise) - _signed(images, torch.float32)
        change = (images.float() - background).abs().amax(-1)[:, None] / (255 * FULL_CHANGE)
        weight = 1 + EMPHASIS * change.clamp(max=1)
        loss = (weight * (error.abs() + error.square())).mean() / weight.mean()
        with torch.no_grad():
            squared = error.square().mean(1, keepdim=True) / 4
            moving = (change >= 1).float()
            of_moving = (squared * moving).sum() / moving.sum().clamp_min(1)
            metrics = {"psnr": _psnr(squared.mean()), "psnr_moving": _psnr(of_moving)}
        return loss, metrics

    def _raw(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (N, height, width, 3) -> latents before scaling, float32."""
        signed = _signed(images, next(self.parameters()).dtype)
        return (self.encoder(signed) + self.embed(signed)).float()

    def _decoded(self, raw: torch.Tensor) -> torch.Tensor:
        """Latents before scaling -> images float32 (N, 3, height, width), -1 .. 1 and a little beyond."""
        raw = raw.to(next(self.parameters()).dtype, memory_format=torch.channels_last)
        return (self.decoder(raw) + self.draw(raw)).float()


class PretrainedAutoencoder(Autoencoder):
    """One of diffusers' autoencoders as an `Autoencoder`, with its own scaling. Frozen; an image is a video of one.

    Args:
        model: an AutoencoderTiny, AutoencoderKL, AutoencoderDC or AutoencoderKLWan.
        image_size: (height, width), pixels.

    Raises:
        ValueError: an image size that does not divide into latents.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, model: Any, image_size: tuple[int, int]) -> None:
        super().__init__()
        config, name = model.config, type(model).__name__
        self.is_video = name == "AutoencoderKLWan"
        if self.is_video:
            factor, channels = config.scale_factor_spatial, config.z_dim
        elif name == "AutoencoderDC":
            factor, channels = model.spatial_compression_ratio, config.latent_channels
        else:
            widths = config.get("encoder_block_out_channels") or config.block_out_channels
            factor, channels = 2 ** (len(widths) - 1), config.latent_channels
        self.model = model.eval().requires_grad_(False)
        self.image_size = image_size
        self.latent_shape = (channels, *_latent_size(image_size, factor, name))
        # Any of: a mean and a standard deviation a channel, one shift, one factor (which multiplies).
        factor = config.get("scaling_factor") or 1.0
        mean = config.get("latents_mean") or [config.get("shift_factor") or 0.0] * channels
        std = config.get("latents_std") or [1.0] * channels
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1) / factor, persistent=False)

    @classmethod
    def load(cls, path: Path, image_size: tuple[int, int]) -> PretrainedAutoencoder:
        """From the folder of a pipeline, with the autoencoder in `vae/`, or of the autoencoder itself.

        Raises:
            ValueError: none of the four classes there, no safetensors, damaged, or an unfit image size.
        """
        import diffusers

        folder, values = _find_model(Path(path))
        name = values["_class_name"]
        try:
            model = getattr(diffusers, name).from_pretrained(
                folder, torch_dtype=torch.float32, use_safetensors=True, local_files_only=True
            )
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{folder}: cannot be loaded as {name} ({str(error).splitlines()[0]}). Copy the folder again, with "
                "config.json and its *.safetensors."
            ) from error
        return cls(model, image_size)

    @classmethod
    def of(cls, values: dict[str, Any], image_size: tuple[int, int]) -> PretrainedAutoencoder:
        """With fresh weights, for a file's to go into; `values`: of a config.json.

        Raises:
            ValueError: none of the four classes, or an unfit image size.
        """
        import diffusers

        name = values.get("_class_name")
        if name not in CLASSES:
            raise ValueError(f"autoencoder.pretrained: is the config of {name!r}; allowed: {', '.join(CLASSES)}")
        return cls(getattr(diffusers, name).from_config(values), image_size)

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """See `Autoencoder.encode`; gives the most likely latents.

        Raises:
            ValueError: images of another size.
        """
        return (_in_parts(self._raw, _checked(images, self.image_size)) - self.mean) / self.std

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See `Autoencoder.decode`."""
        return _in_parts(self._images, latents, self.image_size)

    def _raw(self, images: torch.Tensor) -> torch.Tensor:
        signed = _signed(images, self.model.dtype)
        encoded = self.model.encode(signed[:, :, None] if self.is_video else signed)
        if hasattr(encoded, "latent_dist"):
            raw = encoded.latent_dist.mode()
        else:
            raw = encoded.latent if hasattr(encoded, "latent") else encoded.latents
        return (raw[:, :, 0] if self.is_video else raw).float()

    def _images(self, latents: torch.Tensor) -> torch.Tensor:
        raw = (latents * self.std + self.mean).to(self.model.dtype)
        images = self.model.decode(raw[:, :, None] if self.is_video else raw).sample
        return _pixels((images[:, :, 0] if self.is_video else images).float())


def _psnr(squared_error: torch.Tensor) -> torch.Tensor:
    return -10 * torch.log10(squared_error.clamp_min(1e-10))


def _find_model(path: Path) -> tuple[Path, dict[str, Any]]:
    """The autoencoder's folder and config.json."""
    path = path.expanduser()
    folder = path / "vae" if (path / "vae" / "config.json").is_file() else path
    file, allowed = folder / "config.json", ", ".join(CLASSES)
    if not file.is_file():
        raise ValueError(
            f"{path}: no config.json and no vae/config.json; autoencoder.path must be a folder with a diffusers "
            f"{allowed}"
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        name = values["_class_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not the config of a diffusers model ({type(error).__name__}: {error})") from error
    if name not in CLASSES:
        raise ValueError(f"{file}: is the config of {name!r}; allowed: {allowed}")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder}: has no *.safetensors; other weights are not read. Convert them with diffusers' "
            "save_pretrained(..., safe_serialization=True)."
        )
    return folder, values


def _latent_size(image_size: tuple[int, int], factor: int, what: str) -> tuple[int, int]:
    height, width = image_size
    if height % factor or width % factor:
        raise ValueError(
            f"{what}: makes one latent pixel of {factor} x {factor}, so image height and width must be multiples of "
            f"{factor}; got {height} x {width}"
        )
    return height // factor, width // factor


def _checked(images: torch.Tensor, image_size: tuple[int, int]) -> torch.Tensor:
    if images.dtype != torch.uint8 or tuple(images.shape[1:]) != (*image_size, 3):
        raise ValueError(
            f"images: got {images.dtype} {tuple(images.shape)}; the autoencoder is for uint8 (N, {image_size[0]}, "
            f"{image_size[1]}, 3)"
        )
    return images


def _in_parts(
    function: Callable[[torch.Tensor], torch.Tensor], items: torch.Tensor, image_size: tuple[int, int] | None = None
) -> torch.Tensor:
    """`function` of some items at a time. `image_size`: of their images; None takes the items' own."""
    height, width = image_size or items.shape[1:3]
    at_once = PIXELS_AT_ONCE["cpu" if items.device.type == "cpu" else "cuda"]
    parts = items.split(max(at_once // (height * width), 1))
    return torch.cat([function(part) for part in parts])


def _signed(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 (N, height, width, 3) -> (N, 3, height, width) in -1 .. 1; in memory the channels stay last."""
    return (images.permute(0, 3, 1, 2).float() / 127.5 - 1).to(dtype)


def _pixels(images: torch.Tensor) -> torch.Tensor:
    """(N, 3, height, width) in -1 .. 1 -> uint8 (N, height, width, 3)."""
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
