"""World models whose dynamics knows nothing yet, one complete and two with a part left out: where ablations start.

    python scripts/fresh_dynamics.py WORLD_MODEL --output runs/fresh

Autoencoder and success networks are the given world model's; the dynamics has new weights. Writes `complete`,
`no_reference` (without the reference frame) and `no_context_noise`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from world_model.model.parts import build_parts
from world_model.model.world_model import load_world_model

VARIANTS: dict[str, dict[str, Any]] = {
    "complete": {},
    "no_reference": {"reference": False},
    "no_context_noise": {"context_noise": 0.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world_model", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    for name, change in VARIANTS.items():
        start = load_world_model(arguments.world_model)
        dynamics = start.config.dynamics.model_copy(update=change)
        start.config = start.config.model_copy(update={"dynamics": dynamics})
        torch.manual_seed(0)
        start.dynamics = build_parts(start.config, start.metadata).dynamics
        start.save(arguments.output / name)
        print(f"written: {arguments.output / name}")


if __name__ == "__main__":
    main()
