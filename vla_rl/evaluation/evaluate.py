"""Evaluation of a policy on numbered initial states, greedy and sampled.

    evaluation = evaluate(policy, env_config, EvalConfig(split="eval", episodes_per_task=100))
    evaluation.save("evaluations/final.json")

The same EvalConfig gives the same initial states for every policy, so that two evaluations can be
paired (`vla_rl.evaluation.compare`). Each episode draws from a seed of its own, made of the config's, the
place of its temperature among the config's, the task, the state and the sample: the result depends neither
on `num_envs`, nor on which other states there are, nor on how many processes share them.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import batched
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, SerializeAsAny

from vla_rl.common.distributed.process_group import ALONE, ProcessGroup
from vla_rl.common.progress import Progress, Stopwatch, silent_progress
from vla_rl.common.run_folder import versions
from vla_rl.config import Config, ConfigError, TaskNames, component
from vla_rl.data.config import MaybeDatasets
from vla_rl.evaluation.results import (
    EpisodeJournal,
    EpisodeRecord,
    Evaluation,
    EvaluationError,
    EvaluationMeta,
    journals,
)
from vla_rl.evaluation.video import write_episode_video
from vla_rl.interfaces import EnvConfig, ImaginedEnv, PlanningConfig, PlanningPolicy, Policy, VecEnv
from vla_rl.rollout.runner import MAX_RETRIES, collect, derived_seed, run_episodes
from vla_rl.rollout.source import with_steps_after_success
from vla_rl.types import EnvSpec, Episode, EpisodeSpec, Split

# Episodes are reduced to records batch by batch, so that their images never fill the memory.
_MAX_BATCH_BYTES = 2**30


class EvalConfig(Config):
    """Which initial states, how often each, how actions are drawn."""

    split: Split = Field(default="eval", description="eval for the claim, validation to choose, train to debug.")
    tasks: TaskNames = Field(default=(), description="Tasks to evaluate; empty means all of the environment's.")
    episodes_per_task: PositiveInt = Field(default=50, description="Initial states per task.")
    start_index: NonNegativeInt = Field(default=0, description="First initial state of the split.")
    temperatures: tuple[NonNegativeFloat, ...] = Field(
        default=(0.0, 1.0), min_length=1, description="0 is greedy; others are sampled; none comes twice."
    )
    samples_per_state: PositiveInt = Field(
        default=1, description="Episodes from each state when sampled; greedy runs once."
    )
    approximate: bool = Field(
        default=False,
        description="Evaluate in the environment as it is, approximations for training included (env.rendering=light); "
        "such a figure is not the benchmark's, and says so.",
    )
    videos: NonNegativeInt = Field(default=2, description="Successes, and failures, filmed per task.")
    seed: int = Field(default=0, description="Of the action sampling; initial states do not depend on it.")
    datasets: MaybeDatasets = Field(
        default=(),
        description="env.kind robot: recorded episodes to measure action errors on, none of which the policy has "
        "learned; empty: those that sft.validation_fraction holds out.",
    )
    plan: Annotated[SerializeAsAny[PlanningConfig] | None, component("plan")] = Field(
        default=None,
        description="Planning at test time: {world_model: FOLDER, candidates: N}; null: the policy's own actions.",
    )

    def modes(self) -> dict[str, float]:
        """Mode name -> temperature: "greedy" for 0, "sampled" for the one other, "sampled_T0.7", ... for several.

        Raises:
            ConfigError: a temperature comes twice, or is not the plan's.
        """
        if self.plan is not None and (others := [t for t in self.temperatures if t not in (0, 1)]):
            raise ConfigError(
                f"eval.temperatures: got {others[0]:g} with eval.plan, which draws its candidates at "
                "eval.plan.temperature; set that one, and here 1, or 0 for a greedy candidate among them"
            )
        if len(set(self.temperatures)) != len(self.temperatures):
            raise ConfigError(f"eval.temperatures: got {list(self.temperatures)}; give each once, e.g. [0, 1]")
        sampled = [t for t in self.temperatures if t > 0]
        return {
            "greedy" if t == 0 else "sampled" if len(sampled) == 1 else f"sampled_T{t:g}": t for t in self.temperatures
        }

    def num_episodes(self, spec: EnvSpec) -> int:
        """Episodes of all modes in an environment of this spec; those run again are not counted."""
        per_state = sum(1 if t == 0 else self.samples_per_state for t in self.modes().values())
        return len(self.tasks or spec.tasks) * self.episodes_per_task * per_state


def evaluate(
    policy: Policy,
    env: VecEnv | EnvConfig,
    config: EvalConfig,
    *,
    name: str = "policy",
    policy_path: Path | None = None,
    video_folder: Path | None = None,
    stopwatch: Stopwatch | None = None,
    progress: Progress | None = None,
    on_result: Callable[[Evaluation], None] = lambda _: None,
    file: Path | None = None,
    world: ProcessGroup = ALONE,
) -> Evaluation:
    """Evaluate a policy in every mode of the config, on the same initial states.

    Args:
        env: a running environment, or an environment config, which is built here and closed; of its
            `steps_after_success`, which would count as steps to success, only the videos have any.
        name: what is evaluated, for tables and file names ("base", "final").
        policy_path: where the policy was loaded from; its hash goes into the result.
        video_folder: write `config.videos` successes and failures per task there; None for no videos.
            Given an environment config, every control step is filmed; else what `env` records.
        stopwatch: counts "simulation" and "inference".
        progress: shows how far it is; called with this process's number of episodes and `done=` those that `file` has
            kept. It is told of each in the order of the initial states, as soon as it and all before it have ended:
            successes end first, and a rate of what has ended would mislead.
        on_result: called with the result before anything is filmed, to keep it whatever becomes of the videos.
        file: where `on_result` writes it; until then each episode is kept beside it as it ends (see `EpisodeJournal`),
            and one that is there already is not run again.
        world: processes that call this together, each with the policy and an environment; all get the whole result.

    Raises:
        EvaluationError: unknown task, more states asked than the split has, or `file` has been begun with other
            weights or options.
    """
    film_folder = video_folder if config.videos else None
    planner = None if config.plan is None else config.plan.build(policy, str(policy.device))
    policy = planner or policy
    run = _EvaluationRun(
        policy, config, name, policy_path, stopwatch, progress or silent_progress, on_result, file, world
    )
    if isinstance(env, EnvConfig):
        with closing(build_env(with_steps_after_success(env, 0))) as built:
            evaluation = run.evaluate(built, env)
        if film_folder is not None:
            num_envs = min(evaluation.meta.num_envs, 2 * config.videos * len(evaluation.tasks))
            with closing(build_env(env, num_envs, record_frames=True)) as built:
                film(policy, built, evaluation, config, film_folder, world)
    else:
        evaluation = run.evaluate(env, None)
        if film_folder is not None:
            film(policy, env, evaluation, config, film_folder, world)
    return evaluation


def film(
    policy: Policy, env: VecEnv, evaluation: Evaluation, config: EvalConfig, folder: Path, world: ProcessGroup = ALONE
) -> list[Path]:
    """Repeat a few successes and failures of each task, in the last mode, and write them as MP4: this process's share.

    Sampled as they were, but in other batches, whose rounding may change one; the file name says how it ended:
    `<name>__<task>__<mode>__<split>-<index>__<success|failure>.mp4`.
    """
    mode, temperature = list(config.modes().items())[-1]
    chosen: list[EpisodeRecord] = []
    for task in evaluation.tasks:
        records = [e for e in evaluation.select(mode, task) if e.sample == 0 and not e.lost]
        for success in (True, False):
            chosen += [e for e in records if e.success == success][: config.videos]
    wanted = [EpisodeSpec(e.task, e.split, e.index) for e in world.shard(chosen)]
    paths = []
    for specs in batched(wanted, _batch_size(env, policy)):
        seeds = [_episode_seed(config, len(config.modes()) - 1, spec, 0) for spec in specs]
        for episode in collect(policy, env, specs, temperature=temperature, seed=seeds):
            if not episode.lost:
                spec, outcome = episode.spec, "success" if episode.success else "failure"
                stem = f"{evaluation.meta.name}__{spec.task}__{mode}__{spec.split}-{spec.index:04d}__{outcome}"
                paths.append(write_episode_video(folder / f"{stem}.mp4", episode, env.spec.control_hz))
    return paths


def build_env(env_config: EnvConfig, num_envs: int = 0, record_frames: bool = False) -> VecEnv:
    """The vector environment of an env section; `num_envs` 0 leaves the section's own number."""
    return env_config.build(num_envs=num_envs or None, record_frames=record_frames)


