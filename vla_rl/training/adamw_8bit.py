"""AdamW whose two moments are held in 8 bits a value (Dettmers et al. 2022, arXiv 2110.02861), by torchao.

Blocks of 256 values share a scale. torchao computes on CPUs and GPUs alike, where bitsandbytes' optimizers need a GPU.
Imported only when it is asked for, since torchao is an extra.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

_PARTS = ("codes", "scale")  # of a moment in 8 bits: uint8, as the parameter is shaped, and float32, one per block


class EightBitAdamW(AdamW8bit):
    """torchao's `AdamW8bit`, with learning rates that may be set to numbers and a state of plain tensors.

    On a CPU it runs as written; compiling it, as on a GPU, would take longer than it saves.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._set_lr(float)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """See `torch.optim.Optimizer.step`."""
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        self._set_lr(lambda lr: torch.tensor(float(lr)))
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            result = super().step(closure)
        self._set_lr(float)
        return result

    def _set_lr(self, form: Callable[[Any], object]) -> None:
        for group in self.param_groups:
            group["lr"] = form(group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """As of AdamW, with NAME.codes and NAME.scale where a moment is in 8 bits."""
        whole = super().state_dict()
        state = {index: _take_apart(entries) for index, entries in whole["state"].items()}
        return {"state": state, "param_groups": whole["param_groups"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Undo `state_dict`."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        state = {index: _put_together(values, parameters[index]) for index, values in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})


def _take_apart(entries: Mapping[str, Any]) -> dict[str, Any]:
    apart: dict[str, Any] = {}
    for name, value in entries.items():
        if isinstance(value, OptimState8bit):
            apart |= {f"{name}.{part}": getattr(value, part) for part in _PARTS}
        else:
            apart[name] = value
    return apart


def _put_together(entries: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    state = {name: value for name, value in entries.items() if "." not in name}
    for name in {name.partition(".")[0] for name in entries if "." in name}:
        codes, scale = (entries[f"{name}.{part}"] for part in _PARTS)
        block_size, signed = codes.numel() // scale.numel(), name == "exp_avg"
        moment = OptimState8bit.zeros(codes.shape, signed, block_size, parameter.device, parameter.dtype)
        moment.codes.copy_(codes)
        moment.scale.copy_(scale)
        state[name] = moment
    return state
