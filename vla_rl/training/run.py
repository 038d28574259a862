"""State of one RL run: rollouts, logging, validation, checkpoints."""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from vla_rl.algorithms.learner import Learner
from vla_rl.algorithms.stale import EarlierRollouts
from vla_rl.common.atomic import restore_replaced, write_text_atomic
from vla_rl.common.distributed.process_group import current, resolve_device
from vla_rl.common.distributed.tensor_files import load_weights, trained_weights
from vla_rl.common.progress import Progress, RunSteps, Stopwatch, episode_progress
from vla_rl.common.run_folder import RunFolder
from vla_rl.evaluation.evaluate import evaluate
from vla_rl.evaluation.executed import execute
from vla_rl.evaluation.gate import Gate
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.results import Evaluation
from vla_rl.interfaces import ImaginedEnv, StatefulEnv, VecEnv
from vla_rl.policies.base import resolve_path
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import TrainRecipe
from vla_rl.rollout.runner import derived_seed
from vla_rl.rollout.source import GroupOrder, RolloutPlan, own_state, with_steps_after_success
from vla_rl.rollout.success import TRUE_SUCCESS, reward_metrics, rollout_metrics, success_metrics
from vla_rl.rollout.task_sampling import groups_to_resample
from vla_rl.training.bc_trainer import ContinueBC, Demonstrations
from vla_rl.training.checkpoint import checkpoint_path, keep_last, latest_checkpoint, load_checkpoint, save_checkpoint
from vla_rl.training.config import TrainConfig
from vla_rl.training.metrics import MetricLogger, SilentLogger
from vla_rl.training.trainer import TrainingDivergedError
from vla_rl.types import Episode, EpisodeSpec

_ROLLOUT, _RESAMPLE, _GATE = 1, 2, 3  # streams of the rollouts' seeds
BEFORE, RL, AFTER, REPORT = "evaluation before", "iterations", "evaluation after", "report"
# A run's steps, by train.evaluate.
STEPS = {"before_and_after": (BEFORE, RL, AFTER, REPORT), "after": (RL, AFTER, REPORT), "never": (RL, REPORT)}


class NoSuccessError(ValueError):
    """The policy solves none of the first rollout's episodes; the message says what to do."""


