"""Low-rank adapters in LeRobot's modules, in place, and the plain weights that they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft.tuners.lora import Linear
from torch import Tensor, nn

from vla_rl.config import ConfigError
from vla_rl.policies.lerobot.options import FlowLora
from vla_rl.policies.lora import inject, is_adapter, widen_adapters

if TYPE_CHECKING:
    from vla_rl.policies.lerobot.networks import FlowNetwork

__all__ = ["add_adapters", "is_adapter", "plain_state"]


def add_adapters(core: nn.Module, options: FlowLora, network: FlowNetwork) -> None:
    """Put adapters on the chosen linear layers; they change nothing until trained.

    Raises:
        ConfigError: a target names no linear layer of the chosen part.
    """
    prefixes = {"expert": (network.expert,), "language": (network.language,)}.get(
        options.part, (network.expert, network.language)
    )
    linear = [
        name for name, module in core.named_modules() if isinstance(module, nn.Linear) and name.startswith(prefixes)
    ]
    targets = [name for name in linear if name.rsplit(".", 1)[-1] in options.targets]
    missing = set(options.targets) - {name.rsplit(".", 1)[-1] for name in targets}
    if missing:
        allowed = sorted({name.rsplit(".", 1)[-1] for name in linear})
        raise ConfigError(f"policy.lora.targets: got {sorted(missing)}, allowed: {', '.join(allowed)}")
    inject(core, targets, options.rank, options.alpha, options.dropout)
    widen_adapters(core)


def plain_state(core: nn.Module) -> dict[str, Tensor]:
    """The state dict with each adapter's product added to the weight that it adapts, under the plain names."""
    state: dict[str, Any] = dict(core.state_dict())
    for name, module in core.named_modules():
        if not isinstance(module, Linear):
            continue
        weight = state[f"{name}.base_layer.weight"]
        merged = weight.float()
        for adapter in module.lora_A:
            merged = merged + module.get_delta_weight(adapter).float()
        state[f"{name}.base_layer.weight"] = merged.to(weight.dtype)
    return {name.replace(".base_layer.", "."): value for name, value in state.items() if not is_adapter(name)}