def policy_hash(folder: Path) -> str:
    """SHA-256 over a saved policy's files (names and contents), so that results can be tied to weights.

    Raises:
        EvaluationError: no such folder or file.
    """
    folder = Path(folder)
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    if not files:
        raise EvaluationError(f"policy not found: {folder}")
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(folder)).encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def episode_specs(spec: EnvSpec, config: EvalConfig) -> list[EpisodeSpec]:
    """The initial states an EvalConfig names, task by task.

    Raises:
        EvaluationError: unknown task, or more states than a benchmark's official ones.
    """
    tasks = config.tasks or tuple(spec.tasks)
    stop = config.start_index + config.episodes_per_task
    for task in tasks:
        if task not in spec.tasks:
            raise EvaluationError(f"eval.tasks: unknown task {task!r}; {spec.kind} has: {', '.join(spec.tasks)}")
        available = spec.num_eval_states.get(task)
        if config.split == "eval" and available is not None and stop > available:
            raise EvaluationError(
                f"eval.episodes_per_task: task {task!r} has {available} official initial states, asked for "
                f"{config.start_index} to {stop - 1}. Lower it, and raise eval.samples_per_state for more episodes."
            )
    return [EpisodeSpec(task, config.split, i) for task in tasks for i in range(config.start_index, stop)]


