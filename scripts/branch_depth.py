"""How much an imagined branch's reward tells of the truth, by its depth: before any RL with branches.

    python scripts/branch_depth.py WORLD_MODEL DATASET --groups 8 --output runs/branch_depth.json

From real frames of recorded tabletop episodes, GROUP_SIZE branches each: the policy acts on what is imagined. A branch
of depth d is worth the value at its d-th frame, or the probability of success where that passed the stop; the whole one
its highest probability. Its truth: the simulator, brought to the same frame by the logged actions, executes the
branch's d chunks, and then the policy goes on by what it really sees; the whole branch's truth has imagined actions
alone. What counts for GRPO is the correlation within groups, of branches from one frame.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from sim.tabletop.config import TabletopConfig
from sim.vector.runner import InlineVecEnv
from vla_rl.common.atomic import write_text_atomic
from vla_rl.data.config import DatasetConfig
from vla_rl.data.keyframes import split_start
from vla_rl.evaluation.signal import auc, group_correlation
from vla_rl.interfaces import Policy
from vla_rl.policies.base import resolve_path
from vla_rl.policies.load import load_policy
from vla_rl.rollout.runner import derived_seed
from vla_rl.types import EpisodeSpec, Keyframe, Observation, Split
from world_model.data.episodes import EpisodeFrames, logged_episodes, open_episodes
from world_model.data.recorded_prefixes import RecordedPrefix, remember
from world_model.model.world_model import WorldModel, load_world_model
from world_model.types import Actions

GROUP_SIZE, STOP, DEPTHS = 8, 0.8, (1, 2, 3)


def moments(
    frames: EpisodeFrames, tasks: list[str], per_task: int, seed: int, first: bool
) -> list[tuple[int, int, EpisodeSpec]]:
    """Place, frame and spec of `per_task` decisions of each task: first or, uniformly, later ones before success."""
    rng, found = np.random.default_rng(seed), []
    reached = frames.success(np.arange(frames.num_frames))
    wanted = (frames.number == 0) if first else (frames.number > 0)
    usable = np.flatnonzero(wanted & (frames.number < frames.counts[frames.owner] - 1) & ~reached)
    starts = [split_start(frames.dataset.initial_states[episode]) for episode in frames.episodes]
    for task in tasks:
        own = [row for row in rng.permutation(usable).tolist() if starts[frames.owner[row]][0] == task]
        for row in own[:per_task]:
            owner = frames.owner[row]
            _, split, index = starts[owner]
            spec = EpisodeSpec(task, cast(Split, split), index)
            found.append((int(owner), int(frames.number[row]), spec))
    return found


def replayed(env: InlineVecEnv, frames: EpisodeFrames, place: int, number: int, spec: EpisodeSpec) -> tuple[Any, Any]:
    """The simulator's state at a frame, and the logged episode up to it; they must show the same."""
    whole = logged_episodes(frames, [place])[0]
    cut = {name: getattr(whole, name)[: number + 1] for name in ("images", "states", "actions", "executed", "success")}
    logged = replace(whole, **cut)
    obs = env.reset([spec], [0])
    for chunk in logged.actions[1:]:
        obs = env.step(chunk[None], [0]).obs
    np.testing.assert_array_equal(np.stack([obs.images[c][0] for c in frames.cameras]), logged.images[-1])
    return env.save_state([0])[0], logged


