"""Collect episodes into a LeRobotDataset v3: demonstrations of the scripted expert, or a policy's rollouts.

    vla-rl collect RECIPE collect.source=expert collect.episodes_per_task=1000

Killed at any moment, the same command continues: finished episodes are kept in shards, and the
dataset appears, whole, at the end.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import ConfigError
from vla_rl.data.dataset import OBSERVED_EVERY
from vla_rl.data.lerobot_io import RecordedEpisode, assemble, dataset_features, encode_png, read_shards, write_shard
from vla_rl.data.segmentation import CAMERA_PREFIX, split_cameras
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.recipe.collect_config import CollectConfig
from vla_rl.types import ControlSource, EpisodeSpec, Keyframe, Observation, StepResult

SHARD_BYTES = 128 * 2**20
MAX_LOST = 3  # Tries of one episode whose worker dies, before it is given up.


@dataclass
class _Running:
    """An episode under way in one environment."""

    spec: EpisodeSpec
    rng: np.random.Generator
    obs: Observation  # Latest, one row.
    pending: dict[str, list[Future[bytes]]]
    state: list[np.ndarray] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    executed: list[np.ndarray] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    noise: np.ndarray | None = None
    states: list[Keyframe] = field(default_factory=list)
    structure: dict[str, list[np.ndarray]] = field(default_factory=dict)


class _Plan:
    """Which initial states to run next, one task after another, and what came of them."""

    def __init__(self, config: CollectConfig, tasks: Sequence[str]) -> None:
        self.config, self.tasks = config, list(tasks)
        self.kept = dict.fromkeys(self.tasks, 0)
        self.successes = dict.fromkeys(self.tasks, 0)
        self.tried: dict[str, set[int]] = {task: set() for task in self.tasks}
        self.running = dict.fromkeys(self.tasks, 0)
        self.lost: dict[tuple[str, int], int] = {}
        self._retry: list[EpisodeSpec] = []

    @property
    def wanted(self) -> int:
        return self.config.episodes_per_task * len(self.tasks)

    def next(self) -> EpisodeSpec | None:
        """The next episode to start, or None when none is needed (now)."""
        if self._retry:
            return self._start(self._retry.pop(0))
        for task in self.tasks:
            if (index := self._next_index(task)) is not None:
                return self._start(EpisodeSpec(task, self.config.split, index))
        return None

    def _start(self, spec: EpisodeSpec) -> EpisodeSpec:
        self.tried[spec.task].add(spec.index)
        self.running[spec.task] += 1
        return spec

    def _next_index(self, task: str) -> int | None:
        config = self.config
        need = config.episodes_per_task - self.kept[task]
        if config.keep == "all":
            stop = config.start_index + config.episodes_per_task
        else:
            if need <= self.running[task]:  # Enough are under way, should all succeed.
                return None
            stop = config.start_index + config.max_attempts * config.episodes_per_task
        return next((i for i in range(config.start_index, stop) if i not in self.tried[task]), None)

    def finish(self, spec: EpisodeSpec, success: bool) -> bool:
        """Note an episode's end; returns whether it is kept."""
        self.running[spec.task] -= 1
        self.successes[spec.task] += success
        keep = (success or self.config.keep == "all") and self.kept[spec.task] < self.config.episodes_per_task
        self.kept[spec.task] += keep
        return keep

    def lose(self, spec: EpisodeSpec) -> None:
        """Note an episode that broke: it is run again, up to `MAX_LOST` times."""
        self.running[spec.task] -= 1
        key = (spec.task, spec.index)
        self.lost[key] = self.lost.get(key, 0) + 1
        if self.lost[key] < MAX_LOST:
            self._retry.append(spec)
        else:
            warnings.warn(f"{spec.task} {spec.split} {spec.index}: broke {MAX_LOST} times; given up", stacklevel=2)

    def restore(self, rows: Sequence[dict[str, Any]], rejected: Sequence[tuple[str, int]]) -> None:
        """Take over what an earlier, killed collection has finished."""
        for row in rows:
            self.tried[row["task"]].add(row["index"])
            self.kept[row["task"]] += 1
            self.successes[row["task"]] += row["success"]
        for task, index in rejected:
            self.tried[task].add(index)