_Wanted = tuple[EpisodeSpec, int]  # An initial state, and which sample of it.


@dataclass
class _EvaluationRun:
    """`evaluate`, but for the videos; its fields are that function's arguments."""

    policy: Policy
    config: EvalConfig
    name: str
    policy_path: Path | None
    stopwatch: Stopwatch | None
    progress: Progress
    on_result: Callable[[Evaluation], None]
    file: Path | None
    world: ProcessGroup
    num_retried: int = 0

    def evaluate(self, env: VecEnv, env_config: EnvConfig | None) -> Evaluation:
        """Run what the journal lacks of this process's share, and hand over the result of all processes."""
        spec, config, path, started = env.spec, self.config, self.policy_path, time.perf_counter()
        if spec.approximation and not config.approximate:
            raise EvaluationError(
                f"this environment is for training: {spec.approximation}. Evaluate without "
                "(env.rendering=exact, env.reward=null), or set eval.approximate=true for a figure that is not the "
                "benchmark's"
            )
        hashed = policy_hash(path) if path is not None and self.world.is_main else None
        subject = {  # The rest that the episodes depend on is the environment, which a run's recipe names.
            "policy_hash": hashed,
            "num_episodes": config.num_episodes(spec),
            "eval": config.model_dump(mode="json", exclude={"videos"}),
        }
        with EpisodeJournal(self.file, subject, self.world) as journal:
            episodes = tuple(self._episodes(env, journal))
        meta = EvaluationMeta(
            name=self.name,
            policy=str(path) if path is not None else None,
            policy_hash=hashed,
            env=spec.kind,
            **{name: getattr(spec, name) for name in ("suite", "labels", "groups", "cameras", "image_size")},
            env_config=env_config.model_dump(mode="json") if env_config is not None else None,
            split=config.split,
            seed=config.seed,
            temperatures=config.modes(),
            horizon={task: spec.horizon[task] for task in dict.fromkeys(e.task for e in episodes)},
            num_envs=env.num_envs,
            num_processes=self.world.size,
            protocol=_protocol(spec, config),
            config=config.model_dump(mode="json"),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            wall_seconds=round(time.perf_counter() - started, 3),
            num_retried=sum(self.world.gather(self.num_retried)),
            official_states=config.split == "eval" and bool(spec.num_eval_states),
            official=_official(spec, config),
            versions=versions(),
            latency={} if config.plan is None else cast(PlanningPolicy, self.policy).latency(),
        )
        evaluation = Evaluation(meta=meta, episodes=episodes)
        self.on_result(evaluation)
        if self.file is not None and self.world.is_main:
            for kept in journals(self.file):
                kept.unlink()
        return evaluation

    def _episodes(self, env: VecEnv, journal: EpisodeJournal) -> Iterator[EpisodeRecord]:
        """Every episode's record, of all processes: mode by mode, in the order of the initial states."""
        wanted = {mode: self._wanted(env, temperature) for mode, temperature in self.config.modes().items()}
        mine = {mode: self.world.shard([w for w in all if not journal.of(mode, *w)]) for mode, all in wanted.items()}
        total = len(self.world.shard(range(sum(map(len, wanted.values())))))
        with self.progress(total, done=total - sum(map(len, mine.values()))) as on_episode:
            for mode, ones in mine.items():
                made: list[EpisodeRecord] = []
                for batch in batched(ones, _batch_size(env, self.policy)):
                    made += self._run(env, mode, batch, journal, on_episode)
                values = iter(self.world.collect_dealt([record.model_dump(mode="json") for record in made]))
                for one in wanted[mode]:
                    yield journal.of(mode, *one) or EpisodeRecord.model_validate(next(values))

    def _wanted(self, env: VecEnv, temperature: float) -> list[_Wanted]:
        specs, samples = episode_specs(env.spec, self.config), 1 if temperature == 0 else self.config.samples_per_state
        begun = env.deal(specs, samples) if isinstance(env, ImaginedEnv) else specs
        return [(spec.member(sample), sample) for spec in begun for sample in range(samples)]

    def _run(
        self,
        env: VecEnv,
        mode: str,
        batch: Sequence[_Wanted],
        journal: EpisodeJournal,
        on_episode: Callable[[EpisodeRecord], None],
    ) -> list[EpisodeRecord]:
        number, temperature = list(self.config.modes()).index(mode), self.config.modes()[mode]
        ended: dict[int, EpisodeRecord] = {}
        num_told = 0

        def keep(episode: Episode) -> None:
            nonlocal num_told
            ended[episode.group] = record = EpisodeRecord.of(mode, *batch[episode.group], episode)
            if not record.lost:
                journal.add(record)
            while num_told in ended:
                on_episode(ended[num_told])
                num_told += 1

        episodes, retried = run_episodes(
            self.policy,
            env,
            [spec for spec, _ in batch],
            temperature=temperature,
            seed=[_episode_seed(self.config, number, spec, sample) for spec, sample in batch],
            stopwatch=self.stopwatch,
            on_episode=keep,
        )
        self.num_retried += retried
        return [EpisodeRecord.of(mode, *one, episode) for one, episode in zip(batch, episodes, strict=True)]


