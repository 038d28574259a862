"""The demo's own part: what it says of the result, how it is interrupted, how the base policy is made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_ablate import evaluation
from tiny_run import make_recipe
from typer.testing import CliRunner

from vla_rl.cli.loop import app
from vla_rl.cli.options import PROGRAM
from vla_rl.common.errors import ConfigError
from vla_rl.config import dump_yaml
from vla_rl.recipe.recipe import load_recipe
from vla_rl.workflows import demo
from vla_rl.workflows.loop.rounds import Round


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_yaml(load_recipe("tabletop_imagination", ["eval.videos=0"])))
    monkeypatch.setattr(demo, "RECIPE", str(path))
    return path


def test_it_says_what_was_gained_beside_the_control_and_what_that_does_not_prove(
    recipe_file, tmp_path, monkeypatch, capsys
):
    def loop(recipe, folder, program, show):
        assert recipe.algo.optim.lr == 0.5
        done = Round(folder / "round_1")
        for run, name, outcomes in (
            (done.run, "base", "10000000"),
            (done.run, "final", "11111110"),
            (done.control("shuffled_rewards"), "final", "11000000"),
        ):
            evaluation(name, outcomes).save(run / "evaluations" / f"{name}.json")
        return done

    monkeypatch.setattr(demo, "loop", loop)
    report = demo.demo(["algo.optim.lr=0.5", "loop.controls=[shuffled_rewards]"], tmp_path / "run", program=PROGRAM)
    assert report == tmp_path / "run" / "round_1" / "train" / "report.html"
    shown = " ".join(capsys.readouterr().out.split())
    assert "RL: sampled, all tasks: 12.5 % -> 87.5 %, +75.0" in shown
    assert "shuffled rewards: sampled, all tasks: 12.5 % -> 25.0 %" in shown and "no proof" in shown


def test_on_libero_it_is_another_recipe_and_nothing_is_made_anew(recipe_file, tmp_path, monkeypatch):
    run = ["demo", "--libero", "--output", str(tmp_path / "run")]
    monkeypatch.setattr(demo, "RECIPE", "no such recipe")
    monkeypatch.setattr(demo, "LIBERO_RECIPE", str(recipe_file))
    monkeypatch.setattr(demo, "loop", lambda recipe, *rest: pytest.fail(f"ran {recipe.name}"))
    with pytest.raises(pytest.fail.Exception, match="ran tabletop_imagination"):
        CliRunner().invoke(app, run, catch_exceptions=False)
    refused = CliRunner().invoke(app, [*run, "--from-scratch"])
    assert isinstance(refused.exception, ConfigError) and "--libero and --from-scratch" in str(refused.exception)


def test_on_a_gpu_many_episodes_are_imagined_at_once_unless_the_user_says_how_many(monkeypatch):
    assert demo.for_gpu(demo.RECIPE, ["device=cpu"]) == []
    monkeypatch.setattr(demo, "resolve_device", lambda device: "cuda:1")
    assert demo.for_gpu(demo.RECIPE, ["train.groups=10"]) == ["env.num_envs=80", "algo.micro_batch_size=256"]
    assert demo.for_gpu(demo.RECIPE, ["env.num_envs=3", "algo.micro_batch_size=16"]) == []


def test_ctrl_c_says_how_to_go_on(recipe_file, tmp_path, monkeypatch, capsys):
    def loop(recipe, folder, program, show):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "loop", loop)
    with pytest.raises(KeyboardInterrupt):
        demo.demo(["seed=4"], tmp_path / "run", program=PROGRAM)
    shown = capsys.readouterr().out.replace("\n", "")
    assert f"vla-rl loop {recipe_file} seed=4 --output {tmp_path / 'run'} --resume".replace(" ", "") in shown.replace(
        " ", ""
    )


def test_the_base_policy_is_made_step_by_step_and_finished_steps_are_kept(recipe_file, tmp_path, monkeypatch):
    done: list[str] = []

    def collect(recipe, config, show):
        done.append(f"collect {Path(config.dataset).name}")
        Path(config.dataset).mkdir()

    def sft(recipe, folder):
        done.append(f"sft {recipe.name}")
        (folder / "policy").mkdir()

    monkeypatch.setattr("vla_rl.workflows.demo.collect", collect)
    monkeypatch.setattr("vla_rl.workflows.demo.clone", sft)
    names = []
    for name in ("clean", "sloppy"):
        path = tmp_path / f"{name}.yaml"
        dataset = f"collect={{dataset: {tmp_path}/{name}_demos}}"
        path.write_text(dump_yaml(make_recipe(tmp_path / "base", f"name={name}", dataset)))
        names.append(str(path))
    monkeypatch.setattr(demo, "BASE_RECIPES", tuple(names))
    policy = demo.make_base_policy(tmp_path / "runs")
    assert done == ["collect clean_demos", "sft clean", "collect sloppy_demos", "sft sloppy"]
    assert policy.is_dir() and policy.parent.name.startswith("sloppy")
    policy.rmdir()  # As if cut off while cloning: the demonstrations are there.
    done.clear()
    demo.make_base_policy(tmp_path / "runs")
    assert done == ["sft sloppy"]
