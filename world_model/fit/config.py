"""Options of `vla-rl world-model fit` and `eval`: a recipe's `world_model` section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from vla_rl.config import Config, ConfigError
from vla_rl.data.config import DatasetConfig, MaybeDatasets
from vla_rl.types import EnvSpec, Episode
from world_model.config import (
    BootstrapConfig,
    ImaginationConfig,
    KeyframeConfig,
    StageConfig,
    StyleConfig,
    WorldModelConfig,
)
from world_model.trust.config import MeasureConfig, TrustConfig

if TYPE_CHECKING:
    from world_model.trust.ranking import Ranking


class FitConfig(Config):
    """Data, start, and the stages, one after another."""

    kind: Literal["latent_video"] = "latent_video"
    model: WorldModelConfig | None = Field(
        default=None, description="What it is made of; null takes it from start_from, or the defaults."
    )
    datasets: MaybeDatasets = Field(default=(), description="LeRobotDatasets to learn from.")
    success_datasets: MaybeDatasets = Field(
        default=(),
        description="What the success networks learn from; empty: `datasets`. Give them episodes that the dynamics has "
        "not learned from, since it imagines those that it has too well.",
    )
    start_from: str | None = Field(
        default=None, description="A world model to fine-tune: a folder, or pretrained:NAME; null starts from scratch."
    )
    fresh_success: bool = Field(
        default=False, description="Start the success networks from random weights, whatever start_from has."
    )
    calibrate_on: MaybeDatasets = Field(
        default=(), description="The policy's own episodes, for the threshold; empty holds some of `datasets` out."
    )
    holdout: float = Field(default=0.15, gt=0, lt=1, description="Share of the episodes held out for the threshold.")
    holdout_from: Literal["all", "last"] = Field(
        default="all", description="Of which of `datasets`; last: of the last alone, the newest policy's in the loop."
    )
    temperature: float | None = Field(
        default=None, ge=0, le=1, description="Of imagining, see model.dynamics; null takes the model's."
    )
    clip_frames: PositiveInt = Field(default=8, ge=2, description="T, frames of a clip, the reference included.")
    cuts: PositiveInt = Field(
        default=1,
        description="Ways of cutting an episode into frames that the dynamics learns from.",
    )
    autoencoder: StageConfig = Field(default_factory=StageConfig)
    dynamics: StageConfig = Field(default_factory=StageConfig)
    success: StageConfig = Field(default_factory=StageConfig)
    bootstrap: BootstrapConfig = Field(
        default_factory=BootstrapConfig, description="The dynamics' own frames as context while it is fitted."
    )
    style: StyleConfig = Field(
        default_factory=StyleConfig, description="Images and clips in other styles, for every stage."
    )
    imagined_share: float = Field(
        default=0.5, ge=0, le=1, description="Of the success heads' examples, those on frames that the model imagined."
    )
    imagined_episodes: PositiveInt = Field(
        default=2000, description="Imagined for the success heads, drawn in proportion to the datasets' weights."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="Of computing while fitting; auto: bf16 where the hardware multiplies it natively."
    )
    max_false_success: float = Field(
        default=0.1, gt=0, lt=1, description="The threshold keeps the false-success rate's upper 95 % limit below this."
    )
    min_failures: PositiveInt = Field(
        default=40, description="Held-out failed episodes needed to calibrate the threshold."
    )
    weights: Literal["float32", "float16"] = Field(
        default="float32", description="How the fitted world model is stored; float16 takes half the room."
    )
    save_every: PositiveInt = Field(default=200, description="Updates between checkpoints of a stage.")
    measure: MeasureConfig = Field(default_factory=MeasureConfig)
    keyframes: KeyframeConfig = Field(
        default_factory=KeyframeConfig, description="Moments that `keyframes` mines for RL to start from."
    )
    compare_episodes: PositiveInt = Field(
        default=20, description="Real and imagined episodes per task for each policy that `eval` compares."
    )

    @model_validator(mode="after")
    def _resumes_exactly(self) -> FitConfig:
        every = self.bootstrap.refresh_every
        if self.bootstrap.share and self.save_every % every:
            raise ConfigError(
                f"world_model.bootstrap.refresh_every: got {every}, must divide save_every ({self.save_every}), or a "
                "stopped fit would not go on as it was"
            )
        return self

    def fit(
        self,
        spec: EnvSpec,
        folder: Path,
        *,
        seed: int = 0,
        device: str = "cpu",
        on_metrics: Callable[[int, Mapping[str, Any]], None] | None = None,
    ) -> Path:
        """Fit a world model of the environment that `spec` describes; returns its folder. See `world_model.fit`."""
        from world_model.fit.fit import fit

        return fit(self, spec, folder, seed=seed, device=device, on_metrics=on_metrics)

    def updates_kept(self, folder: Path) -> int:
        """Updates, over all stages, that `fit` would not make again in this folder."""
        from world_model.fit.fit import updates_kept

        return updates_kept(self, folder)

    def measure_trust(
        self,
        world_model: Path,
        held_out: Sequence[Path],
        policies: Sequence[tuple[str, Sequence[str], Sequence[bool], Sequence[bool]]] = (),
        *,
        train: Sequence[Path] = (),
        styles: Mapping[str, Path] | None = None,
        imagination: ImaginationConfig | None = None,
        trust: TrustConfig | None = None,
        chunk_size: int | None = None,
        device: str = "cpu",
        show: Callable[[str], None] | None = None,
        folder: Path | None = None,
    ) -> Path:
        """Write trust.json and trust.html into the world model's folder; returns the page.

        Args:
            held_out: datasets of real episodes of the policy, on none of which it was fitted or its thresholds chosen.
            policies: name, names of initial states, real and imagined success from each.
            train: datasets that the inverse dynamics learns from; empty takes half of the held-out episodes.
            styles: name -> dataset of episodes with another look.
            imagination: how the environment imagines. trust: what is required of it.
            chunk_size: H, actions of the policy's chunk, over which successes are verified; None: one frame.
            folder: for the report, in place of the world model's.
        """
        from world_model.trust.evaluate import measure_trust

        return measure_trust(
            self.measure,
            world_model,
            held_out,
            policies,
            train=train,
            styles=styles,
            imagination=imagination or ImaginationConfig(),
            require=(trust or TrustConfig()).require,
            chunk_size=chunk_size,
            device=device,
            show=show,
            out=folder,
        )

    def mine_keyframes(self, world_model: Path, datasets: Sequence[Path], file: Path, *, device: str = "cpu") -> Path:
        """Mine datasets of real episodes for keyframes, by the world model's latents; writes and returns the file.

        See `world_model.keyframes`.
        """
        from world_model.data.keyframes import mine_keyframes

        mine_keyframes(world_model, datasets, self.keyframes, device).save(file)
        return file

    @property
    def needs_structure(self) -> bool:
        """Whether episodes to fit on must be recorded with `collect.structure`."""
        return self.style.share > 0

    def write_style_sheet(
        self, dataset: Path, spec: EnvSpec, file: Path, *, seed: int = 0, num_episodes: int = 4, num_styles: int = 6
    ) -> list[str]:
        """Show a dataset's episodes in styles as fitting draws them; see `world_model.style_sheet`."""
        from world_model.data.style_sheet import write_style_sheet

        known = [one for one in self.datasets if Path(one.path) == Path(dataset)]
        config = known[0] if known else DatasetConfig(path=str(dataset))
        return write_style_sheet(
            self.style, config, spec, file, seed=seed, num_episodes=num_episodes, num_styles=num_styles
        )

    def judge_episodes(
        self, world_model: Path, episodes: Sequence[Episode], *, imagination: ImaginationConfig, device: str = "cpu"
    ) -> list[bool]:
        """What the success head says of real episodes' frames; see `world_model.ranking`."""
        from world_model.trust.ranking import judge_episodes

        return judge_episodes(world_model, episodes, imagination, device)

    def rank(
        self, outcomes: Sequence[tuple[str, Sequence[str], Sequence[bool], Sequence[bool], Sequence[bool]]]
    ) -> Ranking:
        """Order policies by imagined success; see `world_model.ranking.rank`."""
        from world_model.trust.ranking import rank

        return rank(outcomes)
