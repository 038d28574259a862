"""Autoregressive decoding of action tokens, and the combination of guided logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vla_rl.policies.openvla.network.network import OpenVLANetwork, Prefix
from vla_rl.policies.token_draws import draw, guided, uniforms


def decode(
    network: OpenVLANetwork,
    prefixes: Sequence[Prefix],
    num_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
    weight: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw n tokens one after the other, each after those before it. Logits are computed in full precision.

    Args:
        prefixes: what stands before the tokens; with a second one, logits are guided by `weight` away from its.

    Returns:
        tokens int64 (B, n), logits (B, n, bins), hidden states (B, n, hidden) after the first prefix.
    """
    reading = [network.start(prefix) for prefix in prefixes]
    valid = [prefix.valid for prefix in prefixes]
    first = reading[0][0]
    # All tokens' numbers at once: the same as one by one, and one copy to the device.
    uniform = (
        uniforms((num_tokens, len(first), 1), generator, first.device, dim=1)
        if temperature > 0
        else [None] * num_tokens
    )
    tokens, logits, hiddens = [], [], []
    for i in range(num_tokens):
        if i > 0:
            valid = [None if mask is None else F.pad(mask, (0, 1), value=True) for mask in valid]
            reading = [network.step(tokens[-1], mask, past) for mask, (_, past) in zip(valid, reading, strict=True)]
        with torch.autocast(first.device.type, enabled=False):
            logits.append(guided([network.logits(hidden) for hidden, _ in reading], weight))
        hiddens.append(reading[0][0])
        tokens.append(draw(logits[-1], temperature, None, uniform[i]))
    return torch.cat(tokens, 1), torch.cat(logits, 1), torch.cat(hiddens, 1)
