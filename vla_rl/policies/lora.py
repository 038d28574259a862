"""Low-rank adapters through peft, put into a network's linear layers in place."""

from __future__ import annotations

import peft
from peft.tuners.lora import LoraLayer
from torch import nn

from vla_rl.config import ConfigError
from vla_rl.policies.openvla import LoraOptions

_VISION_TARGETS = ("qkv", "proj", "fc1", "fc2")


def add_adapters(network: nn.Module, options: LoraOptions) -> None:
    """Put adapters on the chosen linear layers; they change nothing until trained.

    Raises:
        ConfigError: a target names no linear layer of the language model.
    """
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    targets = [n for n in linear if n.startswith("language_model.model.") and n.rsplit(".", 1)[-1] in options.targets]
    missing = set(options.targets) - {n.rsplit(".", 1)[-1] for n in targets}
    if missing:
        allowed = sorted({n.rsplit(".", 1)[-1] for n in linear if n.startswith("language_model.model.")})
        raise ConfigError(f"policy.lora.targets: got {sorted(missing)}, allowed: {', '.join(allowed)}")
    if options.vision:
        targets += [n for n in linear if n.startswith("vision_backbone.") and n.rsplit(".", 1)[-1] in _VISION_TARGETS]
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
    )
    peft.inject_adapter_in_model(config, network)


def merge_adapters(network: nn.Module) -> None:
    """Add each adapter's product to its layer's weight and put the plain layer back."""
    for name, module in list(network.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()  # pyright: ignore[reportCallIssue]
            network.set_submodule(name, module.get_base_layer())


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return ".lora_" in name
