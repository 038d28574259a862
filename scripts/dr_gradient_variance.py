"""How noisy is the policy gradient of real episodes, by GRPO and by doubly robust GRPO? No step is made.

    python scripts/dr_gradient_variance.py measure tabletop_grpo WORLD_MODEL out.npz --groups 40 --seed 0
    python scripts/dr_gradient_variance.py report out.npz [MORE.npz ...]

Groups of 8 episodes are rolled out, five groups (one of each task) at a time, and each group's gradient is kept as its
sketch of 65,536 numbers: of GRPO's advantage, of what c takes off (K = 8 and 4), and of what d takes off. c and d are
fitted on the groups that they are not used for (even and odd). Read: the variance of the mean over groups relative to
GRPO's, its 95 % interval by a bootstrap over groups, and the cosine of the gradients of random disjoint halves.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.algorithms.action_values import CoefficientFit, Coefficients, Correction
from vla_rl.algorithms.batch import Batch, gather_observations
from vla_rl.algorithms.dr_grpo import DRGRPOConfig
from vla_rl.algorithms.dr_learner import DRLearner, decision_advantages
from vla_rl.config import build_component
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout.runner import collect
from vla_rl.types import EpisodeSpec

GROUP, SKETCH, FIRST_STATE = 8, 2**16, 900_000
PARTS = ("grpo", "chunk8", "chunk4", "state8", "state4")


def fewer(correction: Correction, count: int) -> Correction:
    """The correction by the first `count` of the candidates."""
    values = correction.candidates * (correction.candidates.shape[1] - 1)  # Less their mean, to which all is relative.
    mean = values[:, :count].mean(1)
    return Correction(
        correction.executed - mean, (values[:, :count] - mean[:, None]) / (count - 1), correction.state + mean
    )


class Sketch:
    """Gradients as signed sums of their numbers in random places: lengths and angles stay."""

    def __init__(self, policy: Any, temperature: float) -> None:
        self.policy, self.temperature = policy, temperature
        self.parameters = [p for p in policy.parameters() if p.requires_grad]
        generator, size = torch.Generator().manual_seed(0), sum(p.numel() for p in self.parameters)
        self.place = torch.randint(SKETCH, (size,), generator=generator)
        self.sign = 2.0 * torch.randint(2, (size,), generator=generator) - 1

    def gradients(self, batch: Batch, rows: tuple[Any, ...], advantages: list[np.ndarray]) -> np.ndarray:
        """Of sums of advantage times log-probability, float32 (advantages, SKETCH); rows: episode, chunk, chunks."""
        episode, chunk, chunks = rows
        found = np.zeros((len(advantages), SKETCH), np.float32)
        for start in range(0, len(episode), 64):
            part = np.arange(start, min(start + 64, len(episode)))
            obs = gather_observations(batch.episodes, episode[part], chunk[part])
            log_prob = self.policy.evaluate(obs, chunks.select(part), self.temperature).log_prob.float()
            for number, advantage in enumerate(advantages):
                weight = torch.from_numpy(advantage[part]).to(log_prob)
                if not weight.any():
                    continue
                loss = (weight[..., None] * log_prob).sum()
                keep = number < len(advantages) - 1
                parts = torch.autograd.grad(loss, self.parameters, retain_graph=keep, allow_unused=True)
                flat = torch.cat(
                    [
                        (torch.zeros_like(p) if g is None else g).flatten()
                        for g, p in zip(parts, self.parameters, strict=True)
                    ]
                )
                found[number] += torch.zeros(SKETCH).index_add_(0, self.place, flat * self.sign).numpy()
        return found


def measure(learner: DRLearner, sketch: Sketch, episodes: list[Any]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """One group's gradients (PARTS, SKETCH), and for K = 8 and 4 the sums that c and d follow from, and the square."""
    values, learner.values = learner.values, None
    batch = learner.prepare(episodes)
    learner.values = values
    candidates = learner.candidates(batch)
    by_count = {8: learner.correction(batch, candidates)}
    by_count[4] = fewer(by_count[8], 4)
    advantage, all_actions = decision_advantages(batch), np.ones(batch.valid.shape)
    on_valid = [advantage, by_count[8].state, by_count[4].state]
    rows = (batch.episode, batch.chunk, batch.chunks)
    dense = [a[:, None] * batch.valid for a in on_valid] + [
        c.executed[:, None] * all_actions for c in by_count.values()
    ]
    own = sketch.gradients(batch, rows, [a.astype(np.float32) for a in dense])
    repeated = np.repeat(np.arange(batch.size), 8)
    fours = np.pad(by_count[4].candidates, ((0, 0), (0, 4)))
    drawn = [c.reshape(-1, 1) * all_actions[repeated] for c in (by_count[8].candidates, fours)]
    rows = (batch.episode[repeated], batch.chunk[repeated], candidates)
    others = sketch.gradients(batch, rows, [a.astype(np.float32) for a in drawn])
    sums = {k: np.array([*CoefficientFit.of(advantage, c), (advantage**2).sum()]) for k, c in by_count.items()}
    return np.stack([own[0], own[3] - others[0], own[4] - others[1], own[1], own[2]]), sums


