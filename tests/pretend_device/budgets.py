"""How often acting, learning and imagining may make the host wait for the device, or copy to it: counts, not times.

    PYTHONPATH=.:tests python -m pretend_device.budgets         # The table: counted now, and allowed.

Counts depend on the code alone, not on the machine; a tiny policy makes as many as a large one of as many layers' kind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from pretend_device import Counts, counting, pretending
from pretend_device.rules import NAME
from vla_rl.policies.fake_input import fake_observation
from vla_rl.training.trainer import Loss, Trainer
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.gpu_bench import learner_matrix, policy_matrix


class Budget(NamedTuple):
    """The most waits of the host, copies to the device, those of them in which the host waits too, and copies back."""

    syncs: int
    uploads: int
    slow_uploads: int
    downloads: int


# One act of 3 environments.
ACT = {
    "openvla-parallel": Budget(3, 5, 5, 3),
    "openvla-autoregressive": Budget(2, 5, 5, 2),
    "openvla-l1": Budget(3, 5, 5, 3),
    "openvla-lora": Budget(2, 5, 5, 2),
    "smolvla-sde": Budget(4, 14, 14, 4),
    "pi05-noise": Budget(4, 14, 14, 4),
}
# One act as a CUDA graph: what the host still launches beside it, copies into the graph and out of it included.
RECORDED = {
    "openvla-graphs": 39,
    "openvla-graphs-merged": 32,
    "openvla-graphs-autoregressive": 38,
    "smolvla-graphs": 36,
    "pi0-graphs": 39,
    "pi05-graphs": 45,
    "xvla-graphs": 39,
}
# One more optimizer step, of two micro-batches.
STEP = {
    "grpo": Budget(1, 17, 11, 1),
    "grpo-kl-muon": Budget(1, 19, 11, 1),
    "grpo-autoregressive": Budget(1, 17, 11, 1),
    "grpo-l1": Budget(1, 17, 11, 1),
    "grpo-lora-bf16-checkpointing": Budget(1, 17, 11, 1),
    "ppo": Budget(1, 21, 11, 1),
    "ppo-smolvla": Budget(3, 28, 18, 1),
}
# A whole update of two such steps; its weights are kept on the host, in a download each.
UPDATE = {
    "grpo": Budget(3, 31, 19, 125),
    "grpo-kl-muon": Budget(3, 35, 19, 125),
    "grpo-autoregressive": Budget(3, 31, 19, 124),
    "grpo-l1": Budget(3, 31, 19, 158),
    "grpo-lora-bf16-checkpointing": Budget(3, 31, 19, 58),
    "ppo": Budget(3, 39, 19, 130),
    "ppo-smolvla": Budget(7, 56, 36, 137),
}
# Three updates of a fit's stage, whose numbers are read together: each uploads the numbers of what it draws.
FIT = {name: Budget(1, 3, 0, 1) for name in ("autoencoder", "dynamics", "success")}
# One step of 4 imagined environments, of one frame; with a second future.
IMAGINED = {"one future": Budget(2, 1, 0, 2), "two futures": Budget(2, 3, 2, 2)}


def count_act(name: str) -> Counts:
    """What one act makes the device do, after a first one."""
    policy = policy_matrix.build(name, NAME)
    obs = fake_observation(policy_matrix.SPEC, policy_matrix.BATCH)
    generator = torch.Generator().manual_seed(0)
    policy.act(obs, generator, 1.0)
    with counting() as counts:
        policy.act(obs, generator, 1.0)
    return counts


class Recorded(NamedTuple):
    """An act by replayed passes: how many, what is in them, and the launches and copies that are left to the host."""

    passes: int
    inside: Counts
    left: int


def watch_act(policy: Any, act: Callable[[], Any]) -> Recorded:
    """Count a second act as if its passes were graphs, of which each is one launch, and a copy per input and result."""
    plain = policy.replayed.function

    def once() -> Recorded:
        moved, inside = [], Counts()

        def watched(*given: Any) -> Any:
            with policy.replayed.constants, counting(inside):
                made = plain(*given)
            moved.append(sum(each is not None for each in (*given, *made)))
            return made

        policy.replayed.function = watched
        with counting() as counts:
            act()
        launches = [c.totals["kernels"] + c.totals["uploads"] + c.totals["downloads"] for c in (counts, inside)]
        return Recorded(len(moved), inside, launches[0] - launches[1] + sum(moved) + len(moved))

    try:
        return [once() for _ in range(2)][1]  # The first copies the numbers that are kept.
    finally:
        policy.replayed.function = plain


def count_recorded(name: str) -> Recorded:
    """`watch_act` of a policy that has graphs."""
    policy: Any = policy_matrix.build(name, NAME)
    obs, generator = fake_observation(policy_matrix.SPEC, policy_matrix.BATCH), torch.Generator().manual_seed(0)
    return watch_act(policy, lambda: policy.act(obs, generator, 1.0))


def count_learning(name: str) -> tuple[Budget, Budget]:
    """What one more optimizer step costs, and a whole update of two steps."""
    policy, learner = learner_matrix.build(name, NAME)
    values: Any = learner
    given = learner_matrix.episodes(policy)
    learner.update(learner.prepare(given))
    found = []
    for epochs in (1, 2):
        values.config = values.config.model_copy(update={"epochs": epochs})
        batch = learner.prepare(given)
        with counting() as counts:
            steps = learner.update(batch)["update/num_steps"]
        assert steps == 2 * epochs, f"{name}: {steps} steps in {epochs} epochs"
        found.append(budget(counts))
    once, twice = found
    return Budget(*(-(-(b - a) // 2) for a, b in zip(once, twice, strict=True))), once


def count_imagined(name: str, world_model: Path) -> Counts:
    """What one step of 4 environments makes the device do, after a first one."""
    from pretend_device.imagined import make_env

    env = make_env(world_model, NAME, ensemble=2 if name == "two futures" else 1)
    env.reset([EpisodeSpec("reach_red", "train", i) for i in range(4)])
    actions = np.zeros((4, env.observed_every, env.spec.action_dim), np.float32)
    env.step(actions)
    with counting() as counts:
        env.step(actions)
    env.close()
    return counts


def count_fits(folder: Path) -> dict[str, Counts]:
    """What three updates of each stage of a fit make the device do; of both success networks the last."""
    from pretend_device.imagined import ENV, collect, fit_config
    from world_model.fit.fit import fit

    found, steps = dict[str, Counts](), Trainer._steps

    def counted_steps(self: Trainer, loss: Loss, until: int) -> list[dict[str, float]]:
        with counting() as found[self.name.removeprefix("world_model.")]:
            return steps(self, loss, until)

    with patch.object(Trainer, "_steps", counted_steps):
        fit(fit_config(collect(folder / "episodes")), ENV.env_spec(), folder / "run", seed=1, device=NAME)
    return found


def budget(counts: Counts) -> Budget:
    """The totals that a budget limits."""
    return Budget(*(counts.totals[name] for name in Budget._fields))


def fitted_world_model(folder: Path) -> Path:
    """A world model of the dummy environment, made in a few updates on the host."""
    from pretend_device.imagined import ENV, collect, fit_config
    from world_model.fit.fit import fit

    return fit(fit_config(collect(folder / "episodes")), ENV.env_spec(), folder / "run", seed=1)


def counted(folder: Path) -> Iterator[tuple[str, Budget, Budget]]:
    """What is counted, beside its budget: (what, counted, allowed)."""
    for name, allowed in ACT.items():
        yield f"act: {name}", budget(count_act(name)), allowed
    for name, allowed in STEP.items():
        step, update = count_learning(name)
        yield f"optimizer step: {name}", step, allowed
        yield f"update of two steps: {name}", update, UPDATE[name]
    for name, counts in count_fits(folder / "on_device").items():
        yield f"three updates: {name}", budget(counts), FIT[name]
    world_model = fitted_world_model(folder)
    for name, allowed in IMAGINED.items():
        yield f"imagined step: {name}", budget(count_imagined(name, world_model)), allowed


def main() -> None:
    """Print the table; where something is over its budget, `test_budgets.py` fails and says where."""
    print(f"{'counted / allowed':58s}" + "".join(f"{field:>14s}" for field in Budget._fields))
    with pretending(), tempfile.TemporaryDirectory() as folder:
        for what, found, allowed in counted(Path(folder)):
            cells = [f"{a} / {b}" for a, b in zip(found, allowed, strict=True)]
            print(f"{what:58s}" + "".join(f"{cell:>14s}" for cell in cells), flush=True)
        for name, most in RECORDED.items():
            found = count_recorded(name)
            kernels = found.inside.totals["kernels"]
            print(f"act: {name}: {found.passes} graph of {kernels:,} launches; {found.left} / {most} beside it")


if __name__ == "__main__":
    main()
