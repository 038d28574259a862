"""Cost of LIBERO's pictures: MuJoCo's own drawing of the whole scene, ours (equal to the bit), and the light one.

    python scripts/libero_pictures.py --suites libero_spatial libero_object --tasks 0 1 2

The three are drawn in turns, of the same states along random motions. Milliseconds are of processor time, which counts
what Mesa's own thread draws too; what a GPU draws it does not count.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import mujoco
import numpy as np

from sim.libero.env import LiberoConfig
from sim.libero.render import Renderer
from sim.libero.suites import CAMERAS
from sim.rendering import gl
from vla_rl.config import validate
from vla_rl.types import EpisodeSpec

STEPS = 10  # control steps between two states that are drawn


def draw_whole(renderer: Renderer, data: mujoco.MjData, camera: int, size: int) -> np.ndarray:
    """The picture by one call of MuJoCo's for the whole scene, as robosuite takes it, turned as ours."""
    image = np.empty((size, size, 3), np.uint8)
    with gl.current():
        uploaded, viewport = renderer.updated(data, camera, size)
        mujoco.mjr_render(viewport, renderer.scene, uploaded.context)
        mujoco.mjr_readPixels(image, None, viewport, uploaded.context)
    return np.ascontiguousarray(image[::-1, ::-1])


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Structural similarity of two pictures' gray values (Wang et al. 2004), with Gaussian windows of 1.5 pixels."""
    x, y = (cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).astype(np.float64) for image in (a, b))

    def blur(values: np.ndarray) -> np.ndarray:
        return cv2.GaussianBlur(values, (11, 11), 1.5)

    mean_x, mean_y = blur(x), blur(y)
    var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    shared = blur(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    ssim = (2 * mean_x * mean_y + c1) * (2 * shared + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return float(ssim.mean())


def measure(suite: str, task: str, num_states: int, size: int, assets: Path | None) -> list[dict[str, Any]]:
    """One row a camera: milliseconds of each drawing, how many pictures of ours are equal, how light ones differ."""
    values = {"suite": suite, "tasks": (task,), "assets_path": assets, "image_size": size, "cameras": tuple(CAMERAS)}
    env = validate(LiberoConfig, values, prefix="env").make()
    env.reset(EpisodeSpec(next(iter(env.spec.tasks)), "train", 0))
    scene, renderer = env.loaded.scene, env.loaded.renderer
    rng = np.random.default_rng(0)
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    seen: dict[str, list[tuple[bool, float, float]]] = defaultdict(list)

    def light(data: mujoco.MjData, camera: int, size: int) -> np.ndarray:
        renderer.light = True
        image = renderer.render(data, camera, size)
        renderer.light = False
        return image

    def whole(data: mujoco.MjData, camera: int, size: int) -> np.ndarray:
        return draw_whole(renderer, data, camera, size)

    draw: dict[str, Callable[..., np.ndarray]] = {"whole": whole, "exact": renderer.render, "light": light}
    for state in range(num_states + 1):
        data = scene.shown()
        for name in CAMERAS:
            camera, images = scene.model.camera(CAMERAS[name]).id, {}
            for how, render in draw.items():
                start = time.process_time()
                images[how] = render(data, camera, size)
                if state > 0:  # the first one uploads
                    spent[name, how].append(1e3 * (time.process_time() - start))
            off = np.abs(images["light"].astype(int) - images["exact"]).mean()
            equal = bool((images["whole"] == images["exact"]).all())
            seen[name].append((equal, float(off), similarity(images["light"], images["exact"])))
        for _ in range(STEPS):
            scene.step(np.clip(rng.normal([0.1, 0, -0.3, 0, 0, 0, 0], 0.6), -1, 1))
    env.close()
    rows = []
    for name in CAMERAS:
        equal, off, similar = zip(*seen[name], strict=True)
        milliseconds = {how: float(np.median(spent[name, how])) for how in draw}
        rows.append(
            {
                **{"suite": suite, "task": task, "camera": name, "size": size, **milliseconds},
                **{"pictures": len(equal), "equal": sum(equal)},
                **{"light_difference": float(np.mean(off)), "light_ssim": float(np.mean(similar))},
            }
        )
    return rows


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """One line a row, and the sum over all pictures."""
    lines = [
        f"{row['suite']:<15}{row['task']:>3} {row['camera']:<10} whole {row['whole']:6.1f} ms, "
        f"exact {row['exact']:6.1f} ({row['whole'] / row['exact']:.2f}x, {row['equal']} of {row['pictures']} equal), "
        f"light {row['light']:6.1f} ({row['whole'] / row['light']:.2f}x, off by {row['light_difference']:.2f} of 255, "
        f"SSIM {row['light_ssim']:.3f})"
        for row in rows
    ]
    whole, exact, light = (sum(row[how] for row in rows) for how in ("whole", "exact", "light"))
    return "\n".join([*lines, f"all: exact {whole / exact:.2f}x, light {whole / light:.2f}x"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--suites", nargs="+", default=["libero_spatial", "libero_object", "libero_goal", "libero_10"])
    parser.add_argument("--tasks", nargs="+", default=["0", "2"], help="names or numbers (0 2)")
    parser.add_argument("--states", type=int, default=6, help="states drawn of each task (6)")
    parser.add_argument("--image-size", type=int, default=256, help="pixels (256)")
    parser.add_argument("--assets", type=Path, default=None, help="LIBERO's assets; else $LIBERO_ASSETS")
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    args = parser.parse_args()
    os.environ.setdefault("LP_NUM_THREADS", "1")
    rows = []
    for suite in args.suites:
        for task in args.tasks:
            rows += measure(suite, task, args.states, args.image_size, args.assets)
    print(json.dumps(rows, indent=2) if args.json else describe(rows))


if __name__ == "__main__":
    main()
