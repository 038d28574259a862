"""Options of datasets and of image augmentation. Imports neither torch nor lerobot."""

from __future__ import annotations

import os
from collections import Counter
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from vla_rl.config import Config, ConfigError, as_list

Frames = Literal["all", "rac", "hg_dagger", "corrections"]


class DatasetError(ValueError):
    """A dataset that is missing, damaged or does not fit; the message says what was found and what to do."""


def _one_each(cameras: dict[str, str]) -> dict[str, str]:
    if twice := [camera for camera, count in Counter(cameras.values()).items() if count > 1]:
        views = [name for name, camera in cameras.items() if camera == twice[0]]
        raise ConfigError(f"camera_map: {views} are all said to be {twice[0]!r}; a policy's camera is one of them")
    return cameras


class DatasetConfig(Config):
    """One LeRobotDataset v3, and which part of it to learn from."""

    shorthand: ClassVar[str] = "path"

    path: Annotated[str, AfterValidator(os.path.expanduser)] = Field(
        description="The dataset's folder (it holds meta/info.json); where there is none, the hub's "
        "ORGANIZATION/NAME[@REVISION] (a branch, tag or commit)."
    )
    weight: PositiveFloat = Field(
        default=1.0,
        description="Share of each batch, relative to the other datasets'. Of what a critic (of `offline`, `online` or "
        "`hil`) draws: its share is in proportion to this times its episodes.",
    )
    only_successes: bool = Field(default=False, description="Leave out episodes that failed.")
    frames: Frames = Field(
        default="all",
        description="Which frames of episodes with interventions. rac: a person's, and the policy's in episodes that "
        "it solved alone; hg_dagger: a person's; corrections: a person's without the recoveries; all: every one, "
        "failures and rewinding included.",
    )
    episodes_per_task: PositiveInt | None = Field(
        default=None, description="Use this many episodes of each instruction, drawn at random, always the same."
    )
    camera_map: Annotated[dict[str, str], AfterValidator(_one_each)] = Field(
        default={},
        validate_default=False,
        description="The dataset's camera name -> the policy's, where they differ.",
    )


class AugmentConfig(Config):
    """Random changes of the training images; all off by default. OpenVLA: crop_area .9, the rest .2."""

    shift: NonNegativeInt = Field(default=0, description="Shift by up to this many pixels each way, edges repeated.")
    crop_area: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Area of a random square crop, scaled back to full size. A policy trained with it should see the "
        "center crop of the same area when it acts (policy.images.crop_area), which these crops then stand in for.",
    )
    brightness: NonNegativeFloat = Field(default=0.0, description="Largest change of brightness, of full scale.")
    contrast: float = Field(default=0.0, ge=0, lt=1, description="Largest relative change of contrast.")
    color: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Largest relative change of saturation; a quarter of it is the largest turn of the hue, as a "
        "fraction of the color circle.",
    )

    @property
    def recolors(self) -> bool:
        """Whether any change of brightness or color is on."""
        return bool(self.brightness or self.contrast or self.color)

    @property
    def active(self) -> bool:
        return bool(self.shift or self.crop_area < 1 or self.recolors)


_Input = str | list[str | DatasetConfig]  # A recipe may write `datasets: path`, or a list of paths.
Datasets = Annotated[
    tuple[DatasetConfig, ...], Field(min_length=1), BeforeValidator(as_list, json_schema_input_type=_Input)
]
MaybeDatasets = Annotated[  # The same, where there may be none.
    tuple[DatasetConfig, ...], BeforeValidator(as_list, json_schema_input_type=_Input)
]
