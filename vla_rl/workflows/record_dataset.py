"""Recording of a LeRobotDataset v3: the scripted expert's demonstrations, or a policy's rollouts.

    vla-rl collect RECIPE collect.source=expert collect.episodes_per_task=1000

Killed at any moment, the same command continues: finished episodes are kept in shards, and the
dataset appears, whole, at the end.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import ConfigError
from vla_rl.data.dataset import OBSERVED_EVERY
from vla_rl.data.lerobot_assembly import assemble
from vla_rl.data.lerobot_io import RecordedEpisode, dataset_features, list_shards, read_shards, write_shard
from vla_rl.data.objects import object_features
from vla_rl.data.segmentation import CAMERA_PREFIX
from vla_rl.interfaces import EnvConfig, ImaginedEnv, Policy, VecEnv
from vla_rl.rollout.episode_recording import EpisodeRecording
from vla_rl.rollout.recording_plan import MAX_ATTEMPTS, CollectConfig, RecordingPlan
from vla_rl.rollout.runner import EpisodeRunner, RunningEpisode, draw_chunk
from vla_rl.types import ControlSource, EpisodeSpec, Observation, StepResult

SHARD_BYTES = 128 * 2**20


def collect_dataset(
    env_config: Any,
    config: CollectConfig,
    *,
    policy: Policy | None = None,
    policy_version: str = "",
    seed: int = 0,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    place: Callable[[Any], Any] = lambda env: env,
) -> dict[str, Any]:
    """Collect episodes and write them as one LeRobotDataset v3; continues where a killed call stopped.

    Args:
        env_config: has `build(num_envs, record_frames) -> VecEnv` and `model_dump`.
        policy: needed with `config.source == "policy"`.
        policy_version: recorded with every frame; "expert" for the expert.
        seed: of the noise (per episode: the same episode comes out in any order) and of the policy's sampling.
        on_progress: called about once a second, and at the end, with the summary so far.
        place: says where the environments run (see `RolloutConfig.placed`); episodes are the same everywhere.

    Returns:
        dataset, episodes, frames, success_rate (task -> of all attempts this call made and restored, but those whose
        worker broke in every try), frames_per_second (simulation included; of this call).

    Raises:
        ConfigError: the dataset exists already with other settings, a task is unknown, or a policy is missing.
        DiskFullError: the disk is full; finished shards are kept and the next call continues.
    """
    if (config.source == "policy") != (policy is not None):
        raise ConfigError(
            f"collect.source: {config.source!r} " + ("needs a policy" if policy is None else "takes none")
        )
    version = policy_version if policy is not None else "expert"
    if (finished := finished_dataset(env_config, config, version, seed)) is not None:
        return finished
    lacking, seen, target = left_out(env_config, config), _seen(env_config, config), Path(config.dataset)
    settings = _settings(env_config, config, version, seed)
    staging = target.parent / f".{target.name}.collecting"
    _open_staging(staging, settings)
    env: VecEnv = place(seen).build(record_frames=policy is not None and config.every_frame)
    try:
        tasks = [task for task in config.tasks or env.spec.tasks if task not in lacking]
        if unknown := sorted(set(tasks) - set(env.spec.tasks)):
            raise ConfigError(f"collect.tasks: unknown {unknown}; allowed: {', '.join(env.spec.tasks)}")
        common = {"policy": policy, "version": version, "seed": seed, "on_progress": on_progress}
        collector = _Collector(env, config, tasks=tasks, staging=staging, **common)
        collector.run()
        spec = env.spec
        collector.check_kept()
        seldom = policy.chunk_size if policy is not None and not config.every_frame else 1
        settings |= {OBSERVED_EVERY: max(env.observed_every if isinstance(env, ImaginedEnv) else 1, seldom)}
    finally:
        env.close()
    summary = collector.summary()
    totals = assemble(
        staging,
        target,
        fps=round(spec.control_hz),
        features=collector.features,
        robot=spec.kind,
        notes={**settings, **summary},
    )
    shutil.rmtree(staging)
    return {**summary, **totals}


def left_out(env_config: Any, config: CollectConfig) -> dict[str, str]:
    """Tasks that are not collected because no expert is offered for them, each with the reason.

    Raises:
        ConfigError: none would be left.
    """
    if config.source != "expert" or not isinstance(env_config, EnvConfig):
        return {}
    lacking = env_config.without_expert()
    lacking = {task: reason for task, reason in lacking.items() if not config.tasks or task in config.tasks}
    if lacking and not set(config.tasks or env_config.env_spec().tasks) - set(lacking):
        raise ConfigError(f"collect.source: got 'expert'; {'; '.join(lacking.values())}")
    return lacking


def _seen(env_config: Any, config: CollectConfig) -> Any:
    """The environment's config, with what it is to show or tell beside observations."""
    if config.objects:
        if not getattr(env_config, "object_names", ()):
            kind = getattr(env_config, "kind", type(env_config).__name__)
            raise ConfigError(
                f"collect.objects: {kind} does not tell where its objects are; tabletop, libero, robosuite do. "
                "Leave it off."
            )
        env_config = env_config.model_copy(update={"objects": True})
    if not config.structure:
        return env_config
    if not getattr(env_config, "shows_structure", False):
        kind = getattr(env_config, "kind", type(env_config).__name__)
        raise ConfigError(
            f"collect.structure: {kind} draws no segmentation; tabletop, libero and robosuite do. Leave it off, or add "
            "files of a segmentation model to the dataset (docs/style_robust.md)."
        )
    return env_config.model_copy(update={"structure": True})


