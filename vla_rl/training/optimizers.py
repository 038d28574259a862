"""Optimizers of a policy and its critic: AdamW, with moments in 32 or 8 bits, or Muon for the hidden matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vla_rl.common.distributed.fsdp import is_sharded
from vla_rl.config import ConfigError

if TYPE_CHECKING:
    from vla_rl.training.config import OptimConfig, OptimizerName

CRITIC_NAME = "value_head"
# Matrices that are not hidden layers: rows are looked up, or are classes, or belong to positions. Muon is not meant for
# these. By parts of a parameter's name, and by words in it.
_NOT_HIDDEN, _POSITIONS = ("embed", "head"), {"place", "offset"}
# torchao's: smaller parameters, and those that blocks do not fill, keep moments of their own dtype.
_SMALLEST_IN_8_BITS, _BLOCK, _NUM_CODES = 4096, 256, 256


def is_critic(name: str) -> bool:
    """Whether a parameter belongs to the critic: its name has a part `value_head`."""
    return CRITIC_NAME in name.split(".")


def build_optimizers(
    config: OptimConfig, parameters: Mapping[str, torch.Tensor], critic_lr: float | None = None
) -> list[torch.optim.Optimizer]:
    """Make AdamW over everything, or Muon over the hidden matrices and AdamW over the rest.

    The critic has its own learning rate, and is left out when that is None. Muon (Jordan et al. 2024) scales its steps
    to AdamW's root mean square, so one `lr` fits both (Liu et al. 2025, arXiv 2502.16982). On CUDA AdamW is fused.
    """
    policy = {n: p for n, p in parameters.items() if not is_critic(n)}
    by_muon = {n for n, p in policy.items() if config.name == "muon" and _is_hidden_matrix(n, p)}
    hidden, rest = [policy[n] for n in policy if n in by_muon], [policy[n] for n in policy if n not in by_muon]
    groups: list[dict] = [{"params": rest, "lr": config.lr}] if rest else []
    if critic_lr is not None:
        critic = [p for n, p in parameters.items() if is_critic(n)]
        groups.append({"params": critic, "lr": critic_lr, "weight_decay": 0.0})
    optimizers: list[torch.optim.Optimizer] = [_muon(config, hidden)] if hidden else []
    if groups:
        adamw = partial(torch.optim.AdamW, fused=all(p.is_cuda for g in groups for p in g["params"]) or None)
        kind = _eight_bit_adamw() if config.name == "adamw_8bit" else adamw
        optimizers.append(kind(groups, betas=config.betas, weight_decay=config.weight_decay))
    for optimizer in optimizers:
        optimizer.register_step_post_hook(_tell_of_step)
    return optimizers


def _muon(config: OptimConfig, hidden: list[torch.Tensor]) -> torch.optim.Muon:
    kind = Float32Muon if all(p.device.type == "cpu" for p in hidden) else torch.optim.Muon
    return kind(hidden, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")


def _tell_of_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count the step in the weights' versions, by which merged adapters are known to be old: fused kernels do not."""
    torch.autograd.graph.increment_version([p for group in optimizer.param_groups for p in group["params"]])


def _eight_bit_adamw() -> Callable[..., torch.optim.Optimizer]:
    try:
        from vla_rl.training.adamw_8bit import EightBitAdamW
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchao":
            raise
        raise ConfigError(
            "optim.name: 'adamw_8bit' needs torchao, which is not installed: pip install '.[low_memory]'; or set "
            "it to adamw, whose moments take four times the memory"
        ) from None
    return EightBitAdamW


def optimizer_bytes(optimizer: OptimizerName, parameters: Mapping[str, torch.Tensor]) -> int:
    """What the optimizer will hold for these trained parameters: momentum (Muon), or the two moments."""
    total = 0
    for name, parameter in parameters.items():
        plain, count = parameter.numel() * parameter.element_size(), parameter.numel()
        if optimizer == "muon" and _is_hidden_matrix(name, parameter):
            total += plain
        elif optimizer == "adamw_8bit" and count >= _SMALLEST_IN_8_BITS and count % _BLOCK == 0:
            total += 2 * (count + 4 * (count // _BLOCK) + 4 * _NUM_CODES)
        else:
            total += 2 * plain
    return total


def optimizer_step_bytes(optimizer: OptimizerName, parameters: Mapping[str, torch.Tensor], device_type: str) -> int:
    """What a step makes and drops: one parameter's at a time, so the largest's. A test measures each on a CPU.

    On CUDA, AdamW is one kernel, which makes nothing. 8-bit AdamW is counted as written; compiled, as on a GPU, it
    makes less.
    """
    most = 0
    for name, parameter in parameters.items():
        if optimizer == "muon" and _is_hidden_matrix(name, parameter):
            rows, columns = sorted(parameter.shape)
            # The step; its orthogonal form, twice, and two square products, in bfloat16, on a CPU in float32.
            numbers, squares = rows * columns, 2 * rows * rows
            width = 4 if device_type == "cpu" else 2
            size = parameter.element_size() * numbers + width * (2 * numbers + squares)
        elif optimizer == "adamw_8bit":
            size = 32 * parameter.numel()
        else:
            size = 0 if device_type == "cuda" else 2 * parameter.numel() * parameter.element_size()
        most = max(most, size)
    return most


def _is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    words = name.replace("_", ".").split(".")
    return parameter.ndim == 2 and not any(part in name for part in _NOT_HIDDEN) and _POSITIONS.isdisjoint(words)


def clip_gradients(parameters: Sequence[torch.Tensor], limit: float) -> torch.Tensor:
    """Scale gradients to a norm of at most `limit`; the norm before, a scalar. Sharded ones: by the norm of the whole.

    All processes call it together. Nothing waits for the device: a norm that is NaN or infinite is the caller's to
    find, when it reads it.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return norm.full_tensor() if is_sharded(norm) else norm


def read_scalars(values: Sequence[Any]) -> Iterator[float]:
    """Return numbers, some of them scalars on a device, in order. The host waits for the device once, not once each.

    Args:
        values: tensors of one element, on one device or the CPU, and plain numbers.
    """
    away = [isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values]
    there = [value.detach().reshape(1) for value, is_away in zip(values, away, strict=True) if is_away]
    read = iter(torch.cat(there).tolist() if there else ())
    return iter([next(read) if is_away else _number(value) for value, is_away in zip(values, away, strict=True)])


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon with `match_rms_adamw` (Liu et al. 2025, arXiv 2502.16982), its products in float32."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See torch.optim.Muon."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            assert group["adjust_lr_fn"] == "match_rms_adamw", "the only scale of its steps"
            parameters: list[torch.Tensor] = []
            gradients: list[torch.Tensor] = []
            buffers: list[torch.Tensor] = []
            self._init_group(group, parameters, gradients, buffers)
            lr, momentum = float(group["lr"]), group["momentum"]
            for parameter, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
                buffer.lerp_(gradient, 1 - momentum)
                step = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer.clone()
                step = orthogonal(step.float(), group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(step, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))
        return loss


def orthogonal(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Bring a matrix's singular values near 1, by Newton and Schulz's iteration; overwrites it.

    Args:
        matrix: (M, N), in the precision to compute in.
        coefficients: of X, (X X^T) X and (X X^T)^2 X in each step (Jordan et al. 2024).

    Returns:
        (M, N), with singular values within about .7 and 1.2.
    """
    a, b, c = coefficients
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide.div_(wide.norm().clamp(min=eps))
    for _ in range(num_steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
