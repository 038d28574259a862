"""Sharding in even parts: what a process computes for another is what that one holds; parts differ by one at most."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from toy_problem import ToyPolicy

from vla_rl.algorithms.batch import Batch, Pool, even_workers, shard
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.methods.algo.dr_grpo import DRBatch
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Observation

# Decisions of 32 sampled episodes of the tabletop's cloned policy, eight of each of four tasks.
LENGTHS = [2, 4, 4, 4, 3, 3, 3, 3, 4, 4, 4, 4, 3, 4, 2, 3, 2, 4, 2, 4, 4, 4, 4, 4, 4, 7, 4, 7, 7, 4, 7, 4]
SIZE = 4


@dataclass
class MarkedBatch(Batch):
    """An algorithm's own batch, with one more number for each decision."""

    mark: np.ndarray = field(default_factory=lambda: np.zeros(0))


class Inverting(ToyPolicy):
    """It prepares negatives."""

    def prepare(self, obs: Observation) -> Observation:
        negatives = {name: 255 - image for name, image in obs.images.items()}
        return obs if obs.is_prepared else replace(obs, images=negatives, is_prepared=True)


POLICY = Inverting()


class Threads(ProcessGroup):
    """Processes that are threads here: they exchange what real ones exchange."""

    table: dict[int, Sequence[bytes]]
    barrier: Barrier

    @staticmethod
    def start(size: int) -> list[Threads]:
        table, barrier = {}, Barrier(size, timeout=60)
        worlds = [Threads(rank, size) for rank in range(size)]
        for world in worlds:
            object.__setattr__(world, "table", table)
            object.__setattr__(world, "barrier", barrier)
        return worlds

    def exchange(self, parcels: Sequence[bytes]) -> list[bytes]:
        self.table[self.rank] = parcels
        self.barrier.wait()
        return [self.table[rank][self.rank] for rank in range(self.size)]


def episode(rng: np.random.Generator, chunks: int, name: str) -> Episode:
    images = {"front": rng.integers(0, 256, (chunks, 4, 4, 3), np.uint8)}
    texts = [f"{name}, {i}: größer" for i in range(chunks)]
    obs = Observation(images, rng.normal(size=(chunks, 8)).astype(np.float32), texts)
    drawn = ActionChunk(
        rng.normal(size=(chunks, 2, 7)).astype(np.float32),
        tokens=rng.integers(0, 256, (chunks, 2, 7)),
        log_prob=rng.normal(size=(chunks, 2, 7)).astype(np.float32),
    )
    flags = np.zeros((chunks, 2), bool)
    steps, reward = np.full(chunks, 2), np.zeros((chunks, 2), np.float32)
    inputs = POLICY.prepare(obs) if rng.random() < 0.5 else None
    return Episode(EpisodeSpec("t"), obs, drawn, reward, flags, flags, steps, False, obs.select([0]), inputs=inputs)


def make_batch(rank: int, lengths: Sequence[int], critic: bool) -> MarkedBatch:
    rng = np.random.default_rng(rank)
    episodes = [episode(rng, n, f"rank {rank}, episode {i}") for i, n in enumerate(lengths)]
    number = np.repeat(np.arange(len(lengths)), lengths).astype(np.int64)
    chunk = np.concatenate([np.arange(n) for n in lengths]) if len(lengths) else np.zeros(0, np.int64)
    chunks = ActionChunk.concatenate([e.chunks for e in episodes or [episode(rng, 1, "unused")]])
    chunks, n = chunks.select(np.arange(len(number))), len(number)
    values = rng.normal(size=n).astype(np.float32) if critic else None
    advantage, mark = rng.normal(size=(n, 2)).astype(np.float32), rng.normal(size=n)
    zeros, valid = np.zeros((n, 2, 7), np.float32), rng.random((n, 2)) < 0.8
    older = {"behavior_log_prob": rng.normal(size=(n, 2, 7)).astype(np.float32), "lag": rng.integers(0, 3, n)}
    return MarkedBatch(
        episodes,
        number,
        chunk,
        chunks,
        valid,
        advantage,
        zeros,
        None,
        values,
        values,
        **older,
        metrics={"a": 1.0},
        mark=mark,
    )


def pooled(batches: Sequence[Batch], rank: int) -> Pool:
    sizes = [b.size for b in batches]
    valid, active = (np.concatenate([getattr(b, name) for b in batches]) for name in ("valid", "active"))
    return Pool(valid, active, np.arange(sum(sizes)), np.repeat(np.arange(len(sizes)), sizes), sum(sizes[:rank]))


