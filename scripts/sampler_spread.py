"""How far imagined futures scatter beside how far they err, and what that does to their order, by sampler.

    vla-rl collect tabletop_grpo collect.source=policy collect.episodes_per_task=64 collect.group_size=4 \
        collect.start_index=400000 collect.every_frame=false -o datasets/groups
    python scripts/sampler_spread.py pretrained:tabletop datasets/groups --samplers 2:.25 2:1 10:1

A sampler is STEPS:TEMPERATURE of the dynamics' flow. Prints a line of JSON each.
"""

from __future__ import annotations

import argparse
import json

from vla_rl.data.config import DatasetConfig
from world_model.config import ImaginationConfig
from world_model.data.episodes import EpisodeFrames, logged_episodes, open_episodes
from world_model.metadata import resolve_path
from world_model.model.world_model import load_world_model
from world_model.trust.config import MeasureConfig
from world_model.trust.measure import measure
from world_model.trust.subject import OpenLoop
from world_model.trust.types import TrustData

FIGURES = ("spread", "group_correlation", "auc", "outcome_flips", "skill", "false_success", "missed_success")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world_model")
    parser.add_argument("dataset", help="Real episodes that it was not fitted on, several from each initial state.")
    parser.add_argument("--samplers", nargs="+", default=["2:.25", "2:1", "10:1"], metavar="STEPS:TEMPERATURE")
    args = parser.parse_args()
    model = load_world_model(resolve_path(args.world_model), "cpu").compute_in("auto")
    spec = model.metadata.env_spec()
    dataset = open_episodes(DatasetConfig(path=args.dataset), spec)
    frames = EpisodeFrames.of(dataset, model.frame_steps, spec.action_low, spec.action_high)
    data = TrustData(logged_episodes(frames))
    config = MeasureConfig(inverse_updates=0, auc_frames=0)
    for sampler in args.samplers:
        steps, temperature = sampler.split(":")
        model.set_dynamics_options(sampling_steps=int(steps), temperature=float(temperature))
        figures = measure(OpenLoop(model, ImaginationConfig(), 1), data, config).report.figures
        found = {name: [round(x, 3) for x in (f.value, f.low, f.high)] for name in FIGURES if (f := figures.get(name))}
        print(json.dumps({"steps": int(steps), "temperature": float(temperature), **found}), flush=True)


if __name__ == "__main__":
    main()