def collect_dataset(
    env_config: Any,
    config: CollectConfig,
    *,
    policy: Policy | None = None,
    policy_version: str = "",
    seed: int = 0,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Collect episodes and write them as one LeRobotDataset v3; continues where a killed call stopped.

    Args:
        env_config: has `build(num_envs, record_frames) -> VecEnv` and `model_dump`.
        policy: needed with `config.source == "policy"`.
        policy_version: recorded with every frame; "expert" for the expert.
        seed: of the noise (per episode: the same episode comes out in any order) and of the policy's sampling.
        on_progress: called about once a second, and at the end, with the summary so far.

    Returns:
        dataset, episodes, frames, success_rate (task -> of all attempts this call made and restored),
        frames_per_second (simulation included; of this call).

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
    seen, target = _seen(env_config, config), Path(config.dataset)
    settings = _settings(env_config, config, version, seed)
    staging = target.parent / f".{target.name}.collecting"
    _open_staging(staging, settings)
    env: VecEnv = seen.build(record_frames=policy is not None and config.every_frame)
    try:
        tasks = list(config.tasks or env.spec.tasks)
        if unknown := sorted(set(tasks) - set(env.spec.tasks)):
            raise ConfigError(f"collect.tasks: unknown {unknown}; allowed: {', '.join(env.spec.tasks)}")
        collector = _Collector(
            env,
            config,
            tasks=tasks,
            staging=staging,
            policy=policy,
            version=version,
            seed=seed,
            on_progress=on_progress,
        )
        collector.run()
        spec = env.spec
        seldom = policy.chunk_size if policy is not None and not config.every_frame else 1
        settings |= {OBSERVED_EVERY: max(getattr(env, OBSERVED_EVERY, 1), seldom)}
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


def _seen(env_config: Any, config: CollectConfig) -> Any:
    """The environment's config, with the structure to see where it is to be recorded."""
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
        ConfigError: what is there was collected with other settings, or by another policy.
    """
    target, settings = Path(config.dataset), _settings(env_config, config, policy_version, seed)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    notes_file = target / "collect.json"
    notes = json.loads(notes_file.read_text()) if notes_file.is_file() else {}
    changed = _differences({key: notes.get(key) for key in settings}, settings)
    if changed:
        raise ConfigError(
            f"collect.dataset: {target} exists already, collected with other settings ({'; '.join(changed)}). "
            "Choose another folder, or delete it."
        )
    return {key: value for key, value in notes.items() if key not in settings} | {"dataset": config.dataset}


def _open_staging(staging: Path, settings: dict[str, Any]) -> None:
    """Create the staging folder, or check that the one found belongs to the same settings."""
    file = staging / "settings.json"
    if file.is_file():
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
    *("env.num_envs", "env.num_workers", "env.num_hosts", "env.hosts", "env.step_timeout", "env.start_timeout"),
    *("env.render_devices", "env.devices", "env.on_gpu"),
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
    # An option that is newer than the data, and off, changes nothing.
    newer = {n for n in after if n not in before and not after[n]}
    names = [n for n in {**before, **after} if n not in {*_FREE, *newer} and before.get(n) != after.get(n)]
    return [f"{n}: there {before.get(n)!r}, now {after.get(n)!r}" for n in names]


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
        self.plan = _Plan(config, tasks)
        self.num_shards = self.frames = self.new_frames = 0
        for rows, rejected, _ in read_shards(staging):
            self.plan.restore(rows, rejected)
            self.num_shards += 1
            self.frames += sum(row["length"] for row in rows)
        self.kept: list[RecordedEpisode] = []
        self.rejected: list[tuple[str, int]] = []
        self.running: dict[int, _Running] = {}
        self.encoders = ThreadPoolExecutor(max_workers=2, thread_name_prefix="png")
        self.started = self.reported = time.monotonic()

    def run(self) -> None:
        """Run every episode of the plan, then write the last shard."""
        generator = None
        if self.policy is not None:
            import torch

            # A resumed collection must not draw what the finished episodes drew.
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + sum(map(len, self.plan.tried.values())))
        with self.encoders:
            self._start(range(self.env.num_envs))
            while self.running:
                env_ids = sorted(self.running)
                self._keep_states(env_ids)
                label, executed = self._act(env_ids, generator)
                result = self.env.step(executed, env_ids)
                for row, env_id in enumerate(env_ids):
                    self._record(env_id, row, label[row], executed[row], result)
                ended = [env_id for row, env_id in enumerate(env_ids) if result.done[row]]
                for row, env_id in enumerate(env_ids):
                    if result.done[row]:
                        self._end(env_id, row, result)
                self._start(sorted(set(range(self.env.num_envs)) - set(self.running)) if ended else [])
                self._report()
        self._write_shard()
        self._report(last=True)

    def summary(self) -> dict[str, Any]:
        """What was collected so far, restored shards included."""
        plan = self.plan
        attempts = {task: max(len(tried) - plan.running[task], 0) for task, tried in plan.tried.items()}
        elapsed = max(time.monotonic() - self.started, 1e-9)
        return {
            "dataset": self.config.dataset,
            "episodes": sum(plan.kept.values()),
            "episodes_wanted": plan.wanted,
            "frames": self.frames,
            "success_rate": {task: plan.successes[task] / max(n, 1) for task, n in attempts.items()},
            "attempts": attempts,
            "frames_per_second": self.new_frames / elapsed,
        }

    def _report(self, last: bool = False) -> None:
        now = time.monotonic()
        if self.on_progress is not None and (last or now - self.reported >= 1.0):
            self.reported = now
            self.on_progress(self.summary())

    def _start(self, env_ids: Sequence[int]) -> None:
        started: dict[int, EpisodeSpec] = {}
        for env_id in env_ids:
            if (spec := self.plan.next()) is not None:
                started[env_id] = spec
        if not started:
            return
        obs = self.env.reset(list(started.values()), list(started))
        for row, (env_id, spec) in enumerate(started.items()):
            rng = np.random.default_rng([self.seed, spec.index, *spec.task.encode()])
            first = obs.select([row])
            pictures, structure = split_cameras(first.images)
            self.running[env_id] = _Running(spec, rng, replace(first, images=pictures), {c: [] for c in pictures})
            self.running[env_id].structure = {camera: [image[0]] for camera, image in structure.items()}

    def _keep_states(self, env_ids: Sequence[int]) -> None:
        """Save the simulator's state of each environment, where it is asked for."""
        if not self.config.keyframes:
            return
        try:
            states = self.env.save_state(env_ids)
        except NotImplementedError as error:
            raise ConfigError(f"collect.keyframes: {self.env.spec.kind} cannot save its state ({error})") from error
        except RuntimeError:  # A worker broke, whose episode the next step counts as lost; the others lack this state.
            return
        for env_id, state in zip(env_ids, states, strict=True):
            self.running[env_id].states.append(state)

    def _act(self, env_ids: Sequence[int], generator: Any) -> tuple[np.ndarray, np.ndarray]:
        """Labels and executed actions, both float32 (B, H, A)."""
        low, high = self.env.spec.action_low, self.env.spec.action_high
        if self.policy is not None:
            obs = Observation.concatenate([self.running[i].obs for i in env_ids])
            actions = np.clip(self.policy.act(obs, generator, self.config.temperature).actions, low, high)
            return actions, actions
        clean = np.clip(self.env.expert_action(env_ids), low, high).astype(np.float32)
        if not (self.config.noise or self.config.rotation_noise):
            return clean[:, None], clean[:, None]
        noise = np.stack([self._noise(self.running[i], clean.shape[1]) for i in env_ids])
        return clean[:, None], np.clip(clean + noise, low, high).astype(np.float32)[:, None]

    def _noise(self, running: _Running, action_dim: int) -> np.ndarray:
        if running.noise is None or len(running.actions) % self.config.noise_hold == 0:
            scale = np.full(action_dim, self.config.rotation_noise)
            scale[:3], scale[-1] = self.config.noise, 0.0  # The last is the gripper.
            running.noise = running.rng.normal(0.0, scale)
        return running.noise

    def _record(self, env_id: int, row: int, label: np.ndarray, executed: np.ndarray, result: StepResult) -> None:
        """Append the executed steps of one environment's chunk: each action with the observation before it."""
        if result.lost[row]:
            return
        running = self.running[env_id]
        num_steps = int(result.num_steps[row])
        images = {camera: image[0] for camera, image in running.obs.images.items()}
        state = running.obs.state[0]
        frames = result.info["frames"][row] if "frames" in result.info else None
        assert frames is not None or num_steps <= 1 or not self.config.every_frame, "needs record_frames=True"
        for i in range(num_steps):
            for camera, image in images.items():
                running.pending[camera].append(self.encoders.submit(encode_png, image))
            running.state.append(state)
            running.actions.append(label[i])
            running.executed.append(executed[i])
            running.reward.append(float(result.reward[row, i]))
            if frames is not None:
                images = {camera: frames[camera][i] for camera in images}
                state = result.info["states"][row][i]
        latest = result.obs.select([row])
        pictures, structure = split_cameras(latest.images)
        running.obs = replace(latest, images=pictures)
        for camera, image in structure.items():
            seen = image if frames is None else frames[CAMERA_PREFIX + camera]
            running.structure[camera] += list(seen[:num_steps])

    def _end(self, env_id: int, row: int, result: StepResult) -> None:
        running = self.running.pop(env_id)
        if result.lost[row]:
            self.plan.lose(running.spec)
            return
        success = bool(result.success[row])
        spec = running.spec
        if self.plan.finish(spec, success):
            self.kept.append(self._assemble(running, success))
            self.frames += len(running.actions)
        else:
            self.rejected.append((spec.task, spec.index))
        self.new_frames += len(running.actions)
        full = sum(e.num_bytes for e in self.kept) >= SHARD_BYTES
        if full or len(self.kept) + len(self.rejected) >= self.config.shard_episodes:
            self._write_shard()

    def _assemble(self, running: _Running, success: bool) -> RecordedEpisode:
        spec, length = running.spec, len(running.actions)
        return RecordedEpisode(
            task=spec.task,
            split=spec.split,
            index=spec.index,
            instruction=running.obs.instruction[0],
            png={camera: [f.result() for f in frames] for camera, frames in running.pending.items()},
            state=np.stack(running.state),
            actions=np.stack(running.actions),
            executed_actions=np.stack(running.executed),
            reward=np.asarray(running.reward, np.float32),
            success=success,
            control_source=[self.source] * length,
            policy_version=self.version,
            final_png={camera: encode_png(image[0]) for camera, image in running.obs.images.items()},
            final_state=running.obs.state[0],
            simulator_states=running.states,
            structure={camera: np.stack(images) for camera, images in running.structure.items()},
        )

    def _write_shard(self) -> None:
        if not self.kept and not self.rejected:
            return
        write_shard(self.staging / f"shard_{self.num_shards:05d}", self.kept, self.rejected, self.features)
        self.num_shards += 1
        self.kept, self.rejected = [], []
