"""Preference learning over whole episodes: TPO of GRAPE (arXiv 2411.19309), DPO's loss.

The loss of a pair is -log sigmoid(BETA (gain of the better - gain of the worse)), an episode's gain being the
log-probability of its chunks under the policy less that under the policy as it was at first. For OpenVLA's tokens the
cloning loss, summed, is exactly minus the log-probability of the actions. What has no likelihood of actions (a flow or
diffusion policy, an L1 decoder, FAST, which writes a chunk in several ways) has its cloning loss stand for it, with
noise and levels that follow from the actions (Diffusion-DPO, arXiv 2311.12908).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field, PositiveInt
from safetensors.numpy import load_file, save_file

from vla_rl.algorithms.offpolicy.logged import FACTS_FILE, clone, kept, with_outcomes
from vla_rl.algorithms.offpolicy.offline import LoggedRun, OfflineConfig
from vla_rl.algorithms.offpolicy.transitions import Transitions, logged_transitions
from vla_rl.common.atomic import atomic_folder
from vla_rl.config import ConfigError
from vla_rl.data.config import AugmentConfig
from vla_rl.data.dataset import BCBatch, BCDataset, EpisodeDataset
from vla_rl.data.lerobot_io import PREFERENCES
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import evaluation_mode
from vla_rl.training.bc_trainer import BCTrainer
from vla_rl.training.config import SFTConfig

FILE = "preferences.safetensors"
RECORDED = "recorded"
BETA = 0.1  # What one nat of an episode's log-probability over the first policy's counts.


class PreferencesConfig(OfflineConfig):
    """No cloning: better episodes become likelier than worse ones of the same task (TPO of GRAPE)."""

    kind: Literal["preferences"] = "preferences"

    pairs: PositiveInt = Field(default=4, description="Pairs of episodes per update.")
    cloning: float = Field(
        default=0.0, ge=0, description="Weight of the cloning loss of the better episodes, which keeps them likely."
    )
    file: str | None = Field(
        default=None,
        description='A person\'s choices, a line each: {"better": 3, "worse": 7, "dataset": "datasets/mine"}, episodes '
        "numbered from 0; the dataset may be left out where there is one, and in a file in its folder. `recorded`: the "
        "files that the console's buttons Better and Worse left in the datasets. Empty: successes over failures.",
    )

    def refuses(self, sft: SFTConfig) -> str:
        """Other images or precision than the first policy's."""
        if sft.precision == "policy" and sft.augment == AugmentConfig():
            return ""
        return (
            "offline.kind=preferences: compares likelihoods with those of the first policy, so images and precision "
            "stay as they are: leave out sft.precision and sft.augment"
        )

    def improve(self, policy: Policy, run: LoggedRun) -> dict[str, Any]:
        """Learn from pairs of episodes, kept with how likely they were at first. See `OfflineConfig.improve`."""

        def choose(data: BCDataset) -> BCDataset:
            made = kept(run, Preferences, lambda: choose_pairs(self, policy, data, run))
            return PreferenceDataset(data, made, self)

        return clone(policy, run, choose, PreferenceTrainer)


