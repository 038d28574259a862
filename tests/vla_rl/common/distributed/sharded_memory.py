"""Host memory of two processes that load, train, save and resume a sharded policy, for `test_sharded_memory.py`.

torchrun --nproc-per-node 2 tests/vla_rl/common/distributed/sharded_memory.py SMALL LARGE PUBLISHED SMOLVLA OUTPUT
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tiny_run import make_recipe

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.learner import Learner
from vla_rl.common.distributed import tensor_files
from vla_rl.common.distributed.fsdp import whole
from vla_rl.common.distributed.launched import launched_group
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.common.distributed.tensor_files import load_weights, trained_weights
from vla_rl.policies.fake_input import fake_env_spec
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.training.checkpoint import load_checkpoint, save_checkpoint
from vla_rl.workflows.collect import clone

SPEC = fake_env_spec()
HEADS: dict[str, Any] = {"value_head": True}  # Not in the folder: fresh.


def resident() -> dict[str, int]:
    """This process's memory now and at most, bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}


@contextmanager
def growth(found: dict[str, int], name: str) -> Iterator[None]:
    """Note by how much memory grew at most in the block."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
    before = resident()["VmRSS"]
    yield
    found[name] = resident()["VmHWM"] - before


def make_learner(folder: Path, world: ProcessGroup, found: dict[str, int], name: str) -> tuple[Any, Learner]:
    """The policy in a folder, distributed, and a learner that has made one step on gradients that are told by names."""
    with growth(found, f"{name}load"):
        policy = world.load(lambda: OpenVLAConfig(path=str(folder), **HEADS).build(SPEC, seed=5))
    return policy, GRPOConfig().build(policy, 0, world=world)


def step(learner: Learner) -> None:
    """Make a step of the optimizer, the same wherever a weight lies: each gradient is its weight."""
    for optimizer in learner.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().clone()
        optimizer.step()
        optimizer.zero_grad()


def run(folder: Path, world: ProcessGroup, output: Path) -> dict[str, int]:
    """Load, step, save twice, resume and save again; return by how much memory grew in each."""
    found: dict[str, int] = {}
    policy, learner = make_learner(folder, world, found, "")
    found["shards"] = sum(world.local(p).numel() * p.element_size() for p in policy.parameters())
    step(learner)
    with growth(found, "save_policy"), world.saving(policy):
        if world.is_main:
            policy.save(output / "policy")
    _save(policy, learner, world, found, output / "step_00000001")
    world.wait()
    del policy, learner
    policy, learner = make_learner(folder, world, found, "again_")
    with growth(found, "resume"):
        tensors, state = load_checkpoint(output / "step_00000001")
        load_weights(policy, tensors, "checkpoint")
        learner.load_state(tensors, state)
        del tensors
    step(learner)
    _save(policy, learner, world, found, output / "step_00000002")
    return found


def _save(policy: Any, learner: Learner, world: ProcessGroup, found: dict[str, int], path: Path) -> None:
    with growth(found, "save_checkpoint"):
        tensors, state = learner.state()
        tensors |= trained_weights(policy)
        with world.gathers(tensors.values()):
            if world.is_main:
                save_checkpoint(path, tensors, state)


def check_same_weights(world: ProcessGroup, config: Any, saved: Path | None = None) -> None:
    """A policy of which each process reads its part is the one that a single process reads, to the bit.

    Args:
        saved: a folder that it is saved to, which has to be the one that a single process writes.
    """

    def make() -> Any:
        return config.build(SPEC, seed=5)

    policy, alone = world.load(make), dict(make().named_parameters())
    assert [n for n, _ in policy.named_parameters()] == list(alone)
    with world.gathers(policy.parameters()):
        for name, parameter in policy.named_parameters() if world.is_main else ():
            assert torch.equal(whole(parameter), alone[name]), name
            assert parameter.requires_grad == alone[name].requires_grad, name
    if saved is None:
        return
    with world.saving(policy):
        if world.is_main:
            policy.save(saved / "together")
    if world.is_main:
        make().save(saved / "alone")
        files = [file for file in (saved / "alone").glob("*") if file.is_file()]
        assert files
        for file in files:
            assert (saved / "together" / file.name).read_bytes() == file.read_bytes(), file


def check_cloning_waits(world: ProcessGroup, folder: Path, output: Path) -> None:
    """`sft` leaves the weights in their file until the policy is cut up."""
    recipe = make_recipe(folder, "parallel=fsdp", "sft={datasets: [none]}")
    with patch("vla_rl.workflows.collect.check"), patch("vla_rl.training.bc_loop.train_bc") as begun:
        clone(recipe, output)
    waiting, policy = tensor_files.sources(begun.call_args.args[0]), begun.call_args.args[0]
    assert waiting.keys() == dict(policy.named_parameters()).keys()


def main(small: Path, large: Path, published: Path, smolvla: Path, output: Path) -> None:
    torch.set_num_threads(1)
    with launched_group(make_recipe(small, "parallel=fsdp")) as world:
        lora = {"lora": {"rank": 4}, "trainable": "lora"}
        for heads in (HEADS, lora):
            config = OpenVLAConfig(precision="fp32", path=str(published), norm_key="from_data", **heads)
            check_same_weights(world, config)
        check_same_weights(world, OpenVLAConfig(precision="fp32", path=str(small), **lora))
        for number, heads in enumerate((HEADS, lora)):
            saved = output / f"smolvla_{number}"
            check_same_weights(world, LeRobotConfig(path=str(smolvla), **heads), saved)
            world.wait()
            check_same_weights(world, LeRobotConfig(path=str(saved / "together")))
        check_cloning_waits(world, small, output / "cloned")
        for name, folder in (("small", small), ("large", large)):  # The first has all imported.
            found = world.gather(run(folder, world, output / name))
            if world.is_main:
                (output / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:6]))
