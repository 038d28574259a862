"""What limits RL in imagination, pictures or rewards: each from the simulator or the world model, in every pairing.

    python scripts/reward_factorial.py run WORLD_MODEL --output runs/factorial --seeds 0 1 2     (resumable, one core)
    python scripts/reward_factorial.py run WORLD_MODEL --output runs/libero --recipe libero_closed_loop --policy FOLDER
    python scripts/reward_factorial.py table runs/factorial

One arm is GRPO from a recipe's policy (by default the tabletop's base), with observations imagined or real, or of which
only the pictures or only the robot's state are imagined (with the true outcome as reward alone), and as reward the true
outcome, the verdict of the success networks (above their threshold), their calibrated probability, or
that of the objects part, which looks at no frame but the first (only where WORLD_MODEL has it). Beside every episode
runs a simulator with the same actions, which knows the truth: an arm's gap is its reward minus that. Advantages are not
divided by a standard deviation in any arm, and learning rates fall to 0, or the last policy's noise would drown the
arms. WORLD_MODEL has been fitted with a calibrated probability; where real frames are judged, threshold and probability
come from real episodes of the policy that RL starts from, by the same functions. Of the recipe (env a world model,
real_env its simulator) come simulators, imagination, algorithm, groups and evaluation (one sample a state); --override
changes it, such as real_env.num_envs=16, or env.body=simulated, with which an imagined state is the simulated body's.
A folder holds results of one world model, policy, recipe and number of iterations (subject.json), and is refused to
others. Each arm's policy is saved beside its results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import expit, logit

from sim.base import SimConfig
from sim.vector.runner import InlineVecEnv
from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import ConfigError, validate
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.evaluation.probability import choose_threshold, platt
from vla_rl.evaluation.statistics import SEEDS_ALIKE, summarize_seeds
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.policies.base import resolve_path
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import Recipe, load_recipe
from vla_rl.rollout.runner import collect, derived_seed
from vla_rl.types import EpisodeSpec, Keyframe, StepResult
from world_model.config import ImaginationConfig
from world_model.data.initial_frames import SimulatedInitialFrames
from world_model.env.config import WorldModelEnvConfig
from world_model.env.env import WorldModelEnv
from world_model.metadata import content_key
from world_model.metadata import resolve_path as resolve_world_model
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel, load_world_model
from world_model.types import Frames

RECIPE = "tabletop_imagination"
SUBJECT = "subject.json"
HALVES = {"imagined_pictures": ("state",), "imagined_state": ("images",)}  # Observations, and what of them is real.
ARMS = (
    *itertools.product(("imagined", "real"), ("success", "probability", "objects", "true")),
    *((half, "true") for half in HALVES),
)
JUDGED = (("real", "success"), ("real", "probability"))  # Which judge real frames, and need a threshold for them.
ITERATIONS = 16
STOP, FALSE_SUCCESS = 0.8, 0.1
CALIBRATION_STATES, CALIBRATION_START = 100, 700_000  # Per task; states that RL never draws.
ENDLESS = 10**6


class FrameJudge:
    """The success networks on real frames: the highest logit of each environment's episode so far."""

    def __init__(self, world_model: WorldModel, num_envs: int, cameras: Sequence[str]) -> None:
        self._world_model, self._cameras = world_model, cameras
        self._memory: list[Memory | None] = [None] * num_envs
        self.score = np.full(num_envs, -np.inf)

    def begin(self, ids: Sequence[int], obs: Any) -> None:
        for row, i in enumerate(ids):
            self._memory[i] = self._world_model.begin(self._frames(obs, [row]), [obs.instruction[row]], [0])
            self.score[i] = -np.inf

    def look(self, ids: Sequence[int], obs: Any, actions: np.ndarray) -> np.ndarray:
        """Judge one more frame of each environment; return the highest logit so far, float64 (B,)."""
        frames = self._frames(obs, list(range(len(ids))))
        for row, i in enumerate(ids):
            memory, frame = self._memory[i], frames.select(torch.tensor([row]))
            assert memory is not None, "begin comes first"
            logits = torch.minimum(*self._world_model.scores(memory, frame))
            self.score[i] = max(self.score[i], float(logits[0, 0]))
            self._memory[i] = memory.seeing(frame)
        return self.score[list(ids)]

    def _frames(self, obs: Any, rows: list[int]) -> Frames:
        images = np.stack([obs.images[camera][rows] for camera in self._cameras], 1)
        return self._world_model.encode(images[:, None], obs.state[rows][:, None])


