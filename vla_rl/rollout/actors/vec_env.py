"""`VecEnv` over environment hosts on any machine; a host may die, hang or join at any time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.interfaces import EnvConfig
from vla_rl.rollout.actors.cluster import (
    UNRECORDED,
    Connection,
    Setting,
    cause_of,
    connect,
    how_gone,
    is_the_callers,
    ray,
    shortage,
)
from vla_rl.rollout.actors.host import Course, EnvHost, Question, is_same, join_results, lost_result
from vla_rl.rollout.env_checks import checked_ids
from vla_rl.types import EpisodeSpec, Keyframe, Observation, StepResult

if TYPE_CHECKING:
    from vla_rl.rollout.actors.config import RayOptions

log = logging.getLogger(__name__)

MAX_MOVES = 3  # of an episode to other hosts; then it counts as lost


@dataclass
class Troubles:
    """Log of failures that were mended; in an actor into Ray's files, else for people.

    Attributes:
        lines: what happened, for people. num_hosts: hosts that were replaced. num_moved: episodes brought to another.
        seconds: for how long something stood.
    """

    lines: list[str] = field(default_factory=list)
    num_hosts: int = 0
    num_moved: int = 0
    seconds: float = 0.0

    def note(self, line: str) -> None:
        """Say what happened."""
        self.lines.append(line)
        log.warning("%s", line)

    def taken(self) -> Troubles:
        """What is noted here, which is then forgotten."""
        found = Troubles(self.lines, self.num_hosts, self.num_moved, self.seconds)
        self.__init__()
        return found

    def add(self, other: Troubles) -> None:
        """Note another's troubles too, those of an actor."""
        for line in other.lines:
            self.note(line)
        self.num_hosts += other.num_hosts
        self.num_moved += other.num_moved
        self.seconds += other.seconds


def no_host(config: RayOptions, why: str = "") -> RuntimeError:
    """The error that there is no host at all; `why`: what became of the last one."""
    after = f", the last one {why}" if why else ""
    return RuntimeError(f"rollout.hosts: none started within {config.start_timeout_s:g} s{after}; {shortage(config)}")


def start_host(env: Mapping[str, Any], config: RayOptions, setting: Setting, record_frames: bool = False) -> Any:
    """Ask Ray for a host, on whichever node has room; it lives as long as the process that asks."""
    options = {"num_cpus": config.host_cpus, "num_gpus": config.host_gpus, "scheduling_strategy": "SPREAD"}
    return ray.remote(EnvHost).options(**options, **UNRECORDED).remote(env, setting, record_frames)


def connected(env: EnvConfig, config: RayOptions, num_envs: int, record_frames: bool) -> RayVecEnv:
    """Environments with a connection of their own."""
    connection = connect(config)
    try:
        return RayVecEnv(env, config, Setting.here(), num_envs, record_frames, connection)
    except BaseException:
        connection.end()
        raise