class TrainingRun:
    """One RL run: its environment, policy, learner and sampler, and the folder that records it.

    Attributes:
        iteration: iterations finished.
        world: the processes that share the run; each has an instance of this class, and the first one writes.
        learner: has `prepare(episodes)` and `update(batch, demonstrations)`.
        earlier: rollouts to learn from once more; None without `train.reuse`.
        demonstrations: batches for the algorithm's anchor or the control; None when neither is on.
    """

    iteration = 0
    _saved_at = -1
    _imagined: float | None = None  # What the last rollouts' episodes from initial states were paid.
    _best: tuple[float, int] | None = None  # validation success, iteration
    _interrupted = _is_looping = False

    def __init__(self, recipe: TrainRecipe, folder: Path, resume: bool):
        if recipe.num_threads:
            torch.set_num_threads(recipe.num_threads)
        self.recipe, self.config, self.algo, self.folder = recipe, recipe.train, recipe.algo, RunFolder(folder)
        self.world, device = current(), resolve_device(recipe.device)
        self.stopwatch = Stopwatch(device if recipe.log.exact_times else None)
        self.steps = run_steps(self.folder, self.config, recipe.log.console, self.world.is_main)
        plan = RolloutPlan(
            env=with_steps_after_success(recipe.env, 0),  # RL learns from none.
            **{name: getattr(recipe, name) for name in ("policy", "rollout", "seed", "device")},
            groups=self.config.groups,
            temperature=self.config.temperature,
        )
        with ExitStack() as opened:
            self.env = opened.enter_context(closing(plan.rollout.build_env(plan.env)))
            self.policy = self.world.load(lambda: recipe.policy.build(self.env.spec, device, recipe.seed))
            self.sampler = recipe.sampling.build(list(self.env.spec.tasks), recipe.seed, recipe.env.is_imagined)
            needed = recipe.sft if recipe.needs_demonstrations else None
            self.demonstrations = needed and Demonstrations(self.policy, needed, self.env.spec, recipe.seed, self.world)
            self.learner = self._build_learner()
            self.gate = self._open_gate() if recipe.gate.every else None
            self.earlier = EarlierRollouts.of(self.config, self.world) if self.config.reuse else None
            if self.world.is_main and isinstance(self.env, ImaginedEnv) and self.env.admission is not None:
                write_text_atomic(self.folder.admission, self.env.admission.model_dump_json(indent=1) + "\n")
            self.source = opened.enter_context(closing(plan.rollout.build(plan, self.env, self.world)))
            self.steps.dashboard = self.source.dashboard
            self._resumed_at = self._restore() if resume else None
            self._opened = opened.pop_all()

    def _build_learner(self) -> Learner | ContinueBC:
        control = self.config.control
        learner = self.algo.build(
            self.policy,
            self.recipe.seed,
            temperature=self.config.temperature,
            control="none" if control == "continue_bc" else control,
            stopwatch=self.stopwatch,
            world=self.world,
        )
        return ContinueBC(learner, self.demonstrations) if control == "continue_bc" and self.demonstrations else learner

    @cached_property
    def logger(self) -> MetricLogger:
        """Where numbers go: opened with the first of them; in other processes than the first, nowhere."""
        if not self.world.is_main:
            return SilentLogger()
        run_config, total = self.recipe.model_dump(mode="json"), self.config.iterations
        return MetricLogger(
            self.folder.path, self.recipe.log, run_config=run_config, resume_step=self._resumed_at, num_iterations=total
        )

    def _open_gate(self) -> Gate:
        """Open the gate, and say what its checks can tell."""
        if self.world.is_main and self.recipe.log.console:
            print(self._gate_power)
        return Gate(self.recipe.gate, self.folder.confirmed, self.policy, self.world, self.folder.gate_episodes)

    @cached_property
    def _gate_power(self) -> str:
        """What the gate's checks can tell, for people."""
        return self.recipe.gate.power(self.config.iterations)

    # --- one iteration ----------------------------------------------------------------------

    def roll_out(self) -> list[Episode]:
        """Collect groups of episodes from fresh train states, of several processes this one's share.

        Uninformative ones are replaced within the budget. A NoSuccessError: the first rollout has no success at all.
        """
        self._is_looping, cfg = True, self.config
        ahead = min(self.source.staleness, cfg.iterations - self.iteration - 1) * cfg.groups
        with self.world.unsharded(self.policy):
            self.source.publish(self.policy, self.iteration)
            specs = self.sampler.draw(cfg.groups + ahead - self.source.num_under_way * self.world.size)
            episodes = self._run_groups(specs, cfg.groups, first_group=0, stream=_ROLLOUT)
            if cfg.resample_budget:
                episodes += self._resample(episodes)
        outcomes = self.world.gather_outcomes(episodes)
        self.sampler.update(outcomes)
        played = [e for e in outcomes if not e.lost]
        if self.iteration == 0 and not cfg.allow_no_success and played and not any(e.success for e in played):
            raise NoSuccessError(self._no_success(len(played)))
        return episodes

    def _resample(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Run more groups, within the budget, until as many as were wanted are informative; return these."""
        target, budget, found = self.config.groups, self.config.resample_budget, list[Episode]()
        drawn = target
        while more := groups_to_resample(self.world.gather_outcomes([*episodes, *found]), target, budget):
            found += self._run_groups(self.sampler.draw(more), more, first_group=drawn, stream=_RESAMPLE)
            budget, drawn = budget - more, drawn + more
        return found

    def _no_success(self, num_episodes: int) -> str:
        whole_spec = (self.recipe.real_env or self.recipe.env).env_spec()
        ends, whole = (max(spec.horizon.values()) for spec in (self.env.spec, whole_spec))
        cut = f" Imagined episodes end after {ends} of {whole} control steps." if ends < whole else ""
        advice = "Train it longer by behavior cloning (`vla-rl sft`), choose easier tasks (env.tasks),"
        if self.recipe.env.is_imagined:
            advice = (
                "If the policy solves some in the simulator (`vla-rl eval`), the world model does not imagine it: "
                "`vla-rl world-model eval` says what it misses; or let it pay by probability "
                "(env.imagination.reward=probability),"
            )
        return (
            f"the policy solved none of {num_episodes} train episodes at temperature {self.config.temperature:g}, so "
            f"every reward is 0 and RL has nothing to learn from.{cut} {advice} or set train.allow_no_success=true to "
            "go on anyway."
        )

    def _run_groups(self, specs: Sequence[EpisodeSpec], num: int, first_group: int, stream: int) -> list[Episode]:
        """Begin a group from each spec and return `num` finished ones: this process's share of both."""
        size = self.algo.rollouts_per_group(self.config.group_size)
        share, ours = self.world.share(len(specs)), self.world.share(num)
        if isinstance(self.env, ImaginedEnv):
            specs = self.env.deal(specs, size)
        if not (wanted := ours.stop - ours.start):
            return []
        first_group += ours.start
        seed = derived_seed(self.recipe.seed, self.iteration, stream, first_group)
        text = f"iteration {self.iteration + 1} of {self.config.iterations}"
        with self._progress(text, transient=True)(wanted * size) as on_episode:
            order = GroupOrder(specs[share], size, seed, first_group, wanted)
            return self.source.collect(order, self.stopwatch, on_episode)

    def finish_iteration(self, episodes: Sequence[Episode], metrics: dict[str, float]) -> None:
        """Log the iteration and where its time went."""
        self.iteration += 1
        episodes = self.world.gather_outcomes(episodes)
        played = [e for e in episodes if not e.lost]
        logged: dict[str, Any] = success_metrics(episodes, self.env.spec.tasks, self.recipe.env.is_imagined)
        self._imagined = logged.get("train/imagined")
        for name in (name for name in played[0].info if name != TRUE_SUCCESS):
            logged[f"env/{name}"] = float(np.mean([e.info[name].mean() for e in played]))
        times = self.stopwatch.report()
        logged |= rollout_metrics(episodes, self.algo.compares_episodes) | reward_metrics(played) | metrics
        logged |= self.source.metrics() | self.sampler.metrics(episodes)
        logged["rollout/num_processes"] = float(self.world.size)
        logged |= {f"time/{stage}": seconds for stage, seconds in times.items()}
        logged["time/episodes_per_second"] = len(episodes) / (times["simulation"] + times["inference"])
        logged["time/overhead_fraction"] = (times["other"] + times.get("optimizer", 0.0)) / times["total"]
        self.logger.log(self.iteration, logged)
        self.steps.update(self.iteration)

    def is_due(self, every: int) -> bool:
        """Whether something done every so many iterations (0: never) is due; the last counts."""
        return bool(every) and (self.iteration % every == 0 or self.iteration == self.config.iterations)

    def took_real_episodes(self) -> bool:
        """Whether a validation or a check of the gate has just run real episodes that RL in imagination did not ask
        for: a kill must not have them run again."""
        measured = self.is_due(self.config.validate_every) or self.is_due(self.recipe.gate.every)
        return self.recipe.env.is_imagined and measured

    # --- measuring --------------------------------------------------------------------------

    def validate(self) -> None:
        """Success on the validation split, sampled and greedy; the best by sampled success is remembered."""
        cfg = self.config
        wanted, name = self.recipe.validation, f"iteration {self.iteration}"
        progress = self._progress("validation", transient=True)
        with self.world.unsharded(self.policy):
            result = evaluate(self.policy, self.real_env, wanted, name=name, progress=progress, world=self.world)
        sampled, greedy = result.rate("sampled").rate, result.rate("greedy").rate
        self.logger.log(self.iteration, {"validation/sampled": sampled, "validation/greedy": greedy})
        if not math.isnan(sampled) and (self._best is None or sampled > self._best[0]):
            self._best = (sampled, self.iteration)
            if cfg.keep == "best":
                self._save_policy(self.folder.best)
        self.stopwatch.report()

    @cached_property
    def real_env(self) -> VecEnv:
        """The environment of real episodes: the run's own, or beside a world model the recipe's `real_env`."""
        if self.recipe.acting_env is self.recipe.env:
            return self.env
        return self._opened.enter_context(closing(self.recipe.gate.build_env(self.recipe.acting_env)))

    def check_gain(self, episodes: Sequence[Episode]) -> None:
        """The gate: is the gain real, and of these newest episodes, what is imagined? Where surely not, RL ends.

        A policy that got worse goes back to the last one found better; the rejected one is kept beside it.
        """
        assert self.gate is not None, "check_gain is due only with a gate"
        env, pairs = self.recipe.env, self.recipe.gate.pairs
        why_not = env.why_not_executed(self.recipe.acting_env)
        check = self.gate.check(
            self.policy,
            self.real_env,
            iteration=self.iteration,
            imagined=self._imagined,
            executed=why_not or execute(self.real_env, episodes, pairs, env.most_flattery, self.world),
            temperature=self.config.temperature,
            seed=derived_seed(self.recipe.seed, self.iteration, _GATE),
            checks_left=self.recipe.gate.num_checks(self.config.iterations, self.iteration - 1),
        )
        self.logger.log(self.iteration, check.metrics())
        self.logger.print(check.text())
        if self.world.is_main:
            found = {"power": self._gate_power} | self.gate.state()
            write_text_atomic(self.folder.gate, json.dumps(found, indent=1) + "\n")
        if check.rolled_back:
            self._save_policy(self.folder.rejected)
            self.policy = load_policy(self.gate.confirmed, self.policy.device)
        elif self.world.is_main:  # Of this check before a kill, which made it end otherwise.
            shutil.rmtree(self.folder.rejected, ignore_errors=True)
        self.stopwatch.report()

    def evaluate(self, name: str, policy_path: Path | None = None) -> None:
        """Evaluate on the recipe's `eval` section; writes evaluations/<name>.json and a picture, then videos.

        Several processes share the episodes; the first one writes.

        Args:
            policy_path: where the policy is saved; by default where the run's policy came from.
        """
        self.steps.begin(BEFORE if name == "base" else AFTER, self.iteration)
        with self.world.unsharded(self.policy):
            result = self._evaluate(name, policy_path)
            self.world.wait()  # The others' videos are shown too.
        self.logger.log_evaluation(self.iteration, result, self.folder.videos_of(name))
        self.steps.update(self.iteration)
        self.stopwatch.report()

    def _evaluate(self, name: str, policy_path: Path | None) -> Evaluation:
        def save(result: Evaluation) -> None:
            if self.world.is_main:
                result.save(self.folder.evaluation(name))
                self.logger.print(result.table())

        base = self.recipe.policy.path
        return evaluate(
            self.policy,
            self.recipe.acting_env,
            self.recipe.eval,
            name=name,
            policy_path=policy_path or (resolve_path(base) if base else None),
            video_folder=self.folder.videos,
            progress=self._progress(f"evaluation, {name}"),
            on_result=save,
            file=self.folder.evaluation(name),
            world=self.world,
        )

    # --- keeping ----------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint from which the run resumes exactly."""
        if self._saved_at == self.iteration:
            return
        tensors, learner_state = self.learner.state()
        tensors |= trained_weights(self.policy) | (self.earlier.tensors() if self.earlier else {})
        under_way = self.world.gather(self.source.state())
        with self.world.gathers(tensors.values()):
            if self.world.is_main:
                self._write_checkpoint(tensors, learner_state, under_way)
        self._saved_at = self.iteration

    def _write_checkpoint(self, tensors: Mapping[str, Any], learner: Mapping[str, Any], sources: list[Any]) -> None:
        state = {
            "iteration": self.iteration,
            "best": self._best,
            "learner": learner,
            "sampler": self.sampler.state(),
            "demonstrations_drawn": self.demonstrations.num_drawn if self.demonstrations else 0,
            "gate": self.gate.state() if self.gate else None,
            "env": self.env.state() if isinstance(self.env, StatefulEnv) else None,  # A world model's noise.
            "sources": sources,
            "earlier": self.earlier.state() if self.earlier else [],
        }
        path = save_checkpoint(checkpoint_path(self.folder.checkpoints, self.iteration), tensors, state)
        keep_last(path, self.config.keep_checkpoints)

    def _save_policy(self, folder: Path) -> None:
        with self.world.saving(self.policy):
            if self.world.is_main:
                self.policy.save(folder)

    def _restore(self) -> int:
        """Load the newest checkpoint, if there is one; return its iteration, else 0."""
        path = latest_checkpoint(self.folder.checkpoints)
        if path is None:
            return 0
        tensors, state = load_checkpoint(path)
        load_weights(self.policy, tensors, str(path))
        self.learner.load_state(tensors, state["learner"])
        self.sampler.load_state(state["sampler"])
        if self.demonstrations is not None:
            self.demonstrations.num_drawn = int(state["demonstrations_drawn"])
        self.iteration = self._saved_at = int(state["iteration"])
        if state["env"] is not None and isinstance(self.env, StatefulEnv):
            self.env.load_state(state["env"])
        self.source.load_state(own_state(state, self.world, path))
        if self.earlier is not None:
            self.earlier.load(tensors, state.get("earlier", []))
        if self.gate is not None and state["gate"]:
            self.gate.load_state(state["gate"])
        self._best = (state["best"][0], state["best"][1]) if state["best"] else None
        return self.iteration

    def keep_policy(self) -> Path:
        """Write the run's result to policy/: the best by validation or the last, as train.keep says."""
        self._is_looping = False
        if self.config.keep == "best" and self._best is not None:
            restore_replaced(self.folder.best)
            self.policy = load_policy(self.folder.best, self.policy.device)
        self._save_policy(self.folder.policy)
        return self.folder.policy

    def _keep_last_good(self) -> str:
        """Save the policy that a diverged update was set back to; says where, and how to go on from it."""
        folder = self.folder.last_good
        self._save_policy(folder)
        return f"That policy is saved: start a new run with policy.path={folder} and these changes."

    def report(self) -> None:
        """Write report.html: the run is finished."""
        self.steps.begin(REPORT, self.iteration)
        self.steps.end(self.iteration, "finished")

    # --- as a context -----------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Whether another iteration is due: not after the gate has closed. After Ctrl-C: saves, and stops the run."""
        if any(self.world.gather(self._interrupted)):
            self.save()
            raise KeyboardInterrupt
        self.steps.begin(RL, self.iteration)
        return self.iteration < self.config.iterations and not (self.gate and self.gate.is_closed)

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        """First Ctrl-C (or SIGTERM): finish the iteration, save, stop. Second: stop at once, at the last checkpoint."""
        if self._interrupted or not self._is_looping:
            raise KeyboardInterrupt
        self._interrupted = True
        self.logger.print("Stopping after this iteration, then saving. Press Ctrl-C again to stop at once.")

    def __enter__(self) -> Self:
        in_main_thread = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
        self._handlers = {number: signal.signal(number, self._on_interrupt) for number in numbers}
        self.stopwatch.restart()  # Setting up is no part of the first iteration.
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if error is not None:
            with suppress(OSError):  # What it ended with matters more.
                self.steps.end(self.iteration, "stopped")
        try:
            self.logger.close()
        finally:
            self._opened.close()
        if isinstance(error, TrainingDivergedError):
            raise TrainingDivergedError(f"{error} {self._keep_last_good()}") from None

    def _progress(self, text: str, transient: bool = False) -> Progress:
        show = self.recipe.log.console and self.world.is_main
        return partial(episode_progress, text=text, show=show, transient=transient)


def run_steps(folder: RunFolder, config: TrainConfig, show: bool, write: bool) -> RunSteps:
    """What says where an RL run is."""
    return RunSteps(folder.status, STEPS[config.evaluate], config.iterations, write_report, show, write)