def _settings(env_config: Any, config: CollectConfig, policy_version: str, seed: int) -> dict[str, Any]:
    return {
        "collect": config.model_dump(mode="json"),
        "env": env_config.model_dump(mode="json"),
        "policy_version": policy_version,
        "seed": seed,
    }


def finished_dataset(env_config: Any, config: CollectConfig, policy_version: str, seed: int) -> dict[str, Any] | None:
    """The summary of a finished dataset with these settings; None when nothing is there.

    Raises:
        ConfigError: what is there was collected with other settings, by another policy, or is something else.
    """
    target, settings = Path(config.dataset), _settings(env_config, config, policy_version, seed)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    notes_file = target / "collect.json"
    notes = json.loads(notes_file.read_text()) if notes_file.is_file() else {}
    if "collect" not in notes:
        raise ConfigError(
            f"collect.dataset: {target} exists already, and `vla-rl collect` did not make it. Choose another folder."
        )
    changed = _differences({key: notes.get(key) for key in settings}, settings)
    if changed:
        raise ConfigError(
            f"collect.dataset: {target} exists already, collected with other settings ({'; '.join(changed)}). "
            "Choose another folder, or delete it."
        )
    return {key: value for key, value in notes.items() if key not in settings} | {"dataset": config.dataset}


def _open_staging(staging: Path, settings: dict[str, Any]) -> None:
    """Create the staging folder, or check that the one found belongs to the same settings, where anything is in it."""
    file = staging / "settings.json"
    if file.is_file() and list_shards(staging):
        if changed := _differences(json.loads(file.read_text()), settings):
            raise ConfigError(
                f"collect.dataset: {staging} holds an unfinished collection with other settings "
                f"({'; '.join(changed)}). Run it to its end with those, choose another folder, or delete it."
            )
        return
    staging.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, json.dumps(settings, indent=1))


