"""Ours and LIBERO's stock environment, drawing in turns in one process: each shows what it shows alone."""

import gc

import numpy as np
import pytest
from libero_setup import ASSETS, needs_assets

from sim.libero import LiberoConfig
from sim.libero.library import bddl_path, init_states_path, load_init_states, suite_tasks
from sim.tabletop import TabletopConfig
from vla_rl.types import EpisodeSpec

pytestmark = [pytest.mark.slow, needs_assets]
Pictures = dict[str, np.ndarray]
ACTIONS = np.clip(np.random.default_rng(0).normal([0.1, 0, -0.4, 0, 0, 0, 0], 0.5, (6, 7)), -1, 1)


class Ours:
    def __init__(self) -> None:
        cameras = ("agentview", "wrist")
        config = LiberoConfig(suite="libero_goal", tasks=("7",), assets_path=ASSETS, image_size=64, cameras=cameras)
        self.env = config.make()

    def begin(self) -> Pictures:
        return self.env.reset(EpisodeSpec(next(iter(self.env.spec.tasks)), "eval", 0)).images

    def step(self, action: np.ndarray) -> Pictures:
        self.env.apply(action)
        return self.env.observe().images


class Tabletop(Ours):
    def __init__(self) -> None:
        self.env = TabletopConfig(image_size=48).make()

    def begin(self) -> Pictures:
        return self.env.reset(EpisodeSpec(next(iter(self.env.spec.tasks)), "train", 0)).images


class Stock:
    """Another task's, in another size."""

    def __init__(self) -> None:
        from libero.libero.envs import OffScreenRenderEnv

        task = suite_tasks("libero_object")[0]
        bddl = str(bddl_path("libero_object", task))
        self.env = OffScreenRenderEnv(bddl_file_name=bddl, camera_heights=96, camera_widths=96)
        self.state = load_init_states(init_states_path("libero_object", task))[0]

    def begin(self) -> Pictures:
        self.env.seed(0)
        self.env.reset()  # makes a renderer, and frees the one before
        return self._images(self.env.set_init_state(self.state))

    def step(self, action: np.ndarray) -> Pictures:
        return self._images(self.env.step(action)[0])

    @staticmethod
    def _images(obs: dict[str, np.ndarray]) -> Pictures:
        return {name: image.copy() for name, image in obs.items() if name.endswith("_image")}


def play(envs: list) -> list[list[Pictures]]:
    """Each environment's pictures, drawn in turns."""
    seen = [[env.begin()] for env in envs]
    for action in ACTIONS:
        for env, pictures in zip(envs, seen, strict=True):
            pictures.append(env.step(action))
            gc.collect()
    return seen


def assert_equal(seen: list[Pictures], alone: list[Pictures], what: str) -> None:
    for step, (now, before) in enumerate(zip(seen, alone, strict=True)):
        assert now.keys() == before.keys()
        for camera in now:
            np.testing.assert_array_equal(now[camera], before[camera], err_msg=f"{what}, step {step}, {camera}")


def test_neither_changes_the_others_pictures() -> None:
    ours, tabletop = Ours(), Tabletop()
    alone = play([ours]) + play([tabletop])
    stock = Stock()
    alone += play([stock])
    for _ in range(2):
        for name, seen, before in zip(("ours", "tabletop", "stock"), play([ours, tabletop, stock]), alone, strict=True):
            assert_equal(seen, before, name)
    stock.env.close()
    assert_equal(play([ours])[0], alone[0], "ours, after the stock one")
    ours.env.close()
