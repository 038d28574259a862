"""Sampling of action tokens from logits, with their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vla_rl.common.row_noise import by_row
from vla_rl.policies.openvla.network.network import OpenVLANetwork, Prefix


def check_temperature(temperature: float, lowest: float) -> None:
    """Raise ValueError where the temperature is below the lowest that is allowed, or not a number."""
    if not temperature >= lowest:
        raise ValueError(f"temperature: got {temperature}, must be at least {lowest:g}")


def uniforms(shape: Sequence[int], generator: torch.Generator | None, device: torch.device, dim: int = 0) -> Tensor:
    """Numbers in [0, 1), float64, drawn where the generator lives and brought to the device; `dim` counts the rows."""
    where = device if generator is None else generator.device

    def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.rand(shape, generator=generator, device=where, dtype=torch.float64)

    return by_row(draw, shape, generator, dim).to(device)


def guided(readings: Sequence[Tensor], weight: float | Tensor) -> Tensor:
    """Classifier-free guidance (arXiv 2207.12598): plain + weight (conditional - plain), to the bit at 0 and 1.

    Args:
        readings: the conditional one, and the plain one; without it, what is conditional stays as it is.
    """
    return readings[0] if len(readings) == 1 else torch.lerp(readings[1], readings[0], weight)


def draw(
    logits: Tensor, temperature: float | Tensor, generator: torch.Generator | None, uniform: Tensor | None = None
) -> Tensor:
    """Draw tokens int64 (...) from logits float32 (..., bins): greedy at temperature 0, else by inverse CDF.

    `uniform`: float64 (...), in place of numbers from the generator; the temperature may then be a tensor above 0.
    """
    if uniform is None:
        if temperature == 0:
            return logits.argmax(-1)
        uniform = uniforms(logits.shape[:-1], generator, logits.device)
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    threshold = uniform[..., None] * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_max_(logits.shape[-1] - 1)


def token_log_prob(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability float32 (...) of tokens under logits (..., bins)."""
    return torch.log_softmax(logits, -1).gather(-1, tokens[..., None]).squeeze(-1)


def decode(
    network: OpenVLANetwork,
    prefixes: Sequence[Prefix],
    num_tokens: int,
    temperature: float | Tensor,
    uniform: Tensor | None,
    weight: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw n tokens one after the other, each after those before it. Logits are computed in full precision.

    Without waiting for the device, so that a CUDA graph can hold all of it.

    Args:
        prefixes: what stands before the tokens; with a second one, logits are guided by `weight` away from its.
        uniform: float64 (n, B, 1), what the tokens are drawn by; None: greedily.

    Returns:
        tokens int64 (B, n), logits (B, n, bins), hidden states (B, n, hidden) after the first prefix.
    """
    started = [network.start(prefix, num_tokens - 1) for prefix in prefixes]
    states, decodings = [state for state, _ in started], [decoding for _, decoding in started]
    tokens, logits, hiddens = [], [], []
    for i in range(num_tokens):
        if i > 0:
            states = [network.step(tokens[-1], decoding) for decoding in decodings]
        with torch.autocast(states[0].device.type, enabled=False):
            logits.append(guided([network.logits(hidden) for hidden in states], weight))
        hiddens.append(states[0])
        tokens.append(draw(logits[-1], temperature, None, uniform[i]) if uniform is not None else logits[-1].argmax(-1))
    return torch.cat(tokens, 1), torch.cat(logits, 1), torch.cat(hiddens, 1)
