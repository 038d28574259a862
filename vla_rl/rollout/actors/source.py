"""Synchronous rollouts by Ray's actors: the trainer's side, which owns what was ordered and outlives what dies."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vla_rl.common.distributed.tensor_files import trained_weights
from vla_rl.common.progress import Stopwatch
from vla_rl.interfaces import Policy
from vla_rl.policies.base import resolve_path
from vla_rl.rollout.actors.cluster import (
    UNRECORDED,
    Connection,
    Setting,
    cause_of,
    full_store_said,
    how_gone,
    ray,
    shortage,
)
from vla_rl.rollout.actors.config import WORKER_CPUS, RayOptions
from vla_rl.rollout.actors.ledger import Ledger, Ticket
from vla_rl.rollout.actors.vec_env import Troubles
from vla_rl.rollout.actors.weights import shards
from vla_rl.rollout.actors.worker import LockstepWorker
from vla_rl.rollout.runner import derived_seed
from vla_rl.rollout.source import GroupOrder, RolloutPlan
from vla_rl.types import Episode

LOOK_SECONDS = 0.5  # between looks at whether a silent worker gets something done


def start_worker(worker: type, plan: RolloutPlan, config: RayOptions, max_concurrency: int) -> Any:
    """Ask Ray for a worker; it lives as long as this process."""
    values, path = plan.model_dump(mode="json"), plan.policy.path
    if path:
        values["policy"]["path"] = str(resolve_path(path))
    options = {"num_cpus": WORKER_CPUS, "num_gpus": config.worker_gpus, "max_concurrency": max_concurrency}
    return ray.remote(worker).options(**options, **UNRECORDED).remote(values, Setting.here())


def not_heard(has_answered: bool, seconds: float, config: RayOptions) -> str:
    """What is wrong with a worker that does not answer."""
    return (
        f"said nothing for {seconds:g} s" if has_answered else f"did not start within {seconds:g} s: {shortage(config)}"
    )


@dataclass
class _Job:
    """A worker's part of a rollout.

    Attributes:
        tickets: its episodes, whole groups in a row.
        refs: what it happened, and each group, once they are there.
        done, heard: what it had done when it last did something, and when that was, in seconds.
        look, asked: the question what it has done, and when it was asked, in seconds.
        num_said: of what broke at its hosts, what was told to people.
    """

    worker: int
    tickets: list[Ticket]
    seed: int
    refs: list[ray.ObjectRef] = field(default_factory=list)
    done: object = None
    heard: float = 0.0
    look: ray.ObjectRef | None = None
    asked: float = 0.0
    num_said: int = 0


class RaySource(ABC):
    """What both sources share: the trainer's weights, the ledger, what broke, and the end."""

    def __init__(self, plan: RolloutPlan, config: RayOptions, connection: Connection) -> None:
        self.staleness, self.dashboard = config.staleness, connection.dashboard
        self._plan, self._config, self._connection = plan, config, connection
        self._ledger, self._troubles, self._num_workers_lost = Ledger[Any](), Troubles(), 0
        self._weights: tuple[Any, ...] = ()  # The newest version's shards in Ray's store.
        self._version = -1
        self._last: dict[str, float] = {}

    @property
    def num_under_way(self) -> int:
        """See `EpisodeSource`."""
        return self._ledger.num_under_way

    def publish(self, policy: Policy, version: int) -> None:
        """See `EpisodeSource.publish`."""
        with full_store_said():
            parts = shards(trained_weights(policy))
            self._weights, self._version = tuple(ray.put(part) for part in parts), version

    def collect(
        self, order: GroupOrder, stopwatch: Stopwatch, on_episode: Callable[[Episode], None] = lambda _: None
    ) -> list[Episode]:
        """See `EpisodeSource.collect`.

        Raises:
            StoreFullError: Ray has no room for an episode, in memory or on disk.
        """
        with full_store_said():
            return self._collect(order, stopwatch, on_episode)

    @abstractmethod
    def _collect(
        self, order: GroupOrder, stopwatch: Stopwatch, on_episode: Callable[[Episode], None]
    ) -> list[Episode]: ...

    def metrics(self) -> dict[str, float]:
        """See `EpisodeSource.metrics`."""
        return self._last

    def state(self) -> dict[str, Any]:
        """See `EpisodeSource.state`."""
        return self._ledger.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `EpisodeSource.load_state`."""
        if state:
            self._ledger.load_state(state)

    @abstractmethod
    def _drop_actors(self) -> list[Any]:
        """Forget the workers; returns their actors."""

    def close(self) -> None:
        """See `EpisodeSource.close`."""
        for actor in self._drop_actors():
            if ray.is_initialized():
                ray.kill(actor)
        self._connection.end()


class LockstepSource(RaySource):
    """Rollout and update by turns: each worker runs its part of the groups as one process would run all of them.

    With one worker the numbers are those of `LocalSource`, to the bit on a CPU, whatever dies meanwhile: a worker's
    part is run again from its beginning, with the same seed. No group is under way between rollouts.
    """

    def __init__(self, plan: RolloutPlan, config: RayOptions, connection: Connection) -> None:
        super().__init__(plan, config, connection)
        self._workers = [self._new_worker() for _ in range(config.workers)]
        self._since = time.monotonic()  # When the rollout before ended.

    def _drop_actors(self) -> list[Any]:
        actors, self._workers = self._workers, []
        return actors

    def _new_worker(self) -> Any:
        return start_worker(LockstepWorker, self._plan, self._config, max_concurrency=2)

    def _collect(self, order: GroupOrder, stopwatch: Stopwatch, on_episode: Callable[[Episode], None]) -> list[Episode]:
        started, before = time.monotonic(), self._ledger.num_redone
        numbers = [self._ledger.add(spec, [order.seed] * order.size) for spec in order.specs]
        size, seconds, attempt = order.size, {"simulation": 0.0, "inference": 0.0}, 0
        while tickets := self._ledger.waiting():
            jobs = self._deal(tickets, size if attempt == 0 else 1, order.seed, attempt)
            for report in self._finished(jobs, size if attempt == 0 else 1, on_episode):
                self._troubles.add(report["troubles"])
                for stage in seconds:
                    seconds[stage] += report["seconds"].get(stage, 0.0) / len(jobs)
            attempt += 1
        whole = dict(self._ledger.ready(not_before=self._version))
        for number in numbers:
            self._ledger.take(number)
        for stage, spent in seconds.items():
            stopwatch.seconds[stage] += spent
        troubles, now = self._troubles.taken(), time.monotonic()
        busy = {stage: spent / (now - self._since) for stage, spent in seconds.items()}
        self._last = {
            "rollout/envs_busy": busy["simulation"],
            "rollout/policy_busy": busy["inference"],
            "rollout/redone": float(self._ledger.num_redone - before),
            "rollout/moved": float(troubles.num_moved),
            "rollout/hosts_lost": float(troubles.num_hosts),
            "rollout/workers_lost": float(self._num_workers_lost),
            "rollout/stood_s": troubles.seconds,
            "rollout/seconds": now - started,
        }
        self._num_workers_lost, self._since = 0, now
        groups = [whole[number] for number in numbers]
        for group, episodes in enumerate(groups):
            for episode in episodes:
                episode.group = order.first_group + group
        return [episode for episodes in groups for episode in episodes]

    def _deal(self, tickets: list[Ticket], size: int, seed: int, attempt: int) -> list[_Job]:
        """Give each worker whole groups; one that is alone draws from the rollout's own seed."""
        num_groups = len(tickets) // size
        shares = min(len(self._workers), num_groups)
        bounds = [size * (num_groups * worker // shares) for worker in range(shares + 1)]
        jobs = [_Job(n, tickets[bounds[n] : bounds[n + 1]], seed) for n in range(shares)]
        for job in jobs:
            if attempt or job.worker:
                job.seed = derived_seed(seed, job.worker, attempt)
            for ticket in job.tickets:
                self._ledger.hand_out(ticket, str(job.worker))
            self._begin(job, size)
        return jobs

    def _begin(self, job: _Job, size: int) -> None:
        specs, now = [ticket.spec for ticket in job.tickets], time.monotonic()
        options = self._workers[job.worker].run.options(num_returns=1 + len(specs) // size)
        job.refs = options.remote(self._version, specs, size, job.seed, *self._weights)
        job.heard, job.done, job.look, job.asked, job.num_said = now, None, None, now, 0

    def _finished(self, jobs: list[_Job], size: int, on_episode: Callable[[Episode], None]) -> Iterator[dict[str, Any]]:
        """Wait for jobs, begin those anew whose worker breaks, and store their episodes; yields each job's report."""
        left = list(jobs)
        while left:
            ray.wait([job.refs[0] for job in left], num_returns=1, timeout=LOOK_SECONDS)
            for job in list(left):  # Each is looked at, so that none is silent for another one's sake.
                try:
                    if not ray.wait(job.refs[:1], timeout=0)[0]:
                        self._look(job)
                        continue
                    report, *groups = ray.get(job.refs)
                except ray.exceptions.RayTaskError as error:
                    raise cause_of(error) from None
                except (ray.exceptions.RayError, TimeoutError) as error:
                    self._replace(job, size, error)
                    continue
                left.remove(job)
                for ticket, episode in zip(job.tickets, [e for group in groups for e in group], strict=True):
                    if episode.lost and not ticket.is_last:
                        self._ledger.give_back(ticket, "its simulator broke; see what it prints")
                        continue
                    self._ledger.store(ticket, episode, self._version)
                    on_episode(episode)
                report["troubles"].lines = report["troubles"].lines[job.num_said :]
                yield report

    def _look(self, job: _Job) -> None:
        """See what a job has done, and say what broke there.

        Raises:
            TimeoutError: it has not answered, or has done nothing, for too long.
        """
        longest, now = self._config.timeout_s + self._config.start_timeout_s, time.monotonic()
        if job.look is not None and ray.wait([job.look], timeout=0)[0]:
            (done, lines), job.look = ray.get(job.look), None
            self._troubles.add(Troubles(lines[job.num_said :]))
            job.num_said = max(job.num_said, len(lines))
            if done != job.done:
                job.done, job.heard = done, now
            elif job.asked - job.heard > longest:  # Not until now: we may have been busy since it answered.
                raise TimeoutError(f"got nothing done for {longest:g} s")
        if job.look is None:
            job.look, job.asked = self._workers[job.worker].done.remote(), now
        elif now - job.asked > longest:
            raise TimeoutError(not_heard(job.done is not None, longest, self._config))

    def _replace(self, job: _Job, size: int, error: Exception) -> None:
        """Begin a job anew with another worker."""
        started = job.heard
        why = f"is gone ({how_gone(error)})" if isinstance(error, ray.exceptions.RayError) else str(error)
        self._troubles.note(f"worker {job.worker} {why}; its episodes are begun again elsewhere")
        self._num_workers_lost += 1
        ray.kill(self._workers[job.worker])
        self._ledger.give_back_all(str(job.worker), f"its worker {why}")
        waiting = {(ticket.group, ticket.member): ticket for ticket in self._ledger.waiting()}
        job.tickets = [waiting[ticket.group, ticket.member] for ticket in job.tickets]
        for ticket in job.tickets:
            self._ledger.hand_out(ticket, str(job.worker))
        self._workers[job.worker] = self._new_worker()
        self._troubles.seconds += time.monotonic() - started
        self._begin(job, size)
