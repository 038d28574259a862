"""Checkpoints that survive a kill: whole folders of safetensors and JSON, written atomically.

A checkpoint is a folder `step_00000100` with

    tensors.safetensors   every tensor, flat names
    state.json            everything else (step, seeds, counters, optimizer options)
    manifest.json         size and CRC-32 of each file, to notice truncation and corruption
    ...                   whatever `extra` wrote, for example the policy's own folder

It is written to a temporary sibling, flushed to disk, then renamed: a reader sees all of it or
nothing. Nothing here is pickled.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vla_rl.common.atomic import atomic_folder
from vla_rl.common.distributed.fsdp import like
from vla_rl.common.distributed.tensor_files import CheckpointError, write_tensors

TENSORS_FILE = "tensors.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
_STEP_FOLDER = re.compile(r"step_(\d{8,})$")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lives: `folder/step_00000100`."""
    return Path(folder) / f"step_{step:08d}"


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _STEP_FOLDER.search(Path(path).name)
    if match is None:
        raise CheckpointError(f"{path}: not a checkpoint folder; expected a name such as step_00000100")
    return int(match.group(1))


def save_checkpoint(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    extra: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint folder atomically, replacing one of the same name.

    Args:
        path: the checkpoint's folder, usually `checkpoint_path(folder, step)`.
        tensors: name -> tensor, any device; tensors that share storage are written separately. Sharded ones are
            gathered one at a time, in a `gathers` block of theirs.
        state: JSON-able values.
        extra: called with the temporary folder, to write further files (`policy.save(folder / "policy")`).

    Raises:
        OSError: the disk is full or not writable; nothing is left behind and `path` is as before.
    """
    with atomic_folder(path, what="checkpoint", replace=True) as partial:
        write_tensors(partial / TENSORS_FILE, tensors)
        (partial / STATE_FILE).write_text(json.dumps(dict(state), indent=1))
        if extra is not None:
            extra(partial)
        files = sorted(p for p in partial.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(partial)): {"bytes": p.stat().st_size, "crc32": _crc32(p)} for p in files}
        (partial / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1))
    return Path(path)


def load_checkpoint(path: Path, device: str = "cpu") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the state of a checkpoint folder, after checking that it is whole.

    Raises:
        CheckpointError: missing, incomplete or corrupt.
    """
    path = Path(path)
    check_whole(path)
    try:
        tensors = load_file(str(path / TENSORS_FILE), device=device)
        state = json.loads((path / STATE_FILE).read_text())
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}. Use an earlier checkpoint.") from error
    return tensors, state


def check_whole(path: Path) -> None:
    """Raise `CheckpointError` unless every file of the checkpoint has the size and CRC-32 it was written with."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"checkpoint not found: {path}. Its folder is named like step_00000100.")
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text())
        expected = {name: (entry["bytes"], entry["crc32"]) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: {MANIFEST_FILE} is missing or unreadable ({error}); not a checkpoint."
        ) from error
    for required in (TENSORS_FILE, STATE_FILE):
        if required not in expected:
            raise CheckpointError(f"{path}: {MANIFEST_FILE} does not list {required}; not a whole checkpoint.")
    for name, (size, crc32) in expected.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path}: {name} is missing; use an earlier checkpoint.")
        if file.stat().st_size != size:
            found = file.stat().st_size
            raise CheckpointError(f"{path}: {name} has {found} bytes, expected {size}; it is truncated or changed.")
        if _crc32(file) != crc32:
            raise CheckpointError(f"{path}: {name} does not match its checksum; it is corrupt.")


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders in `folder`, oldest step first, whole or not."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _STEP_FOLDER.fullmatch(p.name)), key=checkpoint_step)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`, or None without any; broken ones are skipped with a warning.

    Raises:
        CheckpointError: there are checkpoints, but none is whole: starting over in silence would throw the run away.
    """
    broken = []
    for path in reversed(list_checkpoints(folder)):
        try:
            check_whole(path)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        for text in broken:
            warnings.warn(f"skipping a broken checkpoint: {text}", stacklevel=2)
        return path
    if broken:
        raise CheckpointError(
            f"{folder}: no checkpoint in it is whole, so there is nothing to resume from. {' '.join(broken)} Restore "
            "one from a copy; or, to start over, delete the folder or choose another --output."
        )
    return None


def keep_last(saved: Path, num: int) -> None:
    """Delete all but `num` checkpoints: the one just saved, and those before it.

    Later ones are left alone. A run that goes on before them has found them broken, so they must not push out whole
    ones; it writes them anew.

    Raises:
        ValueError: num below 1.
    """
    if num < 1:
        raise ValueError(f"keep_last: num must be at least 1, got {num}")
    newest = checkpoint_step(saved)
    for path in [p for p in list_checkpoints(Path(saved).parent) if checkpoint_step(p) <= newest][:-num]:
        shutil.rmtree(path)


# --- what goes into a checkpoint -------------------------------------------------------------


# Which of torch's implementations an optimizer runs: this device's, whatever the checkpoint was made on.
_KERNELS = ("fused", "foreach")


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, prefix: str = "optimizer"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer's state as flat tensors (`prefix.<parameter>.<name>`) and a JSON-able rest.

    State that is sharded stays so.
    """
    state_dict = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entry in state_dict["state"].items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{prefix}.{index}.{name}"] = value
            else:
                scalars.setdefault(str(index), {})[name] = value
    return tensors, {"param_groups": state_dict["param_groups"], "scalars": scalars}


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    prefix: str = "optimizer",
) -> None:
    """Undo `flatten_optimizer` on an optimizer built over the same parameters in the same order.

    Raises:
        CheckpointError: the parameter groups differ from the optimizer's.
    """
    entries: dict[int, dict[str, Any]] = {int(i): dict(values) for i, values in state["scalars"].items()}
    start = f"{prefix}."
    for name, tensor in tensors.items():
        if name.startswith(start):
            index, _, key = name[len(start) :].partition(".")
            entries.setdefault(int(index), {})[key] = tensor
    groups = [{**g, **({"betas": tuple(g["betas"])} if "betas" in g else {})} for g in state["param_groups"]]
    for group, own in zip(groups, optimizer.param_groups, strict=False):  # A count that differs is refused below.
        group |= {name: own[name] for name in _KERNELS if name in own}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in entries.get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                entries[number][key] = like(value, parameter)
    try:
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    except ValueError as error:
        raise CheckpointError(f"{prefix}: the checkpoint's optimizer does not fit this run's: {error}") from error


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