def imagined(
    world_model: WorldModel, policy: Policy, logged: Any, left: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """GROUP_SIZE branches of `left` chunks: actions (chunks, B, H, A), highest probability and value (chunks, B)."""
    actions = Actions(torch.from_numpy(logged.actions[None]), torch.from_numpy(logged.executed[None]))
    frames = world_model.encode(logged.images[None], logged.states[None])
    prefix = RecordedPrefix(frames, actions, logged.images[-1], logged.states[-1], logged.instruction)
    memory = remember(world_model, [prefix] * GROUP_SIZE, [derived_seed(seed, i) % 2**32 for i in range(GROUP_SIZE)])
    images, state = np.stack([logged.images[-1]] * GROUP_SIZE), np.stack([logged.states[-1]] * GROUP_SIZE)
    generator, best = torch.Generator().manual_seed(seed), np.zeros(GROUP_SIZE)
    done, probability, value = [], [], []
    for number in range(left):
        views = {camera: images[:, i] for i, camera in enumerate(world_model.metadata.cameras)}
        chunk = policy.act(Observation(views, state, [logged.instruction] * GROUP_SIZE), generator, 1.0).actions
        sent = world_model.actions(chunk, np.full(GROUP_SIZE, chunk.shape[1]))
        new = world_model.dynamics.imagine(memory.context, sent, memory.noise)
        best = np.maximum(best, world_model.probability(*world_model.scores(memory, new))[:, -1].numpy())
        time = np.full((GROUP_SIZE, 1), (left - number - 1) * chunk.shape[1])
        value.append(world_model.value(memory, new, time)[:, -1].numpy())
        memory = world_model.extend(memory, new, sent)
        images, state = world_model.decode(new)[:, -1], world_model.states(new)[:, -1]
        done.append(chunk)
        probability.append(best)
    return np.stack(done), np.stack(probability), np.stack(value)


def really(
    env: InlineVecEnv, policy: Policy, spec: EpisodeSpec, start: Keyframe, chunks: np.ndarray, seed: int
) -> np.ndarray:
    """Success, bool (B,), of executing `chunks` (d, B, H, A) from a state and going on with the policy."""
    specs = [EpisodeSpec(spec.task, spec.split, spec.index, keyframe=start)] * GROUP_SIZE
    going, success = list(range(GROUP_SIZE)), np.zeros(GROUP_SIZE, bool)
    obs, generator, number = env.reset(specs, going), torch.Generator().manual_seed(seed), 0
    while going:
        actions = chunks[number][going] if number < len(chunks) else policy.act(obs, generator, 1.0).actions
        result = env.step(actions, going)
        success[going] |= result.success
        kept = np.flatnonzero(~result.done)
        going, obs, number = [going[row] for row in kept], result.obs.select(kept.tolist()), number + 1
    return success


def within(worth: np.ndarray, truth: np.ndarray, group: np.ndarray) -> str:
    """Their correlation within groups, and its interval by bootstrap over groups."""
    found = group_correlation(worth, truth.astype(bool), group)
    assert found is not None, "groups have several branches"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def table(lines: list[dict[str, Any]]) -> None:
    """Depth by depth, and what the whole branches' worth says of the same truth."""
    print("| branch | frames | mean worth | truth | AUC | correlation within groups | of the whole branch's worth |")
    print("|---|---|---|---|---|---|---|")
    whole = [line for line in lines if line["depth"] == "whole"]
    for depth in [*DEPTHS, "whole"]:
        of = [line for line in lines if line["depth"] == depth]
        same = whole if depth == "whole" else [line for line in whole if line["left"] > depth]
        (worth, truth, group), (other, _, _) = joined(of), joined(same)
        told = " | ".join(within(each, truth, group) for each in (worth, other))
        area = auc(worth, truth.astype(bool))
        print(f"| {depth} | {len(of)} | {worth.mean():.3f} | {truth.mean():.3f} | {area:.3f} | {told} |")


def joined(lines: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Worth, truth and group of all branches."""
    worth, truth = (np.concatenate([line[name] for line in lines]) for name in ("worth", "truth"))
    return worth, truth, np.repeat(np.arange(len(lines)), GROUP_SIZE)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world_model", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--policy", default="pretrained:tabletop_base")
    parser.add_argument("--groups", type=int, default=8, help="frames per task")
    parser.add_argument("--first", action="store_true", help="from the episodes' first frames, not from later ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world_model, policy = load_world_model(args.world_model), load_policy(resolve_path(args.policy), "cpu")
    spec, steps = world_model.metadata.env_spec(), world_model.frame_steps
    dataset = open_episodes(DatasetConfig(path=str(args.dataset)), spec)
    frames = EpisodeFrames.of(dataset, steps, spec.action_low, spec.action_high)
    env, lines = InlineVecEnv(TabletopConfig(), GROUP_SIZE), []
    for number, (place, frame, at) in enumerate(moments(frames, list(spec.tasks), args.groups, args.seed, args.first)):
        start, logged = replayed(env, frames, place, frame, at)
        left, seed = spec.horizon[at.task] // steps - frame, derived_seed(args.seed, number)
        chunks, probability, value = imagined(world_model, policy, logged, left, seed)
        for depth in [*DEPTHS, "whole"]:
            deep = left if depth == "whole" else depth
            if depth != "whole" and deep >= left:
                continue
            ended = probability[deep - 1] > STOP
            worth = (
                probability[deep - 1] if depth == "whole" else np.where(ended, probability[deep - 1], value[deep - 1])
            )
            truth = really(env, policy, at, start, chunks[:deep], seed + 1)
            line = {"task": at.task, "frame": frame, "left": left, "depth": depth}
            lines.append(line | {"worth": worth.tolist(), "truth": truth.tolist()})
        write_text_atomic(args.output, json.dumps(lines))
        print(number, at.task, frame, left, flush=True)
    env.close()
    table(lines)


if __name__ == "__main__":
    main()
