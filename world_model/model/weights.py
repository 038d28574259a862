"""Weight files of a part: safetensors, checked against the network."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from world_model.metadata import METADATA_FILE


def write_weights(file: Path, module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Write a module's state; `dtype`: of the stored parameters, None stores them as they are."""
    parameters = {name for name, _ in module.named_parameters()}
    tensors = {
        name: tensor.detach().to("cpu", (dtype if name in parameters else None) or tensor.dtype)
        for name, tensor in module.state_dict().items()
    }
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file)


def read_weights(file: Path, module: nn.Module) -> None:
    """Read what `write_weights` wrote.

    Raises:
        ValueError: missing, damaged, of another network, or not finite.
    """
    if not file.is_file():
        raise ValueError(f"{file}: not found. Copy the world model's folder again, with all of its files.")
    try:
        found = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated or not a safetensors file ({error}). Copy it again.") from error
    expected = module.state_dict()
    problems = [f"{name}: missing" for name in expected if name not in found]
    problems += [f"{name}: not part of it" for name in found if name not in expected]
    problems += [
        f"{name}: found shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
        for name, tensor in found.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    if problems:
        raise ValueError(
            f"{file}: does not fit the networks that {METADATA_FILE} describes: {_some(problems)}. "
            f"Use the {METADATA_FILE} that was saved with these weights."
        )
    if broken := [name for name, tensor in found.items() if not bool(torch.isfinite(tensor).all())]:
        raise ValueError(
            f"{file}: NaN or infinity in {_some(broken)}. Fit the world model again, or use an earlier one."
        )
    module.load_state_dict(found)


def _some(items: list[str], limit: int = 6) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more