def report(gradients: np.ndarray, sums: dict[int, np.ndarray], seed: int = 0) -> None:
    """Print ratios of variance and cosines. gradients: (groups, PARTS, SKETCH), sums: K -> (groups, 6)."""
    num, odd = len(gradients), np.arange(len(gradients)) % 2
    rng = np.random.default_rng(seed)
    picks = rng.integers(num, size=(2000, num))
    halves = [rng.permutation(num) for _ in range(400)]

    def of(gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gram = gradient @ gradient.T
        return gram, np.diag(gram).copy()

    def variance(gram: np.ndarray, square: np.ndarray, pick: np.ndarray) -> float:
        share = np.bincount(pick, minlength=num) / num
        return float(share @ square - share @ gram @ share)

    def cosine(gram: np.ndarray) -> float:
        found = []
        for order in halves:
            a, b = order[: num // 2], order[num // 2 :]
            inner = gram[np.ix_(a, b)].sum()
            found.append(inner / np.sqrt(gram[np.ix_(a, a)].sum() * gram[np.ix_(b, b)].sum()))
        return float(np.mean(found))

    plain = of(gradients[:, 0])
    print(f"{num} groups of {GROUP}; grpo: cosine of halves {cosine(plain[0]):.3f}")
    for count, (x, z) in {8: (1, 3), 4: (2, 4)}.items():
        for name, use in {"c and d": (1, 1), "c alone": (1, 0), "d alone": (0, 1)}.items():
            made, squares, used = gradients[:, 0].copy(), 0.0, []
            for side in (0, 1):
                fit = sums[count][odd != side, :5].sum(0) * np.array([use[0], use[1], use[0], use[1], min(use)])
                c, d = CoefficientFit(*fit).coefficients(Coefficients(0, 0))
                here = odd == side
                made[here] -= c * gradients[here, x] + d * gradients[here, z]
                square = sums[count][here].sum(0)
                squares += CoefficientFit(*square[:5]).left(square[5], Coefficients(c, d))
                used.append(f"{c:.2f}/{d:.2f}")
            gram, square = of(made)
            pairs = [(variance(gram, square, p), variance(*plain, p)) for p in (np.arange(num), *picks)]
            ratios = [made / before for made, before in pairs if before > 0]
            low, high = np.quantile(ratios[1:], [0.025, 0.975])
            print(
                f"K={count} {name}: c/d {' '.join(used)}; variance {ratios[0]:.2f} [{low:.2f}, {high:.2f}] of grpo's; "
                f"squared advantage {squares / sums[count][:, 5].sum():.2f}; cosine of halves {cosine(gram):.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("measure")
    make.add_argument("recipe")
    make.add_argument("world_model")
    make.add_argument("out", type=Path)
    make.add_argument("--groups", type=int, default=40)
    make.add_argument("--seed", type=int, default=0)
    make.set_defaults(run=run)
    show = commands.add_parser("report")
    show.add_argument("files", type=Path, nargs="+")
    show.set_defaults(run=lambda args: report(*joined(args.files)))
    args = parser.parse_args()
    args.run(args)


def joined(files: list[Path]) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    found = [np.load(file) for file in files]
    sums = {k: np.concatenate([f[f"sums{k}"] for f in found]) for k in (8, 4)}
    return np.concatenate([f["gradients"] for f in found]), sums


def run(args: argparse.Namespace) -> None:
    recipe = load_recipe(args.recipe)
    env = recipe.env.build()
    policy: Any = recipe.policy.build(env.spec, "cpu", args.seed)
    values = {"kind": "world_model", "path": args.world_model}
    algo = build_component("algo", {"kind": "dr_grpo", "values": values, "candidates": 8})
    assert isinstance(algo, DRGRPOConfig)
    learner, tasks = algo.build(policy, args.seed), list(env.spec.tasks)
    sketch, kept, sums = Sketch(policy, 1.0), list[np.ndarray](), {8: list[np.ndarray](), 4: list[np.ndarray]()}
    while len(kept) < args.groups:
        index = FIRST_STATE + 1000 * args.seed + len(kept) // len(tasks)
        specs = [EpisodeSpec(task, "train", index) for task in tasks for _ in range(GROUP)]
        groups = [len(kept) + i // GROUP for i in range(len(specs))]
        episodes = collect(policy, env, specs, seed=args.seed * 10_000 + len(kept), groups=groups)
        for group in sorted(set(groups)):
            gradient, found = measure(learner, sketch, [e for e in episodes if e.group == group and not e.lost])
            kept.append(gradient)
            for count, row in found.items():
                sums[count].append(row)
        np.savez(args.out, gradients=np.stack(kept), sums8=np.stack(sums[8]), sums4=np.stack(sums[4]))
        print(f"{len(kept)} of {args.groups} groups", flush=True)
    env.close()


if __name__ == "__main__":
    main()
