"""How action tokens are drawn one after the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vla_rl.policies.openvla.network.network import OpenVLANetwork, Prefix
from vla_rl.policies.token_draws import draw, uniforms


def decode(
    network: OpenVLANetwork, prefix: Prefix, num_tokens: int, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw n tokens one after the other, each after those before it. Logits are computed in full precision.

    Returns:
        tokens int64 (B, n), logits (B, n, bins), hidden states (B, n, hidden).
    """
    hidden, past = network.start(prefix)
    valid = prefix.valid
    # All tokens' numbers at once: the same as one by one, and one copy to the device.
    uniform = (
        uniforms((num_tokens, len(hidden), 1), generator, hidden.device, dim=1)
        if temperature > 0
        else [None] * num_tokens
    )
    tokens, logits, hiddens = [], [], []
    for i in range(num_tokens):
        if i > 0:
            valid = None if valid is None else F.pad(valid, (0, 1), value=True)
            hidden, past = network.step(tokens[-1], valid, past)
        with torch.autocast(hidden.device.type, enabled=False):
            logits.append(network.logits(hidden))
        hiddens.append(hidden)
        tokens.append(draw(logits[-1], temperature, None, uniform[i]))
    return torch.cat(tokens, 1), torch.cat(logits, 1), torch.cat(hiddens, 1)