_FREE = (
    *("collect.dataset", "collect.shard_episodes"),
    *("env.num_envs", "env.num_workers", "env.num_hosts", "env.hosts", "env.step_timeout"),
    *("env.render_devices", "env.devices", "env.assets_path"),
)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Which settings differ, for people; those that do not change the episodes are left out."""

    def flatten(values: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(values, dict):
            for key, value in values.items():
                yield from flatten(value, f"{name}.{key}" if name else key)
        else:
            yield name, values

    before, after = dict(flatten(old, "")), dict(flatten(json.loads(json.dumps(new)), ""))
    # An option that is newer or older than the other side, and off, changes nothing.
    off = {n for n in before.keys() ^ after.keys() if not before.get(n, after.get(n))}
    names = [n for n in {**before, **after} if n not in {*_FREE, *off} and before.get(n) != after.get(n)]
    return [f"{n}: there {before.get(n)!r}, now {after.get(n)!r}" for n in names]


@dataclass(frozen=True)
class _Decision:
    """What is done in B environments, and what a policy should learn from it; both float32 (B, H, A)."""

    actions: np.ndarray
    labels: np.ndarray


class _Collector:
    """Runs the plan's episodes in a vector environment and stages them as shards."""

    def __init__(
        self,
        env: VecEnv,
        config: CollectConfig,
        *,
        tasks: Sequence[str],
        staging: Path,
        policy: Policy | None,
        version: str,
        seed: int,
        on_progress: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.env, self.config, self.staging = env, config, staging
        self.policy, self.version, self.seed = policy, version, seed
        self.on_progress = on_progress
        self.source: ControlSource = "expert" if policy is None else "imagined" if config.imagined else "policy"
        spec = env.spec
        cameras = [name for name in spec.cameras if not name.startswith(CAMERA_PREFIX)]
        self.features = dataset_features(cameras, spec.image_size, spec.state_dim, spec.action_dim)
        self.features |= object_features(spec.objects)
        self.plan = RecordingPlan(config, tasks)
        self.num_shards = self.frames = self.new_frames = 0
        for rows, rejected, _ in read_shards(staging):
            self.plan.restore(rows, rejected)
            self.num_shards += 1
            self.frames += sum(row["length"] for row in rows)
        self.kept: list[RecordedEpisode] = []
        self.rejected: list[tuple[str, int]] = []
        self.recordings: dict[int, EpisodeRecording] = {}
        self.noise: dict[int, _HeldNoise] = {}
        self.generator: torch.Generator | None = None
        self.encoders = ThreadPoolExecutor(max_workers=2, thread_name_prefix="png")
        self.started = self.reported = time.monotonic()

    def run(self) -> None:
        """Run every episode of the plan, then write the last shard."""
        if self.policy is not None:
            # A resumed collection must not draw what the finished episodes drew.
            drawn = sum(tried.total() for tried in self.plan.tried.values())
            self.generator = torch.Generator().manual_seed(self.seed * 1_000_003 + drawn)
        with self.encoders:
            EpisodeRunner(
                self.env,
                self.plan.specs(),
                self._act,
                self._on_step,
                policy=self.policy,
                on_start=self._on_start,
                before_step=self._before_step,
                max_attempts=MAX_ATTEMPTS,
            ).run()
        self._write_shard()
        self._report(last=True)

    def check_kept(self) -> None:
        """Refuse to write a dataset without an episode, and leave nothing."""
        if not any(self.plan.kept.values()):
            shutil.rmtree(self.staging)
            raise ConfigError(
                f"collect: none of {sum(self.summary()['attempts'].values())} episodes of {', '.join(self.plan.tasks)} "
                "succeeded, so there is nothing to keep, and no dataset is written. collect.keep=all keeps failures; "
                "collect.tasks chooses other tasks."
            )

    def summary(self) -> dict[str, Any]:
        """What was collected so far, restored shards included."""
        plan = self.plan
        attempts = {task: max(tried.total() - plan.running[task], 0) for task, tried in plan.tried.items()}
        elapsed = max(time.monotonic() - self.started, 1e-9)
        return {
            "dataset": self.config.dataset,
            "episodes": sum(plan.kept.values()),
            "episodes_wanted": plan.wanted,
            "frames": self.frames,
            "success_rate": {task: plan.successes[task] / max(n - plan.lost[task], 1) for task, n in attempts.items()},
            "attempts": attempts,
            "frames_per_second": self.new_frames / elapsed,
        }

    def _report(self, last: bool = False) -> None:
        now = time.monotonic()
        if self.on_progress is not None and (last or now - self.reported >= 1.0):
            self.reported = now
            self.on_progress(self.summary())

    def _on_start(self, episode: RunningEpisode) -> None:
        spec = episode.spec
        self.recordings[episode.env_id] = EpisodeRecording(spec, episode.obs, self.encoders)
        self.noise[episode.env_id] = _HeldNoise(
            self.config, self.env.spec.action_dim, np.random.default_rng([self.seed, spec.index, *spec.task.encode()])
        )

    def _before_step(self, episodes: list[RunningEpisode]) -> None:
        """Say how far it is; save the simulators' states, where that is asked for."""
        self._report()
        if not self.config.keyframes:
            return
        env_ids = [episode.env_id for episode in episodes]
        try:
            states = self.env.save_state(env_ids)
        except NotImplementedError as error:
            raise ConfigError(f"collect.keyframes: {self.env.spec.kind} cannot save its state ({error})") from error
        except RuntimeError:  # A worker broke, whose episode the next step counts as lost; the others lack this state.
            return
        for env_id, state in zip(env_ids, states, strict=True):
            self.recordings[env_id].simulator_states.append(state)

    def _act(self, episodes: list[RunningEpisode]) -> _Decision:
        low, high = self.env.spec.action_low, self.env.spec.action_high
        env_ids = [episode.env_id for episode in episodes]
        if self.policy is not None:
            obs = Observation.concatenate([self.recordings[i].obs for i in env_ids])
            chunk = draw_chunk(self.policy, episodes, self.generator, self.config.temperature, obs)
            actions = np.clip(chunk.actions, low, high)
            return _Decision(actions, actions)
        clean = np.clip(self.env.expert_action(env_ids), low, high).astype(np.float32)
        if not self.config.noise:
            return _Decision(clean[:, None], clean[:, None])
        noise = np.stack([self.noise[i].next() for i in env_ids])
        return _Decision(np.clip(clean + noise, low, high).astype(np.float32)[:, None], clean[:, None])

    def _on_step(self, episode: RunningEpisode, row: int, decision: _Decision, result: StepResult) -> None:
        if result.lost[0]:
            if episode.attempt == MAX_ATTEMPTS:
                self.plan.give_up(episode.spec)
            return
        recording = self.recordings[episode.env_id]
        assert "frames" in result.info or result.num_steps[0] <= 1 or not self.config.every_frame, "record_frames is on"
        recording.add(decision.labels[row], decision.actions[row], result)
        if result.done[0]:
            self._end(episode.spec, recording, bool(result.success[0]))

    def _end(self, spec: EpisodeSpec, recording: EpisodeRecording, success: bool) -> None:
        if self.plan.finish(spec, success):
            self.kept.append(recording.finish(success, self.source, self.version))
            self.frames += len(recording)
        else:
            self.rejected.append((spec.task, spec.index))
        self.new_frames += len(recording)
        full = sum(e.num_bytes for e in self.kept) >= SHARD_BYTES
        if full or len(self.kept) + len(self.rejected) >= self.config.shard_episodes:
            self._write_shard()

    def _write_shard(self) -> None:
        if not self.kept and not self.rejected:
            return
        write_shard(self.staging / f"shard_{self.num_shards:05d}", self.kept, self.rejected, self.features)
        self.num_shards += 1
        self.kept, self.rejected = [], []


class _HeldNoise:
    """The noise on one episode's executed actions; each sample is held for `noise_hold` control steps."""

    def __init__(self, config: CollectConfig, action_dim: int, rng: np.random.Generator) -> None:
        self.rng, self.hold, self.num_steps = rng, config.noise_hold, 0
        self.scale = np.zeros(action_dim)
        self.scale[:3] = config.noise
        self.sample = np.zeros(action_dim)

    def next(self) -> np.ndarray:
        """Of the next control step, float64 (A,)."""
        if self.num_steps % self.hold == 0:
            self.sample = self.rng.normal(0.0, self.scale)
        self.num_steps += 1
        return self.sample
