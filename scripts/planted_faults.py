"""Damaged copies of a world model, to see what trust says of them and what RL gains in them.

    python scripts/planted_faults.py WORLD_MODEL --output runs/faults

Writes one folder per fault: `noisy_dynamics_N` and `noisy_success_N` (each weight matrix of the dynamics, or of both
success networks, with Gaussian noise of N % of its root mean square), `optimist` (what the success networks give more
than `OPTIMIST` counts as a success), `pessimist` (both thresholds higher by `PESSIMIST`), and where it has a calibrated
probability `too_sure` (its logit times `TOO_SURE`, which changes no verdict and no order).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from world_model.model.world_model import WorldModel, load_world_model

DYNAMICS_NOISE, SUCCESS_NOISE = (0.05, 0.1, 0.2), (0.2, 0.4)
OPTIMIST, PESSIMIST = -1.0, 1.5  # logits
TOO_SURE = 4.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world_model", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    for share in DYNAMICS_NOISE:
        damaged = load_world_model(arguments.world_model)
        shake(damaged.dynamics, share)
        save(damaged, arguments.output / f"noisy_dynamics_{100 * share:.0f}")
    for share in SUCCESS_NOISE:
        damaged = load_world_model(arguments.world_model)
        shake(damaged.success, share)
        shake(damaged.clip, share)
        save(damaged, arguments.output / f"noisy_success_{100 * share:.0f}")
    metadata = load_world_model(arguments.world_model).metadata
    thresholds = {
        "optimist": (OPTIMIST, OPTIMIST),
        "pessimist": (metadata.success_threshold + PESSIMIST, metadata.clip_threshold + PESSIMIST),
    }
    for name, (success, clip) in thresholds.items():
        damaged = load_world_model(arguments.world_model)
        damaged.metadata = metadata.model_copy(update={"success_threshold": success, "clip_threshold": clip})
        save(damaged, arguments.output / name)
    damaged = load_world_model(arguments.world_model)
    if metadata.success_probability is None:
        print("no too_sure: it has no calibrated probability of success")
        return
    slope, intercept = metadata.success_probability
    changes = {"success_probability": (TOO_SURE * slope, TOO_SURE * intercept)}
    damaged.metadata = metadata.model_copy(update=changes)
    save(damaged, arguments.output / "too_sure")


def shake(network: Any, share: float) -> None:
    """Add Gaussian noise of `share` of its root mean square to each parameter of two dimensions or more of a module."""
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        if parameter.dim() >= 2:
            scale = share * parameter.data.float().pow(2).mean().sqrt()
            parameter.data += scale * torch.randn(parameter.shape, generator=generator).to(parameter)


def save(damaged: WorldModel, folder: Path) -> None:
    damaged.save(folder)
    print(f"written: {folder}")


if __name__ == "__main__":
    main()
