"""Do trees tell more per simulated step than whole episodes? How noisy GRPO's gradient is with either, on the tabletop.

    python scripts/branch_study.py 8

From each of so many train states of each task the shipped base policy draws eight episodes, and from the exact state at
each later decision of these one more continuation; and two episodes more, which branch in two at the second, third and
fourth decision, and so do their branches. Trees are parts of that. A piece between two branches counts by its share of
the leaves, and its advantage is the mean success of its leaves, less what the others say: the mean of its siblings, or
the average of that and of its ancestors' siblings' (as TreePO averages, arXiv 2508.17445). So the expected gradient is
policy gradient's with any tree whose branches do not look ahead, and what is left to compare is noise: the mean squared
length of a group's gradient, by the last layer's weights, times its steps, beside that of eight episodes; and the same
as if decisions' gradients were orthogonal and as large as their likelihoods say (`noise_alone`). A line of JSON each;
intervals (95 %) over states within tasks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sim.tabletop.env import TabletopConfig
from vla_rl.algorithms.batch import valid_actions
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.policies.base import resolve_path
from vla_rl.policies.load import load_policy
from vla_rl.rollout.runner import collect
from vla_rl.types import Episode, EpisodeSpec, Keyframe, StepResult

SKETCH = 4096  # Numbers that stand for a gradient: sums of its entries, each with a sign drawn (a count sketch).
TRUNKS = 8
RESAMPLES = 2000


class KeepsStates(VecEnv):
    """An environment that tells the exact state after each chunk, in `info`."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.num_envs, self.spec = env, env.num_envs, env.spec
        self.reset, self.save_state, self.expert_action = env.reset, env.save_state, env.expert_action
        self.close = env.close

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        """See `VecEnv.step`."""
        result = self.env.step(actions, env_ids)
        return replace(result, info={**result.info, "state": self.env.save_state(env_ids)})


