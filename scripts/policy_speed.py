"""What an option of OpenVLA's policies saves: both forms in one process, by turns, on one thread.

    python scripts/policy_speed.py merged      # policy.merge_lora: acting with adapters, and with merged weights
    python scripts/policy_speed.py compiled    # policy.compile, which takes a minute to compile before

Printed: medians over the turns of the processor's time, which other processes disturb less than they do the clock, and
the ratio's median and quartiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vla_rl.config import build_component
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.recipe.recipe import load_recipe

BATCH = 8


def by_turns(what: str, before: Callable[[], object], after: Callable[[], object], turns: int) -> None:
    """Print how long both take."""
    before(), after()  # Warms up, and compiles.
    seconds = np.array([[_seconds(before), _seconds(after)] for _ in range(turns)])
    old, new = 1000 * np.median(seconds, 0)
    low, middle, high = np.quantile(seconds[:, 1] / seconds[:, 0], (0.25, 0.5, 0.75))
    print(f"{what}: {old:.1f} ms, {new:.1f} ms, ratio {middle:.2f} (quartiles {low:.2f} to {high:.2f}), {turns} turns")


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def merged(turns: int, preset: str) -> None:
    """Acting of a network with adapters of rank 32 on every linear layer, as the LIBERO recipes have them."""
    spec = fake_env_spec(image_size=64)
    lora = {"rank": 32, "vision": True}
    options = {"kind": "openvla", "preset": preset, "precision": "bf16", "lora": lora, "trainable": "lora"}
    policies = []
    for merges in (False, True):
        policy: Any = build_component("policy", options | {"merge_lora": merges}).build(spec, "cpu", 0)
        policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
        policies.append(policy.eval())
    obs = fake_observation(spec, BATCH)
    apart, whole = ((lambda policy=policy: _act(policy, obs)) for policy in policies)
    by_turns(f"act, {BATCH} observations, preset {preset}: adapters apart, merged", apart, whole, turns)


def compiled(turns: int) -> None:
    """Acting, and likelihoods with their gradient, of the tabletop's policy."""
    policies, spec = [], load_recipe("tabletop_grpo").env.env_spec()
    for compiles in ("false", "true"):
        recipe = load_recipe("tabletop_grpo", [f"policy.compile={compiles}", "policy.precision=bf16"])
        policies.append(recipe.policy.build(spec, "cpu", 0))
    obs = fake_observation(spec, BATCH)
    chunk = policies[0].act(obs, torch.Generator().manual_seed(0), 1.0)
    eager, fast = ((lambda policy=policy: _act(policy, obs)) for policy in policies)
    by_turns(f"act, {BATCH} observations: eager, compiled", eager, fast, turns)
    eager, fast = ((lambda policy=policy: _learn(policy, obs, chunk)) for policy in policies)
    by_turns("likelihoods and their gradient: eager, compiled", eager, fast, turns)


def _act(policy: Any, obs: Any) -> None:
    policy.act(obs, torch.Generator().manual_seed(0), 1.0)


def _learn(policy: Any, obs: Any, chunk: Any) -> None:
    policy.evaluate(obs, chunk).log_prob.mean().backward()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("merged", "compiled"))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--preset", default="tiny", help="merged: of the network (tiny)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "merged":
        merged(options.turns, options.preset)
    else:
        compiled(options.turns)


if __name__ == "__main__":
    main()
