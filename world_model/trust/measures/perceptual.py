"""LPIPS and a Fréchet video distance, where the user has their weights. Nothing is ever downloaded.

Networks are torchvision's; the files are state dicts, read with `weights_only=True` or as safetensors.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torchvision.models import alexnet as build
from torchvision.models.video import r3d_18

# ReLUs of AlexNet's five convolutions.
_LPIPS_TAPS = (1, 4, 7, 9, 11)
_LPIPS_CHANNELS = (64, 192, 384, 256, 256)
_VIDEO_SIDE = 112


class Lpips:
    """LPIPS 0.1 with AlexNet (Zhang et al. 2018, arXiv 1801.03924).

    Args:
        alexnet: torchvision's AlexNet, ImageNet weights (alexnet-owt-7be5be79.pth).
        linear: the learned weights of each channel (weights/v0.1/alex.pth of the lpips package).
    """

    def __init__(self, alexnet: Path, linear: Path) -> None:
        self.features = load_weights(build(weights=None), alexnet).features.eval()
        weights = read_state(linear)
        self.weights = []
        for i, channels in enumerate(_LPIPS_CHANNELS):
            name = f"lin{i}.model.1.weight"
            if name not in weights or weights[name].numel() != channels:
                raise ValueError(
                    f"{linear}: needs {name} with {channels} numbers; use weights/v0.1/alex.pth of the lpips package"
                )
            self.weights.append(weights[name].reshape(1, channels, 1, 1).float())

    @torch.no_grad()
    def __call__(self, imagined: np.ndarray, real: np.ndarray) -> np.ndarray:
        """uint8 (..., height, width, 3) twice -> float64 (...)."""
        flat = [
            torch.from_numpy(x.reshape(-1, *x.shape[-3:])).permute(0, 3, 1, 2) / 127.5 - 1 for x in (imagined, real)
        ]
        total = torch.zeros(len(flat[0]))
        for a, b, weight in zip(*map(self._activations, flat), self.weights, strict=True):
            total += ((a - b).square() * weight).sum(1).mean((1, 2))
        return total.double().numpy().reshape(real.shape[:-3])

    def _activations(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Of each tap, every pixel's channels scaled to length 1."""
        shift, scale = (torch.tensor(x).reshape(1, 3, 1, 1) for x in ((-0.03, -0.088, -0.188), (0.458, 0.448, 0.45)))
        x, found = (images - shift) / scale, []
        for i, layer in enumerate(self.features):
            x = layer(x)
            if i in _LPIPS_TAPS:
                found.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return found


class VideoFeatures:
    """R3D-18's features of a clip (Tran et al. 2018), trained on Kinetics-400.

    Args:
        path: torchvision's R3D-18 weights (r3d_18-b3b3357e.pth).
    """

    def __init__(self, path: Path) -> None:
        network = load_weights(r3d_18(weights=None), path)
        self.network = nn.Sequential(*list(network.children())[:-1], nn.Flatten()).eval()

    @torch.no_grad()
    def __call__(self, video: np.ndarray) -> np.ndarray:
        """uint8 (B, F, height, width, 3) -> float64 (B, 512)."""
        batch, length = video.shape[:2]
        frames = torch.from_numpy(video).flatten(0, 1).permute(0, 3, 1, 2) / 255
        frames = F.interpolate(frames, (_VIDEO_SIDE, _VIDEO_SIDE), mode="bilinear", align_corners=False, antialias=True)
        mean, std = (
            torch.tensor(x).reshape(1, 3, 1, 1) for x in ((0.43216, 0.394666, 0.37645), (0.22803, 0.22145, 0.216989))
        )
        clips = ((frames - mean) / std).unflatten(0, (batch, length)).transpose(1, 2)
        return self.network(clips).double().numpy()


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Distance of two crowds of features, each taken for a Gaussian (Heusel et al. 2017; FVD: arXiv 1812.01717).

    |mean_a - mean_b|^2 + trace(C_a + C_b - 2 (C_a C_b)^(1/2)). With fewer samples than features it is biased upwards,
    so only distances from equally many samples compare.

    Args:
        a, b: float (N, D), N >= 2.
    """
    means = a.mean(0) - b.mean(0)
    cov_a, cov_b = np.atleast_2d(np.cov(a, rowvar=False)), np.atleast_2d(np.cov(b, rowvar=False))
    # The root's trace is the sum of the square roots of the eigenvalues of C_a C_b, which are those of the symmetric
    # C_a^(1/2) C_b C_a^(1/2).
    values, vectors = np.linalg.eigh(cov_a)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    eigenvalues = np.linalg.eigvalsh(root @ cov_b @ root)
    return float(means @ means + np.trace(cov_a) + np.trace(cov_b) - 2 * np.sqrt(np.maximum(eigenvalues, 0)).sum())


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name from a .safetensors file or a state dict saved by torch.

    Raises:
        ValueError: the file is missing or holds anything else.
    """
    if not path.is_file():
        raise ValueError(f"weights not found at {path}")
    if path.suffix == ".safetensors":
        return load_file(path)
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"{path}: expected a state dict, found {type(state).__name__}")
    return state


def load_weights[M: nn.Module](network: M, path: Path) -> M:
    """The network with the weights of a file.

    Raises:
        ValueError: the weights are missing or of another network.
    """
    try:
        network.load_state_dict(read_state(path))
    except RuntimeError as error:
        raise ValueError(f"{path}: not the weights of {type(network).__name__}: {str(error).splitlines()[0]}") from None
    return network
