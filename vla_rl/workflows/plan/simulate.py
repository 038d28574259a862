"""Event simulation of a run: rollouts in lockstep, or asynchronous. Numpy only.

The synchronous rollout follows `EpisodeRunner` step by step. The asynchronous one has GPUs that
act for whoever waits, processes that step what they are asked for in turns, as `AheadWorker` and its hosts do, and a
trainer that takes groups as they are whole. What is not in it: the network between machines but for what a `Placement`
says of it, and one process's Python beside its stages.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from vla_rl.workflows.plan.costs import Costs

Mode = Literal["synchronous", "asynchronous"]


@dataclass(frozen=True)
class Work:
    """Work of an iteration: groups of episodes, cut into minibatches of decisions, `epochs` times."""

    groups: int
    group_size: int
    minibatch_size: int
    micro_batch_size: int
    epochs: int = 1

    @property
    def episodes(self) -> int:
        return self.groups * self.group_size


@dataclass(frozen=True)
class Placement:
    """Placement of a run's stages on machines.

    Attributes:
        gpus: in all. envs: per GPU that rolls out. workers: processes that step them, of the same; 0: none but
            the policy's own. rollout_gpus: of `gpus`, where training is apart (asynchronous).
        staleness: how many updates ahead rollouts may run (asynchronous).
        exchange: seconds that all wait for each other's gradients, a step. publish: until rollouts have new weights.
    """

    mode: Mode
    gpus: int
    envs: int
    workers: int
    rollout_gpus: int = 0
    staleness: int = 1
    exchange: float = 0.0
    publish: float = 0.0

    @property
    def text(self) -> str:
        """For a table."""
        if self.mode != "asynchronous":
            return self.mode
        apart = f"{self.rollout_gpus} roll out, {self.gpus - self.rollout_gpus} train"
        return f"asynchronous, {apart}, staleness {self.staleness}"


@dataclass(frozen=True)
class Outcome:
    """What a placement gives.

    Attributes:
        seconds: of an iteration. episodes_per_second: finished and learned from.
        rollout, learning: seconds of an iteration in which the slowest process rolls out, and in which all learn.
        gpu_busy: share of the time that GPUs act or learn. env_busy: share that processes that step are stepping.
        waits_for: the stage whose speed decides.
    """

    placement: Placement
    seconds: float
    episodes_per_second: float
    rollout: float
    learning: float
    gpu_busy: float
    env_busy: float
    waits_for: str


class Dice:
    """Sampler of costs."""

    def __init__(self, costs: Costs, seed: int):
        self.costs, self._rng = costs, np.random.default_rng(seed)
        self._kept = {name: deque[float]() for name in ("step", "reset", "chunks")}

    def draw(self, name: str) -> float:
        kept = self._kept[name]
        if not kept:
            kept.extend(self._rng.choice(getattr(self.costs, name), 4096).tolist())
        return kept.popleft()

    def length(self) -> int:
        """Decisions of an episode."""
        return max(1, int(self.draw("chunks")))


@dataclass
class Rollout:
    """What one process's rollout took."""

    seconds: float = 0.0
    acting: float = 0.0
    stepping: float = 0.0  # Summed over the processes that step.
    decisions: int = 0


def roll_out(costs: Costs, episodes: int, placement: Placement, dice: Dice) -> Rollout:
    """Play one process's rollout through."""
    workers = max(1, min(placement.workers, placement.envs))
    free_at = [0.0] * workers  # When each process that steps is done with what it has.
    left, todo, done, held = dict[int, int](), episodes, Rollout(), placement.envs

    def step_all(stage: str, which: Iterable[int]) -> float:
        """Give each process its environments, in turn; when the last of them is done."""
        end = done.seconds
        for env in which:
            took, worker = dice.draw(stage), env % workers
            free_at[worker] = max(free_at[worker], done.seconds) + took
            done.stepping += took
            end = max(end, free_at[worker])
        return end

    while held:
        free = [env for env in range(placement.envs) if env not in left]
        starting = free[:todo] if len(left) < held else []
        todo -= len(starting)
        left |= {env: dice.length() for env in starting}
        done.seconds = step_all("reset", starting)
        running = sorted(left)
        held = len(running)
        if running:
            took = costs.act.of(held)
            done.seconds, done.acting = done.seconds + took, done.acting + took
            done.decisions += held
            done.seconds = step_all("step", running)
            left = {env: count - 1 for env, count in left.items() if count > 1}
    return done


