"""The pictures of the README and the docs, made from one run of `vla-rl demo`.

python scripts/pictures.py RUN    # writes docs/pictures/: imagined_and_real.gif, demo_gain.svg, report.png, trust.png
python scripts/pictures.py --dataset FOLDER    # writes dataset.png
python scripts/pictures.py --console    # writes console.png, of a simulated robot (`vla-rl robot install` first)
"""

from __future__ import annotations

import argparse
import contextlib
import io
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from vla_rl.cli.options import PROGRAM
from vla_rl.common.run_folder import RunFolder
from vla_rl.evaluation.report.charts import BLUE, GRAY, ORANGE
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.video import decorate, episode_frames, tile
from vla_rl.interfaces import VecEnv
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout.runner import collect
from vla_rl.types import Episode, EpisodeSpec
from vla_rl.workflows.world_model import imagined_env
from world_model.trust.report import PAGE_FILE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "real_robot"))
from browser import browser

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STATES = (1, 2, 3)  # Of the validation split; which of them makes a picture is the first below, whatever its outcome.
SIZE, HOLD, CONTROL_STEPS_PER_SECOND = 128, 8, 20
WINDOW = {"width": 1000, "height": 720}


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


def draw_imagined_and_real(run: Path, recipe_name: str, picture: str, every: int) -> None:
    """Draw the trained policy acting in imagination, above the same actions in the simulator.

    A column for each task; of a recipe with one task, for each of several initial states. Every so many frames.
    """
    recipe = load_recipe(recipe_name)
    policy = load_policy(RunFolder(run / "round_1" / "train").policy)
    world_model = RunFolder(run / "round_1" / "fit").world_model
    with closing(imagined_env(recipe, world_model).build(num_envs=1, record_frames=True)) as env:
        states = STATES[:1] if len(env.spec.tasks) > 1 else STATES
        specs = [EpisodeSpec(task, "validation", state) for task in env.spec.tasks for state in states]
        imagined = [collect(policy, env, [spec], temperature=0.0)[0] for spec in specs]
    with closing(recipe.acting_env.model_copy(update={"num_workers": 0}).build(1, record_frames=True)) as env:
        real = [same_actions(env, episode) for episode in imagined]
    above = [decorate(episode_frames(e), f"imagined: {_verdict(e.success)}", e.success, SIZE) for e in imagined]
    below = [decorate(frames, f"simulator: {_verdict(success)}", success, SIZE) for frames, success in real]
    frames = tile([*above, *below], columns=len(above))
    frames = np.concatenate([frames[::every], np.repeat(frames[-1:], HOLD, axis=0)])
    images = [Image.fromarray(frame).quantize(96, dither=Image.Dither.NONE) for frame in frames]
    images[0].save(
        PICTURES / picture,
        save_all=True,
        append_images=images[1:],
        duration=1000 * every // CONTROL_STEPS_PER_SECOND,
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


def save(page: Any, name: str) -> None:
    """Write what a browser's window shows as a small PNG."""
    shown = Image.open(io.BytesIO(page.screenshot()))
    shown.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(PICTURES / name, optimize=True)


def pages_of(run: Path) -> dict[str, Path]:
    """A run's page, and what it says of its world model, each by its picture's name."""
    world_model = RunFolder(run / "round_1" / "fit").world_model
    return {"report.png": RunFolder(run / "round_1" / "train").report, "trust.png": world_model / PAGE_FILE}


def draw_pages(pages: dict[str, Path], height: int = WINDOW["height"]) -> None:
    """Draw the top of each page."""
    with browser() as chromium:
        for name, page_file in pages.items():
            page = chromium.new_context(viewport={**WINDOW, "height": height}).new_page()
            page.goto(page_file.resolve().as_uri())
            save(page, name)


def draw_console() -> None:
    """Draw the operator's console while a policy drives the simulated robot."""
    programs = (
        (*("robot", "sim", "--master", "new"), "task=pick_place", "speed=0.5"),
        ("serve", "pretrained:tabletop_base"),
        ("deploy", "sim_robot", "--console", "8080"),
    )
    with ExitStack() as stack, browser() as chromium:
        for program in programs:
            stack.callback(subprocess.Popen([*PROGRAM, *program], stdout=subprocess.DEVNULL).terminate)
        page = chromium.new_context(viewport=WINDOW, color_scheme="dark").new_page()
        for _ in range(60):
            with contextlib.suppress(Exception):
                page.goto("http://127.0.0.1:8080")
                break
            time.sleep(1)
        page.get_by_text("Ready. Start lets the policy drive").wait_for(timeout=60_000)
        page.get_by_text("Take control").first.click()
        page.locator("#ask-name").fill("Ada")
        page.keyboard.press("Enter")
        page.get_by_text("You have control").wait_for()
        page.keyboard.press("Enter")
        page.get_by_text("The policy drives").wait_for()
        time.sleep(1)
        save(page, "console.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="of `vla-rl demo`")
    parser.add_argument("--libero-demo", type=Path, help="of `vla-rl demo --libero`: its moving picture")
    parser.add_argument("--console", action="store_true", help="the console's picture")
    parser.add_argument("--dataset", type=Path, help="a dataset with the page that `vla-rl report` wrote")
    parser.add_argument("--libero", type=Path, help="an evaluation in LIBERO: `vla-rl eval`'s folder")
    args = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    if args.run:
        draw_imagined_and_real(args.run, "tabletop_imagination", "imagined_and_real.gif", every=2)
        draw_gain(args.run)
        draw_pages(pages_of(args.run))
    if args.libero_demo:
        draw_imagined_and_real(args.libero_demo, "libero_imagination", "libero_imagined_and_real.gif", every=8)
    if args.dataset:
        draw_pages({"dataset.png": args.dataset / "report.html"}, height=1000)
    if args.libero:
        draw_pages({"libero.png": RunFolder(args.libero).report}, height=820)
    if args.console:
        draw_console()


if __name__ == "__main__":
    main()
