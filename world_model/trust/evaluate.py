"""`vla-rl world-model eval | rank`: trust.json and its page of a world model; policies ranked by imagination."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from vla_rl.common.saved import Saved
from vla_rl.config import Config, ConfigError
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import EpisodeDataset
from vla_rl.evaluation.signal import rate_figure
from vla_rl.evaluation.statistics import Figure
from vla_rl.types import Episode
from world_model.config import ImaginationConfig
from world_model.data.episodes import EpisodeFrames, logged_episodes, open_episodes
from world_model.data.objects import poses_for
from world_model.metadata import WorldModelMetadata, content_key, resolve_path
from world_model.model.world_model import load_world_model
from world_model.trust.config import MeasureConfig, TrustConfig
from world_model.trust.figures import as_text
from world_model.trust.measure import measure
from world_model.trust.measures.outcomes import policy_figures
from world_model.trust.page import save_trust
from world_model.trust.report import PAGE_FILE, Provenance
from world_model.trust.subject import OpenLoop
from world_model.trust.types import PolicyOutcomes, TrustData
from world_model.types import LoggedEpisode

PolicySuccess = tuple[str, Sequence[str], Sequence[bool], Sequence[bool]]


def measure_trust(
    config: MeasureConfig,
    world_model: Path,
    held_out: Sequence[Path],
    policies: Sequence[PolicySuccess] = (),
    *,
    acting: PolicyOutcomes | None = None,
    train: Sequence[Path] = (),
    styles: Mapping[str, Path] | None = None,
    imagination: ImaginationConfig | None = None,
    trust: TrustConfig | None = None,
    chunk_size: int | None = None,
    device: str = "cpu",
    show: Callable[[str], None] | None = None,
    folder: Path | None = None,
) -> Path:
    """Write trust.json and trust.html into the world model's folder and return the page's path.

    Args:
        held_out: datasets of real episodes of the policy, on none of which it was fitted or its thresholds chosen.
        policies: name, names of initial states, real and imagined success from each.
        acting: of the policy that RL starts from, with its held-out episodes as the real ones.
        train: other datasets, that the inverse dynamics learns from; empty takes half of the held-out episodes.
        styles: name -> dataset of episodes with another look.
        imagination: how the environment imagines. trust: what is required of it. None takes the defaults.
        chunk_size: H, actions of the policy's chunk, over which successes are verified; None: one frame.
        folder: for the report, in place of the world model's.

    Raises:
        ConfigError: no such world model, or one that ships with the package and no `folder`.
        DatasetError: held-out episodes that something judged by them has seen, or a dataset of another robot.
    """
    source = resolve_path(world_model)
    imagination = imagination or ImaginationConfig()
    if folder is None and str(world_model).startswith("pretrained:"):
        raise ConfigError(f"{world_model}: ships with the package, whose files stay as they are; name another --output")
    loaded = load_world_model(source, device).compute_in(imagination.precision)
    spec = loaded.metadata.env_spec()

    def opened(path: Path) -> EpisodeDataset:
        return open_episodes(DatasetConfig(path=str(path)), spec, body=loaded.metadata.body)

    def episodes(dataset: EpisodeDataset) -> list[LoggedEpisode]:
        frames = EpisodeFrames.of(dataset, loaded.frame_steps, spec.action_low, spec.action_high)
        return logged_episodes(frames, poses=poses_for(loaded.config.objects, frames))

    datasets = [opened(path) for path in held_out]
    _check_unseen(datasets, learned := [opened(path) for path in train], loaded.metadata)
    chunk_frames = -(-(chunk_size or 1) // loaded.frame_steps)
    measured = measure(
        OpenLoop(loaded, imagination, chunk_frames),
        TrustData(
            held_out=[episode for dataset in datasets for episode in episodes(dataset)],
            train=[episode for dataset in learned for episode in episodes(dataset)],
            styles={name: episodes(opened(path)) for name, path in (styles or {}).items()},
            policies=[_outcomes(*policy) for policy in policies],
            acting=acting,
        ),
        config,
        _provenance(world_model, held_out, datasets, chunk_frames),
        show,
    )
    target = Path(folder or source)
    save_trust(measured, target, control_hz=spec.control_hz, require=(trust or TrustConfig()).require)
    return target / PAGE_FILE


def _provenance(
    world_model: Path, held_out: Sequence[Path], datasets: Sequence[EpisodeDataset], chunk_frames: int
) -> Provenance:
    return Provenance(
        model=str(world_model),
        model_key=content_key(resolve_path(world_model)),
        datasets=tuple(str(path) for path in held_out),
        dataset_keys=tuple(dataset.cache.name for dataset in datasets),
        chunk_frames=chunk_frames,
        command=shlex.join(["vla-rl", *sys.argv[1:]]),
    )


def _outcomes(name: str, starts: Sequence[str], real: Sequence[bool], imagined: Sequence[bool]) -> PolicyOutcomes:
    return PolicyOutcomes(name, starts, np.array(real), np.array(imagined))


def _check_unseen(
    datasets: Sequence[EpisodeDataset], train: Sequence[EpisodeDataset], metadata: WorldModelMetadata
) -> None:
    """Check that neither the world model, its thresholds nor the inverse dynamics has seen what judges them."""
    seen = {"was fitted": metadata.datasets, "chose its thresholds": metadata.calibrated_on}
    for dataset in datasets:
        for what, keys in seen.items():
            if dataset.cache.name in keys:
                raise DatasetError(
                    f"{dataset.path}: the world model {what} on it; trust needs episodes it has not seen"
                )
    keys = {dataset.cache.name for dataset in datasets}
    if again := [dataset.path for dataset in train if dataset.cache.name in keys]:
        raise DatasetError(
            f"{again[0]}: is held out, and the inverse dynamics is to learn from it (--train) and be judged on it; "
            "name other episodes there, or none: then it learns from half of the held-out ones, and the others judge it"
        )


EPISODES_AT_ONCE = 64
FIGURES = ("pearson", "spearman", "mmrv", "policy_gap")
Outcomes = tuple[str, Sequence[str], Sequence[bool], Sequence[bool], Sequence[bool]]


class RankedPolicy(Config):
    """Success rates of one policy.

    Attributes:
        real: in the simulator. imagined: in the world model. judged: the simulator's episodes, by the success head.
    """

    name: str
    real: Figure
    imagined: Figure
    judged: Figure


class Ranking(Saved):
    """Policies, the best in imagination first.

    Attributes:
        imagined: figures of imagined against real success; see `trust.figures`. judged: of judged against real.
        num_states: initial states, the same for all.
    """

    WHAT = "ranking"
    AGAIN = "Rank again with `vla-rl world-model rank`."
    policies: tuple[RankedPolicy, ...]
    imagined: dict[str, Figure]
    judged: dict[str, Figure]
    num_states: int = Field(description="Initial states that each policy started from.")

    def text(self) -> str:
        """A table for people, and how far to believe it."""
        width = max(len(policy.name) for policy in self.policies)
        rows = [f"{'policy':<{width}}  imagined                real                    head on real frames"]
        for policy in self.policies:
            cells = (f"{_rate(figure):<22}" for figure in (policy.imagined, policy.real, policy.judged))
            rows.append(f"{policy.name:<{width}}  {'  '.join(cells)}".rstrip())
        for name, figures in (("imagined against real", self.imagined), ("head on real frames", self.judged)):
            rows.append(f"{name}: " + ", ".join(f"{key} {_number(figures[key])}" for key in FIGURES))
        return "\n".join(rows)


def judge_episodes(
    world_model: Path, episodes: Sequence[Episode], imagination: ImaginationConfig, device: str = "cpu"
) -> list[bool]:
    """Whether the success head says, of the real frames of each episode, that it succeeded.

    Args:
        episodes: with recorded frames.

    Raises:
        ValueError: an episode without frames.
    """
    loaded = OpenLoop(load_world_model(world_model, device).compute_in(imagination.precision), imagination)
    cameras, verdicts = loaded.world_model.metadata.cameras, []
    for start in range(0, len(episodes), EPISODES_AT_ONCE):
        seen = [_frames_of(e, cameras, loaded.frame_steps) for e in episodes[start : start + EPISODES_AT_ONCE]]
        longest = max(len(states) for _, states in seen)
        rows = [np.minimum(np.arange(longest), len(states) - 1) for _, states in seen]
        images = np.stack([images[row] for (images, _), row in zip(seen, rows, strict=True)])
        states = np.stack([states[row] for (_, states), row in zip(seen, rows, strict=True)])
        text = [e.obs.instruction[0] for e in episodes[start : start + EPISODES_AT_ONCE]]
        scores = loaded.score(loaded.encode(images, states), text)
        verdicts += [bool(row[len(states) - 1]) for row, (_, states) in zip(scores.success, seen, strict=True)]
    return verdicts


def _frames_of(episode: Episode, cameras: Sequence[str], frame_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (T, V, height, width, 3) and states float32 (T, S): the first, one every G steps, the last."""
    if episode.frames is None or episode.states is None:
        raise ValueError("judging real episodes needs their frames: build the environment with record_frames=True")
    length = len(episode.states)
    steps = np.unique([*range(frame_steps - 1, length, frame_steps), length - 1])
    views = [np.concatenate([episode.obs.images[name][:1], episode.frames[name][steps]]) for name in cameras]
    return np.stack(views, 1), np.concatenate([episode.obs.state[:1], episode.states[steps]])


