"""How long short branches are, by what a world model says about itself. Imports no torch."""

from __future__ import annotations

from vla_rl.config import ConfigError
from world_model.config import ImaginationConfig
from world_model.metadata import WorldModelMetadata
from world_model.model.lacking import NO_VALUE

BRANCH_AUC = 0.85  # A branch is as deep as the value's AUC stays at this.


def steps_of_branches(metadata: WorldModelMetadata, frame_steps: int, config: ImaginationConfig) -> int | None:
    """Control steps since a real frame after which an episode ends, worth the value; None: none.

    Args:
        frame_steps: of the world model. config: its horizon is the one that holds, measured or given.

    Raises:
        ConfigError: the world model has no value, with "auto" none whose AUC is high enough on imagined frames, or the
            horizon ends episodes before branches do.
    """
    if config.branch_frames is None:
        return None
    if metadata.value_probability is None:
        raise ConfigError(NO_VALUE)
    frames = config.branch_frames
    if frames == "auto":
        frames = _deepest(metadata, None if config.horizon is None else config.horizon // frame_steps)
    check_depth(frames, frame_steps, config)
    return frames * frame_steps


def check_depth(frames: int, frame_steps: int, config: ImaginationConfig) -> None:
    """Check that episodes go on for as many frames since a real one.

    Raises:
        ConfigError: the horizon ends them before.
    """
    if config.horizon is None or frames <= (room := config.horizon // frame_steps):
        return
    most = f"give {room} at most" if room else "leave it null"
    raise ConfigError(
        f"env.imagination.branch_frames: got {config.branch_frames!r}, {frames} frames of {frame_steps} control "
        f"steps, but imagined episodes end after {config.horizon} (env.imagination.horizon, or where that is null "
        f"the trust horizon that was measured), and there a branch is not worth the value; {most}, or set "
        f"env.imagination.horizon={frames * frame_steps}"
    )


def _deepest(metadata: WorldModelMetadata, room: int | None) -> int:
    """Frames since a real one up to which the value's AUC is high enough; within the horizon's `room` where any is."""
    figures = metadata.value_calibration.get("by_depth", ())
    measured = [figure["auc"] or 0.0 for figure in figures]
    deep = [depth for depth, auc in enumerate(measured) if depth and min(measured[1 : depth + 1]) >= BRANCH_AUC]
    if not deep:
        raise ConfigError(
            f"env.imagination.branch_frames: got 'auto', but one frame after a real one the value's AUC is below "
            f"{BRANCH_AUC:g} (by frames since a real one: {', '.join(f'{auc:.3f}' for auc in measured) or 'unknown'}); "
            "give a number, or fit the value on more episodes"
        )
    return max([depth for depth in deep if room is None or depth <= room] or deep[:1])