def _episode_seed(config: EvalConfig, mode: int, spec: EpisodeSpec, sample: int) -> int:
    """Of an episode's sampling: by what it is, so that neither its place nor the others change it."""
    return derived_seed(config.seed, mode, zlib.crc32(f"{spec.task}/{spec.split}".encode()), spec.index, sample)


def _batch_size(env: VecEnv, policy: Policy) -> int:
    """Episodes per `collect`, so that their images stay below `_MAX_BATCH_BYTES`; at least two a slot."""
    height, width = env.spec.image_size
    image = height * width * 3 * len(env.spec.cameras)
    horizon = max(env.spec.horizon.values())
    seen = horizon / policy.chunk_size + 2 + (horizon if getattr(env, "record_frames", False) else 0)
    return max(2 * env.num_envs, int(_MAX_BATCH_BYTES / (image * seen)))


def _official(spec: EnvSpec, config: EvalConfig) -> dict[str, tuple[str, str]]:
    """The benchmark's protocol beside the evaluation's own; empty where the environment is of none."""
    if not spec.official:
        return {}
    number = max(spec.num_eval_states.values())
    official = f"the {number} official ones"
    is_whole = config.split == "eval" and config.episodes_per_task == number
    here = official if is_whole else f"{config.episodes_per_task} of the {config.split} split"
    return {**spec.official, "initial states of each task": (here, official)}


def _protocol(spec: EnvSpec, config: EvalConfig) -> str:
    stop = config.start_index + config.episodes_per_task - 1
    official = " (the benchmark's official initial states)" if config.split == "eval" and spec.num_eval_states else ""
    modes = ", ".join(
        f"{mode} at temperature {t:g} once per state"
        if t == 0 or config.samples_per_state == 1
        else f"{mode} at temperature {t:g}, {config.samples_per_state} episodes per state"
        for mode, t in config.modes().items()
    )
    plan = f"; {config.plan.protocol()}" if config.plan is not None else ""
    kind = f"{spec.title} ({spec.approximation})" if spec.approximation else spec.title
    return (
        f"{kind}, {config.split} split{official}, initial states {config.start_index} to {stop} of each task; "
        f"{modes}{plan}; an episode succeeds when the simulator says so before its horizon; an episode whose worker "
        f"broke is run again up to {MAX_RETRIES} times, then left out and counted as lost."
    )
