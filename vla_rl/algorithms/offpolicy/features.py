"""Feature cache: a frozen policy's embeddings of datasets and its chunks at them, computed once.

For a dataset it is kept beside the dataset's decoded images, in a folder named by a hash of the dataset's content, the
policy and what was drawn, which appears whole: the next run begins at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from vla_rl.algorithms.offpolicy.noise import embed_and_steer
from vla_rl.algorithms.offpolicy.value_guided import embed_and_draw
from vla_rl.common.atomic import atomic_folder
from vla_rl.data.config import DatasetError
from vla_rl.data.dataset import EpisodeDataset
from vla_rl.interfaces import Policy
from vla_rl.types import Observation

FORMAT = 1
FILE = "features.safetensors"
_BATCH = 64  # Observations that go through the policy together.


@dataclass(frozen=True)
class Draws:
    """Chunks drawn from the policy at each observation.

    Attributes:
        count: how many, the greedy one first; 0: none. seed: of the others.
        noise: (steps, D), of the noise that each is made of, the first one of none; None: as the policy draws them.
    """

    count: int = 0
    seed: int = 0
    noise: tuple[int, int] | None = None


NO_DRAWS = Draws()


@dataclass(frozen=True)
class Features:
    """Of N observations.

    Attributes:
        embedding: float32 (N, D). candidates: float32 (N, C, H, A), the policy's chunks; None: not drawn.
        noise: float32 (N, C, steps, D), what each was made of; None: not known.
    """

    embedding: np.ndarray
    candidates: np.ndarray | None = None
    noise: np.ndarray | None = None


@dataclass(frozen=True)
class FeatureCache:
    """Features of datasets as one policy sees them.

    Attributes:
        policy: a hash of the policy; None: nothing is kept.
        section: of the policy's options, as text, which may change what it computes.
        show: is told what is computed.
    """

    policy: str | None
    section: str
    show: Callable[[str], None] = lambda _: None

    @property
    def fingerprint(self) -> str:
        """Of the policy and its options."""
        return hashlib.blake2b(f"{self.policy} {self.section}".encode(), digest_size=16).hexdigest()

    def of_dataset(self, policy: Policy, data: EpisodeDataset, chunk_size: int, draws: Draws) -> Features:
        """Of the frames that are learned from, read or computed.

        Raises:
            DatasetError: what is kept is damaged.
        """
        if self.policy is None:
            return compute_features(policy, _observations(data, chunk_size), draws)
        wanted: dict[Path, tuple[str, ...]] = {self._path(data, chunk_size, NO_DRAWS): ("embedding",)}
        if draws.count:
            wanted[self._path(data, chunk_size, draws)] = ("candidates", "noise") if draws.noise else ("candidates",)
        if not all(path.is_dir() for path in wanted):
            self.show(f"embedding {len(data.rows)} decisions of {data.path.name}")
            computed = compute_features(policy, _observations(data, chunk_size), draws)
            for path, names in wanted.items():
                with atomic_folder(path, "features") as partial:
                    save_file({name: getattr(computed, name) for name in names}, partial / FILE)
        return Features(**{n: _read(path, n, len(data.rows)) for path, names in wanted.items() for n in names})

    def _path(self, data: EpisodeDataset, chunk_size: int, draws: Draws) -> Path:
        """Where what is drawn is kept; of no draws, the embeddings."""
        rows = hashlib.blake2b(np.ascontiguousarray(data.rows, np.int64).tobytes(), digest_size=16).hexdigest()
        drawn = [draws.count, draws.seed] if draws.count else []
        drawn += [list(draws.noise)] if draws.noise else []
        facts = [FORMAT, data.cache.name, rows, chunk_size, self.policy, self.section, drawn]
        facts += [renamed] if (renamed := {c: name for c, name in sorted(data.cameras.items()) if c != name}) else []
        key = hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()
        return data.cache.parent / f"features-{key}"


def _read(path: Path, name: str, rows: int) -> np.ndarray:
    """One array of a folder.

    Raises:
        DatasetError: it is damaged.
    """
    try:
        array = load_file(path / FILE)[name]
    except (OSError, SafetensorError, KeyError) as error:
        raise DatasetError(f"{path}: not readable ({error}). Delete the folder, and run again") from error
    if len(array) != rows:
        raise DatasetError(f"{path}: has {len(array)} rows, not {rows}. Delete the folder, and run again")
    return array


def compute_features(policy: Policy, observations: Iterable[Observation], draws: Draws = NO_DRAWS) -> Features:
    """Embed observations and draw the policy's chunks for them, in their order.

    Raises:
        ValueError: the policy has no embeddings.
    """
    generator = torch.Generator(policy.device).manual_seed(draws.seed)
    embedding, candidates, noise = [], [], []
    for obs in _batches(observations):
        if draws.noise:
            features, noises, drawn = embed_and_steer(policy, obs, draws.count, draws.noise, generator)
            candidates.append(drawn)
            noise.append(noises)
        elif draws.count:
            features, drawn = embed_and_draw(policy, obs, draws.count, generator, 1.0)
            candidates.append(drawn)
        else:
            features = policy.embed(obs)
        embedding.append(features.float().cpu().numpy())
    whole = [np.concatenate(part) if part else None for part in (candidates, noise)]
    return Features(np.concatenate(embedding), *whole)


def _batches(observations: Iterable[Observation]) -> Iterator[Observation]:
    """The same rows in batches of up to `_BATCH`."""
    waiting: list[Observation] = []
    for obs in observations:
        waiting.append(obs)
        if sum(part.batch_size for part in waiting) >= _BATCH:
            together = Observation.concatenate(waiting)
            whole = together.batch_size // _BATCH * _BATCH
            for first in range(0, whole, _BATCH):
                yield together.select(np.arange(first, first + _BATCH))
            waiting = [together.select(np.arange(whole, together.batch_size))] if whole < together.batch_size else []
    if waiting:
        yield Observation.concatenate(waiting)


def _observations(data: EpisodeDataset, chunk_size: int) -> Iterator[Observation]:
    for first in range(0, len(data.rows), _BATCH):
        yield data.batch(data.rows[first : first + _BATCH], chunk_size).obs
