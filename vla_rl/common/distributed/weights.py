"""Trainable weights of a policy by name: extracted, checked and loaded, sharded or whole."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, cast

import torch

from vla_rl.common.distributed.fsdp import like, local

if TYPE_CHECKING:
    from vla_rl.interfaces import Policy


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, corrupt or does not fit; the message says which and what to do."""


def trained_weights(policy: torch.nn.Module | Policy, prefix: str = "policy.") -> dict[str, torch.Tensor]:
    """Return a module's weights and buffers without its frozen parameters, under `prefix`."""
    module = cast(torch.nn.Module, policy)  # Every policy is one.
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return {prefix + name: tensor for name, tensor in module.state_dict().items() if name not in frozen}


def load_weights(
    policy: torch.nn.Module | Policy,
    tensors: Mapping[str, torch.Tensor],
    source: str,
    prefix: str = "policy.",
    is_part: bool = False,
) -> None:
    """Undo `trained_weights`: every weight that is not frozen must be there, fit and be finite.

    Args:
        is_part: some of the weights; the others stay as they are.

    Raises:
        CheckpointError: missing or unknown weights, wrong shapes, NaN or infinity.
    """
    given = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    wanted = trained_weights(policy, prefix="")
    check_names(given.keys(), given.keys() & wanted.keys() if is_part else wanted.keys(), source)
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(wanted[name].shape)}. "
                "Was it made with another policy config?"
            )
    given = {name: like(tensor, wanted[name]) for name, tensor in given.items()}
    check_finite({name: local(tensor) for name, tensor in given.items()}, source)
    cast(torch.nn.Module, policy).load_state_dict(given, strict=False)


def check_names(given: Set[str], wanted: Set[str], source: str) -> None:
    """Raise `CheckpointError` unless the weights given are those wanted."""
    missing, unknown = sorted(wanted - given), sorted(given - wanted)
    if missing or unknown:
        raise CheckpointError(
            f"{source}: weights do not fit this model: {len(missing)} missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}. Was it made with another policy config?"
        )


def check_finite(tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Raise `CheckpointError` if any floating tensor holds NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{source}: {name} holds NaN or infinite values; use an earlier checkpoint.")