def learning_seconds(
    costs: Costs, work: Work, decisions: Iterable[float], gpus: int, exchange: float
) -> tuple[float, float]:
    """Return seconds of an update, and how many of these a GPU computes, on average.

    Args:
        decisions: of each process that rolled out: old log-probabilities are each one's own, minibatches are sharded.
    """
    own = [costs.active * count for count in decisions]
    before = [_in_parts(count, work.micro_batch_size, costs, "forward") for count in own]
    total, seconds = sum(own), max(before)
    steps = max(1, round(total / work.minibatch_size)) if total else 0
    share = np.ceil(total / max(steps, 1) / gpus)
    each = _in_parts(share, work.micro_batch_size, costs, "update") + costs.optimizer
    computed = sum(before) / gpus + work.epochs * steps * each
    return seconds + work.epochs * steps * (each + exchange), computed


def _in_parts(count: float, size: int, costs: Costs, stage: str) -> float:
    whole, rest = divmod(count, size)
    curve = getattr(costs, stage)
    return float(whole * curve.of(size) + curve.of(rest))


def synchronous(costs: Costs, work: Work, placement: Placement, seed: int = 0) -> Outcome:
    """Every process rolls out its share of the groups; all wait for the slowest, and learn together."""
    dice, gpus, iterations = Dice(costs, seed), placement.gpus, _num_iterations(work, 4)
    total = rollout = learning = acting = computed = stepping = 0.0
    each, more = divmod(work.groups, gpus)
    for _ in range(iterations):
        shares = [(each + (rank < more)) * work.group_size for rank in range(gpus)]
        parts = [roll_out(costs, share, placement, dice) for share in shares]
        slowest = max(part.seconds for part in parts)
        learned, busy = learning_seconds(costs, work, [p.decisions for p in parts], gpus, placement.exchange)
        total, rollout, learning = total + slowest + learned + costs.other, rollout + slowest, learning + learned
        acting, computed = acting + sum(part.acting for part in parts) / gpus, computed + busy
        stepping += sum(part.stepping for part in parts) / gpus / max(1, min(placement.workers, placement.envs))
    stages = {"learning": learning, "environments": rollout - acting, "acting": acting}
    return Outcome(
        placement,
        seconds=total / iterations,
        episodes_per_second=work.episodes * iterations / total,
        rollout=rollout / iterations,
        learning=learning / iterations,
        gpu_busy=(acting + computed) / total,
        env_busy=stepping / total,
        waits_for=max(stages, key=lambda name: stages[name]),
    )


@dataclass
class _Host:
    """One GPU that rolls out, and its environments."""

    waiting: list[int] = field(default_factory=list)  # Environments that want a chunk.
    jobs: dict[int, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))  # Of each process.
    at_work: set[int] = field(default_factory=set)  # Processes that step.
    idle: list[int] = field(default_factory=list)  # Environments without an episode.
    is_acting: bool = False
    new_weights: bool = False


