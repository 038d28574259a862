"""Sharding of a minibatch over processes, in even parts: who holds more than its part sends the rest to others.

Episodes differ in length, and groups that teach nothing fall out, so that processes hold unequal parts of a minibatch;
all would wait for the largest. Everyone knows the pool, so all work out the same shards, and only decisions travel,
with what the policy prepared of their pixels. Minibatches, weights and sums are those of one process: no result
depends on who computed what.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
from safetensors.numpy import load, save

from vla_rl.algorithms.batch import Batch, Pool
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, Observation

Part = tuple[dict[str, np.ndarray], Observation]  # A batch's arrays by name, with a row for each decision.


def shard(
    policy: Policy, batch: Batch, pool: Pool, rows: np.ndarray, used: np.ndarray, world: ProcessGroup
) -> tuple[np.ndarray, Batch, np.ndarray]:
    """Return what this process computes of a minibatch; called by all together.

    Args:
        policy: prepares observations. batch: this process's decisions. pool: everyone's.
        rows: int (B,), the minibatch's decisions in the pool. used: int (U,), which of these are computed at all.

    Returns:
        Which of the minibatch this process computes, int (M,) of 0 .. B - 1; a batch that holds them; and where in it
        they are, int (M,). M differs by one at most between processes.
    """
    owner = pool.rank[rows[used]]
    worker = even_workers(owner, world.size)
    mine = owner == world.rank
    if (worker == owner).all():
        return used[mine], batch, rows[used[mine]] - pool.first
    kept = mine & (worker == world.rank)
    sent = [rows[used[mine & (worker == rank) & ~kept]] - pool.first for rank in range(world.size)]
    came = world.exchange([_packed(*_taken(policy, batch, own)) if len(own) else b"" for own in sent])
    parts = [_taken(policy, batch, rows[used[kept]] - pool.first)] if kept.any() else []
    parts += [_unpacked(parcel) for parcel in came if parcel]
    theirs = [used[(worker == world.rank) & (owner == rank) & ~kept] for rank in range(world.size)]
    ours = np.concatenate([used[kept], *theirs])
    return ours, _joined(batch, parts) if parts else batch, np.arange(len(ours))


def even_workers(owner: np.ndarray, size: int) -> np.ndarray:
    """Return which process computes each decision, int (U,): even parts, by as few decisions moved as that takes.

    Args:
        owner: int (U,), which process holds each. size: how many processes there are.
    """
    counts = np.bincount(owner, minlength=size)
    each, more = divmod(len(owner), size)
    due = np.full(size, each)
    due[np.argsort(-counts, kind="stable")[:more]] += 1
    order = np.argsort(owner, kind="stable")
    place = np.empty(len(owner), np.int64)  # Of each among its owner's.
    place[order] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    worker = owner.copy()
    worker[place >= due[owner]] = np.repeat(np.arange(size), np.maximum(due - counts, 0))
    return worker


# --- decisions that travel ---------------------------------------------------------------------


def _taken(policy: Policy, batch: Batch, rows: np.ndarray) -> Part:
    return {name: array[rows] for name, array in _columns(batch).items()}, policy.prepare(batch.observations(rows))


def _columns(batch: Batch) -> dict[str, np.ndarray]:
    """All that a batch has of each decision but the observation; an algorithm's own fields are among it."""
    columns: dict[str, np.ndarray] = {}
    for name, value in ((field.name, getattr(batch, field.name)) for field in fields(batch)):
        if isinstance(value, np.ndarray):
            columns[name] = value
        elif isinstance(value, ActionChunk):
            parts = {f"{name}.{part.name}": getattr(value, part.name) for part in fields(value)}
            columns |= {key: array for key, array in parts.items() if array is not None}
    return columns


def _packed(columns: dict[str, np.ndarray], obs: Observation) -> bytes:
    """A part as a safetensors file."""
    arrays = {f"row.{name}": array for name, array in columns.items()}
    arrays |= {f"image.{name}": image for name, image in obs.images.items()}
    text = json.dumps([obs.instruction, obs.is_prepared])
    arrays |= {"state": obs.state, "rest": np.frombuffer(text.encode(), np.uint8)}
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def _unpacked(parcel: bytes) -> Part:
    arrays = load(parcel)

    def named(kind: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}

    instruction, is_prepared = json.loads(arrays["rest"].tobytes())
    return named("row."), Observation(named("image."), arrays["state"], instruction, is_prepared)


def _joined(batch: Batch, parts: Sequence[Part]) -> Batch:
    """A batch like this one with the decisions of parts, at least one, in order: observations in place of episodes."""
    columns = {name: np.concatenate([part[name] for part, _ in parts]) for name in parts[0][0]}
    values: dict[str, object] = {}
    for name in (field.name for field in fields(batch)):
        chunk = {key.removeprefix(f"{name}."): array for key, array in columns.items() if key.startswith(f"{name}.")}
        values |= {name: columns[name]} if name in columns else {name: ActionChunk(**chunk)} if chunk else {}
    return replace(batch, episodes=[], obs=Observation.concatenate([obs for _, obs in parts]), **values)
