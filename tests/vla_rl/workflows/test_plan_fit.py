"""`vla-rl plan --fit`: the arithmetic of an update against a block's by hand, sums, and recipes that fit nothing."""

from __future__ import annotations

import pytest

from sim.dummy import DummyConfig
from vla_rl.config import ConfigError
from vla_rl.recipe.recipe import load_recipe
from vla_rl.workflows.gpu_bench.roofline import H200, LAUNCH_SECONDS
from vla_rl.workflows.plan.fit import COMPUTED, PRESETS, fit_text, stage_costs
from world_model.fit.config import FitConfig

SPEC = DummyConfig(image_size=32, cameras=("front",)).env_spec()
WIDTH, BATCH, LENGTH = 64, 4, 4


def config(depth: int, **options: object) -> FitConfig:
    dynamics = {"width": WIDTH, "depth": depth, "heads": 2, "patch": 4, "memory": 2}
    stage = {"steps": 1000, "batch_size": BATCH}
    values = {"model": {"dynamics": dynamics}, "datasets": "any", "clip_frames": LENGTH, "precision": "fp32"}
    return FitConfig.model_validate(values | dict.fromkeys(COMPUTED, stage) | options)


def test_a_blocks_arithmetic_is_what_it_is_by_hand():
    one, two = ({c.name: c for c in stage_costs(config(depth), SPEC, H200)}["dynamics"] for depth in (1, 2))
    frames, tokens = 2 * LENGTH - 1, len(SPEC.cameras) * (SPEC.image_size[0] // 4 // 4) ** 2 + 1
    matrices = 16 * WIDTH**2  # Two attentions of 4 width^2, an MLP of 8.
    attention = 2 * WIDTH * tokens + 2 * WIDTH * frames  # Scores and values, in a frame and in time.
    # Two FLOP a product, three products: forward, and two in the backward pass.
    expected = 2 * 3 * BATCH * frames * tokens * (matrices + attention)
    assert two.work.flops - one.work.flops == expected
    assert two.parameters - one.parameters == matrices + 13 * WIDTH + 9 * WIDTH  # And biases, and modulation's offsets.


def test_stages_sum_to_the_recipe_and_presets_ask_for_nothing():
    costs = stage_costs(config(1), SPEC, H200)
    names = ["autoencoder", "dynamics", "success", "clip", *(f"dynamics: {preset}" for preset in PRESETS)]
    assert [cost.name for cost in costs] == names
    assert [cost.steps for cost in costs] == [1000] * 4 + [0] * 3
    assert costs[-3].parameters < costs[-2].parameters < costs[-1].parameters
    for cost in costs:
        work = cost.work
        assert work.flops > 0 and work.bytes > 4 * cost.parameters
        assert work.eager_seconds == max(work.seconds, LAUNCH_SECONDS * work.kernels)
        assert (work.limit == "host") == (LAUNCH_SECONDS * work.kernels > work.seconds)


def test_the_table_is_of_the_recipes_updates():
    recipe = load_recipe("tabletop_world_model", [f"world_model.{name}.steps=100000" for name in COMPUTED])
    text = fit_text(recipe, 3.0)
    assert isinstance(recipe.world_model, FitConfig)
    whole = sum(c.steps * c.work.eager_seconds for c in stage_costs(recipe.world_model, recipe.env.env_spec(), H200))
    assert f"The recipe's updates: {whole / 60:,.1f} min" in text.split("\n\n")[0]
    assert "computed, not measured" in text and "updates in 3 min" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [("tabletop_grpo", "no section world_model"), ("tabletop_imagination", "makes no update")],
)
def test_a_recipe_that_fits_nothing_is_refused(name, message):
    with pytest.raises(ConfigError, match=f"--fit: recipe {name}.*{message}"):
        fit_text(load_recipe(name), 6.0)
