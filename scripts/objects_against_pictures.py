"""What the objects part says of held-out episodes with poses, beside what the imagined pictures say, open loop.

    python scripts/objects_against_pictures.py WORLD_MODEL DATASET [--pictures]

DATASET was collected with collect.objects, in groups (collect.group_size). Printed: AUC, the order within an initial
state, calibration error, and verdicts at a probability of a half; from poses that the probe reads, from the true ones,
and with --pictures (slow) of the success networks; and how far off the probe reads slot 0, by task.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from scipy.special import expit

from vla_rl.data.config import DatasetConfig
from vla_rl.evaluation.outcomes import calibration
from vla_rl.evaluation.signal import auc_figure, group_correlation
from world_model.data.clips import ClipDataset
from world_model.data.episodes import EpisodeFrames, logged_episodes, open_episodes
from world_model.data.latents import open_latents
from world_model.data.objects import poses_for
from world_model.fit.objects import EPISODES_AT_ONCE, objects_scores
from world_model.fit.replay import replay_logits
from world_model.model.world_model import load_world_model


def show(name: str, score: np.ndarray, sigmoid: tuple[float, float], real: np.ndarray, groups: np.ndarray) -> None:
    """Print a judge's figures. `score`: float (E,), an episode's highest logit."""
    said = expit(sigmoid[0] * score + sigmoid[1])
    auc, order, verdict = auc_figure(said, real, groups), group_correlation(said, real, groups), said > 0.5
    within = "not measured" if order is None else f"{order.value:.3f} [{order.low:.3f}, {order.high:.3f}]"
    print(f"{name}: n = {len(real)}, real {real.mean():.3f}, mean probability {said.mean():.3f}")
    print(f"  AUC {auc.value:.3f} [{auc.low:.3f}, {auc.high:.3f}], order within a state {within}, calibration error "
          f"{calibration(said, real, 10).error:.3f}")  # fmt: skip
    print(f"  agreement {(verdict == real).mean():.3f}, recall {verdict[real].mean():.3f}, false successes "
          f"{verdict[~real].mean():.3f}", flush=True)  # fmt: skip
    tasks = np.array([group.split("/")[0] for group in groups])
    each = {task: tasks == task for task in dict.fromkeys(tasks.tolist())}
    print("  AUC by task:", {t: round(auc_figure(said[m], real[m], groups[m]).value, 3) for t, m in each.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world_model")
    parser.add_argument("dataset")
    parser.add_argument("--pictures", action="store_true")
    arguments = parser.parse_args()
    world_model = load_world_model(arguments.world_model)
    sigmoid, metadata, part = world_model.check_objects(), world_model.metadata, world_model.objects
    assert part is not None, "check_objects has seen it"
    spec = metadata.env_spec()
    dataset = open_episodes(DatasetConfig(path=arguments.dataset), spec)
    frames = EpisodeFrames.of(dataset, world_model.frame_steps, spec.action_low, spec.action_high)
    poses = poses_for(world_model.config.objects, frames)
    if poses is None:
        raise SystemExit(f"{arguments.dataset}: holds no poses; collect it with collect.objects=true")
    encoded = open_latents(frames, world_model.autoencoder)
    clips = ClipDataset([encoded], 2, np.array(metadata.state_mean), np.array(metadata.state_std))
    score, real, groups = objects_scores(world_model, clips)
    show("objects", score, sigmoid, real, groups)

    true = torch.from_numpy(poses[frames.place[frames.starts]])
    with torch.no_grad():
        latents = torch.from_numpy(encoded.latents[frames.starts].astype(np.float32))
        read = part.probe(latents, frames.instruction(frames.starts))
    off = 1000 * (read - true)[:, 0, :2].norm(dim=1).numpy()
    tasks = np.array([group.split("/")[0] for group in groups])
    each = {t: round(float(np.median(off[tasks == t])), 1) for t in dict.fromkeys(tasks.tolist())}
    print("probe, slot 0, median mm:", each)
    rest = iter(true.split(EPISODES_AT_ONCE))  # In the batches of `objects_scores`.
    part.probe.forward = lambda latents, instruction: next(rest)  # type: ignore[method-assign]
    show("objects from true poses", objects_scores(world_model, clips)[0], sigmoid, real, groups)
    if arguments.pictures:
        pairs = zip(*replay_logits(world_model, logged_episodes(frames), seed=0), strict=True)
        lower = np.array([np.minimum(success, clip).max() for success, clip in pairs])
        show("pictures", lower, world_model.check_probability(), real, groups)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
