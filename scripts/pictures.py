"""The pictures of the README and the docs, made from one run of `vla-rl demo`.

python scripts/pictures.py RUN    # writes docs/pictures/: imagined_and_real.gif, demo_gain.svg
"""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from vla_rl.common.run_folder import RunFolder
from vla_rl.evaluation.report.charts import BLUE, GRAY, ORANGE
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.video import decorate, episode_frames, tile
from vla_rl.interfaces import VecEnv
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout.runner import collect
from vla_rl.types import Episode, EpisodeSpec
from vla_rl.workflows.imagination.real_and_imagined import imagined_env

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STATES = (1, 2, 3)  # Of the validation split; which of them makes a picture is the first below, whatever its outcome.
SIZE, HOLD, FRAMES_PER_SECOND = 128, 8, 10


def same_actions(env: VecEnv, episode: Episode) -> tuple[np.ndarray, bool]:
    """Execute an episode's actions in another environment from its initial state, and return frames and success."""
    obs = env.reset([episode.spec])
    camera = next(iter(obs.images))
    frames, success = [obs.images[camera]], False
    for chunk in episode.chunks.actions:
        result = env.step(chunk[None], [0])
        frames.append(result.info["frames"][0][camera])
        success = bool(result.success[0])
        if result.done[0]:
            break
    return np.concatenate(frames), success


def draw_imagined_and_real(run: Path) -> None:
    """Draw the trained policy acting in imagination, above the same actions in the simulator, a column a task."""
    recipe = load_recipe("tabletop_imagination")
    policy = load_policy(RunFolder(run / "round_1" / "train").policy)
    world_model = RunFolder(run / "round_1" / "fit").world_model
    with closing(imagined_env(recipe, world_model).build(num_envs=1, record_frames=True)) as env:
        specs = [EpisodeSpec(task, "validation", STATES[0]) for task in env.spec.tasks]
        imagined = [collect(policy, env, [spec], temperature=0.0)[0] for spec in specs]
    with closing(recipe.acting_env.model_copy(update={"num_workers": 0}).build(1, record_frames=True)) as env:
        real = [same_actions(env, episode) for episode in imagined]
    above = [decorate(episode_frames(e), f"imagined: {_verdict(e.success)}", e.success, SIZE) for e in imagined]
    below = [decorate(frames, f"simulator: {_verdict(success)}", success, SIZE) for frames, success in real]
    frames = tile([*above, *below], columns=len(above))
    frames = np.concatenate([frames[::2], np.repeat(frames[-1:], HOLD, axis=0)])
    images = [Image.fromarray(frame).quantize(96, dither=Image.Dither.NONE) for frame in frames]
    images[0].save(
        PICTURES / "imagined_and_real.gif",
        save_all=True,
        append_images=images[1:],
        duration=1000 // FRAMES_PER_SECOND,
        loop=0,
        optimize=True,
    )


def _verdict(success: bool) -> str:
    return "success" if success else "failure"


def draw_gain(run: Path) -> None:
    """Draw sampled success in the simulator: base policy, after RL in imagination, after RL on shuffled rewards."""
    done = run / "round_1"
    found = {
        "base policy": (Evaluation.load(RunFolder(done / "train").evaluation("base")), GRAY),
        "GRPO in imagination": (Evaluation.load(RunFolder(done / "train").evaluation("final")), BLUE),
        "GRPO, rewards shuffled": (
            Evaluation.load(RunFolder(done / "train_shuffled_rewards").evaluation("final")),
            ORANGE,
        ),
    }
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    for number, (name, (evaluation, color)) in enumerate(found.items()):
        rates = [evaluation.rate("sampled"), *(evaluation.rate("sampled", task) for task in evaluation.tasks)]
        at = np.arange(len(rates)) + 0.27 * (number - 1)
        ends = np.array([rate.interval for rate in rates]).T
        heights = np.array([rate.rate for rate in rates])
        axes.bar(at, heights, 0.25, color=color, label=f"{name} (n = {rates[0].num_episodes})")
        axes.errorbar(at, heights, np.abs(ends - heights), fmt="none", ecolor="0.2", elinewidth=1, capsize=2)
    tasks = [task.replace("_", " ") for task in found["base policy"][0].tasks]
    axes.set_xticks(np.arange(len(tasks) + 1), ["all five tasks", *tasks])
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_title("Success in the simulator on unseen initial states, sampled, 95 % intervals", loc="left", size=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    figure.savefig(PICTURES / "demo_gain.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    PICTURES.mkdir(exist_ok=True)
    draw_imagined_and_real(run)
    draw_gain(run)


if __name__ == "__main__":
    main()
