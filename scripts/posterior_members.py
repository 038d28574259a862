"""What members of a posterior, and futures of other noise, say of held-out episodes, open loop with the logged actions.

    python scripts/posterior_members.py WORLD_MODEL DATASET [--episodes 400] [--futures 4]

DATASET was collected in groups (collect.group_size); whole groups are taken, spread over it. Printed: AUC and the order
within an initial state of the probability by the dynamics itself, by the mean over members, and by one member for each
episode or for each initial state; the same of futures of other noise; and AUC of disagreement for verdicts (a
probability above a half by the dynamics itself) that are wrong.
"""

from __future__ import annotations

import argparse
import zlib

import numpy as np
import torch

from vla_rl.data.config import DatasetConfig
from vla_rl.evaluation.signal import auc_figure, group_correlation
from world_model.config import ImaginationConfig
from world_model.data.episodes import EpisodeFrames, logged_episodes, open_episodes
from world_model.model.world_model import WorldModel, load_world_model
from world_model.trust.measures.open_loop import Noise
from world_model.trust.subject import OpenLoop
from world_model.trust.types import LoggedEpisode, collate
from world_model.types import Actions

BATCH = 64


def imagined(
    world_model: WorldModel, episodes: list[LoggedEpisode], draw: int, member: int | None, futures: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Each episode's highest probability, and the mean disagreement of `futures` side by side: float (E,) each."""
    config = ImaginationConfig(dual_noise=0, ensemble=futures, posterior=member is not None)
    subject, probability, spread = OpenLoop(world_model, config), [], []
    for start in range(0, len(episodes), BATCH):
        batch = collate(episodes[start : start + BATCH])
        first = subject.encode(batch.images[:, :1], batch.states[:, :1])
        memory = subject.begin(
            first, batch.instruction, Noise(0, draw).of(range(start, start + len(batch.instruction)))
        )
        if member is not None:
            memory = world_model.with_members(memory, [member] * memory.size)
        actions = Actions(torch.from_numpy(batch.actions)[:, 1:], torch.from_numpy(batch.executed)[:, 1:])
        _, scores = subject.imagine(memory, actions)
        valid = batch.valid[:, 1:]
        probability.append(np.where(valid, scores.probability, 0).max(1))
        if scores.disagreement is not None:
            spread.append(np.where(valid, scores.disagreement, 0).sum(1) / valid.sum(1))
    return np.concatenate(probability), np.concatenate(spread) if spread else np.zeros(len(episodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world_model")
    parser.add_argument("dataset")
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--futures", type=int, default=4)
    arguments = parser.parse_args()
    world_model = load_world_model(arguments.world_model)
    spec = world_model.metadata.env_spec()
    dataset = open_episodes(DatasetConfig(path=arguments.dataset), spec)
    frames = EpisodeFrames.of(dataset, world_model.frame_steps, spec.action_low, spec.action_high)
    states = list(dict.fromkeys(dataset.initial_states[e] for e in frames.episodes))
    wanted = max(1, round(arguments.episodes * len(states) / len(frames.episodes)))
    kept = {states[i] for i in np.linspace(0, len(states) - 1, wanted).round().astype(int)}
    rows = [row for row, e in enumerate(frames.episodes) if dataset.initial_states[e] in kept]
    episodes = logged_episodes(frames, rows)
    real, groups = np.array([e.succeeded for e in episodes]), np.array([e.start for e in episodes])
    print(f"{len(episodes)} episodes, {len(kept)} initial states, {real.mean():.3f} succeeded", flush=True)

    def show(name: str, probability: np.ndarray) -> None:
        auc, order = auc_figure(probability, real, groups), group_correlation(probability, real, groups)
        assert order is not None, "the dataset was collected in groups"
        print(f"{name}: AUC {auc.value:.3f} [{auc.low:.3f}, {auc.high:.3f}], order within a state {order.value:.3f} "
              f"[{order.low:.3f}, {order.high:.3f}]", flush=True)  # fmt: skip

    def show_disagreement(name: str, spread: np.ndarray) -> None:
        found = auc_figure(spread, wrong, groups)
        print(f"  {name}: mean {spread.mean():.4f}, AUC for {wrong.sum()} wrong verdicts {found.value:.3f} "
              f"[{found.low:.3f}, {found.high:.3f}]", flush=True)  # fmt: skip

    def compare(kind: str, each: np.ndarray, side_by_side: np.ndarray) -> None:
        show(f"mean over {len(each)} {kind}", each.mean(0))
        drawn = np.random.default_rng(0).integers(len(each), size=len(real))
        shared = np.array([zlib.crc32(group.encode()) % len(each) for group in groups])
        for name, which in (("episode", drawn), ("initial state", shared)):
            show(f"one of the {kind} for each {name}", each[which, np.arange(len(real))])
        show_disagreement("latents side by side", side_by_side)
        show_disagreement("probabilities", each.std(0, ddof=1))

    alone, spread = imagined(world_model, episodes, 0, None, arguments.futures)
    wrong = (alone > 0.5) != real
    show("the dynamics itself", alone)
    show_disagreement("how near the probability is to a half", -np.abs(alone - 0.5))
    if world_model.config.posterior is not None:
        count = world_model.config.posterior.members
        found = [imagined(world_model, episodes, 0, m, count if m == 0 else 1) for m in range(count)]
        compare("members", np.stack([probability for probability, _ in found]), found[0][1])
    others = [imagined(world_model, episodes, draw, None)[0] for draw in range(1, arguments.futures)]
    compare("futures of other noise", np.stack([alone, *others]), spread)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
