"""LIBERO's perturbations: other words for every task; other pictures and starts, and clean ones beside them."""

from dataclasses import replace

import numpy as np
import pytest
from libero_setup import ASSETS, needs_assets, needs_library

from sim.libero import LiberoConfig, library
from sim.libero.suites import HORIZONS, paraphrases
from vla_rl.common.tables import libero_instruction
from vla_rl.types import EpisodeSpec


@needs_library
@pytest.mark.parametrize("suite", HORIZONS)
def test_every_instruction_has_three_paraphrases(suite: str) -> None:
    for task in library.suite_tasks(suite):
        text = libero_instruction(task)
        assert len({text, *paraphrases(text)}) == 4, text
    assert paraphrases("put both moka pots on the stove")[1] == "set both coffee pots on the cooker"


@pytest.mark.slow
@needs_assets
@pytest.mark.timeout(600)
def test_each_axis_changes_what_it_says_and_the_clean_environment_nothing() -> None:
    clean_config = LiberoConfig(suite="libero_spatial", tasks=("0",), assets_path=ASSETS, image_size=64)
    (task,) = clean_config.task_names()
    spec = EpisodeSpec(task, "eval", 1)
    clean_env = clean_config.make()
    clean = clean_env.reset(spec)
    for axis in ("camera", "light", "texture", "distractors", "layout", "noise", "robot", "wording"):
        moved = []
        for level in (1, 2, 3):
            config = clean_config.perturbed(axis, level)
            assert config.env_spec().title == f"libero/libero_spatial+{axis}-{level}"
            env = config.make()
            obs = env.reset(spec)
            moved.append(np.abs(obs.images["agentview"].astype(float) - clean.images["agentview"]).mean())
            assert (obs.instruction == clean.instruction) == (axis != "wording")
            assert np.array_equal(obs.state, clean.state) == (axis not in ("noise", "robot"))
            env.close()
        assert moved == [0, 0, 0] if axis == "wording" else moved[0] < moved[2]
        again = clean_env.observe()
        np.testing.assert_array_equal(again.images["agentview"], clean.images["agentview"], err_msg=axis)
    clean_env.close()
    again = clean_config.make().reset(spec)  # in a scene that the perturbed ones may have used
    np.testing.assert_array_equal(again.images["agentview"], clean.images["agentview"])
    np.testing.assert_array_equal(again.state, clean.state)


@pytest.mark.slow
@needs_assets
def test_objects_start_elsewhere_clear_of_one_another_and_not_solved() -> None:
    """The hand and what stands on others do not move; the official state is left for the clean episode."""
    config = LiberoConfig(suite="libero_object", tasks=("0",), assets_path=ASSETS)
    (task,) = config.task_names()
    spec, env = EpisodeSpec(task, "eval", 3), config.make()

    def places() -> np.ndarray:
        scene = env.loaded.scene
        return np.array([scene.data.body(thing.root_body).xpos for thing in scene.env.objects_dict.values()])

    env.begin(spec)
    clean = places()
    for level, most in ((1, 0.025), (2, 0.05), (3, 0.08)):
        env.begin(replace(spec, perturbation=f"layout-{level}"))
        moved = np.linalg.norm(places() - clean, axis=1)
        assert (moved > 0.008 * level).sum() >= 5 and moved.max() < most, "settled, on the floor, near where it was"
        assert not env.loaded.scene.is_success()
        apart = np.linalg.norm(places()[:, None] - places()[None], axis=2) + np.eye(len(clean))
        assert apart.min() > 0.03
    env.begin(spec)
    np.testing.assert_array_equal(places(), clean)
    env.close()


@pytest.mark.slow
@needs_assets
@pytest.mark.parametrize("axis", ["robot", "layout", "distractors"])
def test_the_expert_still_solves_what_is_hard(axis: str) -> None:
    env = LiberoConfig(suite="libero_object", tasks=("0",), assets_path=ASSETS).perturbed(axis, 3).make()
    (task,) = env.spec.tasks
    for index in range(3):
        env.begin(EpisodeSpec(task, "eval", index))
        assert any(env.apply(np.clip(env.expert_action(), -1, 1)) for _ in range(env.horizon)), index
    env.close()