def rows_of(batch: Batch, rows: np.ndarray) -> list[Any]:
    """All that a loss may read of these decisions, comparable."""
    obs, chunks = POLICY.prepare(batch.observations(rows)), batch.chunks.select(rows)
    arrays = [obs.images["front"], obs.state, chunks.actions, chunks.tokens, chunks.log_prob]
    names = (
        "episode",
        "chunk",
        "valid",
        "advantage",
        "old_log_prob",
        "old_value",
        "returns",
        "behavior_log_prob",
        "lag",
        "mark",
    )
    arrays += [None if getattr(batch, name) is None else getattr(batch, name)[rows] for name in names]
    return [obs.instruction, *(None if a is None else (a.dtype.str, a.tolist()) for a in arrays)]


@pytest.mark.parametrize(
    ("lengths", "critic"),
    [
        ([LENGTHS[8 * i : 8 * i + 8] for i in range(SIZE)], False),
        ([LENGTHS[:20], LENGTHS[20:], [], []], True),  # Groups that teach nothing leave some with no decision.
        ([[1], [], [], [2]], True),  # Fewer decisions than processes.
    ],
)
def test_every_decision_is_computed_once_as_its_process_holds_it_and_parts_are_even(lengths, critic):
    batches = [make_batch(rank, own, critic) for rank, own in enumerate(lengths)]
    starts = np.cumsum([0, *(b.size for b in batches)])
    rng = np.random.default_rng(7)
    rows = rng.permutation(starts[-1])[: max(2, starts[-1] // 2)]
    used = np.flatnonzero(rng.random(len(rows)) < 0.9)

    def sharded(world: ProcessGroup) -> tuple[np.ndarray, Batch, np.ndarray]:
        return shard(POLICY, batches[world.rank], pooled(batches, world.rank), rows, used, world)

    with ThreadPoolExecutor(SIZE) as threads:
        shares = list(threads.map(sharded, Threads.start(SIZE)))
    assert sorted(np.concatenate([ours for ours, _, _ in shares]).tolist()) == used.tolist()
    counts = [len(ours) for ours, _, _ in shares]
    assert max(counts) - min(counts) <= 1
    for ours, held, where in shares:
        assert type(held) is MarkedBatch and len(where) == len(ours)
        for position, place in zip(ours, where, strict=True):
            owner = int(np.searchsorted(starts, rows[position], "right")) - 1
            expected = rows_of(batches[owner], np.array([rows[position] - starts[owner]]))
            assert rows_of(held, np.array([place])) == expected


def idle(owner: np.ndarray, size: int, micro: int) -> float:
    """The share of the processes' time in which they wait for the one with most micro-batches."""
    passes = -(-np.bincount(owner, minlength=size) // micro)
    return 1 - passes.mean() / passes.max()


def test_processes_wait_for_one_micro_batch_at_most():
    owner = np.repeat(np.arange(SIZE), np.reshape(LENGTHS, (SIZE, 8)).sum(1))
    worker = even_workers(owner, SIZE)
    assert idle(owner, SIZE, 1) > 0.15 and idle(worker, SIZE, 1) < 0.02
    # No more move than must: what the processes have above their even part.
    assert (worker != owner).sum() == np.maximum(np.bincount(owner) - np.bincount(worker), 0).sum()


def test_an_even_minibatch_stays_where_it_is():
    batch = make_batch(0, LENGTHS[:4], critic=False)
    batches = [batch, replace(batch)]
    world = ProcessGroup(1, 2)  # Its `exchange` would give the decisions to itself.
    rows = np.arange(2 * batch.size)
    ours, held, where = shard(POLICY, batch, pooled(batches, 1), rows, rows, world)
    assert held is batch and where.tolist() == list(range(batch.size))
    assert ours.tolist() == list(range(batch.size, 2 * batch.size))


def test_chunks_that_nobody_executed_are_known_as_such_elsewhere():
    made = make_batch(0, LENGTHS[:4], critic=False)
    inherited = {f.name: getattr(made, f.name) for f in fields(Batch)}
    half = made.size // 2
    decision = np.concatenate([np.arange(half), np.arange(made.size - half)])
    dr = DRBatch(**inherited, decision=decision, is_added=np.arange(made.size) >= half)
    nothing = DRBatch(**{f.name: getattr(make_batch(1, [], critic=False), f.name) for f in fields(Batch)})
    batches, rows = [dr, nothing], np.arange(made.size)

    def sharded(world: ProcessGroup) -> tuple[np.ndarray, Batch, np.ndarray]:
        return shard(POLICY, batches[world.rank], pooled(batches, world.rank), rows, rows, world)

    with ThreadPoolExecutor(2) as threads:
        for ours, held, where in threads.map(sharded, Threads.start(2)):
            assert isinstance(held, DRBatch) and len(where) > 3
            assert held.is_added[where].tolist() == (ours >= half).tolist()
