"""GRPO on the tabletop from top to bottom, with the packages' public parts and nothing hidden.

    python docs/examples/grpo_from_scratch.py --iterations 8

The policy that ships with the package places things too short. Each iteration runs it several times from the same
initial states, compares the episodes of a state with each other, and makes the better ones' actions more likely. What
`vla-rl train tabletop_grpo` adds: several processes, checkpoints, validation, controls, more algorithms.

Shapes: B decisions, one for each action chunk; H actions in a chunk; A dimensions of an action.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from sim.tabletop import TabletopConfig
from vla_rl.evaluation.statistics import wilson_interval
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.policies.load import load_policy
from vla_rl.rollout.runner import collect
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Observation

TEMPERATURE = 1.0  # Of the sampling in rollouts; the likelihoods of the update are taken at the same.
CLIP = 0.2  # How far a step may move the probability ratio of an action's token from 1.
MINIBATCH, MICRO_BATCH = 256, 64  # Decisions for an optimizer step; for a forward and backward pass.


def roll_out(
    policy: Policy, env: VecEnv, tasks: list[str], num_groups: int, group_size: int, seed: int
) -> list[Episode]:
    """Return `group_size` episodes from each of `num_groups` initial states of the train split."""
    rng = np.random.default_rng(seed)
    states = [EpisodeSpec(tasks[i % len(tasks)], "train", int(rng.integers(100_000))) for i in range(num_groups)]
    specs = [state for state in states for _ in range(group_size)]
    groups = [group for group in range(num_groups) for _ in range(group_size)]
    return collect(policy, env, specs, temperature=TEMPERATURE, seed=seed, groups=groups)


def group_advantages(episodes: list[Episode]) -> np.ndarray:
    """Return each episode's reward less its group's mean, over the group's deviation (arXiv 2402.03300), float (E,)."""
    reward, group = np.array([e.total_reward for e in episodes]), np.array([e.group for e in episodes])
    advantage = np.zeros(len(episodes))
    for number in np.unique(group):
        rows = group == number
        deviation = reward[rows].std(ddof=1)
        advantage[rows] = (reward[rows] - reward[rows].mean()) / (deviation + 1e-6)
    return advantage


def decisions(
    episodes: list[Episode], advantage: np.ndarray
) -> tuple[Observation, ActionChunk, np.ndarray, torch.Tensor]:
    """Return what the update learns from: the decisions of all episodes whose group was not all alike.

    Returns:
        observations and chunks of B decisions; executed: bool (B, H), which actions were executed before the episode
        ended; advantage: float32 (B,), of the episode that the decision belongs to.
    """
    used = [(episode, a) for episode, a in zip(episodes, advantage, strict=True) if a != 0]
    if not used:
        raise SystemExit("every group was all success or all failure: nothing to learn from; use more groups")
    chunks = ActionChunk.concatenate([episode.chunks for episode, _ in used])
    num_steps = np.concatenate([episode.num_steps for episode, _ in used])
    executed = np.arange(chunks.actions.shape[1]) < num_steps[:, None]
    per_decision = np.concatenate([np.full(episode.num_chunks, a, np.float32) for episode, a in used])
    obs = Observation.concatenate([episode.obs for episode, _ in used])
    return obs, chunks, executed, torch.as_tensor(per_decision)


def clipped_loss(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, executed: torch.Tensor
) -> torch.Tensor:
    """Return PPO's clipped surrogate, negated and summed over the tokens of executed actions.

    Args:
        log_prob, old: float (B, H, A), now and when the rollout was made. advantage: (B,). executed: bool (B, H).
    """
    ratio = (log_prob - old).exp()
    gain = advantage[:, None, None] * ratio
    clipped = advantage[:, None, None] * ratio.clamp(1 - CLIP, 1 + CLIP)
    return -(torch.minimum(gain, clipped) * executed[..., None]).sum()


def update(policy: Policy, optimizer: torch.optim.Optimizer, episodes: list[Episode], epochs: int, seed: int) -> float:
    """Improve the policy on a rollout; return the mean loss of a token."""
    obs, chunks, executed, advantage = decisions(episodes, group_advantages(episodes))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert chunks.log_prob is not None, "collect() draws with likelihoods"
    old = torch.as_tensor(chunks.log_prob)
    generator, losses = np.random.default_rng(seed), []
    for _ in range(epochs):
        order = generator.permutation(len(executed))
        for rows in np.array_split(order, max(1, round(len(order) / MINIBATCH))):
            num_tokens = executed[rows].sum() * chunks.actions.shape[2]
            optimizer.zero_grad()
            total = 0.0
            for part in np.array_split(rows, -(-len(rows) // MICRO_BATCH)):
                out = policy.evaluate(obs.select(part), chunks.select(part), TEMPERATURE)
                mask = torch.as_tensor(executed[part])
                loss = clipped_loss(out.log_prob, old[part], advantage[part], mask) / num_tokens
                loss.backward()
                total += float(loss.detach())
            losses.append(total)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    return float(np.mean(losses))


def evaluate(policy: Policy, env: VecEnv, tasks: list[str], episodes_per_task: int) -> str:
    """Return the success rate on initial states of the eval split, which training never sees, with its interval."""
    specs = [EpisodeSpec(task, "eval", index) for task in tasks for index in range(episodes_per_task)]
    successes = sum(episode.success for episode in collect(policy, env, specs, temperature=TEMPERATURE))
    low, high = wilson_interval(successes, len(specs))
    return f"{100 * successes / len(specs):.1f} % [{100 * low:.1f}, {100 * high:.1f}] of {len(specs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("iterations", 8),
        ("groups", 40),
        ("group-size", 8),
        ("epochs", 2),
        ("episodes-per-task", 40),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-4)
    args = parser.parse_args()
    if args.group_size < 2:
        parser.error("--group-size: at least 2, since the episodes of a state are compared with each other")
    env = TabletopConfig(num_envs=40).build()
    policy = load_policy("pretrained:tabletop_base")
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0)
    tasks = list(env.spec.tasks)
    print("before:", evaluate(policy, env, tasks, args.episodes_per_task))
    for iteration in range(args.iterations):
        episodes = roll_out(policy, env, tasks, args.groups, args.group_size, seed=iteration)
        loss = update(policy, optimizer, episodes, args.epochs, seed=iteration)
        print(f"{iteration + 1:3d}  success {np.mean([e.success for e in episodes]):.3f}  loss {loss:+.4f}", flush=True)
    print("after:", evaluate(policy, env, tasks, args.episodes_per_task))
    env.close()


if __name__ == "__main__":
    main()
