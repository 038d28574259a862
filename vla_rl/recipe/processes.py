"""A recipe in several processes: what it may not have, and joining those that a launcher started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vla_rl.config import ConfigError
from vla_rl.distributed.process_group import ALONE, ProcessGroup, join, num_launched, resolve_device
from vla_rl.recipe.recipe import Recipe


@contextmanager
def joined(recipe: Recipe) -> Iterator[ProcessGroup]:
    """Join the processes that a launcher started, for the block; without a launcher: this process alone.

    Raises:
        ConfigError: the recipe has what does not work in several processes.
    """
    if num_launched() == 1:
        yield ALONE
        return
    check(recipe, num_launched())
    with join(recipe.parallel, on_cpu=resolve_device(recipe.device) == "cpu") as world:
        yield world


def check(recipe: Recipe, size: int) -> None:
    """Refuse what does not work in several processes.

    Raises:
        ConfigError: naming the field and what to do.
    """
    algo, sft = recipe.algo, recipe.sft
    if recipe.env.is_imagined:
        raise ConfigError(
            "env.kind: a world model's noise comes from one stream, which several processes cannot share; train in it "
            "with one process, or in a simulator with several"
        )
    if ":" in recipe.device:
        raise ConfigError(
            f"device: got {recipe.device!r}, but each of {size} processes has a GPU of its own; set device=cuda or auto"
        )
    if algo is not None and recipe.train.groups < size:
        raise ConfigError(
            f"train.groups: got {recipe.train.groups} for {size} processes; a group stays in one process, so each "
            "needs one at least"
        )
    if sft is not None and sft.batch_size < size:
        raise ConfigError(f"sft.batch_size: got {sft.batch_size} for {size} processes; each needs one example at least")
    for section, options in (("algo", algo), ("sft", sft)):
        if recipe.parallel == "fsdp" and options is not None and options.optimizer != "adamw":
            raise ConfigError(
                f"{section}.optimizer: got {options.optimizer!r}, but with parallel=fsdp only adamw knows parameters "
                "that are cut up; set it to adamw, or parallel=ddp"
            )
