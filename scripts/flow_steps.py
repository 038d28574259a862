"""What fewer steps of the flow cost and save: AUC, order within an initial state, imagined frames per second.

    python scripts/flow_steps.py DATASET WORLD_MODEL=STEPS [WORLD_MODEL=STEPS ...] [--episodes N]

DATASET holds episodes of the policy that no part was fitted on, collected in groups (collect.group_size). Each world
model imagines them open loop with its number of steps, from the same noise. An episode's score is its highest logit, of
the less sure of the two success networks; for the order, a probability by a sigmoid fitted without its initial state.
Speeds are by the processor's time, in turns; a frame is imagined, judged, decoded and remembered, 40 episodes at once.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from vla_rl.data.config import DatasetConfig
from vla_rl.evaluation.probability import cross_fit
from vla_rl.evaluation.signal import auc, auc_draws, auc_figure, group_correlation, interval_of
from world_model.bench import imagined_frame, in_turns
from world_model.data.episodes import EpisodeFrames, logged_episodes, open_episodes
from world_model.fit.guard import Logits
from world_model.fit.replay import replay_logits
from world_model.model.world_model import WorldModel, load_world_model
from world_model.trust.types import LoggedEpisode

NUM_ENVS = 40


def with_steps(text: str) -> WorldModel:
    """The world model of "FOLDER=STEPS", or "pretrained:NAME=STEPS"."""
    path, steps = text.rsplit("=", 1)
    world_model = load_world_model(path)
    world_model.set_dynamics_options(sampling_steps=int(steps))
    return world_model


def some_groups(episodes: list[LoggedEpisode], most: int) -> list[LoggedEpisode]:
    """All episodes of as many initial states, drawn at random, as make `most` of them or fewer."""
    starts = np.array([episode.start for episode in episodes])
    chosen: list[LoggedEpisode] = []
    for start in np.random.default_rng(0).permutation(np.unique(starts)):
        group = [episode for episode in episodes if episode.start == start]
        if len(chosen) + len(group) <= most:
            chosen += group
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument(
        "world_models", nargs="+", metavar="WORLD_MODEL=STEPS", help="the first is what others are held to"
    )
    parser.add_argument("--episodes", type=int, default=800, help="at most, in whole groups (800)")
    arguments = parser.parse_args()
    each = {text: with_steps(text) for text in arguments.world_models}
    first = next(iter(each.values()))
    spec = first.metadata.env_spec()
    dataset = open_episodes(DatasetConfig(path=arguments.dataset), spec)
    frames = EpisodeFrames.of(dataset, first.frame_steps, spec.action_low, spec.action_high)
    episodes = some_groups(list(logged_episodes(frames)), arguments.episodes)
    real, groups = np.array([e.succeeded for e in episodes]), np.array([e.start for e in episodes])
    print(f"{len(episodes)} episodes, {real.mean():.3f} succeeded, {len(np.unique(groups))} initial states", flush=True)
    against: np.ndarray | None = None
    for name, world_model in each.items():
        score = Logits(*replay_logits(world_model, episodes, seed=0)).score
        against = score if against is None else against
        found, order = auc_figure(score, real, groups), group_correlation(cross_fit(score, real, groups), real, groups)
        within = "not measured" if order is None else f"{order.value:.3f} [{order.low:.3f}, {order.high:.3f}]"
        change = interval_of(auc_draws(score, real, groups) - auc_draws(against, real, groups))
        print(f"{name}: AUC {found.value:.3f} [{found.low:.3f}, {found.high:.3f}], order within a state {within}")
        print(f"  change of AUC {auc(score, real) - auc(against, real):+.4f} [{change.low:+.4f}, {change.high:+.4f}]")
    seconds = in_turns({name: imagined_frame(one, NUM_ENVS) for name, one in each.items()}, first.device)
    for name, value in seconds.items():
        print(f"{name}: {NUM_ENVS / value:.1f} imagined frames/s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
