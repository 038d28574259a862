"""Asynchronous rollouts by Ray's actors: episodes go on while the policy is updated."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from vla_rl.common.progress import Stopwatch
from vla_rl.interfaces import Policy
from vla_rl.rollout.actors.ahead_worker import AheadWorker
from vla_rl.rollout.actors.cluster import Connection, cause_of, how_gone, ray
from vla_rl.rollout.actors.config import RayOptions
from vla_rl.rollout.actors.ledger import Ticket
from vla_rl.rollout.actors.source import LOOK_SECONDS, RaySource, not_heard, start_worker
from vla_rl.rollout.runner import derived_seed
from vla_rl.rollout.source import GroupOrder, RolloutPlan
from vla_rl.types import Episode

MOST_AT_ONCE = 100_000  # episodes handed to one worker, which runs as many as its hosts hold


@dataclass
class _Worker:
    """A worker, and what is known of it.

    Attributes:
        number: since the run's start: no other gets it.
        num_held: episodes handed to it.
        loads: what tells that weights were taken over, which it has not told yet.
        status: the last answer. look: the question for it, under way since `asked`, in seconds.
        before: its status at the end of the rollout before.
        since: when the one was found to be gone that it replaces.
    """

    number: int
    actor: Any
    num_held: int = 0
    loads: list[ray.ObjectRef] = field(default_factory=list)
    status: dict[str, Any] | None = None
    before: dict[str, Any] | None = None
    look: ray.ObjectRef | None = None
    asked: float = 0.0
    since: float | None = None


class AheadSource(RaySource):
    """Hands every episode that is ordered to the workers at once, and takes the groups that are whole first.

    A group whose oldest chunk is more than `staleness` updates old is begun again: none is left out for being slow.
    """

    def __init__(self, plan: RolloutPlan, config: RayOptions, connection: Connection) -> None:
        super().__init__(plan, config, connection)
        # What tells of an episode's end -> whose, and where.
        self._flying: dict[ray.ObjectRef, tuple[Ticket, _Worker, ray.ObjectRef]] = {}
        self._workers: list[_Worker] = []
        self._num_workers, self._looked, self._busy = 0, 0.0, {"envs": 0.0, "policy": 0.0}

    def _drop_actors(self) -> list[Any]:
        actors, self._workers, self._flying = [worker.actor for worker in self._workers], [], {}
        return actors

    def publish(self, policy: Policy, version: int) -> None:
        """See `EpisodeSource.publish`."""
        super().publish(policy, version)
        for worker in self._workers:
            worker.loads.append(worker.actor.load.remote(version, *self._weights))
        while len(self._workers) < self._config.workers:
            self._start()

    def _start(self, since: float | None = None) -> None:
        actor = start_worker(AheadWorker, self._plan, self._config, max_concurrency=MOST_AT_ONCE)
        loads = [actor.load.remote(self._version, *self._weights)]
        self._workers.append(_Worker(self._num_workers, actor, loads=loads, asked=time.monotonic(), since=since))
        self._num_workers += 1

    def _collect(self, order: GroupOrder, stopwatch: Stopwatch, on_episode: Callable[[Episode], None]) -> list[Episode]:
        started, ledger = time.monotonic(), self._ledger
        redone, dropped, workers_lost = ledger.num_redone, ledger.num_dropped, self._num_workers_lost
        for number, spec in enumerate(order.specs):
            ledger.add(spec, [derived_seed(order.seed, number, member) for member in range(order.size)])
        self._hand_out()
        groups: list[list[Episode]] = []
        with stopwatch.measure("simulation"):
            while len(groups) < order.num_groups:
                groups += self._whole_groups(order.num_groups - len(groups), on_episode)
                if len(groups) < order.num_groups:
                    self._hear()
        stopwatch.seconds["inference"] += 0.0
        for number, episodes in enumerate(groups):
            for episode in episodes:
                episode.group = order.first_group + number
        lags = self._version - np.array([cast(np.ndarray, e.chunks.version).min() for group in groups for e in group])
        self._look()
        troubles = self._troubles.taken()
        status = [worker.status or {} for worker in self._workers]
        self._last = {
            "rollout/lag": float(lags.mean()),
            "rollout/lag_max": float(lags.max()),
            "rollout/groups_dropped": float(ledger.num_dropped - dropped),
            "rollout/groups_under_way": float(ledger.num_under_way),
            "rollout/redone": float(ledger.num_redone - redone),
            "rollout/moved": float(troubles.num_moved),
            "rollout/hosts_lost": float(troubles.num_hosts),
            "rollout/workers_lost": float(self._num_workers_lost - workers_lost),
            "rollout/stood_s": troubles.seconds,
            "rollout/seconds": time.monotonic() - started,
        }
        self._last |= {f"rollout/{name}_busy": share for name, share in self._busy_shares().items()}
        for name in ("hosts", "running", "waiting", "asking"):
            self._last[f"rollout/{name}"] = float(sum(found.get(name, 0) for found in status))
        return [episode for episodes in groups for episode in episodes]

    def _busy_shares(self) -> dict[str, float]:
        """Share of the time since the rollout before in which hosts stepped, and in which the policy acted."""
        spent = Counter[str]()
        for worker in self._workers:
            if worker.status is not None:
                since = worker.before or {}
                spent.update({n: worker.status[n] - since.get(n, 0.0) for n in ("clock_s", "envs_s", "policy_s")})
                worker.before = worker.status
        if (total := spent["clock_s"]) > 0:  # Else none has answered meanwhile.
            self._busy = {"envs": spent["envs_s"] / (total * self._config.hosts), "policy": spent["policy_s"] / total}
        return self._busy

    def _hand_out(self) -> None:
        """Give every waiting episode to the worker that has the fewest."""
        for ticket in self._ledger.waiting():
            worker = min(self._workers, key=lambda each: each.num_held)
            ended, episode = worker.actor.play.options(num_returns=2).remote(ticket)
            self._ledger.hand_out(ticket, str(worker.number))
            self._flying[ended] = ticket, worker, episode
            worker.num_held += 1

    def _whole_groups(self, most: int, on_episode: Callable[[Episode], None]) -> list[list[Episode]]:
        """Fetch the groups that are whole and young enough; what cannot be fetched is begun again."""
        dropped, groups = self._ledger.num_dropped, list[list[Episode]]()
        for number, refs in self._ledger.ready(self._version - self.staleness):
            if len(groups) == most:
                break
            episodes = []
            for member, ref in enumerate(refs):
                try:
                    episodes.append(ray.get(ref))
                except ray.exceptions.RayTaskError as error:
                    raise cause_of(error) from None
                except ray.exceptions.RayError as error:
                    self._ledger.reopen(number, member, f"it was lost with its node ({how_gone(error)})")
            if len(episodes) == len(refs):
                self._ledger.take(number)
                groups.append(episodes)
                for episode in episodes:
                    on_episode(episode)
        if self._ledger.num_dropped > dropped or len(groups) < most:
            self._hand_out()
        return groups

    def _hear(self) -> None:
        """Wait for ends of episodes, and note them; look after the workers, too."""
        loads = {ref: worker for worker in self._workers for ref in worker.loads}
        refs = [*self._flying, *loads]
        if ray.wait(refs, num_returns=1, timeout=LOOK_SECONDS, fetch_local=False)[0]:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
            for ref in ready:
                if ref in loads:
                    worker = loads[ref]
                    worker.loads.remove(ref)
                    self._answer(worker, ref)
                elif ref in self._flying:  # Else its worker was found to be gone just now.
                    self._note_end(ref)
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()

    def _note_end(self, ended: ray.ObjectRef) -> None:
        ticket, worker, episode = self._flying.pop(ended)
        if (outcome := self._answer(worker, ended)) is None:
            return
        worker.num_held -= 1
        if outcome["lost"] and not ticket.is_last:
            self._ledger.give_back(ticket, "its simulator broke; see what it prints")
        else:
            self._ledger.store(ticket, episode, outcome["oldest"])

    def _answer(self, worker: _Worker, ref: ray.ObjectRef) -> Any:
        """What a worker answers; None, and the worker replaced, where it is gone. Raises what it raised."""
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None
        except ray.exceptions.RayError as error:
            self._replace(worker, f"is gone ({how_gone(error)})")
            return None

    def _look(self) -> None:
        """Ask the workers how they are; replace those that have not answered, or got nothing done, for too long."""
        longest, now = self._config.timeout_s + self._config.start_timeout_s, time.monotonic()
        self._looked = now
        for worker in list(self._workers):
            if worker.look is not None and ray.wait([worker.look], timeout=0)[0]:
                if (status := self._answer(worker, worker.look)) is None:
                    continue
                self._troubles.add(status.pop("troubles"))
                if worker.since is not None:
                    self._troubles.seconds, worker.since = self._troubles.seconds + now - worker.since, None
                worker.status, worker.look = status, None
                if status["stuck_s"] > longest:
                    self._troubles.seconds += status["stuck_s"]
                    self._replace(worker, f"got nothing done for {longest:g} s")
                    continue
            if worker.look is None:
                worker.look, worker.asked = worker.actor.status.remote(), now
            elif now - worker.asked > longest:
                self._troubles.seconds += now - worker.asked
                self._replace(worker, not_heard(worker.status is not None, longest, self._config))

    def _replace(self, worker: _Worker, why: str) -> None:
        """Start another worker, and let what this one held be begun again."""
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        ray.kill(worker.actor)
        self._num_workers_lost += 1
        self._troubles.note(f"worker {worker.number} {why}; its episodes are begun again elsewhere")
        self._flying = {ended: held for ended, held in self._flying.items() if held[1] is not worker}
        self._ledger.give_back_all(str(worker.number), f"its worker {why}")
        self._start(since=time.monotonic())
        self._hand_out()