@dataclass(frozen=True)
class Preferences:
    """P pairs of E logged episodes, numbered over all datasets.

    Attributes:
        better, worse: int64 (P,).
        reference: float64 (E,), log-probability under the policy as it was at first; NaN of those in no pair.
    """

    better: np.ndarray
    worse: np.ndarray
    reference: np.ndarray

    def save(self, folder: Path, found: Mapping[str, float]) -> None:
        """Write them, and figures about them; the folder appears whole or not at all."""
        with atomic_folder(folder, "preferences") as partial:
            save_file({"better": self.better, "worse": self.worse, "reference": self.reference}, partial / FILE)
            (partial / FACTS_FILE).write_text(json.dumps(found, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> tuple[Self, dict[str, float]]:
        """What `save` wrote."""
        return cls(**load_file(folder / FILE)), json.loads((folder / FACTS_FILE).read_text())


def pair_up(transitions: Transitions, dataset: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A success over a failure of the same task and dataset, so that who drove is no difference, int64 (P,) each.

    Each episode of the commoner outcome is in one pair, with one of the same initial state where there is.

    Args:
        dataset: int64 (E,), where each episode comes from; -1: it is in no pair.

    Raises:
        ValueError: nowhere are there both outcomes.
    """
    rng = np.random.default_rng(seed)
    better: list[int] = []
    worse: list[int] = []
    for task, source in np.unique(np.stack([transitions.task, dataset], 1)[dataset >= 0], axis=0):
        own = (transitions.task == task) & (dataset == source)
        good, bad = np.flatnonzero(own & transitions.success), np.flatnonzero(own & ~transitions.success)
        if not len(good) or not len(bad):
            continue
        many, few = (good, bad) if len(good) >= len(bad) else (bad, good)
        for one in many:
            alike = few[transitions.initial_state[few] == transitions.initial_state[one]]
            other = rng.choice(alike if len(alike) else few)
            better.append(int(one if many is good else other))
            worse.append(int(other if many is good else one))
    if not better:
        raise ValueError(
            "no dataset has both a success and a failure of one task, so that no episode can be preferred to another: "
            "log episodes of both kinds (collect.keep=all), or say which are better in offline.file"
        )
    return np.array(better), np.array(worse)


def read_pairs(file: str, parts: Sequence[EpisodeDataset]) -> tuple[np.ndarray, np.ndarray]:
    """The pairs that a person chose, int64 (P,) each, of a file, or of all that datasets hold (`RECORDED`).

    Raises:
        ConfigError: no such file, or a line that says no pair of episodes of these datasets.
    """
    files = [Path(file)]
    if file == RECORDED:
        files = [found for part in parts if (found := part.path / PREFERENCES).is_file()]
        if not files:
            where = ", ".join(str(part.path) for part in parts)
            raise ConfigError(f"offline.file: {RECORDED}, but no dataset has a {PREFERENCES}: {where}")
    elif not files[0].is_file():
        raise ConfigError(f"offline.file: {file} not found; give a file of pairs, or leave it out")
    pairs = [pair for one in files for pair in _pairs_of(one, parts)]
    if not pairs:
        raise ConfigError(f"{', '.join(map(str, files))}: holds no pair")
    return np.array([better for better, _ in pairs]), np.array([worse for _, worse in pairs])


def _pairs_of(file: Path, parts: Sequence[EpisodeDataset]) -> Iterator[tuple[int, int]]:
    """(better, worse) of each line, numbered over all datasets."""
    first = np.cumsum([0, *(len(part.starts) for part in parts)])
    folders = [part.path.resolve() for part in parts]
    own = str(file.parent) if file.parent.resolve() in folders else None
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            name, pair = values.get("dataset", own), (values["better"], values["worse"])
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(
                f'{file}, line {number}: needs {{"better": 3, "worse": 7, "dataset": ...}}, got {line[:80]!r}'
            ) from error
        where = [i for i, folder in enumerate(folders) if name is None or Path(name).resolve() == folder]
        if len(where) != 1:
            raise ConfigError(
                f"{file}, line {number}: dataset {name!r} is not one of {[str(part.path) for part in parts]}"
            )
        count = len(parts[where[0]].starts)
        if not all(isinstance(e, int) and 0 <= e < count for e in pair) or pair[0] == pair[1]:
            raise ConfigError(f"{file}, line {number}: {pair} must be two different episodes, 0 to {count - 1}")
        yield int(first[where[0]] + pair[0]), int(first[where[0]] + pair[1])


class PreferenceDataset(BCDataset):
    """Logged episodes of which some are preferred to others."""

    def __init__(self, data: BCDataset, preferences: Preferences, config: PreferencesConfig) -> None:
        super().__init__(data.parts, data.chunk_size)
        self.preferences, self.config = preferences, config

    def episode(self, number: int) -> BCBatch:
        """An episode's decisions; see `episode_batch`."""
        return episode_batch(self, number)


def episode_batch(data: BCDataset, number: int) -> BCBatch:
    """An episode as chunks that follow one another without overlap, (K, H, A).

    Raises:
        ValueError: no frame of the episode is learned from.
    """
    ends = np.cumsum([len(part.starts) for part in data.parts])
    where = int(np.searchsorted(ends, number, side="right"))
    part = data.parts[where]
    number -= int(ends[where]) - len(part.starts)
    start = part.starts[number]
    rows = part.rows[(part.rows >= start) & (part.rows < start + part.lengths[number])]
    chosen: list[int] = []
    for row in rows:
        if not chosen or row >= chosen[-1] + data.chunk_size:
            chosen.append(int(row))
    if not chosen:
        raise ValueError(f"{part.path}: no frame of episode {number} is learned from (sft.datasets.frames)")
    return part.batch(np.array(chosen), data.chunk_size)


def log_probs(policy: Policy, episode: BCBatch, most: int) -> Iterator[torch.Tensor]:
    """The log-probability of an episode's chunks, in parts of up to `most` decisions; see the module on which."""
    parts = math.ceil(episode.size / most)
    for rows in np.array_split(np.arange(episode.size), parts):
        part = episode.select(rows)
        loss, _ = policy.bc_loss(part.obs, part.actions, part.valid)
        yield -loss * (int(part.valid.sum()) * part.actions.shape[2])


@torch.no_grad()
def reference_log_probs(policy: Policy, data: BCDataset, episodes: np.ndarray, most: int) -> np.ndarray:
    """Of some episodes, float64 (E,), NaN for the others."""
    found = np.full(sum(len(part.starts) for part in data.parts), np.nan)
    for number in episodes:
        found[number] = sum(float(value) for value in log_probs(policy, episode_batch(data, number), most))
    return found


class PreferenceTrainer(BCTrainer):
    """Makes better episodes likelier than worse ones, in this process alone.

    It computes in the policy's own precision, without dropout or augmentation, a few decisions at a time: first how
    likely both episodes are, then the gradients of each, times what the loss's derivative says.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.world.size > 1:
            raise ConfigError(f"offline.kind=preferences: learns in one process; got {self.world.size}")
        self.most = decisions_at_once(self.config.batch_size, self.config.grad_accumulation)

    def learn(self, data: BCDataset, seed: int) -> dict[str, float]:
        """One update on some pairs; see `BCTrainer.step`."""
        assert isinstance(data, PreferenceDataset), "chosen with the trainer"
        rng = np.random.default_rng([seed, self.trainer.num_steps])
        drawn = rng.integers(len(data.preferences.better), size=data.config.pairs)
        self.policy.eval()
        totals: defaultdict[str, float] = defaultdict(float)
        for pair in drawn:
            for name, value in self._pair(data, pair).items():
                totals[name] += value / len(drawn)
        return self.trainer.update(totals)

    def _pair(self, data: PreferenceDataset, pair: int) -> dict[str, float]:
        """Gradients and metrics of one pair."""
        config, known = data.config, data.preferences
        numbers = int(known.better[pair]), int(known.worse[pair])
        episodes = [data.episode(number) for number in numbers]
        with torch.no_grad():
            now = [sum(float(v) for v in log_probs(self.policy, e, self.most)) for e in episodes]
        gains = [value - float(known.reference[number]) for value, number in zip(now, numbers, strict=True)]
        margin = BETA * (gains[0] - gains[1])
        pull = BETA / (1 + math.exp(min(margin, 500.0)))
        actions = int(episodes[0].valid.sum()) * episodes[0].actions.shape[2]
        weights = pull + config.cloning / max(actions, 1), -pull
        for episode, weight in zip(episodes, weights, strict=True):
            for value in log_probs(self.policy, episode, self.most):
                (value * (-weight / config.pairs)).backward()
        loss = float(np.logaddexp(0.0, -margin)) - config.cloning * now[0] / max(actions, 1)
        found = {"loss": loss, "margin": margin, "told_apart": float(margin > 0)}
        return found | {"gain_of_better": gains[0], "gain_of_worse": gains[1]}


def decisions_at_once(batch_size: int, grad_accumulation: int) -> int:
    """How many decisions go through the policy together."""
    return max(1, batch_size // grad_accumulation)


def choose_pairs(
    config: PreferencesConfig, policy: Policy, data: BCDataset, run: LoggedRun
) -> tuple[Preferences, dict[str, float]]:
    """Which episodes are preferred to which, and how likely the policy makes them now; figures by name."""
    if config.file is not None:
        better, worse = read_pairs(config.file, data.parts)
        alike = np.zeros(len(better), bool)
        if config.control == "shuffled_outcomes":
            swapped = np.random.default_rng(run.seed).random(len(better)) < 0.5
            better, worse = np.where(swapped, worse, better), np.where(swapped, better, worse)
    else:
        transitions = with_outcomes(config, logged_transitions(None, data), run.seed)
        dataset = np.full(len(transitions.success), -1)
        source = np.repeat(np.arange(len(data.parts)), [len(part.rows) for part in data.parts])
        dataset[transitions.episode] = source  # Of episodes that are learned from at all.
        better, worse = pair_up(transitions, dataset, run.seed)
        alike = transitions.initial_state[better] == transitions.initial_state[worse]
    episodes = np.unique(np.concatenate([better, worse]))
    run.show(f"{len(better)} pairs of {len(episodes)} episodes: how likely they are now")
    with evaluation_mode(policy):
        most = decisions_at_once(run.sft.batch_size, run.sft.grad_accumulation)
        reference = reference_log_probs(policy, data, episodes, most)
    found = {"pairs": float(len(better)), "pairs/same_initial_state": float(alike.mean())}
    found |= {"pairs/likelier": float((reference[better] > reference[worse]).mean())}
    return Preferences(better, worse, reference), found


METHOD = PreferencesConfig
