"""`vla-rl world-model fit`: autoencoder, dynamics, success networks, value, objects, inverse dynamics,
threshold; resumable stages.

folder/
  stages/autoencoder/ ...        weights of finished stages, which are not fitted again
  checkpoints/dynamics/ ...      the stage under way
  world_model/                   the result
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vla_rl.common.atomic import atomic_folder
from vla_rl.common.precision import wants_bf16
from vla_rl.common.progress import step_progress
from vla_rl.config import ConfigError
from vla_rl.evaluation.probability import CalibrationError
from vla_rl.interfaces import EnvConfig
from vla_rl.training.checkpoint import (
    checkpoint_path,
    keep_last,
    latest_checkpoint,
    save_checkpoint,
)
from vla_rl.training.trainer import Loss
from vla_rl.types import EnvSpec
from world_model.config import FitStage, WorldModelConfig
from world_model.data.clips import ClipDataset
from world_model.data.episodes import EpisodeFrames, state_statistics
from world_model.data.latents import ImageSamples, open_latents
from world_model.data.objects import ObjectSamples
from world_model.data.outcomes import ValueSamples
from world_model.data.styled import StyledImages
from world_model.fit.calibration import calibrate, no_threshold, threshold_values
from world_model.fit.config import FitConfig
from world_model.fit.data import FitData, content_keys
from world_model.fit.inverse import calibrate_inverse, inverse_loss, learn_scale
from world_model.fit.objects import calibrate_objects, objects_loss, prepare_objects
from world_model.fit.replay import ImaginedSamples, Logits, RefitGuard, replay_logits, success_loss
from world_model.fit.stage import WEIGHTS, finished_weights, resume_stage, stage_checkpoints, stage_trainer
from world_model.fit.start import body_in, check_start, continue_in, for_env
from world_model.fit.value import calibrate_value, value_loss
from world_model.interfaces import SuccessHead
from world_model.metadata import WorldModelMetadata
from world_model.model.autoencoder import TinyAutoencoder
from world_model.model.parts import build_parts
from world_model.model.success import LatentSuccessHead, ValueHead
from world_model.model.world_model import WorldModel, load_world_model
from world_model.types import Frames, LoggedEpisode

log = logging.getLogger(__name__)

OnMetrics = Callable[[int, Mapping[str, Any]], None]
CALIBRATION_IMAGES = 1024
LOG_EVERY = 50
# Small networks that imagine in float32 as well, see `WorldModel.compute_in`.
IN_FLOAT32 = ("objects", "inverse")


def fit(
    config: FitConfig,
    spec: EnvSpec,
    folder: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    on_metrics: OnMetrics | None = None,
    needs_threshold: bool = True,
    show: bool = False,
    env: EnvConfig | None = None,
) -> Path:
    """Fit a world model and return its folder, `folder`/world_model. Stopped anywhere, the same call goes on.

    The same seed gives the same result on a CPU.

    Args:
        spec: the environment that it imitates.
        on_metrics: called with (updates done over all stages, metrics).
        needs_threshold: False: where the episodes cannot bound false successes, no threshold is chosen
            (`WorldModelMetadata.no_threshold`), and the fit goes on.
        show: each stage's progress on the console.
        env: whose `spec` it is; needed for a dynamics that is conditioned on the robot's body.

    Raises:
        ConfigError: no dataset, a start that does not fit the environment, or no simulator of the body that is needed.
        DatasetError: a dataset that is damaged or of another robot, or without successes or failures.
        CalibrationError: too few failures to bound false successes, or no threshold that does; without the need of
            one, episodes that all succeeded or all failed.
    """
    result = Path(folder) / "world_model"
    if result.is_dir():
        return result
    run = _Fit(config, spec, Path(folder), seed, device, on_metrics, show, env, needs_threshold=needs_threshold)
    run.autoencoder()
    if config.cross_fit and (config.dynamics.steps or config.success.steps):
        folds = (
            _Fit(config, spec, Path(folder) / "folds" / str(k), seed, device, None, show, env, k)
            for k in range(config.cross_fit)
        )
        scored = [one for fold in folds for one in fold.scored()]
        guard = run.guard([episode for episode, _, _ in scored])
        if guard.admits(Logits([success for _, success, _ in scored], [clip for _, _, clip in scored])):
            run.dynamics()
            run.success()
    else:
        guard = run.guard()
        if config.dynamics.steps:
            guard.watch("dynamics", ["dynamics"], run.dynamics)
        if config.success.steps:
            guard.watch("success", ["success", "clip"], run.success)
    run.value()
    run.objects()
    run.inverse()
    run.calibrate(guard)
    run.calibrate_value()
    run.calibrate_objects()
    run.calibrate_inverse()
    run.world_model.save(result, torch.float16 if config.weights == "float16" else None)
    for name in ("checkpoints", "folds"):
        shutil.rmtree(Path(folder) / name, ignore_errors=True)
    return result


class _Fit:
    """The stages share the data and the world model under way."""

    def __init__(
        self,
        config: FitConfig,
        spec: EnvSpec,
        folder: Path,
        seed: int,
        device: str,
        on_metrics: OnMetrics | None,
        show: bool,
        env: EnvConfig | None,
        fold: int | None = None,
        needs_threshold: bool = True,
    ) -> None:
        if not config.datasets:
            raise ConfigError("world_model.datasets: empty; name at least one LeRobotDataset (`vla-rl collect`)")
        self.config, self.folder, self.seed, self.on_metrics = config, folder, seed, on_metrics
        self.updates, self.fold, self.needs_threshold, self.show = 0, fold, needs_threshold, show
        start = load_world_model(config.start_from, device) if config.start_from else None
        if start is not None:
            check_start(start, spec, config)
        self.model = start.config if start is not None else for_env(config.model or WorldModelConfig(), spec)
        body = body_in(start, self.model, spec, env)
        if body and config.objects.steps:
            raise ConfigError(
                "world_model.objects.steps: the objects part takes no dynamics with kinematics=body; set 0"
            )
        self.data = FitData.open(config, spec, self.model.frame_steps, seed, fold, body, show)
        if fold is None:
            self.data.check_calibration(config, needs_threshold)
        self.start_saw = () if start is None else start.metadata.datasets
        if config.calibrate_on and set(self.start_saw) & set(content_keys(self.data.calibration)):
            log.warning(
                "world_model.calibrate_on: %s has learned from a dataset of it, so thresholds and probabilities may be "
                "chosen on episodes that are known; name others of the policy",
                config.start_from,
            )
        if start is not None:
            fitted_on = content_keys(self.data.learned(config))
            seen = {*start.metadata.datasets, *fitted_on}
            metadata = continue_in(start, spec, self.data.fitted, body, config.start_from)
            metadata, self.model = metadata.model_copy(update={"datasets": tuple(sorted(seen))}), start.config
        else:
            mean, std = state_statistics(self.data.fitted)
            datasets = content_keys([*self.data.fitted, *self.data.judged])
            metadata = WorldModelMetadata.of(spec, mean, std, datasets=datasets, body=body)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.world_model = start or WorldModel(self.model, metadata, build_parts(self.model, metadata)).to(device)
            if start is not None and config.fresh_success:
                fresh = build_parts(self.model, metadata)
                start.success, start.clip = fresh.success, fresh.clip
                start.to(device)
            self.value_is_fresh = self.world_model.value_head is None
            if config.value.steps:
                self.world_model.add_value_head()
            self.objects_are_fresh = prepare_objects(self.world_model, config.objects)
            if config.inverse.steps:
                self.world_model.add_inverse()
        self.world_model.metadata = metadata
        sampling = {"temperature": config.temperature, "sampling_steps": config.sampling_steps}
        self.world_model.set_dynamics_options(**{name: value for name, value in sampling.items() if value is not None})

    # --- data --------------------------------------------------------------------------------

    def _clips(self, episodes: Sequence[EpisodeFrames], cuts: int = 1) -> ClipDataset:
        """Clips of episodes, cut in `cuts` ways, evenly over a frame's steps."""
        metadata, steps = self.world_model.metadata, self.model.frame_steps
        first_steps = sorted({max(steps * (i + 1) // cuts, 1) for i in range(cuts)})
        parts = [
            open_latents(part.cut_after(first), self.world_model.autoencoder)
            for part in episodes
            for first in first_steps
        ]
        return ClipDataset(parts, self.config.clip_frames, np.array(metadata.state_mean), np.array(metadata.state_std))

    # --- stages ------------------------------------------------------------------------------

    def autoencoder(self) -> None:
        """Reconstruct the episodes' images; then measure the latents' scale."""
        network = self.world_model.autoencoder
        stage = self.config.autoencoder
        if not stage.steps:
            return
        if not isinstance(network, TinyAutoencoder):
            raise ConfigError("world_model.autoencoder.steps: a pretrained one is taken as it is; set steps to 0")
        datasets = [part.dataset for part in self.data.fitted]
        device, samples = self.world_model.device, ImageSamples(datasets)
        draw = samples.batch_there if not self.data.restylers and samples.hold(device) else samples.batch
        if self.data.restylers:
            samples = StyledImages(datasets, self.data.restylers, self.config.style.share)
            draw = samples.batch

        def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
            images, background = draw(stage.batch_size, self.seed, step)
            return network.loss(images.to(device), background.to(device), _generator(self.seed, step, device))

        images = samples.batch(CALIBRATION_IMAGES, self.seed, stage.steps)[0].to(self.world_model.device)

        def begin() -> None:
            if self.config.start_from is None:
                network.start(images)

        self._stage("autoencoder", network, loss, stage, before=begin, after=lambda: network.calibrate(images))

    def dynamics(self) -> None:
        """Predict the next frames of clips."""
        network = self.world_model.dynamics
        stage = self.config.dynamics
        if not stage.steps:
            return
        section, kind = self.config.clip_source, self.model.dynamics.kind
        if section is not None and not self.model.dynamics.learns_from_own_frames:
            raise ConfigError(f"world_model.clip_source: not for dynamics of kind {kind}; set it to null")
        clips, device = self._clips(self.data.shown, self.config.cuts), self.world_model.device
        source = None if section is None else section.build(clips, network, stage.steps, self.seed, device)
        if source is None:
            clips.hold(device)

        def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
            if source is None:
                clip, context = clips.batch(stage.batch_size, self.seed, step), None
            else:
                clip, context = source.batch(stage.batch_size, step)
            if context is None:
                return network.loss(clip.to(device), _generator(self.seed, step, device))
            context = Frames(context.latents.to(device), context.states.to(device))
            return network.loss(clip.to(device), _generator(self.seed, step, device), context)

        self._stage("dynamics", network, loss, stage)

    def success(self) -> None:
        """Tell success from failure, on real frames and on those that the dynamics imagines from the same actions."""
        stage = self.config.success
        if not stage.steps:
            return
        clips, imagined = self._clips(self.data.judged), None
        longest, latents = max(int(part.frames.counts.max()) for part in clips.parts), clips.parts[0].latents
        wanted = self.config.imagined_episodes if self.config.imagined_share else 0
        clips.hold(self.world_model.device, wanted * longest * latents[0].nbytes)
        for number, name in enumerate(("success", "clip")):
            network: SuccessHead = getattr(self.world_model, name)
            if self._load_finished(name, network):
                self.updates += stage.steps
                continue
            if imagined is None and self.config.imagined_share:
                imagined = ImaginedSamples.of(self.world_model, clips, self.config.imagined_episodes, self.seed)
            loss = success_loss(network, clips, imagined, self.config, self.seed, number, self.world_model.device)
            self._stage(name, network, loss, stage)

    def value(self) -> None:
        """Tell at every real frame whether its episode will succeed; a first value starts as the success head."""
        stage, network, device = self.config.value, self.world_model.value_head, self.world_model.device
        if network is None or not stage.steps:
            return
        samples = ValueSamples(self._clips(self.data.judged), self.world_model.metadata, network.num_frames)

        def begin() -> None:
            success = self.world_model.success
            if self.value_is_fresh and isinstance(network, ValueHead) and isinstance(success, LatentSuccessHead):
                network.start_from(success)

        self._stage("value", network, value_loss(network, samples, stage, self.seed, device), stage, before=begin)

    def calibrate_value(self) -> None:
        """Turn the value into a probability, on the held-out episodes; it goes where it tells nothing of them."""
        if self.world_model.value_head is None:
            return
        found = calibrate_value(self.world_model, self._clips(self.data.calibration), self.seed)
        if found is None:
            log.warning(
                "value: on the held-out episodes, a higher one does not mean more success, so the world model is saved "
                "without it; fit it longer (world_model.value.steps) or on more of the policy's episodes"
            )
            self.world_model.value_head = None
        values = {
            "value_probability": None if found is None else (found.slope, found.intercept),
            "value_calibration": {} if found is None else found.model_dump(mode="json"),
        }
        self.world_model.metadata = self.world_model.metadata.model_copy(update=values)

    def objects(self) -> None:
        """Read objects' poses off real frames, and roll them with the actions."""
        stage, network = self.config.objects, self.world_model.objects
        if network is None or not stage.steps:
            return
        samples = ObjectSamples(self._clips(self.data.fitted), network.config.slots, stage)

        def begin() -> None:
            poses, positions = (values.to(self.world_model.device) for values in samples.all_poses())
            if self.objects_are_fresh:
                network.learn_ranges(poses, positions)
            else:
                network.widen_reach(positions)

        self._stage("objects", network, objects_loss(network, samples, stage, self.seed), stage, before=begin)

    def calibrate_objects(self) -> None:
        """Choose its probability, on the held-out episodes."""
        if self.world_model.objects is not None:
            calibrate_objects(self.world_model, self._clips(self.data.calibration))

    def inverse(self) -> None:
        """Read actions off pairs of real frames."""
        network, stage = self.world_model.inverse, self.config.inverse
        if network is None or not stage.steps:
            return
        clips, seed = self._clips(self.data.fitted), self.seed
        loss = inverse_loss(network, clips, stage, seed)
        self._stage("inverse", network, loss, stage, before=lambda: learn_scale(network, clips, seed))

    def calibrate_inverse(self) -> None:
        """Find the errors between which the action penalty rises, on the held-out episodes."""
        if self.world_model.inverse is not None:
            calibrate_inverse(self.world_model, self._clips(self.data.calibration), self.seed)

    def scored(self) -> list[tuple[LoggedEpisode, np.ndarray, np.ndarray]]:
        """Fit on the other folds, and score this one's episodes: each with both networks' logits."""
        self.dynamics()
        self.success()
        episodes = self.data.calibration_episodes()
        return list(zip(episodes, *replay_logits(self.world_model, episodes, self.seed), strict=True))

    def guard(self, episodes: Sequence[LoggedEpisode] | None = None) -> RefitGuard:
        """What keeps parts from getting worse than in a start that has not seen the episodes; it compares nothing where
        there is no such start, or latents mean something else now."""
        config, seen = self.config, set(self.start_saw) & set(content_keys(self.data.calibration))
        comparable = not (seen or config.fresh_success or config.autoencoder.steps)
        episodes = episodes or self.data.calibration_episodes()
        return RefitGuard(self.world_model, config.start_from if comparable else None, episodes, self.seed)

    def calibrate(self, guard: RefitGuard) -> None:
        """Choose the threshold on held-out episodes, imagined with their logged actions by what was kept."""
        episodes = guard.episodes
        logits = guard.logits or Logits(*replay_logits(self.world_model, episodes, self.seed))
        outcomes = ([one.succeeded for one in episodes], [one.start for one in episodes])
        bound = {"max_false_success": self.config.max_false_success, "min_failures": self.config.min_failures}
        try:
            found = calibrate(*logits, *outcomes, **bound)
            values, figures = threshold_values(found), found.figures
        except CalibrationError as error:
            if self.needs_threshold:
                raise
            log.warning("no threshold of success was chosen, and RL is not paid by one. %s", error)
            values, figures = no_threshold(logits.score, *outcomes, reason=str(error)), {}
        values |= {
            "calibrated_on": content_keys(self.data.calibration),
            "refits": {part: refit.model_dump(mode="json") for part, refit in guard.refits.items()},
        }
        self.world_model.metadata = self.world_model.metadata.model_copy(update=values)
        figures = {f"calibration/{name}": figure.value for name, figure in figures.items()}
        figures |= {f"refit/{part}_auc_change": refit.change.value for part, refit in guard.refits.items()}
        self._log(self.updates, figures)

    # --- one stage ---------------------------------------------------------------------------

    def _stage(
        self,
        name: str,
        network: nn.Module,
        loss: Loss,
        stage: FitStage,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        earlier, self.updates = self.updates, self.updates + stage.steps
        if self._load_finished(name, network):
            return
        folder = stage_checkpoints(self.folder, name)
        before()
        on_cpu = self.world_model.device.type == "cpu"
        low_precision = wants_bf16(self.config.precision, self.world_model.device.type) and name not in IN_FLOAT32
        trainer = stage_trainer(network, stage, "success" if name == "clip" else name, low_precision)
        if (checkpoint := latest_checkpoint(folder)) is not None:
            resume_stage(trainer, checkpoint)

        def on_step(step: int, metrics: dict[str, float]) -> None:
            advance(step, f"loss {metrics['loss']:.4f}" if "loss" in metrics else "")
            if step % LOG_EVERY == 0 or step == stage.steps:
                self._log(earlier + step, {f"{name}/{key}": value for key, value in metrics.items()})
            if step % self.config.save_every == 0 and step < stage.steps:
                keep_last(save_checkpoint(checkpoint_path(folder, step), *trainer.state()), 1)

        told = name if self.fold is None else f"{name}, fold {self.fold + 1} of {self.config.cross_fit}"
        with step_progress(told, stage.steps, self.show and stage.steps > 0) as advance:
            advance(trainer.num_steps, "")
            # On a device the numbers are read where they are logged or saved, so that it never waits for the host.
            trainer.run(loss, on_step, 1 if on_cpu else math.gcd(LOG_EVERY, self.config.save_every))
        network.eval()
        after()
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in network.state_dict().items()}
        with atomic_folder(finished_weights(self.folder, name).parent, f"{name} stage", replace=True) as partial:
            save_file(tensors, partial / WEIGHTS)

    def _load_finished(self, name: str, network: nn.Module) -> bool:
        file = finished_weights(self.folder, name)
        if not file.is_file():
            return False
        network.load_state_dict(load_file(file))
        network.eval()
        return True

    def _log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self.on_metrics is not None:
            self.on_metrics(step, metrics)


def _generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    state = int(np.random.SeedSequence([seed, step]).generate_state(1)[0])
    return torch.Generator(device).manual_seed(state)