@dataclass
class Piece:
    """An episode from its start or from a branch on.

    Attributes:
        first: the number in its episode of its first decision. success: how it ended.
        steps, entropy, size: float (K,), of its decisions: simulated steps, nats a token, sum of (1 - p)^2 over tokens.
        gradient: float32 (K, SKETCH), of the log-probability of each chunk by the last layer's weights, sketched.
        states: K, each after a decision. branches: decision -> pieces that begin from the state before it.
    """

    spec: EpisodeSpec
    first: int
    success: float
    steps: np.ndarray
    entropy: np.ndarray
    size: np.ndarray
    gradient: np.ndarray
    states: Sequence[Keyframe]
    branches: dict[int, list[Piece]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """One more than its last decision."""
        return self.first + len(self.steps)

    def begins_at(self, decision: int) -> EpisodeSpec:
        """What begins where this piece makes a decision other than its first."""
        return replace(self.spec, keyframe=self.states[decision - self.first - 1])


@dataclass
class Node:
    """Decisions between two branches: their gradients' sum, sizes' sum and steps; success where it is a leaf."""

    gradient: np.ndarray
    size: float
    steps: float
    success: float = 0.0
    children: list[Node] = field(default_factory=list)

    @property
    def value(self) -> float:
        """Mean success of its leaves, each by its share."""
        return float(np.mean([child.value for child in self.children])) if self.children else self.success

    @property
    def all_steps(self) -> float:
        """Of it and what follows."""
        return self.steps + sum(child.all_steps for child in self.children)


class Player:
    """Plays pieces and takes their gradients."""

    def __init__(self, policy: Policy, env: VecEnv, seed: int) -> None:
        self.policy, self.env, self.seed = policy, KeepsStates(env), seed
        last = policy.sharding_units()[-1].parameters()
        self.parameters = [*last, *(p for name, p in policy.named_parameters() if name.endswith("lm_head.weight"))]
        for parameter in policy.parameters():
            parameter.requires_grad_(any(parameter is kept for kept in self.parameters))
        count, draw = sum(p.numel() for p in self.parameters), torch.Generator().manual_seed(0)
        self.place = torch.randint(SKETCH, (count,), generator=draw)
        self.sign = torch.randint(2, (count,), generator=draw) * 2.0 - 1

    def play(self, starts: Sequence[tuple[EpisodeSpec, int]]) -> list[Piece]:
        """Play from each spec, which is that of a decision of this number."""
        self.seed += 1
        episodes = collect(self.policy, self.env, [spec for spec, _ in starts], seed=self.seed)
        return [self._piece(episode, first) for episode, (_, first) in zip(episodes, starts, strict=True)]

    def _piece(self, episode: Episode, first: int) -> Piece:
        chunks, valid = episode.chunks, valid_actions(episode)
        assert chunks.log_prob is not None, "they were drawn"
        missing = 1 - np.exp(np.minimum(chunks.log_prob, 0.0))
        out = self.policy.evaluate(episode.obs, chunks)
        counted = (out.log_prob.float() * torch.from_numpy(valid)[..., None]).sum((1, 2))
        gradient = np.stack([self._sketch(row) for row in counted])
        size, entropy = (missing**2 * valid[..., None]).sum((1, 2)), out.entropy.detach().mean((1, 2)).numpy()
        states = list(episode.info["state"])
        return Piece(episode.spec, first, float(episode.success), episode.num_steps, entropy, size, gradient, states)

    def _sketch(self, log_prob: torch.Tensor) -> np.ndarray:
        found = torch.autograd.grad(log_prob, self.parameters, retain_graph=True)
        whole = torch.cat([gradient.flatten() for gradient in found])
        return torch.zeros(SKETCH).index_add_(0, self.place, whole * self.sign).numpy()

    def branch(self, pieces: Sequence[Piece], decisions: Sequence[int]) -> list[Piece]:
        """Play a branch from each of these decisions that a piece makes after its first; return the branches."""
        made = [(piece, d) for piece in pieces for d in decisions if piece.first < d < piece.end]
        branches = self.play([(piece.begins_at(d), d) for piece, d in made])
        for (piece, d), branch in zip(made, branches, strict=True):
            piece.branches.setdefault(d, []).append(branch)
        return branches


Rule = Callable[[Piece], Sequence[int]]  # The decisions, in order, at which a piece branches.


def tree(piece: Piece, rule: Rule, begin: int | None = None) -> Node:
    """Return what a piece is from a decision on (by default its first), with the branches that the rule takes."""
    begin = piece.first if begin is None else begin
    cut = next((d for d in rule(piece) if d > begin and d in piece.branches), piece.end)
    own = slice(begin - piece.first, cut - piece.first)
    node = Node(piece.gradient[own].sum(0), piece.size[own].sum(), piece.steps[own].sum(), piece.success)
    if cut < piece.end:
        node.children = [tree(piece, rule, cut), *(tree(branch, rule) for branch in piece.branches[cut])]
    return node


def advantages(nodes: Sequence[Node], averaged: bool, above: Sequence[float] = (), share: float = 1.0):
    """Yield each node of trees that are siblings, with its advantage times its share of the leaves.

    Args:
        averaged: the baseline is the average of the siblings' mean and its ancestors', `above`; False: the siblings'.
    """
    values = np.array([node.value for node in nodes])
    others = (values.sum() - values) / (len(values) - 1)
    for node, value, mean in zip(nodes, values, others, strict=True):
        means = [*above, float(mean)]
        own = share / len(nodes)
        yield node, own * (value - (np.mean(means) if averaged else mean))
        if node.children:
            yield from advantages(node.children, averaged, means, own)


def measured(roots: Sequence[Node], averaged: bool) -> np.ndarray:
    """Return of a group: squared length of its gradient, and as if decisions' were orthogonal; steps; informative."""
    found = list(advantages(roots, averaged))
    gradient = np.sum([a * node.gradient for node, a in found], axis=0)
    alone = sum(a * a * node.size for node, a in found)
    return np.array([gradient @ gradient, alone, sum(r.all_steps for r in roots), any(a != 0 for _, a in found)])


def first_above(threshold: float) -> Rule:
    """Branch at the first later decision of more entropy, which does not look ahead."""
    return lambda piece: [piece.first + i for i in range(1, len(piece.steps)) if piece.entropy[i] > threshold][:1]


def at_highest(piece: Piece) -> Sequence[int]:
    """Branch at the later decision of most entropy: known afterwards, so that the gradient is biased."""
    return [piece.first + 1 + int(np.argmax(piece.entropy[1:]))] if len(piece.steps) > 1 else []


def at_random(piece: Piece) -> Sequence[int]:
    """Branch at one of the later decisions, drawn; the same one whenever it is asked."""
    rng = np.random.default_rng(int(1e6 * piece.entropy.sum()))
    return [piece.first + int(rng.integers(1, len(piece.steps)))] if len(piece.steps) > 1 else []


def studied(groups: Sequence[Sequence[Piece]], rule: Rule, size: int, averaged: bool) -> np.ndarray:
    """Return `measured`, float (groups, 4), of trees of `size` trunks: the average over runs of adjacent trunks."""
    rows = []
    for trunks in groups:
        roots = [tree(trunk, rule) for trunk in trunks]
        runs = range(len(roots) if size < len(roots) else 1)
        rows.append(np.mean([measured([roots[(r + i) % len(roots)] for i in range(size)], averaged) for r in runs], 0))
    return np.array(rows)


def report(name: str, found: np.ndarray, whole: np.ndarray, tasks: int) -> None:
    """Print how a rule's noise at equal steps compares with whole episodes'; both float (states, 4), tasks in turn."""
    per_task, draw = len(found) // tasks, np.random.default_rng(0)
    drawn = draw.multinomial(per_task, [1 / per_task] * per_task, (RESAMPLES, tasks)).transpose(0, 2, 1)
    weights = np.concatenate([np.ones((1, len(found))), drawn.reshape(RESAMPLES, -1)])
    ours, theirs = weights @ found, weights @ whole
    said = {"tree": name, "steps": round(float(found[:, 2].mean())), "informative": round(float(found[:, 3].mean()), 2)}
    for column, kind in enumerate(("noise", "noise_alone")):
        ratio = np.asarray(ours[:, column] * ours[:, 2] / (theirs[:, column] * theirs[:, 2]), np.float64)
        said[kind] = [round(float(x), 2) for x in (ratio[0], *np.quantile(ratio[1:], [0.025, 0.975]))]
    print(json.dumps(said), flush=True)


def grown(player: Player, tasks: Sequence[str], number: int) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """Return groups of a state of each task: whole episodes with a branch at each decision, and two whole trees."""
    groups = []
    for count in (TRUNKS, 2):
        pieces = player.play([(EpisodeSpec(task, "train", number), 0) for task in tasks for _ in range(count)])
        groups.append([pieces[i : i + count] for i in range(0, len(pieces), count)])
        if count == TRUNKS:
            player.branch(pieces, range(1, max(len(piece.steps) for piece in pieces)))
        else:
            for decision in (1, 2, 3):
                pieces += player.branch(pieces, [decision])
    return groups[0], groups[1]


def compare(trunks: Sequence[Sequence[Piece]], full: Sequence[Sequence[Piece]], tasks: int) -> None:
    """Print what all rules give."""
    entropy = np.concatenate([piece.entropy[1:] for group in trunks for piece in group])
    rules = {
        "at the second decision": (trunks, lambda _: [1], 5),
        "at the third decision": (trunks, lambda _: [2], 5),
        "at the fourth decision": (trunks, lambda _: [3], 6),
        "where entropy is above its median": (trunks, first_above(float(np.median(entropy))), 5),
        "where entropy is highest": (trunks, at_highest, 5),
        "at random": (trunks, at_random, 5),
        "at the second, third and fourth decision": (full, lambda _: [1, 2, 3], 2),
    }
    whole = studied(trunks, lambda _: [], TRUNKS, averaged=False)
    for size in (TRUNKS, 4):
        report(f"none, {size} episodes", studied(trunks, lambda _: [], size, averaged=False), whole, tasks)
    for averaged in (False, True):
        for name, (groups, rule, size) in rules.items():
            text = f"{name}, {size} trunks, {'averaged' if averaged else 'siblings'}"
            report(text, studied(groups, rule, size, averaged), whole, tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", type=int, help="Initial states of each task.")
    parser.add_argument("--first", type=int, default=200_000, help="Number of the first of them in the train split.")
    parser.add_argument("--policy", default="pretrained:tabletop_base")
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = TabletopConfig(num_envs=40, num_workers=0).build()
    policy, tasks = load_policy(resolve_path(args.policy)), list(env.spec.tasks)
    policy.eval()
    player, trunks, full = Player(policy, env, args.first), list[list[Piece]](), list[list[Piece]]()
    for number in range(args.first, args.first + args.states):
        more = grown(player, tasks, number)
        trunks, full = trunks + more[0], full + more[1]
    env.close()
    compare(trunks, full, len(tasks))


if __name__ == "__main__":
    main()