class RayVecEnv:
    """Environments in blocks, each at a host. The same numbers as the environments in one process.

    A host that dies or says nothing for `timeout_s` is replaced: each of its episodes is begun again elsewhere and
    brought to where it was by the same actions, so nobody notices but by the time. An episode that does not come back
    to what was seen, as in a simulator that is not deterministic, is lost.

    Args:
        connection: with Ray, to end with these environments.

    Attributes:
        record_frames: whether the steps' results hold each control step's images.
        troubles: what broke since it was last asked.
    """

    def __init__(
        self,
        env: EnvConfig,
        config: RayOptions,
        setting: Setting,
        num_envs: int = 0,
        record_frames: bool = False,
        connection: Connection | None = None,
    ) -> None:
        self.spec, self.num_envs, self.troubles = env.env_spec(), num_envs or env.num_envs, Troubles()
        self.record_frames, self._connection = record_frames, connection
        self._config, self._num_failures = config, 0  # The last: of hosts, with no completed step in between.
        self._courses: dict[int, Course] = {}  # Of the episodes that run.
        values, num_hosts = env.model_dump(mode="json"), min(config.hosts, self.num_envs)
        self._new_host: Callable[[], Any] = lambda: start_host(values, config, setting, record_frames)
        parts = np.array_split(np.arange(self.num_envs), num_hosts)
        self._blocks = [[int(env_id) for env_id in part] for part in parts]
        self._at: list[Any] = [None] * num_hosts  # The host of each block.
        self._hosts: list[Any] = []  # Those that have started.
        self._joining: list[tuple[Any, Any]] = []  # Hosts asked for, and what says that they have started.
        self._ask_for_hosts(num_hosts)
        self._welcome(num_hosts)
        self._settle(list(range(num_hosts)))

    def reset(self, specs: Sequence[EpisodeSpec], env_ids: Sequence[int] | None = None) -> Observation:
        """See `VecEnv.reset`."""
        ids = checked_ids(env_ids, self.num_envs)
        if not self._courses:
            self._spread()
        for env_id, spec in zip(ids, specs, strict=True):
            self._courses[env_id] = Course(spec)
        while missing := [env_id for env_id in ids if self._courses[env_id].seen is None]:
            self._turn(missing, None)
        return Observation.concatenate([self._seen(env_id) for env_id in ids])

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        """See `VecEnv.step`."""
        ids = checked_ids(env_ids, self.num_envs)
        rows = dict(zip(ids, np.asarray(actions, np.float32), strict=True))
        results: dict[int, StepResult] = {}
        while missing := [env_id for env_id in ids if env_id not in results]:
            if going := [env_id for env_id in missing if not self._courses[env_id].is_lost]:
                results |= self._turn(going, rows)
                continue
            info = next((result.info for result in results.values()), {})
            results |= {i: lost_result(self._seen(i), rows[i].shape[0], info) for i in missing}
            for env_id in missing:
                del self._courses[env_id]
        return join_results([results[env_id] for env_id in ids])

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[Keyframe]:
        """See `VecEnv.save_state`.

        Raises:
            RuntimeError: a host broke; its episodes go on elsewhere.
        """
        ids = checked_ids(env_ids, self.num_envs)
        answers = self._ask("save_state", ids)
        if missing := [env_id for env_id in ids if env_id not in answers]:
            raise RuntimeError(f"save_state: the host of environments {missing} broke, so there is no state to save")
        return [answers[env_id] for env_id in ids]

    def expert_action(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """See `VecEnv.expert_action`; zeros where a host broke, whose episodes are then lost."""
        ids = checked_ids(env_ids, self.num_envs)
        for env_id in ids:
            self._courses[env_id].has_expert = True
        answers, zeros = self._ask("expert_action", ids), np.zeros(self.spec.action_dim, np.float32)
        return np.stack([answers.get(env_id, zeros) for env_id in ids])

    def expert_remaining(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """See `ProgressEnv.expert_remaining`; zeros where a host broke, whose episodes are then lost."""
        ids = checked_ids(env_ids, self.num_envs)
        for env_id in ids:
            self._courses[env_id].has_expert = True
        answers = self._ask("expert_remaining", ids)
        return np.array([answers.get(env_id, 0.0) for env_id in ids], np.float64)

    def _ask(self, what: Question, ids: Sequence[int]) -> dict[int, Any]:
        """What hosts say of running environments; a host that broke is replaced, and its environments are left out."""
        started = time.monotonic()
        parts = self._parts([env_id for env_id in ids if not self._courses[env_id].is_lost])
        rows = {n: [env_id - self._blocks[n][0] for env_id in part] for n, part in parts.items()}
        refs = {n: self._at[n].ask.remote(n, what, own) for n, own in rows.items()}
        answers, broken = self._answers(refs, self._config.timeout_s)
        if broken:
            self._settle(self._drop_hosts(broken))
            self.troubles.seconds += time.monotonic() - started
        pairs = [zip(parts[n], found, strict=True) for n, found in answers.items()]
        return {env_id: one for pair in pairs for env_id, one in pair}

    def _parts(self, ids: Sequence[int]) -> dict[int, list[int]]:
        """Those of each block, by its number."""
        return {n: part for n, block in enumerate(self._blocks) if (part := [i for i in ids if i in block])}

    def close(self) -> None:
        """End the hosts. May be called twice."""
        for host in [*self._hosts, *(host for host, _ in self._joining)]:
            if ray.is_initialized():
                ray.kill(host)
        self._hosts, self._joining = [], []
        if self._connection is not None:
            self._connection.end()

    def _seen(self, env_id: int) -> Observation:
        seen = self._courses[env_id].seen
        assert seen is not None, "the episode has begun"
        return seen

    def _turn(self, ids: Sequence[int], actions: Mapping[int, np.ndarray] | None) -> dict[int, StepResult]:
        """Begin (without actions) or step these; what is due to a host that broke is left out, and the host replaced.

        Raises:
            ValueError, NotImplementedError: the caller's fault, as the environment says.
        """
        started, results, refs = time.monotonic(), dict[int, StepResult](), {}
        parts = self._parts(ids)
        for number, part in parts.items():
            rows = [i - self._blocks[number][0] for i in part]
            if actions is None:
                starts = [(row, self._courses[i].spec, ()) for row, i in zip(rows, part, strict=True)]
                refs[number] = self._at[number].turn.remote(number, starts, (), None)
            else:
                refs[number] = self._at[number].turn.remote(number, (), rows, np.stack([actions[i] for i in part]))
        answers, broken = self._answers(refs, self._config.timeout_s)
        for number, (seen, result) in answers.items():
            for row, env_id in enumerate(parts[number]):
                course = self._courses[env_id]
                if actions is None:
                    course.seen = seen.row(row)
                    continue
                results[env_id] = own = result.row(row)
                course.chunks.append(actions[env_id])
                course.seen, self._num_failures = own.obs, 0
                if own.done[0]:
                    del self._courses[env_id]
        if broken:
            self._settle(self._drop_hosts(broken))
            self.troubles.seconds += time.monotonic() - started
        return results

    def _answers(self, refs: Mapping[int, Any], seconds: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Wait for what blocks' hosts were asked: their answers, and why there is none of the others, by block."""
        ready = set(ray.wait(list(refs.values()), num_returns=len(refs), timeout=seconds)[0]) if refs else set()
        answers, broken = dict[int, Any](), dict[int, str]()
        for number, ref in refs.items():
            if ref not in ready:
                broken[number] = f"said nothing for {seconds:g} s"
                continue
            try:
                answers[number] = ray.get(ref)
            except ray.exceptions.RayTaskError as error:
                if is_the_callers(error.cause):
                    raise cause_of(error) from error
                broken[number] = f"failed: {cause_of(error)}"
            except ray.exceptions.RayError as error:
                broken[number] = f"is gone ({how_gone(error)})"
        return answers, broken

    def _drop_hosts(self, broken: Mapping[int, str]) -> list[int]:
        """Set the hosts of these blocks aside and ask for others; returns all blocks that have no host now.

        Raises:
            RuntimeError: hosts broke again and again, with no completed step in between.
        """
        homeless: list[int] = []
        for number, why in broken.items():
            if (host := self._at[number]) is None:
                continue
            held = [n for n, at in enumerate(self._at) if at is host]
            self._num_failures += 1
            self.troubles.num_hosts += 1
            line = f"the host of environments {self._blocks[number]} {why}"
            self.troubles.note(f"{line}; another takes over")
            if self._num_failures > MAX_MOVES * self._config.hosts:
                raise RuntimeError(f"{line}; {self._num_failures} hosts broke without a step between")
            ray.kill(host)
            self._hosts = [other for other in self._hosts if other is not host]
            for n in held:
                self._at[n] = None
            homeless += held
        self._ask_for_hosts(len(self._blocks) - len(self._hosts) - len(self._joining))
        return homeless

    def _ask_for_hosts(self, num_hosts: int) -> None:
        for _ in range(num_hosts):
            host = self._new_host()
            self._joining.append((host, host.where.remote()))

    def _welcome(self, num_hosts: int) -> None:
        """Take in the hosts that have started; with `num_hosts` above 0 wait for so many, or for the time's end.

        Raises:
            RuntimeError: there is no host at all.
        """
        deadline, why = time.monotonic() + self._config.start_timeout_s, ""
        while True:
            wanted = num_hosts - len(self._hosts)
            seconds = max(0.0, deadline - time.monotonic()) if wanted > 0 else 0.0
            refs = [ref for _, ref in self._joining]
            ready, _ = ray.wait(refs, num_returns=min(max(wanted, 1), len(refs)), timeout=seconds) if refs else ([], [])
            for host, ref in [(host, ref) for host, ref in self._joining if ref in set(ready)]:
                self._joining.remove((host, ref))
                try:
                    ray.get(ref)
                    self._hosts.append(host)
                except ray.exceptions.RayTaskError as error:
                    raise cause_of(error) from error  # It cannot be made anywhere.
                except ray.exceptions.RayError as error:
                    if why != (why := f"did not start ({how_gone(error)})"):
                        self.troubles.note(f"a host {why}; another is asked for")
                    self._ask_for_hosts(1)
            if len(self._hosts) >= num_hosts or time.monotonic() >= deadline:
                break
        if not self._hosts:
            raise no_host(self._config, why)

    def _settle(self, homeless: list[int]) -> None:
        """Give these blocks a host each, and bring their episodes to where they were."""
        while homeless:
            self._welcome(1 if not self._hosts else 0)
            for number in homeless:
                self._at[number] = min(self._hosts, key=lambda host: sum(at is host for at in self._at))
            running = {n: [i for i in self._blocks[n] if i in self._courses] for n in homeless}
            opened = {n: self._at[n].open.remote(n, len(self._blocks[n])) for n in homeless}
            _, broken = self._answers(opened, self._config.start_timeout_s)
            refs = {}
            for number in (n for n in homeless if n not in broken and running[n]):
                first, courses = self._blocks[number][0], [(i, self._courses[i]) for i in running[number]]
                starts = [(i - first, course.spec, course.chunks) for i, course in courses]
                refs[number] = self._at[number].turn.remote(number, starts, (), None)
            answers, also_broken = self._answers(refs, self._config.start_timeout_s)
            for number, (seen, _) in answers.items():
                for row, env_id in enumerate(running[number]):
                    self._resume(self._courses[env_id], seen.row(row))
            homeless = self._drop_hosts(broken | also_broken)

    def _resume(self, course: Course, shown: Observation) -> None:
        """Note where a course was brought by its actions; it is lost where that is somewhere else."""
        self.troubles.num_moved += 1
        course.num_moves += 1
        is_elsewhere = course.seen is not None and not is_same(course.seen, shown)
        course.is_lost = is_elsewhere or course.has_expert or course.num_moves > MAX_MOVES
        course.seen = course.seen or shown

    def _spread(self) -> None:
        """Nothing runs: give hosts that have joined a part of the blocks of those that took over."""
        self._welcome(0)
        for host in self._hosts:
            if not any(at is host for at in self._at):
                crowd = max(self._hosts, key=lambda other: sum(at is other for at in self._at))
                held = [n for n, at in enumerate(self._at) if at is crowd]
                if len(held) > 1:
                    crowd.close.remote(held[-1])
                    self._at[held[-1]] = None
                    self._settle([held[-1]])
