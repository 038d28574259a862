"""What a loop is refused for before any real episode."""

from __future__ import annotations

import pytest

from vla_rl.config import ConfigError
from vla_rl.recipe.recipe import load_recipe
from vla_rl.workflows.loop.before import check_loop

UNCERTAIN = ("sampling.keyframe_share=0.3", "world_model.keyframes.kinds=[uncertain]")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["world_model.start_from=pretrained:tabletop"],
            r"world_model\.start_from: got 'pretrained:tabletop', but .*env",
        ),
        (["world_model.calibrate_on=data/c"], r"world_model\.calibrate_on: got \['data/c'\], but a loop chooses"),
        (["world_model.success_datasets=[a, b]"], r"world_model\.success_datasets: got \['a', 'b'\], but the success"),
        (["env.imagination.reward=objects"], r"reward: got 'objects', but pretrained:tabletop has no objects part"),
        (["world_model.objects={steps: 2, network: null}"], r"objects\.network: got null with steps=2, and pretrained"),
        (["env.imagination.branch_frames=2"], r"branch_frames: got 2, but pretrained:tabletop has no value and"),
        (
            ["env.imagination={branch_frames: 2, horizon: 12}", "world_model.value.steps=2"],
            r"branch_frames: got 2, 2 frames of 8 control steps, but imagined episodes end after 12",
        ),
        (["env.imagination.action_penalty=0.1"], r"action_penalty: got 0\.1, but pretrained:tabletop has no inverse"),
        ([*UNCERTAIN], r"keyframes\.kinds: got 'uncertain', but pretrained:tabletop has no value"),
        (["world_model.cuts=4", "loop.every_frame=false"], r"world_model\.cuts: got 4 with loop\.every_frame=false"),
        (["loop.episodes=20"], r"loop\.episodes: got 20, of which .*=0\.5 leaves 50 episodes .* 52 of them must fail"),
        (["sampling.first_state=500199"], r"sampling\.first_state: got 500199, .* those of the held-out episodes"),
        (["env.path=nowhere"], r"world model 'nowhere': no such folder"),
    ],
)
def test_what_a_loop_would_refuse_after_its_real_episodes_is_refused_before(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_loop(load_recipe("tabletop_closed_loop", options))


@pytest.mark.parametrize(
    "options",
    [
        ["env.imagination.reward=objects", "world_model.objects.steps=2"],
        ["env.imagination.branch_frames=2", "world_model.value.steps=2"],
        ["env.imagination.action_penalty=0.1", "world_model.inverse.steps=2"],
        [*UNCERTAIN, "world_model.value.steps=2"],
        ["world_model.cuts=4"],
        ["loop.episodes=20", "world_model.cross_fit=2"],
        ["sampling.first_state=500200"],
        ["sampling={first_state: 499990, train_states: 10}"],
        ["loop.episodes=20", "env.imagination.reward=probability"],
    ],
)
def test_what_a_loops_fit_gives_is_not_refused(options: list[str]) -> None:
    check_loop(load_recipe("tabletop_closed_loop", options))


def test_liberos_loop_chooses_its_threshold_on_its_own_episodes() -> None:
    recipe = load_recipe("libero_closed_loop")
    assert recipe.world_model.calibrate_on == ()  # type: ignore[union-attr]
    assert recipe.loop.episodes * recipe.world_model.holdout == 120  # type: ignore[union-attr]
