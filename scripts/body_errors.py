"""How far the robot's state is off in imagination: as the world model imagines it, and of the body simulated alone.

    python scripts/body_errors.py WORLD_MODEL --policy FOLDER [--recipe libero_closed_loop] [--override KEY=VALUE ...]

The policy acts in the recipe's simulator, on initial states from --first on; beside each episode, world model and body
execute its actions from its first frame on, and see nothing else of it.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import reward_factorial as factorial
import torch
from scipy.spatial.transform import Rotation

from vla_rl.interfaces import Policy
from vla_rl.policies.base import resolve_path
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import Recipe
from vla_rl.rollout.runner import derived_seed
from vla_rl.types import EpisodeSpec
from world_model.env.config import WorldModelEnvConfig
from world_model.metadata import resolve_path as resolve_world_model
from world_model.model.world_model import WorldModel, load_world_model

MARKS = (8, 24, 64, 128)  # Control steps.


def followed(recipe: Recipe, world_model: WorldModel, policy: Policy, specs: list[EpisodeSpec]) -> dict[int, list]:
    """Control steps -> (real, learned, simulated) states (S,) of the episodes that have not ended before."""
    assert isinstance(recipe.env, WorldModelEnvConfig), "checked before"
    learned = recipe.env.model_copy(update={"body": "learned"})
    imagined = factorial.build_env(
        recipe.model_copy(update={"env": learned}), "imagined", "true", world_model, {}, 0
    ).seen
    real, body = factorial.simulators(recipe), recipe.env.build_body()
    assert body is not None, "env.body=simulated"
    generator, found = torch.Generator().manual_seed(derived_seed(0)), defaultdict(list)
    for start in range(0, len(specs), real.num_envs):
        batch = specs[start : start + real.num_envs]
        going, done = list(range(len(batch))), 0
        obs, (bodies, _) = real.reset(batch, going), body.begin(batch)
        imagined.reset(batch, going)
        while going:
            actions = policy.act(policy.prepare(obs), generator, 1.0).actions
            result, dreamt = real.step(actions, going), imagined.step(actions, going)
            bodies, moved = body.step(bodies, actions)
            done += actions.shape[1]
            found[done] += list(zip(result.obs.state, dreamt.obs.state, moved[:, -1], strict=True))
            rows = np.flatnonzero(~(result.done | dreamt.done)).tolist()
            going, bodies, obs = [going[row] for row in rows], [bodies[row] for row in rows], result.obs.select(rows)
    return found


def line(steps: int, states: np.ndarray) -> str:
    """Of one time, from states (n, 3, S): medians and 90 % quantiles, millimeters and degrees."""
    real, texts = states[:, 0], []
    for name, told in (("learned", states[:, 1]), ("simulated", states[:, 2])):
        away = 1e3 * np.linalg.norm(told[:, :3] - real[:, :3], axis=1)
        turned = (Rotation.from_rotvec(told[:, 3:6]) * Rotation.from_rotvec(real[:, 3:6]).inv()).magnitude()
        gap = 1e3 * np.abs((told[:, 6] - told[:, 7]) - (real[:, 6] - real[:, 7]))
        parts = (("mm", away), ("degrees", np.degrees(turned)), ("mm between fingers", gap))
        texts.append(
            f"{name} " + ", ".join(f"{np.median(x):.2f} ({np.quantile(x, 0.9):.2f}) {unit}" for unit, x in parts)
        )
    return f"{steps} steps, n = {len(states)}: " + "; ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world_model")
    parser.add_argument("--policy", required=True)
    parser.add_argument("--recipe", default="libero_closed_loop")
    parser.add_argument("--first", type=int, default=25_000, help="number of the first initial state, of split train")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.override, args.iterations = ["env.body=simulated", *args.override], 1
    torch.set_num_threads(1)
    recipe = factorial.read_recipe(args)
    world_model = load_world_model(resolve_world_model(Path(args.world_model)))
    policy = load_policy(resolve_path(args.policy), "cpu")
    task = next(iter(recipe.acting_env.env_spec().tasks))
    specs = [EpisodeSpec(task, "train", args.first + i) for i in range(args.episodes)]
    print("median (90 %) over episodes")
    for steps, states in followed(recipe, world_model, policy, specs).items():
        if steps in MARKS:
            print(line(steps, np.array(states)), flush=True)


if __name__ == "__main__":
    main()
