"""Policy folders: written whole or not at all, and read with errors that say what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from vla_rl.common.atomic import atomic_folder
from vla_rl.common.distributed import tensor_files
from vla_rl.common.distributed.tensor_files import write_tensors
from vla_rl.policies.base import CONFIG_FILE

WEIGHTS_FILE = "model.safetensors"


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a new folder with `write`, then put it in `folder`'s place, whole or not at all (see `atomic_folder`).

    Raises:
        DiskFullError: the disk is full.
    """
    with atomic_folder(Path(folder), what="policy", replace=True) as partial:
        write(partial)


def write_weights(folder: Path, network: nn.Module, config: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """Write model.safetensors (weights as `dtype`, None: as they are) and config.json."""
    tensors = network.state_dict()
    dtypes = dict.fromkeys(tensors, dtype) if dtype else None
    write_tensors(folder / WEIGHTS_FILE, tensors, dtypes, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))


def read_weights(folder: Path, network: nn.Module, may_miss: tuple[str, ...] = ()) -> None:
    """Load model.safetensors into a network, in the network's dtype.

    `may_miss`: prefixes of names that the file may lack (heads added anew) or have in vain (heads turned off).

    Raises:
        ValueError: the file is missing or truncated; tensors are missing, unknown, of another
            shape, or hold NaN or infinity.
    """
    file = Path(folder) / WEIGHTS_FILE
    if not file.is_file():
        raise ValueError(f"{file}: not found. Copy the policy folder again, with all of its files.")
    try:
        found = safetensors.torch.load_file(file)  # Mapped: what is not touched below takes no memory.
    except SafetensorError as error:
        raise ValueError(
            f"{file}: truncated or not a safetensors file ({error}). Copy or download it again."
        ) from error
    expected = network.state_dict()
    problems = [f"{k}: missing" for k in expected if k not in found and not k.startswith(may_miss or ("\0",))]
    found = {k: v for k, v in found.items() if k in expected or not k.startswith(may_miss or ("\0",))}
    problems += [f"{k}: not part of this architecture" for k in found if k not in expected]
    problems += [
        f"{k}: found shape {tuple(v.shape)}, expected {tuple(expected[k].shape)}"
        for k, v in found.items()
        if k in expected and v.shape != expected[k].shape
    ]
    if problems:
        raise ValueError(
            f"{file}: does not fit the architecture in {CONFIG_FILE}: {some(problems)}. "
            f"Use the {CONFIG_FILE} that was saved with these weights."
        )
    for name in tensor_files.await_file(network, file):
        found.pop(name)
    broken = [k for k, v in found.items() if not bool(torch.isfinite(v).all())]
    if broken:
        raise ValueError(f"{file}: NaN or infinity in {some(broken)}. Use an earlier checkpoint of the run.")
    network.load_state_dict(found, strict=False)


def some(items: list[str], limit: int = 8) -> str:
    """The first of a list, and how many more."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more
