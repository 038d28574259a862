"""Ray's actors as an `EpisodeSource`: the trainer's side, which owns what was ordered and outlives whatever dies."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vla_rl.common.progress import Stopwatch
from vla_rl.distributed.actors.cluster import UNRECORDED, Connection, Setting, full_store_said
from vla_rl.distributed.actors.ledger import MAX_ATTEMPTS, Ledger, Ticket
from vla_rl.distributed.actors.vec_env import Troubles
from vla_rl.distributed.actors.weights import shards
from vla_rl.policies.base import resolve_path
from vla_rl.rollout.runner import derived_seed
from vla_rl.rollout.source import GroupOrder
from vla_rl.types import Episode

if TYPE_CHECKING:
    from vla_rl.distributed.actors.config import RayRolloutConfig
    from vla_rl.interfaces import Policy
    from vla_rl.recipe.recipe import Recipe

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # between looks at whether a silent worker gets something done


def start_worker(worker: type, recipe: Recipe, config: RayRolloutConfig, max_concurrency: int) -> Any:
    """Ask Ray for a worker; it lives as long as this process."""
    import ray

    values, path = recipe.model_dump(mode="json"), recipe.policy.path
    if path:
        values["policy"]["path"] = str(resolve_path(path))
    options = {"num_cpus": config.worker_cpus, "num_gpus": config.worker_gpus, "max_concurrency": max_concurrency}
    return ray.remote(worker).options(**options, **UNRECORDED).remote(values, Setting.here())


def say(troubles: Troubles) -> None:
    """Tell people what broke and was mended."""
    for line in troubles.lines:
        log.warning("%s; its episodes are begun again elsewhere", line)


@dataclass
class _Job:
    """A worker's part of a rollout.

    Attributes:
        tickets: its episodes, whole groups in a row.
        refs: what it happened, and each group, once they are there.
        done, heard: what it had done when it last did something, and when that was, in seconds.
        look: the question what it has done.
    """

    worker: int
    tickets: list[Ticket]
    seed: int
    refs: list[Any] = field(default_factory=list)
    done: Any = None
    heard: float = 0.0
    look: Any = None


class RaySource(ABC):
    """What both sources share: the trainer's weights, the ledger, what broke, and the end."""

    def __init__(self, recipe: Recipe, config: RayRolloutConfig, connection: Connection) -> None:
        self.staleness, self.dashboard = config.staleness, connection.dashboard
        self._recipe, self._config, self._connection = recipe, config, connection
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
        import ray

        from vla_rl.training.checkpoint import trained_weights

        with full_store_said():
            parts = shards(trained_weights(policy), self._config.weights_dtype)
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
        import ray

        for actor in self._drop_actors():
            if ray.is_initialized():
                ray.kill(actor)
        self._connection.end()


class LockstepSource(RaySource):
    """Rollout and update by turns: each worker runs its part of the groups as one process would run all of them.

    With one worker the numbers are those of `LocalSource`, to the bit on a CPU, whatever dies meanwhile: a worker's
    part is run again from its beginning, with the same seed. No group is under way between rollouts.
    """

    def __init__(self, recipe: Recipe, config: RayRolloutConfig, connection: Connection) -> None:
        super().__init__(recipe, config, connection)
        self._workers = [self._new_worker() for _ in range(config.workers)]

    def _drop_actors(self) -> list[Any]:
        actors, self._workers = self._workers, []
        return actors

    def _new_worker(self) -> Any:
        from vla_rl.distributed.actors.worker import LockstepWorker

        return start_worker(LockstepWorker, self._recipe, self._config, max_concurrency=2)

    def _collect(self, order: GroupOrder, stopwatch: Stopwatch, on_episode: Callable[[Episode], None]) -> list[Episode]:
        started, before = time.monotonic(), self._ledger.num_redone
        numbers = [self._ledger.add(spec, [order.seed] * order.size) for spec in order.specs]
        size, seconds, attempt = order.size, {"simulation": 0.0, "inference": 0.0}, 0
        while tickets := self._ledger.waiting():
            jobs = self._deal(tickets, size if attempt == 0 else 1, order.seed, attempt)
            for job in jobs:
                report = self._finish(job, size if attempt == 0 else 1, attempt, on_episode)
                self._troubles.add(report["troubles"])
                for stage in seconds:
                    seconds[stage] += report["seconds"].get(stage, 0.0) / len(jobs)
            attempt += 1
        whole = dict(self._ledger.ready(not_before=self._version))
        for number in numbers:
            self._ledger.take(number)
        for stage, spent in seconds.items():
            stopwatch.seconds[stage] += spent
        troubles = self._troubles.taken()
        say(troubles)
        self._last = {
            "rollout/redone": float(self._ledger.num_redone - before),
            "rollout/moved": float(troubles.num_moved),
            "rollout/hosts_lost": float(troubles.num_hosts),
            "rollout/workers_lost": float(self._num_workers_lost),
            "rollout/stood_s": troubles.seconds,
            "rollout/seconds": time.monotonic() - started,
        }
        self._num_workers_lost = 0
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
        specs = [ticket.spec for ticket in job.tickets]
        options = self._workers[job.worker].run.options(num_returns=1 + len(specs) // size)
        job.refs, job.heard, job.done, job.look = (
            options.remote(self._version, specs, size, job.seed, *self._weights),
            time.monotonic(),
            None,
            None,
        )

    def _finish(self, job: _Job, size: int, attempt: int, on_episode: Callable[[Episode], None]) -> dict[str, Any]:
        """Wait for a job, begin it anew where its worker breaks, and store its episodes; returns its report."""
        import ray

        while True:
            try:
                self._wait(job)
                report, *groups = ray.get(job.refs)
                break
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except (ray.exceptions.RayError, TimeoutError) as error:
                self._replace(job, size, error)
        for ticket, episode in zip(job.tickets, [e for group in groups for e in group], strict=True):
            if episode.lost and attempt + 1 < MAX_ATTEMPTS:
                self._ledger.give_back(ticket, "its simulator broke")
                continue
            self._ledger.store(ticket, episode, self._version)
            on_episode(episode)
        return report

    def _wait(self, job: _Job) -> None:
        """Wait for a job's end.

        Raises:
            TimeoutError: nothing was done for too long.
        """
        import ray

        longest = self._config.timeout_s + self._config.start_timeout_s
        while not ray.wait(job.refs, num_returns=1, timeout=LOOK_SECONDS)[0]:
            if job.look is None:
                job.look = self._workers[job.worker].done.remote()
            if ray.wait([job.look], timeout=0)[0]:
                done, job.look = ray.get(job.look), None
                if done != job.done:
                    job.done, job.heard = done, time.monotonic()
            if time.monotonic() - job.heard > longest:
                raise TimeoutError(f"got nothing done for {longest:g} s")

    def _replace(self, job: _Job, size: int, error: Exception) -> None:
        """Begin a job anew with another worker."""
        import ray

        started = job.heard
        why = str(error) if isinstance(error, TimeoutError) else f"is gone ({type(error).__name__})"
        self._troubles.lines.append(f"worker {job.worker} {why}")
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
