"""`vla-rl world-model eval`: from a world model's folder and held-out datasets to trust.json and the trust page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import EpisodeDataset
from world_model.config import ImaginationConfig
from world_model.data.episodes import EpisodeFrames, logged_episodes, open_episodes
from world_model.data.objects import poses_for
from world_model.metadata import WorldModelMetadata, content_key, resolve_path
from world_model.model.world_model import load_world_model
from world_model.trust.config import MeasureConfig, TrustConfig
from world_model.trust.measure import measure
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
