"""Would imagined outcomes save the gate real pairs? How much of the real paired difference they explain.

    python scripts/imagined_control_variate.py RECIPE WORLD_MODEL --policy A --policy B

Both policies act from the same `validation` states, in the simulator and, several times, in imagination. As a control
variate the imagined difference takes from the variance of the real one the share R2 that it explains. Sample k draws
its actions from the same random numbers in all four, so "the same draws" is what imagination says of these very draws.
Beside it stands what the same random numbers for both policies do: how many real pairs differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from vla_rl.evaluation.evaluate import EvalConfig, build_env, episode_specs
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout.runner import EpisodeRunner, RunningEpisode, derived_seed
from vla_rl.types import ActionChunk, EpisodeSpec, StepResult
from vla_rl.workflows.imagination.real_and_imagined import imagined_env

START = 3000  # Validation states that neither the gate nor a validation has used.


def outcomes(policy: Policy, env: VecEnv, specs: Sequence[EpisodeSpec], sample: int) -> np.ndarray:
    """Reward of an episode from each state, float (N,); each decision has a random stream of its own."""
    found = np.zeros(len(specs))

    def act(episodes: list[RunningEpisode]) -> ActionChunk:
        seeds = [derived_seed(sample, each.number, each.num_chunks) for each in episodes]
        draws = [
            policy.act(each.obs, torch.Generator().manual_seed(seed), 1.0)
            for each, seed in zip(episodes, seeds, strict=True)
        ]
        return ActionChunk.concatenate(draws)

    def on_step(episode: RunningEpisode, row: int, chunk: ActionChunk, result: StepResult) -> None:
        found[episode.number] += float(result.reward.sum())

    EpisodeRunner(env, specs, act, on_step, policy).run()
    return found


def explained(target: np.ndarray, predictors: np.ndarray) -> float:
    """R2 of least squares of (N,) on (N, P)."""
    design = np.column_stack([np.ones(len(target)), predictors])
    residual = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return 1 - float(residual.var() / target.var())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("world_model", type=Path)
    parser.add_argument("--policy", action="append", required=True)
    parser.add_argument("--states", type=int, default=80, help="per task")
    parser.add_argument("--samples", type=int, default=8, help="imagined ones of each policy and state; 2 are real")
    parser.add_argument("--save", type=Path, help="an .npz of all outcomes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe)
    policies = [load_policy(path) for path in options.policy]
    imagined_config = imagined_env(recipe, options.world_model)
    paid = imagined_config.imagination.model_copy(update={"reward": "probability"})
    env_configs = recipe.acting_env, imagined_config.model_copy(update={"imagination": paid})
    wanted = EvalConfig(split="validation", episodes_per_task=options.states, start_index=START)
    found = []
    for env_config, samples in zip(env_configs, (2, options.samples), strict=True):
        with closing(build_env(env_config)) as env:
            specs = episode_specs(env.spec, wanted)
            found.append([[outcomes(policy, env, specs, k) for policy in policies] for k in range(samples)])
    real, imagined = (np.array(each) for each in found)  # (samples, policies, states)
    if options.save:
        np.savez(options.save, real=real, imagined=imagined)
    report(real, imagined)


def report(real: np.ndarray, imagined: np.ndarray) -> None:
    """Print what is explained, with intervals over initial states; outcomes are (samples, policies, states)."""
    difference, guess = np.diff(real, axis=1)[:, 0], np.diff(imagined, axis=1)[:, 0]  # (samples, states)
    others = guess[2:].mean(0)[None].repeat(2, 0)
    print(f"{real.shape[2]} states; real success {real.mean((0, 2))}, imagined probability {imagined.mean((0, 2))}")
    crossed = np.stack([real[1, 1] - real[0, 0], real[0, 1] - real[1, 0]])
    for title, pairs in (("the same draws", difference), ("other draws", crossed)):
        _print(f"pairs that differ, {title}", lambda chosen, pairs=pairs: float(np.mean(pairs[:, chosen] != 0)), real)
    for title, predictors in (
        ("one other imagined pair", guess[2][None, :, None].repeat(2, 0)),
        ("mean of the other imagined pairs", others[..., None]),
        ("the same draws", guess[:2, :, None]),
        ("the same draws, and the others' mean", np.stack([guess[:2], others], -1)),
        ("each policy's, the same draws and the others' mean", _all_predictors(imagined)),
    ):

        def share(chosen: np.ndarray, predictors: np.ndarray = predictors) -> float:
            rows = predictors[:, chosen].reshape(-1, predictors.shape[-1])
            return explained(difference[:, chosen].ravel(), rows)

        _print(f"R2 of the real difference, {title}", share, real)


def _print(title: str, figure: Callable[[np.ndarray], float], real: np.ndarray) -> None:
    states = np.arange(real.shape[2])
    rows = np.random.default_rng(0).choice(states, (2000, len(states)))
    low, high = np.quantile([figure(chosen) for chosen in rows], [0.025, 0.975])
    print(f"{title}: {figure(states):.3f} [{low:.3f}, {high:.3f}]")


def _all_predictors(imagined: np.ndarray) -> np.ndarray:
    others = imagined[2:].mean(0)[None].repeat(2, 0)
    return np.concatenate([imagined[:2], others], axis=1).transpose(0, 2, 1)


if __name__ == "__main__":
    main()
