"""What a recipe is refused for: before any environment or policy is built, and before the run's folder is made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tiny_run import RECIPE, make_recipe, save_policy
from typer.testing import CliRunner

from sim.dummy import DummyConfig
from vla_rl.cli import app as cli
from vla_rl.config import ConfigError
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.recipe.checks import RULES, check

MEASURED = "train.evaluate=before_and_after"
IMAGINED = ("env.kind=world_model", "env.path=pretrained:tabletop", "env.first_frames.kind=tabletop")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("checks") / "base")


@pytest.fixture
def nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("built before the recipe was checked")

    for config in (DummyConfig, OpenVLAConfig):
        monkeypatch.setattr(config, "build", build)


REFUSED = [
    ("train", ["train.group_size=1"], r"train\.group_size: got 1, but grpo compares episodes .* at least 2, or"),
    ("train", ["algo.kind=rloo", "train.group_size=1"], r"train\.group_size: got 1, but rloo"),
    ("train", ["algo=null"], r"algo: this recipe has none"),
    ("train", ["algo.bc_coef=0.1"], r"sft: this recipe has none, .*name them in sft\.datasets"),
    ("train", ["train.control=continue_bc"], r"sft: this recipe has none"),
    ("train", ["algo.bc_coef=0.1", "sft.datasets=/no/demos"], r"sft\.datasets: /no/demos is not there\. Collect it"),
    ("train", ["sampling.keyframe_share=0.5"], r"sampling\.keyframes: is null, but sampling\.keyframe_share is 0\.5"),
    ("train", ["sampling.keyframe_share=1", "sampling.keyframes=/no/k.json"], r"sampling\.keyframes: no file /no/k"),
    ("train", ["sampling.kind=vade", "sampling.level=state", "sampling.train_states=null"], r"sampling\.level: got 's"),
    ("train", ["train.keep=best"], r"train\.keep: got 'best' with validate_every 0"),
    ("train", ["algo.decay_iterations=2"], r"algo\.decay_iterations: got 2: the last of train\.iterations \(4\)"),
    ("train", ["algo.betas=[0.9, 2]"], r"algo\.betas\.1: got 2\. Input should be less than 1"),
    ("train", ["policy.path=/no/policy"], r"policy path '/no/policy': no such folder"),
    ("train", ["train.evaluate=after", "eval.tasks=[nosuch]"], r"eval\.tasks: unknown task 'nosuch'"),
    (
        "train",
        ["train.evaluate=after", "eval.temperatures=[1, 1]"],
        r"eval\.temperatures: got \[1\.0, 1\.0\]; give",
    ),
    ("train", ["train.evaluate=after", "eval.tasks=[reach_red, reach_red]"], r"eval\.tasks: got .*name each once"),
    ("train", [MEASURED, *IMAGINED], r"real_env: the recipe has none, and its env is a world model"),
    ("train", ["env.horizon=0"], r"env\.horizon: got 0\. Input should be greater than 0"),
    ("train", ["train.groups=0"], r"train\.groups: got 0\. Input should be greater than 0"),
    ("train", ["rollout={kind: ray, object_store_mb: 10}"], r"rollout\.object_store_mb: got 10.*Ray takes 75 or more"),
    ("sft", [], r"sft: the recipe has no sft section"),
    ("sft", ["sft.datasets=[/no/a, /no/b]"], r"/no/a is not there\. .*\nsft\.datasets: /no/b is not there"),
    ("eval", ["policy.path=/no/policy"], r"policy path '/no/policy': no such folder"),
    ("eval", ["eval.tasks=[nosuch]"], r"eval\.tasks: unknown task 'nosuch'"),
    ("collect", ["collect.source=policy", "policy.path=/no/policy"], r"policy path '/no/policy': no such folder"),
    ("ablate", ["train.group_size=1"], r"train\.group_size: got 1"),
    (
        "loop",
        ["train.group_size=1"],
        r"\.group_size: got 1.*\nloop: the recipe needs .*\ntrain\.evaluate: got",
    ),
    ("loop", ["loop.controls=[continue_bc]"], r"sft: this recipe has none"),
]


@pytest.mark.parametrize(("command", "overrides", "message"), REFUSED)
def test_it_is_refused_before_anything_is_built_or_written(
    command: str, overrides: list[str], message: str, policy: Path, tmp_path: Path, nothing_is_built: None
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({**RECIPE, "policy": {"kind": "openvla", "path": str(policy)}}))
    result = CliRunner().invoke(cli.app, [command, str(file), *overrides, "--output", str(tmp_path / "out")])
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith("error: ")
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "out").exists()


def test_states_beyond_a_benchmarks_are_refused_also_of_an_evaluation_at_the_end(policy: Path) -> None:
    pytest.importorskip("libero")
    options = ["env.kind=libero", "env.suite=libero_spatial", "train.evaluate=after", "eval.episodes_per_task=51"]
    recipe = make_recipe(policy, *options, "sampling.first_state=0", "sampling.train_states=null")
    with pytest.raises(ValueError, match=r"has 50 official initial states, asked for 0 to 50"):
        check(recipe, "train")
    check(recipe.model_copy(update={"train": recipe.train.model_copy(update={"evaluate": "never"})}), "train")


def test_what_may_run_passes(policy: Path) -> None:
    recipe = make_recipe(policy, MEASURED)
    for command in {name for rule in RULES for name in rule.commands} - {"loop", "sft", "offline", "online", "hil"}:
        check(recipe, command)
    for options in (["algo.kind=ppo", "train.group_size=1"], ["algo.kind=mc_grpo", "train.group_size=1"]):
        check(make_recipe(policy, *options), "train")


def test_commands_that_cannot_use_a_cluster_say_so(policy: Path) -> None:
    recipe = make_recipe(policy, "rollout=ray")
    for command in ("study", "hub"):
        with pytest.raises(ConfigError, match=r"rollout\.kind: got 'ray', but this command runs all episodes"):
            check(recipe, command)
    for command in ("train", "eval", "collect", "rac", "trust", "rank", "failure"):
        check(recipe, command)


def test_a_loop_mines_its_own_keyframes() -> None:
    from vla_rl.recipe.recipe import load_recipe

    check(load_recipe("tabletop_closed_loop"), "loop")
    with pytest.raises(ConfigError, match=r"sampling\.keyframes: is null"):
        check(load_recipe("tabletop_imagination", ["sampling.keyframe_share=0.3"]), "train")


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
        ([*UNCERTAIN], r"keyframes\.kinds: got 'uncertain', but pretrained:tabletop has no value"),
        (["world_model.cuts=4", "loop.every_frame=false"], r"world_model\.cuts: got 4 with loop\.every_frame=false"),
        (["loop.episodes=20"], r"loop\.episodes: got 20, of which .*=0\.5 leaves 50 episodes .* 52 of them must fail"),
        (["env.path=nowhere"], r"world model 'nowhere': no such folder"),
    ],
)
def test_what_a_loop_would_refuse_after_its_real_episodes_is_refused_before(options: list[str], message: str) -> None:
    from vla_rl.recipe.recipe import load_recipe

    with pytest.raises(ConfigError, match=message):
        check(load_recipe("tabletop_closed_loop", options), "loop")


@pytest.mark.parametrize(
    "options",
    [
        ["env.imagination.reward=objects", "world_model.objects.steps=2"],
        ["env.imagination.branch_frames=2", "world_model.value.steps=2"],
        [*UNCERTAIN, "world_model.value.steps=2"],
        ["world_model.cuts=4"],
        ["loop.episodes=20", "world_model.cross_fit=2"],
        ["loop.episodes=20", "env.imagination.reward=probability"],
    ],
)
def test_what_a_loops_fit_gives_is_not_refused(options: list[str]) -> None:
    from vla_rl.recipe.recipe import load_recipe

    check(load_recipe("tabletop_closed_loop", options), "loop")


def test_liberos_loop_chooses_its_threshold_on_its_own_episodes() -> None:
    from vla_rl.recipe.recipe import load_recipe

    recipe = load_recipe("libero_closed_loop")
    assert recipe.world_model.calibrate_on == ()  # type: ignore[union-attr]
    assert recipe.loop.episodes * recipe.world_model.holdout == 120  # type: ignore[union-attr]
