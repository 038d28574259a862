"""Whether a device that a person names is one, and is here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vla_rl.config import ConfigError

if TYPE_CHECKING:
    import torch

ALLOWED = "auto (a GPU where torch finds one, else the CPU), cpu, cuda, cuda:N, mps"
_NAMES = re.compile(r"auto|(cpu|cuda|mps)(:(0|[1-9][0-9]?))?")


def check_name(device: str, option: str = "device") -> str:
    """Return a device's name, wherever the device is. The usual names are known without torch.

    Raises:
        ConfigError: naming the option, what it got and what is allowed.
    """
    if _NAMES.fullmatch(device) is None:
        parse_device(device, option)
    return device


def parse_device(device: str, option: str = "device") -> torch.device:
    """The device of that name, here or not.

    Raises:
        ConfigError: naming the option, what it got and what is allowed.
    """
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{option}: got {device!r}, allowed: {ALLOWED}") from None
    if wanted.type not in ("cpu", "cuda", "mps", torch._C._get_privateuse1_backend_name()):
        raise ConfigError(f"{option}: got {device!r}, allowed: {ALLOWED}")
    return wanted


def check_device(device: str, option: str = "device") -> None:
    """Refuse a device that torch cannot compute on here, before anything is made for it.

    Raises:
        ConfigError: naming the option, what it got, what is allowed or there, and what to do.
    """
    if device in ("auto", "cpu"):
        return
    import torch

    wanted = parse_device(device, option)
    here = f"Set {option}=auto or {option}=cpu to compute here; `vla-rl doctor` says what there is."
    if wanted.type == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"it is built for CUDA {built} and finds no GPU with a driver" if built else "it is a build for CPUs"
        raise ConfigError(f"{option}: got {device!r}, but torch {torch.__version__} has no GPU here: {why}. {here}")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(f"{option}: got {device!r}, but the GPUs here are cuda:0 to cuda:{last}. {here}")
    if wanted.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"{option}: got {device!r}, but torch {torch.__version__} finds no Apple GPU here. {here}")
