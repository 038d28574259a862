"""Sampling a flow-matching policy with a likelihood: the ODE, Flow-SDE and Flow-Noise, and the paths they draw.

A flow policy moves noise x at level t = 1 to actions at t = 0 along a velocity v = dx/dt that a network
gives; the ODE has no likelihood that RL could use. Flow-SDE and Flow-Noise (pi_RL, Chen et al. 2025,
arXiv 2510.25889) make each denoising step a Gaussian, so that a sampled *path* has one.

Shape legend: B rows, C actions that the network denoises at once, D their dimensions with the network's
padding, K denoising steps, P points of a stored path.

A path is stored as float32 (B, P, C, D + 1): P points x, each with its noise level t in the last
column (the same for all C). The log-probability is of each point given the one before it. With
`joint` that is the whole path, P = K + 1; else P = 2, the one step that was drawn at random.

X-VLA's own sampler is no ODE solver: it predicts the clean actions and mixes them anew with the noise that it started
from, x' = t' x1 + (1 - t') x0 (`keeps_noise`). So each step depends on that noise, and a path of one step holds it as
its first point, P = 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vla_rl.common.row_noise import by_row
from vla_rl.policies import token_draws
from vla_rl.policies.lerobot.options import FlowSampling

# (x (B, C, D), t (B,)) -> velocity (B, C, D), and the learned noise (B, C, D) or None.
Velocity = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]

LOG_2PI = math.log(2 * math.pi)


class Injected(NamedTuple):
    """What is random in denoising, drawn before it, so that a CUDA graph can hold all steps.

    Attributes:
        noise: N(0, I) of each step, float32 (K, B, C, D).
        step: the noisy step of each row, int64 (B,); None: all are (`joint`).
        temperature: that scales the noise, float64 ().
    """

    noise: Tensor
    step: Tensor | None
    temperature: Tensor


@dataclass(frozen=True)
class Drawn:
    """A sample: x (B, C, D) at noise level 0, and with a likelihood its path and log-probability (B, C, D)."""

    x: Tensor
    path: Tensor | None = None
    log_prob: Tensor | None = None


def gaussian_step(
    sampling: FlowSampling,
    x: Tensor,
    velocity: Tensor,
    learned_std: Tensor | None,
    level: Tensor,
    next_level: Tensor,
    temperature: float | Tensor = 1.0,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, (B, C, D), of one noisy denoising step from `level` to `next_level`, (B,).

    Flow-SDE (pi_RL, eq. of Flow-SDE; Flow-GRPO, arXiv 2505.05470): with the predicted ends of the path
    x0 = x - t v and x1 = x + (1 - t) v, step d = t - t', sigma = a sqrt(t / (1 - t)),

        mean = (1 - t') x0 + (t' - sigma^2 d / 2t) x1,   std = sigma sqrt(d),

    whose marginals are the ODE's as d -> 0. At t = 1, 1 - t is replaced by d, as pi_RL does. Flow-Noise and
    ReinFlow (arXiv 2505.22094): the ODE's mean x - d v, and a learned std. Both: std at least `std_floor`.
    With `kept`, the noise that a policy keeps, x1 is that noise.
    """
    t, after = level[:, None, None], next_level[:, None, None]
    step = t - after
    if sampling.method == "flow_noise":
        assert learned_std is not None, "Flow-Noise has a noise head"
        mean, std = plain_step(x, velocity, level, next_level, kept), temperature * learned_std
    else:
        start, end = x - t * velocity, x + (1 - t) * velocity if kept is None else kept
        sigma = sampling.noise_level * temperature * (t / torch.maximum(1 - t, step)).sqrt()
        mean = (1 - after) * start + (after - sigma**2 * step / (2 * t)) * end
        std = (sigma * step.sqrt()).expand_as(x)
    return mean, std.clamp_min(sampling.std_floor)


def plain_step(x: Tensor, velocity: Tensor, level: Tensor, next_level: Tensor, kept: Tensor | None = None) -> Tensor:
    """One step without noise, (B, C, D): Euler's along the ODE, or with the noise that is kept, X-VLA's."""
    t, after = level[:, None, None], next_level[:, None, None]
    if kept is None:
        return x + (after - t) * velocity
    return (1 - after) * (x - t * velocity) + after * kept


def log_density(x: Tensor, mean: Tensor, std: Tensor, clamp: tuple[float, float] | None = None) -> Tensor:
    """log N(x; mean, std^2) of each component; `clamp` bounds it, so that no outlier rules a gradient (DPPO)."""
    value = -0.5 * ((x - mean) / std) ** 2 - std.log() - 0.5 * LOG_2PI
    return value if clamp is None else value.clamp(*clamp)


def inject(
    start: Tensor, num_steps: int, sampling: FlowSampling, temperature: float, generator: torch.Generator | None
) -> Injected | None:
    """Draw what `num_steps` steps from `start` (B, C, D) need; None at temperature 0, where nothing is random.

    Args:
        temperature: 0 integrates the ODE by Euler steps, as LeRobot does; else the injected noise is scaled by it.
        generator: its device may differ from the start's.
    """
    if temperature == 0:
        return None
    device, home = start.device, _home(generator)
    step = None if sampling.joint else random_step(num_steps, len(start), generator).to(device)
    noise = torch.stack([normal(start.shape, generator, home) for _ in range(num_steps)]).to(device)
    return Injected(noise, step, torch.full((), temperature, dtype=torch.float64, device=device))