class ObjectsJudge(FrameJudge):
    """The objects part, begun at each episode's real first frame and rolled by the actions."""

    def look(self, ids: Sequence[int], obs: Any, actions: np.ndarray) -> np.ndarray:
        for row, i in enumerate(ids):
            memory = self._memory[i]
            assert memory is not None and memory.objects is not None, "begin comes first"
            done = self._world_model.actions(actions[[row]], np.array([actions.shape[1]]))
            assert self._world_model.objects is not None, "its memory has objects"
            rolled, _, logits = self._world_model.objects.roll(memory.objects, done)
            self.score[i] = max(self.score[i], float(logits.max()))
            self._memory[i] = replace(memory, objects=rolled)
        return self.score[list(ids)]


class FactorialEnv:
    """Observations of one environment, rewards of one judge, and a simulator beside it that knows the truth.

    Args:
        seen: gives observations. Where a judge decides, it must not end by itself before the horizon.
        truth: knows what has happened; as many environments, or `seen` itself. Closed with this one, as `seen` is.
        reward: "own" (`seen`'s), "true", "success" or "probability" (of `judge`'s logits; also "objects").
        sigmoid: slope and intercept. threshold: logit. stop: probability that ends an episode.
        from_truth: with reward "true", what `truth` shows in place of `seen`: "state", "images".
    """

    def __init__(
        self,
        seen: VecEnv,
        truth: VecEnv,
        reward: str,
        judge: FrameJudge | None = None,
        sigmoid: tuple[float, float] = (1.0, 0.0),
        threshold: float = np.inf,
        stop: float = STOP,
        from_truth: Sequence[str] = (),
    ) -> None:
        self.seen, self.reward, self.judge, self.from_truth = seen, reward, judge, from_truth
        self.sigmoid, self.threshold, self.stop = sigmoid, threshold, stop
        self.spec, self.num_envs, self.record_frames = seen.spec, seen.num_envs, False
        self.truth_env = truth
        self.over, self.truth = np.zeros(seen.num_envs, bool), np.zeros(seen.num_envs, bool)
        self.total, self.paid = np.zeros(seen.num_envs), np.zeros(seen.num_envs)
        self.specs: list[EpisodeSpec | None] = [None] * seen.num_envs
        self.log: list[tuple[str, int, float, bool]] = []  # Task, initial state, reward, truth of ended episodes.

    def reset(self, specs: Sequence[EpisodeSpec], env_ids: Sequence[int] | None = None) -> Any:
        ids = list(range(self.num_envs)) if env_ids is None else list(env_ids)
        obs = self.seen.reset(specs, ids)
        if self.truth_env is not self.seen:
            self.truth_env.reset(specs, ids)
        for array in (self.over, self.truth, self.total, self.paid):
            array[ids] = 0
        for i, spec in zip(ids, specs, strict=True):
            self.specs[i] = spec
        if self.judge is not None:
            self.judge.begin(ids, obs)
        return obs

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        ids = list(range(self.num_envs)) if env_ids is None else list(env_ids)
        result = self.seen.step(actions, ids)
        if self.reward == "true":
            real = result if self.truth_env is self.seen else self.truth_env.step(actions, ids)
            self.truth[ids] |= real.success
            told = {name: getattr(real.obs, name) for name in self.from_truth}
            result = replace(real, obs=replace(result.obs, **told), info={})
        else:
            self._step_truth(actions, ids)
            if self.reward != "own":
                result = self._judged(result, ids, actions)
        self.total[ids] += result.reward.sum(1)
        for i, done in zip(ids, result.done.tolist(), strict=True):
            spec = self.specs[i]
            if done and spec is not None:
                self.log.append((spec.task, spec.index, float(self.total[i]), bool(self.truth[i])))
        return result

    def _step_truth(self, actions: np.ndarray, ids: Sequence[int]) -> None:
        going = [row for row, i in enumerate(ids) if not self.over[i]]
        if going:
            at = [ids[row] for row in going]
            part = self.truth_env.step(actions[going], at)
            self.truth[at] |= part.success
            self.over[at] |= part.done

    def _judged(self, result: StepResult, ids: Sequence[int], actions: np.ndarray) -> StepResult:
        assert self.judge is not None, "a judge decides"
        score = self.judge.look(ids, result.obs, actions)
        probability = expit(self.sigmoid[0] * score + self.sigmoid[1])
        ends = score > self.threshold if self.reward == "success" else probability > self.stop
        worth = ends.astype(float) if self.reward == "success" else probability
        reward, terminated = np.zeros_like(result.reward), np.zeros_like(result.terminated)
        reward[:, -1], self.paid[list(ids)] = worth - self.paid[list(ids)], worth
        terminated[:, -1] = ends
        truncated = result.truncated & ~ends[:, None]
        return replace(result, reward=reward, terminated=terminated, truncated=truncated, success=worth > 0.5, info={})

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[Keyframe]:
        raise NotImplementedError("the factorial has no keyframes")

    def expert_action(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        raise NotImplementedError("the factorial has no expert")

    def close(self) -> None:
        self.seen.close()
        self.truth_env.close()


def simulators(recipe: Recipe, endless: bool = False) -> VecEnv:
    """The recipe's simulators, in this process; endless: no success ends an episode before its horizon."""
    config = recipe.acting_env
    if not isinstance(config, SimConfig):
        raise ConfigError(f"real_env: got {config.kind!r}, must be one of the simulators in sim/")
    if endless:
        config = config.model_copy(update={"steps_after_success": ENDLESS})
    return InlineVecEnv(config, config.num_envs)


def build_env(
    recipe: Recipe, observations: str, reward: str, world_model: WorldModel, real_judge: dict[str, Any], seed: int
) -> FactorialEnv:
    truth = simulators(recipe)
    if (observations, reward) == ("real", "true"):
        return FactorialEnv(truth, truth, "true")
    if observations == "real":
        seen, cameras = simulators(recipe, endless=True), world_model.metadata.cameras
        if reward == "objects":
            judge = ObjectsJudge(world_model, seen.num_envs, cameras)
            return FactorialEnv(seen, truth, reward, judge, world_model.check_objects())
        judge = FrameJudge(world_model, seen.num_envs, cameras)
        return FactorialEnv(seen, truth, reward, judge, tuple(real_judge["sigmoid"]), real_judge["threshold"])
    kind, stop = ("probability", 1 - 1e-7) if reward == "true" else (reward, STOP)
    assert isinstance(recipe.env, WorldModelEnvConfig), "checked before"
    options = recipe.env.imagination.model_dump() | {"reward": kind, "stop_probability": stop}
    first = SimulatedInitialFrames(simulators(recipe))
    imagination, body = validate(ImaginationConfig, options), recipe.env.build_body()
    seen = WorldModelEnv(
        world_model, first, imagination, truth.num_envs, seed=seed, body=body, shows_body=recipe.env.body == "simulated"
    )
    told = HALVES.get(observations, ())
    return FactorialEnv(seen, truth, "true" if reward == "true" else "own", from_truth=told)


def calibrate_real(recipe: Recipe, world_model: WorldModel, policy: Policy) -> dict[str, Any]:
    """Sigmoid and threshold of the success networks on real frames, from episodes of the policy before RL."""
    seen = simulators(recipe, endless=True)
    judge = FrameJudge(world_model, seen.num_envs, world_model.metadata.cameras)
    env = FactorialEnv(seen, simulators(recipe), "probability", judge, stop=1.0)
    states = [CALIBRATION_START + i for i in range(CALIBRATION_STATES)]
    specs = [EpisodeSpec(task, "train", i) for i in states for task in env.spec.tasks]
    collect(policy, env, specs, temperature=1.0, seed=derived_seed(99))
    score = logit(np.array([total for _, _, total, _ in env.log]).clip(1e-12, 1 - 1e-12))
    real = np.array([truth for *_, truth in env.log])
    groups = np.array([f"{task}/{index}" for task, index, *_ in env.log])
    env.close()
    threshold = choose_threshold(score, real, groups, FALSE_SUCCESS)
    sigmoid = platt(score, real)
    if threshold is None or sigmoid is None:
        raise SystemExit("the success networks tell nothing on real frames: no threshold, or no rising probability")
    return {"threshold": threshold, "sigmoid": sigmoid}


def train(
    recipe: Recipe, arm: tuple[str, str], seed: int, world_model: WorldModel, policy: Policy, judge: dict[str, Any]
) -> dict[str, Any]:
    """One arm and seed, from a policy, which is changed, to its success on `eval` states; what the table needs of it.

    Seeds with one number of iterations have no initial states in common.
    """
    started = time.process_time()
    env = build_env(recipe, *arm, world_model, judge, seed)
    assert recipe.algo is not None, "checked before"
    learner, history = recipe.algo.build(policy, seed), []
    iterations, group_size = recipe.train.iterations, recipe.train.group_size
    tasks, per_task = tuple(env.spec.tasks), recipe.train.groups // len(env.spec.tasks)
    for iteration in range(iterations):
        env.log.clear()
        first = (seed * iterations + iteration) * per_task
        states = [EpisodeSpec(task, "train", first + i) for i in range(per_task) for task in tasks]
        groups = np.repeat(np.arange(len(states)), group_size)
        specs = [states[group] for group in groups]
        episodes = collect(policy, env, specs, seed=derived_seed(seed, iteration), groups=groups.tolist())
        learner.update(learner.prepare(episodes))
        reward, truth = (np.array([line[k] for line in env.log], float) for k in (2, 3))
        history.append({"reward": reward.mean(), "truth": truth.mean(), "correlation": within_groups(env.log)})
        print(f"{'_'.join(arm)} seed {seed} iteration {iteration + 1}: {json.dumps(history[-1])}", flush=True)
    env.close()
    return {"outcomes": outcomes(recipe, policy), "history": history, "cpu_seconds": time.process_time() - started}


def within_groups(log: Sequence[tuple[str, int, float, bool]]) -> float:
    """Correlation of reward and truth, both less the mean of their initial state; NaN where one never varies."""
    places = np.unique([f"{task}/{index}" for task, index, *_ in log], return_inverse=True)[1]
    values = np.array([[reward, truth] for *_, reward, truth in log], float)
    means = np.stack([np.bincount(places, column) / np.bincount(places) for column in values.T], 1)
    x, y = (values - means[places]).T
    norm = np.sqrt((x**2).sum() * (y**2).sum())
    return float((x * y).sum() / norm) if norm else float("nan")


def outcomes(recipe: Recipe, policy: Policy) -> list[list[bool]]:
    """Success on each task's `eval` states, sampled: tasks x states."""
    env, states = simulators(recipe), recipe.eval.episodes_per_task
    specs = [EpisodeSpec(task, "eval", i) for task in env.spec.tasks for i in range(states)]
    episodes = collect(policy, env, specs, temperature=1.0, seed=0)
    env.close()
    return np.array([e.success for e in episodes]).reshape(-1, states).tolist()


def read_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe with what every arm has in common, and what was asked for on the command line.

    Raises:
        ConfigError: a wrong recipe or override, or one without imagination, simulator or algorithm.
    """
    common = ["algo.normalize_std=false", f"algo.decay_iterations={args.iterations}"]
    common += [f"train.iterations={args.iterations}", *([f"policy.path={args.policy}"] if args.policy else [])]
    recipe = load_recipe(args.recipe, [*args.override, *common])
    if not isinstance(recipe.env, WorldModelEnvConfig) or recipe.real_env is None:
        raise ConfigError(f"--recipe {args.recipe}: must have an env of kind world_model, and the section real_env")
    return recipe


def claim(folder: Path, world_model: Path, policy: Path, args: argparse.Namespace) -> None:
    """Write into a folder what its results are of, or check that they are of just that.

    Raises:
        ConfigError: they are of another world model, policy, recipe or number of iterations, or do not say of which.
    """
    facts = {"world_model": content_key(world_model), "policy": policy_hash(policy), "iterations": args.iterations}
    facts |= {"recipe": args.recipe, "overrides": sorted(args.override)}
    file = folder / SUBJECT
    if not file.is_file():
        if found := sorted(path.name for path in folder.glob("*.json")):
            raise ConfigError(
                f"--output {folder}: has {', '.join(found[:3])}, but no {SUBJECT}, which says what they are of; choose "
                f"another --output, or, if they are of just these, write into that file: {json.dumps(facts)}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, json.dumps(facts, indent=1) + "\n")
        return
    there = json.loads(file.read_text())
    if other := [name for name in facts if there.get(name) != facts[name]]:
        parts = ", ".join(f"{name} there {there.get(name)}, here {facts[name]}" for name in other)
        raise ConfigError(
            f"--output {folder}: holds results of another {' and '.join(other)} ({parts}); give what it was begun with "
            "(WORLD_MODEL, --policy, --iterations, --recipe, --override), or choose another --output"
        )


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    recipe = read_recipe(args)
    judge_file, base_file = args.output / "judge.json", args.output / "base.json"
    model_folder, policy_folder = resolve_world_model(args.world_model), resolve_path(recipe.policy.path or "")
    claim(args.output, model_folder, policy_folder, args)
    world_model, policy = load_world_model(model_folder), load_policy(policy_folder, "cpu")
    arms = [arm for arm in ARMS if "_".join(arm) in args.arms or not args.arms]
    if world_model.metadata.objects_probability is None and not args.arms:
        arms = [arm for arm in arms if arm[1] != "objects"]
    judged = any(arm in arms for arm in JUDGED)
    if judged and not judge_file.exists():
        write_text_atomic(judge_file, json.dumps(calibrate_real(recipe, world_model, policy)))
    judge = json.loads(judge_file.read_text()) if judged else {}
    if not base_file.exists():
        write_text_atomic(base_file, json.dumps(outcomes(recipe, policy)))
    for seed, arm in itertools.product(args.seeds, arms):
        file = args.output / f"{'_'.join(arm)}_{seed}.json"
        if not file.exists():
            learned = load_policy(policy_folder, "cpu")
            found = train(recipe, arm, seed, world_model, learned, judge)
            learned.save(file.with_suffix("") / "policy")
            write_text_atomic(file, json.dumps(found))


def table(args: argparse.Namespace) -> None:
    base = np.array(json.loads((args.output / "base.json").read_text()), float)
    print(f"base {100 * base.mean():.1f} %\n")
    print("| observations | reward | seeds | success % | gain, points | gap | correlation |")
    print("|---|---|---|---|---|---|---|")
    for arm in ARMS:
        runs = [json.loads(file.read_text()) for file in sorted(args.output.glob(f"{'_'.join(arm)}_*.json"))]
        if not runs:
            continue
        after = np.array([run["outcomes"] for run in runs], float)
        last = [step for run in runs for step in run["history"][-3:]]
        gap = np.mean([step["reward"] - step["truth"] for step in last])
        correlation = np.nanmean([step["correlation"] for run in runs for step in run["history"]])
        gain = summarize_seeds((after - base).reshape(len(runs), -1))
        interval = f"[{100 * gain.interval.low:+.1f}, {100 * gain.interval.high:+.1f}]"
        each = ", ".join(f"{100 * seed:+.1f}" for seed in gain.per_seed)
        print(
            f"| {arm[0]} | {arm[1]} | {each} | {100 * after.mean():.1f} | {100 * gain.mean:+.1f} {interval} | "
            f"{100 * gap:+.0f} | {correlation:.2f} |"
        )
    print(f"\n{SEEDS_ALIKE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("world_model", help="a folder, or pretrained:NAME")
    running.add_argument("--output", type=Path, required=True)
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    names = ["_".join(arm) for arm in ARMS]
    running.add_argument("--arms", nargs="*", default=(), choices=names, help="by default all")
    running.add_argument("--iterations", type=int, default=ITERATIONS)
    running.add_argument("--recipe", default=RECIPE, help=f"by default {RECIPE}")
    running.add_argument("--policy", help="that RL starts from, a folder or pretrained:NAME; by default the recipe's")
    running.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe")
    running.set_defaults(function=run)
    showing = commands.add_parser("table")
    showing.add_argument("output", type=Path)
    showing.set_defaults(function=table)
    arguments = parser.parse_args()
    try:
        arguments.function(arguments)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
