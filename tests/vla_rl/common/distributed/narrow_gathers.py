"""A forward and backward pass of a policy that computes in bfloat16, for `test_narrow_gathers.py`.

torchrun --nproc-per-node 2 tests/vla_rl/common/distributed/narrow_gathers.py POLICY OUTPUT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_run import make_recipe

from vla_rl.common.distributed.fsdp import is_sharded, units
from vla_rl.common.distributed.launched import launched_group
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.policies.fake_input import fake_env_spec
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.training.memory import _chunk, _observation, _unit_statistics

SPEC = fake_env_spec()
ROWS = 4


def passed(world: ProcessGroup, narrow: bool = True) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Log-probabilities of all rows and gradients of their sum; the dtypes of the units' weights at work."""
    policy = OpenVLAConfig(precision="bf16").build(SPEC)
    policy.norm_stats = _unit_statistics(policy, SPEC)
    if not narrow:
        policy.sharding_dtype = None
    world.distribute(policy)
    seen: set[str] = set()

    def look(module: Any, inputs: Any) -> None:
        seen.update(str(p.dtype) for p in module.parameters())

    for unit in units(policy):
        unit.register_forward_pre_hook(look)
    obs, chunk = _observation(policy, SPEC, ROWS), _chunk(policy, ROWS)
    rng = np.random.default_rng(0)
    obs = replace(obs, images={c: rng.integers(0, 256, x.shape, np.uint8) for c, x in obs.images.items()})
    own = list(range(ROWS))[world.share(ROWS)]
    out = policy.evaluate(obs.select(own), chunk.select(own))
    out.log_prob.sum().backward()
    grads = {f"grad.{n}": p.grad for n, p in policy.named_parameters() if p.grad is not None}
    gradients = {n: cast(Any, g).full_tensor() if is_sharded(g) else g for n, g in grads.items()}
    rows: Sequence[Any] = [row for part in world.gather(out.log_prob.tolist()) for row in part]
    return {"log_prob": torch.tensor(rows), **gradients}, seen


def main(policy: Path, output: Path) -> None:
    with launched_group(make_recipe(policy, "parallel=fsdp")) as world:
        for narrow, dtype in ((True, "torch.bfloat16"), (False, "torch.float32")):
            tensors, seen = passed(world, narrow)
            assert seen == {dtype}, f"gathered as {seen}"
            if world.is_main:
                save_file({n: t.contiguous() for n, t in tensors.items()}, output / f"{dtype}.safetensors")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:3]))
