"""What a recipe is refused for: before any environment or policy is built, and before the run's folder is made."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from tiny_run import make_recipe, save_policy, tiny_values
from typer.testing import CliRunner

from sim.dummy import DummyConfig
from vla_rl.cli import app as cli
from vla_rl.config import ConfigError
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.recipe.checks import COLLECT, EVAL, FIT, LOOP, STUDY
from vla_rl.recipe.recipe import TRAIN, check, load_recipe
from vla_rl.recipe.runs import OfflineRecipe

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


HIL = "run=hil"
NO_DEMONSTRATIONS = r"sft: this recipe has none, .*name them in sft\.datasets"
OF_ANOTHER_RUN = r"run: got 'train', and this command is for recipes of run {run!r}; `vla-rl config {example}` is one"
REFUSED = [
    ("train", ["train.group_size=1"], r"train\.group_size: got 1, but grpo compares episodes .* at least 2, or"),
    ("train", ["algo.kind=rloo", "train.group_size=1"], r"train\.group_size: got 1, but rloo"),
    (
        "train",
        ["algo.kind=reinforce_pp", "train.group_size=1", "train.resample_budget=4"],
        r"train\.resample_budget: got 4 with train\.group_size 1: a group of one episode never",
    ),
    ("train", ["seed=-1"], r"seed: got -1\. Input should be greater than or equal to 0"),
    ("train", ["seed=9223372036854775808"], r"seed: got 9223372036854775808\. Input should be less than 9223"),
    ("sft", ["sft.datasets=[{path: d, weight: -1}]"], r"sft\.datasets\.0\.weight: got -1"),
    ("train", ["algo.bc_coef=0.1"], NO_DEMONSTRATIONS),
    ("train", ["train.control=continue_bc"], NO_DEMONSTRATIONS),
    ("train", ["algo.bc_coef=0.1", "sft.datasets=/no/demos"], r"sft\.datasets: /no/demos is not there\. Collect it"),
    ("train", ["algo.bc_coef=0.1", "sft.datasets=/"], r"sft\.datasets: / holds no LeRobotDataset .*\. Collect it"),
    ("train", ["sampling.keyframe_share=0.5"], r"sampling\.keyframes: is null, but sampling\.keyframe_share is 0\.5"),
    ("train", ["sampling.keyframe_share=1", "sampling.keyframes=/no/k.json"], r"sampling\.keyframes: no file /no/k"),
    (
        "train",
        ["sampling.kind=vade", "sampling.level=state", "sampling.train_states=null"],
        r"sampling: level 'state' needs train_states",
    ),
    ("train", ["train.keep=best"], r"train: keep 'best' needs validate_every"),
    ("train", ["algo.decay_iterations=2"], r"algo\.decay_iterations: got 2: the last of train\.iterations \(4\)"),
    ("train", ["algo.optim.betas=[0.9, 2]"], r"algo\.optim\.betas\.1: got 2\. Input should be less than 1"),
    ("train", ["policy.path=/no/policy"], r"policy path '/no/policy': no such folder"),
    ("train", ["policy.path=/"], r"policy\.path: / holds no checkpoint \(no config\.json\)\.$"),
    ("train", ["train.evaluate=after", "eval.tasks=[nosuch]"], r"eval\.tasks: unknown task 'nosuch'"),
    (
        "train",
        ["train.evaluate=after", "eval.temperatures=[1, 1]"],
        r"eval\.temperatures: got \[1\.0, 1\.0\]; give",
    ),
    ("train", ["train.evaluate=after", "eval.tasks=[reach_red, reach_red]"], r"eval\.tasks: got .*name each task once"),
    ("train", [MEASURED, *IMAGINED], r"real_env: the recipe has none, and its env is a world model"),
    (
        "train",
        [*IMAGINED, "env.imagination.branch_frames=2", "algo.kind=ppo"],
        r"algo\.bootstrap_truncated: got true with env\.imagination\.branch_frames=2, .* set it to false",
    ),
    ("train", ["gate.every=1"], r"gate\.every: env is no world model"),
    ("train", ["gate.split=eval"], r"gate\.split: got 'eval'\. Input should be 'train' or 'validation'"),
    ("train", ["env.horizon=0"], r"env\.horizon: got 0\. Input should be greater than 0"),
    ("train", ["train.groups=0"], r"train\.groups: got 0\. Input should be greater than 0"),
    ("train", ["rollout={kind: ray, object_store_mb: 10}"], r"rollout\.object_store_mb: got 10.*Ray takes 75 or more"),
    (
        "train",
        ["world_model.kind=latent_video"],
        r"world_model: a recipe of run 'train' has no such section",
    ),
    ("train", ["run=trian"], r"run: got 'trian', allowed: eval, sft, train, .*Did you mean 'train'\?"),
    ("sft", [], r"sft: the recipe has no sft section"),
    ("sft", ["sft.datasets=[/no/a, /no/b]"], r"/no/a is not there\. .*\nsft\.datasets: /no/b is not there"),
    (
        "train",
        [HIL, "hil={actor: recordings, recordings: /no, prior: none, warm_updates: 0}", "env.reward.kind=simulator"],
        r"env\.reward\.kind: got 'simulator' with hil\.actor=recordings",
    ),
    ("train", [HIL, "hil.episodes=2", "rollout=ray"], r"rollout\.kind: got 'ray'\. Input should be 'local'"),
    ("train", ["run=online", "online.rounds=2"], r"sft: logged episodes are learned from; name them in sft\.datasets"),
    (
        "train",
        ["run=online", "online={prior: none, warm_updates: 0}", "policy.path=null"],
        r"policy\.path: the run improves a checkpoint",
    ),
    ("eval", ["policy.path=/no/policy"], r"policy path '/no/policy': no such folder"),
    ("eval", ["eval.tasks=[nosuch]"], r"eval\.tasks: unknown task 'nosuch'"),
    ("collect", ["collect.source=policy", "policy.path=/no/policy"], r"policy path '/no/policy': no such folder"),
    ("sweep --controls 1", ["train.group_size=1"], r"train\.group_size: got 1"),
    ("failure fit", [], OF_ANOTHER_RUN.format(run="failure", example="tabletop_failure")),
    ("reward fit", [], OF_ANOTHER_RUN.format(run="reward", example="tabletop_reward")),
    ("hub measure", [], OF_ANOTHER_RUN.format(run="hub", example="tabletop_hub")),
    ("world-model fit", [], OF_ANOTHER_RUN.format(run="fit", example="tabletop_world_model")),
    ("loop", [], OF_ANOTHER_RUN.format(run="loop", example="tabletop_imagination")),
    ("loop", ["run=loop", "world_model.kind=latent_video"], r"real_env: required, but not given"),
]


@pytest.mark.parametrize(("command", "overrides", "message"), REFUSED)
def test_it_is_refused_before_anything_is_built_or_written(
    command: str, overrides: list[str], message: str, policy: Path, tmp_path: Path, nothing_is_built: None
) -> None:
    file = tmp_path / "tiny.yaml"
    of_run = [text for text in overrides if text.startswith("run=")]
    file.write_text(yaml.safe_dump(tiny_values(policy, *of_run)))
    result = CliRunner().invoke(cli.app, [*command.split(), str(file), *overrides, "--output", str(tmp_path / "out")])
    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith("error: ")
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_stands_for_its_policy_if_it_has_one(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for command in (TRAIN, EVAL):
        with pytest.raises(ConfigError, match=rf"policy path: the run {tmp_path} has no policy so far"):
            check(make_recipe(policy, f"policy.path={tmp_path}"), command)
    shutil.copytree(policy, tmp_path / "policy")
    for command in (TRAIN, EVAL):
        check(make_recipe(policy, f"policy.path={tmp_path}"), command)


def test_states_beyond_a_benchmarks_are_refused_also_of_an_evaluation_at_the_end(policy: Path) -> None:
    pytest.importorskip("libero")
    options = ["env.kind=libero", "env.suite=libero_spatial", "train.evaluate=after", "eval.episodes_per_task=51"]
    recipe = make_recipe(policy, *options, "sampling.first_state=0", "sampling.train_states=null")
    with pytest.raises(ValueError, match=r"has 50 official initial states, asked for 0 to 50"):
        check(recipe, TRAIN)
    check(recipe.model_copy(update={"train": recipe.train.model_copy(update={"evaluate": "never"})}), TRAIN)


def test_what_may_run_passes(policy: Path) -> None:
    recipe = make_recipe(policy, MEASURED)
    for command in (TRAIN, EVAL, COLLECT):
        assert check(recipe, command) is recipe
    for options in (["algo.kind=ppo", "train.group_size=1"], ["algo.kind=mc_grpo", "train.group_size=1"]):
        check(make_recipe(policy, *options), TRAIN)


def test_commands_that_cannot_use_a_cluster_say_so() -> None:
    recipe = load_recipe("tabletop_imagination", ["rollout=ray"])
    with pytest.raises(ConfigError, match=r"rollout\.kind: got 'ray', but this command runs all episodes"):
        check(recipe, STUDY)
    for command in (TRAIN, EVAL, COLLECT, FIT):
        check(recipe, command)


def test_a_base_of_another_run_gives_the_sections_that_both_have(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: tabletop_grpo\nrun: offline\nname: mine\noffline: {kind: filtered}\n")
    recipe = load_recipe(file)
    assert isinstance(recipe, OfflineRecipe) and recipe.sft == load_recipe("tabletop_grpo").sft  # type: ignore[attr-defined]
    file.write_text("base: tabletop_grpo\nrun: offline\nname: mine\noffline: {}\ntrain: {iterations: 2}\n")
    with pytest.raises(ConfigError, match=r"^train: a recipe of run 'offline' has no such section; run train, loop"):
        load_recipe(file)
    file.write_text("name: mine\nenv: {kind: 'sim.dummy:DummyConfig'}\n")
    with pytest.raises(ConfigError, match=r"^run: the recipe does not say what it is for; add one of: eval, sft"):
        load_recipe(file)


def test_a_loop_mines_its_own_keyframes() -> None:
    check(load_recipe("tabletop_closed_loop"), LOOP)
    with pytest.raises(ConfigError, match=r"sampling\.keyframes: is null"):
        check(load_recipe("tabletop_imagination", ["sampling.keyframe_share=0.3"]), TRAIN)


def test_validation_takes_no_initial_state_of_the_gate() -> None:
    def checked(*options: str) -> None:
        gate = ["train.validate_every=2", "train.iterations=4", "gate.every=2", "gate.pairs=150"]
        check(load_recipe("tabletop_imagination", [*gate, *options]), TRAIN)

    message = r"validation_episodes: got 1001, .*states 0 to 1000 .*takes those from 1000 on; .*at least 1001"
    with pytest.raises(ConfigError, match=message):
        checked("train.validation_episodes=1001")
    with pytest.raises(ConfigError, match=r"validation_episodes: got 20, .*states 1299 to 1318"):
        checked("eval.start_index=1299")
    for options in (
        ["train.validation_episodes=1000"],
        ["train.validation_episodes=1001", "gate.start_index=1001"],
        ["train.validation_episodes=1001", "gate.every=0"],
        ["train.validation_episodes=1001", "gate.split=train"],
        ["train.validation_episodes=1001", "train.validate_every=0"],
        ["eval.start_index=1300"],
    ):
        checked(*options)


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("tabletop_imagination", "real_env.taks=[stack]", "real_env.taks: unknown key"),
        ("tabletop_imagination", "real_env.reward={kind: learned}", "real_env.reward.path: required"),
        ("tabletop_imagination", "env.first_frames.taks=[a]", "env.first_frames.taks: unknown key"),
        ("tabletop_imagination", "real_env=tabeltop", "real_env.kind: got 'tabeltop', allowed: "),
        ("tabletop_grpo", "eval.plan=best", "eval.plan.kind: got 'best', allowed: best_of_n"),
        ("tabletop_grpo", "eval.plan={world_model: a, num: 4}", "eval.plan.num: unknown key"),
        ("tabletop_world_model", "world_model.model.dynamics=wn", "world_model.model.dynamics.kind: got 'wn', allowed"),
    ],
)
def test_an_error_names_the_option_where_it_stands(recipe: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        load_recipe(recipe, [override])


def test_a_kind_alone_is_short_for_the_sections_wherever_the_section_stands() -> None:
    recipe = load_recipe("tabletop_imagination", ["real_env=tabletop"])
    assert recipe.real_env == load_recipe("tabletop_imagination").real_env, "the same kind keeps the other options"