class _Asynchronous:
    """The events of rollouts and training that go on beside each other."""

    def __init__(self, costs: Costs, work: Work, placement: Placement, seed: int):
        self.costs, self.work, self.placement, self.dice = costs, work, placement, Dice(costs, seed)
        self.workers = max(1, min(placement.workers, placement.envs))
        self.hosts = [_Host(idle=list(range(placement.envs))) for _ in range(placement.rollout_gpus)]
        self.now = self.acting = self.stepping = self.computed = 0.0
        self.version, self.is_training, self.trained_at = 0, False, list[float]()
        self.begun = 0  # Episodes.
        self.left: dict[tuple[int, int], int] = {}  # (host, environment) -> decisions to go.
        self.episode: dict[tuple[int, int], tuple[int, int]] = {}  # -> its group, and how long it is.
        self.open: dict[int, list[int]] = {}  # Group -> decisions of its finished episodes.
        self.whole: deque[int] = deque()  # Decisions of each finished group.
        self._events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self._number = 0

    def run(self, iterations: int) -> None:
        """Until so many updates are done."""
        for host in range(len(self.hosts)):
            self._give(host)
        while self.version < iterations:
            assert self._events, "rollouts and training never both stand still"
            self.now, _, kind, what = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(*what)

    def _at(self, seconds: float, kind: str, *what: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, kind, what))

    def _give(self, host: int) -> None:
        """Begin episodes in idle environments, as far ahead of training as staleness allows."""
        own = self.hosts[host]
        limit = (self.version + self.placement.staleness + 1) * self.work.episodes
        while own.idle and self.begun < limit:
            env, length = own.idle.pop(), self.dice.length()
            self.left[host, env], self.episode[host, env] = length, (self.begun // self.work.group_size, length)
            self.begun += 1
            self._ask(host, env, "reset")

    def _ask(self, host: int, env: int, stage: str) -> None:
        own, process = self.hosts[host], env % self.workers
        own.jobs[process].append((env, stage))
        if process not in own.at_work:
            self._turn(host, process)

    def _turn(self, host: int, process: int) -> None:
        """Let a process do all that it was asked for, one after the other; it answers when all of it is done."""
        own = self.hosts[host]
        jobs, own.jobs[process] = own.jobs[process], []
        if not jobs:
            own.at_work.discard(process)
            return
        own.at_work.add(process)
        took = sum(self.dice.draw(stage) for _, stage in jobs)
        self.stepping += took
        answers = [number for env, stage in jobs for number in (env, int(stage == "step"))]
        self._at(took, "answered", host, process, *answers)

    def _answered(self, host: int, process: int, *answers: int) -> None:
        own = self.hosts[host]
        for env, is_step in zip(answers[::2], answers[1::2], strict=True):
            self.left[host, env] -= is_step
            if self.left[host, env]:
                own.waiting.append(env)
            else:
                self._end(host, env)
        self._turn(host, process)
        self._give(host)
        self._act(host)

    def _end(self, host: int, env: int) -> None:
        """An episode is over; with the last of its group the group is whole."""
        group, length = self.episode.pop((host, env))
        finished = self.open.setdefault(group, [])
        finished.append(length)
        self.hosts[host].idle.append(env)
        if len(finished) == self.work.group_size:
            self.whole.append(sum(self.open.pop(group)))
            self._train()

    def _act(self, host: int) -> None:
        own = self.hosts[host]
        if own.is_acting or not own.waiting:
            return
        batch, own.waiting = own.waiting, []
        took = self.costs.act.of(len(batch))
        self.acting += took
        own.is_acting = True
        pause = self.placement.publish if own.new_weights else 0.0
        own.new_weights = False
        self._at(took + pause, "acted", host, *batch)

    def _acted(self, host: int, *batch: int) -> None:
        own = self.hosts[host]
        own.is_acting = False
        for env in batch:
            self._ask(host, env, "step")
        self._act(host)

    def _train(self) -> None:
        if self.is_training or len(self.whole) < self.work.groups:
            return
        self.is_training = True
        decisions = sum(self.whole.popleft() for _ in range(self.work.groups))
        gpus = self.placement.gpus - self.placement.rollout_gpus
        even = [decisions / gpus] * gpus
        seconds, computed = learning_seconds(self.costs, self.work, even, gpus, self.placement.exchange)
        self.computed += computed * gpus
        self._at(seconds + self.costs.other, "trained")

    def _trained(self) -> None:
        self.version, self.is_training = self.version + 1, False
        self.trained_at.append(self.now)
        for host, own in enumerate(self.hosts):
            own.new_weights = True
            self._give(host)
        self._train()


def asynchronous(costs: Costs, work: Work, placement: Placement, seed: int = 0) -> Outcome:
    """GPUs that only roll out beside GPUs that only train; the first updates, which wait for all, are not counted."""
    played, iterations = _Asynchronous(costs, work, placement, seed), _num_iterations(work, 8)
    first = 2 + placement.staleness
    played.run(first)
    before = played.now, played.acting, played.stepping, played.computed
    played.run(first + iterations)
    now, acting, stepping, computed = (
        after - then
        for after, then in zip((played.now, played.acting, played.stepping, played.computed), before, strict=True)
    )
    rolling, training = placement.rollout_gpus, placement.gpus - placement.rollout_gpus
    shares = {
        "learning": computed / training / now,
        "acting": acting / rolling / now,
        "environments": stepping / (rolling * played.workers) / now,
    }
    return Outcome(
        placement,
        seconds=now / iterations,
        episodes_per_second=work.episodes * iterations / now,
        rollout=now / iterations,
        learning=computed / training / iterations,
        gpu_busy=(acting + computed) / placement.gpus / now,
        env_busy=shares["environments"],
        waits_for=max(shares, key=lambda name: shares[name]),
    )


def _num_iterations(work: Work, most: int) -> int:
    """How many iterations are played: fewer large ones, which vary less."""
    return max(2, min(most, 1024 // work.episodes))


def play(costs: Costs, work: Work, placement: Placement, seed: int = 0) -> Outcome:
    """Play a placement through."""
    return (asynchronous if placement.mode == "asynchronous" else synchronous)(costs, work, placement, seed)
