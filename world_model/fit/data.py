"""Datasets of a fit: episodes to fit on, and held-out ones to calibrate on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import EpisodeDataset
from vla_rl.evaluation.probability import check_outcomes
from vla_rl.types import EnvSpec
from world_model.data.episodes import EpisodeFrames, logged_episodes, open_episodes
from world_model.data.styled import Restyler, restylers, with_styles
from world_model.fit.calibration import GET_MORE
from world_model.fit.config import FitConfig
from world_model.types import LoggedEpisode


@dataclass
class FitData:
    """Episodes to fit on, those the threshold is chosen on (of `fitted`, or datasets of their own), and `judged`, which
    the success networks learn from.

    `shown` is `fitted`, and its copies in other styles where they are asked for; `restylers` makes those.
    """

    fitted: list[EpisodeFrames]
    calibration: list[EpisodeFrames]
    shown: list[EpisodeFrames]
    judged: list[EpisodeFrames]
    restylers: list[Restyler]

    @classmethod
    def open(
        cls,
        config: FitConfig,
        spec: EnvSpec,
        frame_steps: int,
        seed: int,
        fold: int | None = None,
        body: dict[str, Any] | None = None,
        show: bool = False,
    ) -> FitData:
        """Open a fit's datasets.

        Args:
            body, show: see `open_episodes`.
            fold: with `config.cross_fit`, the fold of the policy's episodes to leave out; None: all are fitted on, and
                all are for calibration.

        Raises:
            ConfigError: a dataset is both fitted on and in `config.calibrate_on`, or a dataset given twice brings back
                episodes that are held out.
            DatasetError: a dataset that is damaged or of another robot.
        """

        def opened(one: DatasetConfig) -> EpisodeDataset:
            return open_episodes(one, spec, body=body, show=show)

        def frames(dataset: EpisodeDataset) -> EpisodeFrames:
            return EpisodeFrames.of(dataset, frame_steps, spec.action_low, spec.action_high)

        fitted, calibration = [], []
        for number, one in enumerate(config.datasets):
            dataset = opened(one)
            newest = number == len(config.datasets) - 1
            if not config.calibrate_on and (newest or config.holdout_from == "all"):
                if config.cross_fit:
                    dataset, held = dataset.fold(fold, config.cross_fit, [seed, number])
                else:
                    dataset, held = dataset.hold_out(config.holdout, [seed, number])
                calibration.append(frames(held))
            fitted.append(frames(dataset))
        calibration += [frames(opened(one)) for one in config.calibrate_on]
        judged = [frames(opened(one)) for one in config.success_datasets]
        if config.calibrate_on:
            _check_apart([*fitted, *judged], calibration)
        elif not config.cross_fit or fold is not None:
            _check_unknown([*fitted, *judged], calibration)
        style = config.style
        if not style.share:
            return cls(fitted, calibration, fitted, judged or fitted, [])
        makers = restylers(style, fitted, [one.camera_map for one in config.datasets], tuple(spec.projections))
        shown = with_styles(style, fitted, makers, seed)
        return cls(fitted, calibration, shown, judged or shown, makers)

    def learned(self, config: FitConfig) -> list[EpisodeFrames]:
        """What weights learn from: nothing of a stage without steps."""
        stages = (
            config.autoencoder,
            config.dynamics,
            config.objects,
            config.inverse,
        )
        fits = any(stage.steps for stage in stages)
        judges = config.success.steps or config.value.steps
        return [*(self.fitted if fits else ()), *(self.judged if judges else ())]

    def check_calibration(self, config: FitConfig, needs_threshold: bool = True) -> None:
        """Fail before hours of fitting where the episodes cannot give a threshold after it, or a probability alone."""
        parts = self.calibration
        real = np.concatenate([part.dataset.success[part.episodes] for part in parts])
        if not needs_threshold and real.any() and not real.all():
            return
        starts = np.array([part.dataset.initial_states[episode] for part in parts for episode in part.episodes])
        check_outcomes(real, starts, config.max_false_success, config.min_failures, GET_MORE)

    def calibration_episodes(self) -> list[LoggedEpisode]:
        """All of them, as trust sees episodes."""
        return [episode for part in self.calibration for episode in logged_episodes(part)]


def content_keys(parts: Sequence[EpisodeFrames]) -> tuple[str, ...]:
    """Of the datasets that the parts are of, sorted."""
    return tuple(sorted({part.dataset.cache.name for part in parts}))


def _check_apart(fitted: Sequence[EpisodeFrames], calibration: Sequence[EpisodeFrames]) -> None:
    """Check that no dataset, by what it holds, is fitted on and chooses the thresholds as well."""
    learned = {part.dataset.cache.name: part.dataset.path for part in fitted}
    for part in calibration:
        if (key := part.dataset.cache.name) in learned:
            raise ConfigError(
                f"world_model.calibrate_on: got {part.dataset.path}, which is also fitted on ({learned[key]} in "
                "world_model.datasets or success_datasets), so thresholds would be chosen on episodes that are known; "
                "name other episodes of the policy, or leave calibrate_on empty, which holds some of datasets out"
            )


def _check_unknown(fitted: Sequence[EpisodeFrames], held: Sequence[EpisodeFrames]) -> None:
    """Check that no held-out episode is fitted on by way of its dataset's other mention."""
    for part in held:
        key = part.dataset.cache.name
        again = [other for other in fitted if other.dataset.cache.name == key]
        if again and np.isin(np.concatenate([other.episodes for other in again]), part.episodes).any():
            raise ConfigError(
                f"world_model.datasets: some episodes of {part.dataset.path} are held out to choose the thresholds, "
                f"and fitted on as well, since {again[-1].dataset.path} is named once more, there or in "
                "world_model.success_datasets; name it once, or name other episodes of the policy in calibrate_on"
            )
