"""Which parameters of an OpenVLA network are trained."""

from __future__ import annotations

from vla_rl.policies import lora
from vla_rl.policies.openvla.files.folders import NEW_HEADS, TRAINED_WHOLE
from vla_rl.policies.openvla.network.network import OpenVLANetwork
from vla_rl.policies.openvla.options import OpenVLAOptions


def trained_names(network: OpenVLANetwork, config: OpenVLAOptions) -> set[str]:
    """Names in the network of the parameters that `config.trainable` selects."""
    unused = network.vision_backbone.unused_parameters()
    if network.action_head is not None:
        unused |= {id(p) for p in network.language_model.lm_head.parameters()}
    mode = config.trainable
    heads = NEW_HEADS if config.decoder != "l1" else (*NEW_HEADS, *TRAINED_WHOLE)
    chosen = set()
    for name, parameter in network.named_parameters():
        adapted = lora.is_adapter(name) or name.startswith(heads)
        full = mode == "full" or (mode == "frozen_vision" and not name.startswith("vision_backbone."))
        base_of_adapter = ".base_layer." in name
        if id(parameter) not in unused and (adapted or (full and not base_of_adapter)):
            chosen.add(name)
    return chosen