def denoise(
    velocity: Velocity,
    noise: Tensor,
    num_steps: int,
    sampling: FlowSampling,
    injected: Injected | None,
    keeps_noise: bool = False,
) -> Drawn:
    """Denoise `noise` (B, C, D), which is N(0, I), in `num_steps` steps; the host neither draws, nor waits, nor copies.

    Args:
        keeps_noise: whether each step mixes the prediction with `noise` anew, as X-VLA does.
    """
    kept, rows = noise if keeps_noise else None, len(noise)
    levels = torch.linspace(1.0, 0.0, num_steps + 1, dtype=torch.float32, device=noise.device)
    x, points, total = noise, [noise], torch.zeros_like(noise)
    if injected is not None and sampling.joint:
        total = log_density(noise, torch.zeros_like(noise), torch.ones_like(noise))
    before, after = noise, noise
    for k in range(num_steps):
        level, next_level = levels[k].expand(rows), levels[k + 1].expand(rows)
        speed, learned_std = velocity(x, level)
        ode = plain_step(x, speed, level, next_level, kept)
        if injected is None:
            x = ode
            continue
        mean, std = gaussian_step(sampling, x, speed, learned_std, level, next_level, injected.temperature, kept)
        drawn = mean + std * injected.noise[k]
        log_prob = log_density(drawn, mean, std, sampling.log_prob_clamp)
        if injected.step is None:
            total = total + log_prob
            x = drawn
            points.append(x)
            continue
        here = (injected.step == k)[:, None, None]
        before, after = torch.where(here, x, before), torch.where(here, drawn, after)
        total = torch.where(here, log_prob, total)
        x = torch.where(here, drawn, ode)
    if injected is None:
        return Drawn(x)
    if injected.step is None:
        return Drawn(x, _pack(torch.stack(points, 1), levels.expand(rows, -1)), total)
    pair = [levels[injected.step], levels[injected.step + 1]]
    points = [before, after]
    if keeps_noise:
        points, pair = [noise, *points], [torch.ones_like(pair[0]), *pair]
    return Drawn(x, _pack(torch.stack(points, 1), torch.stack(pair, 1)), total)


def path_log_prob(
    velocity: Velocity, path: Tensor, sampling: FlowSampling, temperature: float, keeps_noise: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of stored paths (B, P, C, D + 1), and the entropy of their steps, (B, C, D) each, with gradient.

    The density of the start noise, which no parameter changes, is counted in a joint path.
    """
    points, levels = path[..., :-1], path[:, :, 0, -1]
    first = points[:, 0]
    total, entropy = torch.zeros_like(first), torch.zeros_like(first)
    if sampling.joint:
        total = log_density(first, torch.zeros_like(first), torch.ones_like(first))
        entropy = entropy + 0.5 * (LOG_2PI + 1)
    kept = first if keeps_noise else None
    for k in range(1 if keeps_noise and not sampling.joint else 0, points.shape[1] - 1):
        x = points[:, k]
        speed, learned_std = velocity(x, levels[:, k])
        step = levels[:, k], levels[:, k + 1]
        mean, std = gaussian_step(sampling, x, speed, learned_std, *step, temperature, kept)
        total = total + log_density(points[:, k + 1], mean, std, sampling.log_prob_clamp)
        entropy = entropy + std.log() + 0.5 * (LOG_2PI + 1)
    return total, entropy


def guided(velocities: Sequence[Velocity], weight: float | Tensor) -> Velocity:
    """A conditional velocity, guided by `weight` away from a plain one, where there is one; see `token_draws`."""
    if len(velocities) == 1:
        return velocities[0]
    conditional, plain = velocities

    def velocity(x: Tensor, level: Tensor) -> tuple[Tensor, Tensor | None]:
        speed, learned_std = conditional(x, level)
        return token_draws.guided([speed, plain(x, level)[0]], weight), learned_std

    return velocity


def normal(shape: torch.Size | tuple[int, ...], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """N(0, I) noise, float32, drawn where the generator lives."""

    def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.randn(shape, generator=generator, device=_home(generator), dtype=torch.float32)

    return by_row(draw, shape, generator).to(device)


def random_step(num_steps: int, rows: int, generator: torch.Generator | None) -> Tensor:
    """One of the steps for each row, int64 (rows,), drawn where the generator lives."""

    def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.randint(num_steps, shape, generator=generator, device=_home(generator))

    return by_row(draw, (rows,), generator)


def _home(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


def _pack(points: Tensor, levels: Tensor) -> Tensor:
    """Points (B, P, C, D) and their levels (B, P) as one path (B, P, C, D + 1)."""
    column = levels[:, :, None, None].expand(*points.shape[:-1], 1)
    return torch.cat([points, column], -1)