def rank(outcomes: Sequence[Outcomes]) -> Ranking:
    """Order policies by imagined success. Only initial states that all of them finished count.

    Args:
        outcomes: name, names of initial states, real, imagined and judged success from each.

    Raises:
        ValueError: fewer than two policies, or no initial state that all finished.
    """
    common = sorted(set.intersection(*(set(starts) for _, starts, *_ in outcomes)))
    if not common:
        raise ValueError("ranking: no initial state was finished by every policy; every episode of some was lost")
    tables = []
    for name, starts, *columns in outcomes:
        at = {start: i for i, start in enumerate(starts)}
        rows = [at[start] for start in common]
        tables.append((name, *(np.asarray(column, bool)[rows] for column in columns)))
    groups = np.array(common)
    policies = [
        RankedPolicy(
            name=name,
            real=rate_figure(real, groups),
            imagined=rate_figure(imagined, groups),
            judged=rate_figure(judged, groups),
        )
        for name, real, imagined, judged in tables
    ]
    figures = {
        what: policy_figures([PolicyOutcomes(t[0], common, t[1], t[column]) for t in tables])
        for what, column in (("imagined", 2), ("judged", 3))
    }
    return Ranking(
        policies=tuple(sorted(policies, key=lambda policy: -policy.imagined.value)),
        imagined={name: figures["imagined"][name] for name in FIGURES},
        judged={name: figures["judged"][name] for name in FIGURES},
        num_states=len(common),
    )


def _rate(figure: Figure) -> str:
    return f"{as_text(figure.value, 'rate')} [{100 * figure.low:.1f}, {100 * figure.high:.1f}]"


def _number(figure: Figure) -> str:
    return f"{figure.value:.2f} [{figure.low:.2f}, {figure.high:.2f}]"
