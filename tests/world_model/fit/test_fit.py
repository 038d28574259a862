"""Fitting a world model of the dummy environment, a few updates a stage: results, resuming, fine-tuning, bad input."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dummy_fit import ENV, KEPT, MODEL, SPEC, STAGE, collect, config, fit_with_stops, stop_fitting, weights
from typer.testing import CliRunner, Result

from sim.dummy import DummyConfig
from vla_rl.cli.app import app
from vla_rl.common.run_folder import read_metrics
from vla_rl.config import ConfigError, dump_yaml, read_yaml, validate
from vla_rl.data.config import DatasetError
from vla_rl.evaluation.probability import CalibrationError
from vla_rl.recipe.recipe import read_recipe
from vla_rl.types import EnvSpec
from vla_rl.workflows.world_model import fit_world_model
from world_model.config import ImaginationConfig
from world_model.fit import fit as fit_module
from world_model.fit.config import FitConfig
from world_model.fit.data import FitData
from world_model.fit.fit import fit
from world_model.fit.stage import updates_kept
from world_model.imagination.reward import check_reward
from world_model.model.world_model import load_world_model
from world_model.trust.config import MeasureConfig
from world_model.trust.evaluate import measure_trust
from world_model.trust.report import TrustReport


@pytest.fixture
def fitted(plain) -> Path:
    return plain


def test_a_fit_leaves_a_world_model_that_knows_its_data_and_thresholds(fitted):
    world_model = load_world_model(fitted)
    metadata = world_model.metadata
    assert metadata.cameras == ENV.cameras and metadata.tasks == ENV.env_spec().tasks and len(metadata.datasets) == 1
    assert metadata.calibration["num_episodes"] == 12 and 0 < metadata.calibration["num_failures"] < 12
    assert metadata.success_threshold == metadata.calibration["success_threshold"]
    assert not (fitted.parent / "checkpoints").exists()


def test_a_stopped_fit_goes_on_to_the_same_result(episodes, fitted, tmp_path, monkeypatch):
    assert weights(fit_with_stops(config(episodes), tmp_path / "run", monkeypatch)) == weights(fitted)


def test_a_stopped_fits_metrics_are_those_of_a_whole_one(episodes, tmp_path, monkeypatch):
    monkeypatch.setattr(fit_module, "LOG_EVERY", 1)
    values = {"run": "fit", "name": "fit", "device": "cpu", "env": ENV.model_dump(), "policy": {"kind": "openvla"}}
    values |= {"world_model": config(episodes).model_dump(), "log": {"tensorboard": False, "console": False}}
    recipe = read_recipe(values)

    def metrics(folder: Path) -> list[dict[str, float]]:
        return read_metrics(folder / "metrics.jsonl")

    fit_world_model(recipe, tmp_path / "whole")
    whole = metrics(tmp_path / "whole")
    assert [row["step"] for row in whole] == [*range(1, 13), 12]
    budget = stop_fitting(monkeypatch, 0)
    for _ in range(3):  # Each time an update is lost: stages of three, checkpoints after the second.
        budget[0] = 4
        with pytest.raises(KeyboardInterrupt):
            fit_world_model(recipe, tmp_path / "cut")
    budget[0] = 12
    fit_world_model(recipe, tmp_path / "cut")
    assert metrics(tmp_path / "cut") == whole
    fit_world_model(recipe, tmp_path / "cut")
    assert metrics(tmp_path / "cut") == whole, "a finished fit is left as it is"


def test_fine_tuning_starts_from_the_weights_and_keeps_what_is_not_fitted(episodes, fitted, tmp_path):
    options = config(episodes, model=None, start_from=str(fitted), autoencoder={"steps": 0})
    tuned = fit(options, ENV.env_spec(), tmp_path / "run")
    before, after = weights(fitted), weights(tuned)
    assert before["autoencoder.safetensors"] == after["autoencoder.safetensors"]
    assert before["dynamics.safetensors"] != after["dynamics.safetensors"]
    assert load_world_model(tuned).metadata.state_mean == load_world_model(fitted).metadata.state_mean


def test_episodes_of_their_own_can_choose_the_threshold_and_then_not_measure_trust(episodes, held_out, tmp_path):
    options = config(episodes, calibrate_on=str(held_out))
    chosen = fit(options, ENV.env_spec(), tmp_path / "run")
    metadata = load_world_model(chosen).metadata
    assert metadata.calibration["num_episodes"] == 24
    assert set(metadata.calibrated_on).isdisjoint(metadata.datasets)
    for seen, why in ((episodes, "was fitted on it"), (held_out, "chose its thresholds on it")):
        with pytest.raises(DatasetError, match=why):
            measure_trust(options.measure, chosen, [seen])
    unseen = collect(tmp_path / "unseen", noise=1.5, noise_hold=4, start_index=600, episodes_per_task=6)
    copy = shutil.copytree(unseen, tmp_path / "copy", ignore=shutil.ignore_patterns(".cache"))
    with pytest.raises(DatasetError, match=r"copy: is held out, and the inverse dynamics is to learn from it"):
        measure_trust(options.measure, chosen, [unseen], train=[episodes, copy])


def test_too_few_failures_stop_no_fit_that_needs_no_threshold(episodes, fitted, tmp_path, caplog):
    options = config(episodes, min_failures=400)
    with pytest.raises(CalibrationError, match="400 are needed"):
        fit(options, SPEC, tmp_path / "run", seed=1)
    found = load_world_model(fit(options, SPEC, tmp_path / "run", seed=1, needs_threshold=False))
    metadata, with_threshold = found.metadata, load_world_model(fitted).metadata
    assert metadata.success_probability == with_threshold.success_probability
    assert "400 are needed" in metadata.no_threshold and not with_threshold.no_threshold
    assert "no threshold of success was chosen" in caplog.text
    if metadata.success_probability is not None:
        slope, intercept = metadata.success_probability
        assert slope * metadata.success_threshold + intercept == pytest.approx(0), "a half"
    with pytest.raises(ConfigError, match=r"got 'success', but the world model has no threshold.* 400 are needed"):
        check_reward(found, ImaginationConfig())


def test_only_what_weights_learned_from_is_recorded_as_that(episodes, fitted, tmp_path):
    newest = collect(tmp_path / "newest", noise=1.5, noise_hold=4, start_index=900)
    options = config(newest, model=None, start_from=str(fitted), value=STAGE, sampling_steps=5, temperature=0.1)
    chosen, start = load_world_model(fit(options.without_learning(), SPEC, tmp_path / "run")), load_world_model(fitted)
    metadata, before = chosen.metadata, start.metadata
    assert chosen.config == start.config, "it imagines as RL's did, though the recipe says otherwise"
    assert weights(fitted) == weights(tmp_path / "run" / "world_model")
    assert metadata.datasets == before.datasets and len(metadata.calibrated_on) == 1
    assert metadata.calibrated_on != before.calibrated_on
    with pytest.raises(DatasetError, match="chose its thresholds on it"):
        measure_trust(MeasureConfig(), tmp_path / "run" / "world_model", [newest])


def test_what_ships_with_the_package_gets_its_report_elsewhere(tmp_path):
    with pytest.raises(ConfigError, match=r"pretrained:tabletop: ships with the package.*--output"):
        measure_trust(MeasureConfig(), Path("pretrained:tabletop"), [])
    with pytest.raises(DatasetError, match="nowhere"):  # It is found, and its metadata are read.
        measure_trust(MeasureConfig(), Path("pretrained:tabletop"), [tmp_path / "nowhere"], folder=tmp_path)


@pytest.mark.parametrize(("chunk_size", "frames"), [(None, 1), (4, 1), (6, 2)])
def test_trust_verifies_successes_over_the_policys_chunk(fitted, held_out, tmp_path, chunk_size, frames):
    options = MeasureConfig(inverse_updates=0, auc_frames=0)
    measure_trust(options, fitted, [held_out], chunk_size=chunk_size, folder=tmp_path)
    assert TrustReport.load(tmp_path / "trust.json").provenance.chunk_frames == frames


def test_the_last_datasets_episodes_alone_can_choose_the_threshold(episodes, held_out, fitted, tmp_path):
    chosen_on = []
    for holdout_from in ("all", "last"):
        datasets = [str(episodes), str(held_out)]
        options = config(episodes, **KEPT, start_from=str(fitted), datasets=datasets, holdout_from=holdout_from)
        metadata = load_world_model(fit(options, ENV.env_spec(), tmp_path / holdout_from)).metadata
        chosen_on.append(metadata.calibration["num_episodes"])
    assert chosen_on == [24, 12]


def test_success_networks_can_start_afresh_and_learn_from_episodes_of_their_own(episodes, held_out, fitted, tmp_path):
    kept = {"model": None, "start_from": str(fitted), "autoencoder": {"steps": 0}, "dynamics": {"steps": 0}}
    found = {}
    for name, options in {
        "continued": {},
        "fresh": {"fresh_success": True},
        "others": {"success_datasets": str(held_out)},
    }.items():
        result = fit(config(episodes, **kept, **options), ENV.env_spec(), tmp_path / name)
        assert weights(result)["dynamics.safetensors"] == weights(fitted)["dynamics.safetensors"]
        found[name] = weights(result)["success.safetensors"]
        assert len(load_world_model(result).metadata.datasets) == (2 if name == "others" else 1)
    assert len(set(found.values())) == 3


def test_thresholds_are_not_chosen_on_what_is_fitted_on(episodes, fitted, held_out, tmp_path, caplog):
    copy = shutil.copytree(episodes, tmp_path / "copy", ignore=shutil.ignore_patterns(".cache"))
    for options in (
        {"calibrate_on": str(episodes)},
        {"calibrate_on": [str(held_out), str(copy)]},
        {"calibrate_on": str(held_out), "success_datasets": str(held_out)},
    ):
        with pytest.raises(ConfigError, match=r"world_model\.calibrate_on: got .*, which is also fitted on"):
            fit(config(episodes, **options), SPEC, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "before anything is fitted"
    none = {name: {"steps": 0} for name in ("autoencoder", "dynamics", "success")}
    known = {"model": None, "start_from": str(fitted), "calibrate_on": str(episodes)}
    fit(config(held_out, **known, **none), SPEC, tmp_path / "run")
    assert f"world_model.calibrate_on: {fitted} has learned from a dataset of it" in caplog.text


def test_held_out_episodes_are_not_fitted_on_by_another_mention(episodes, held_out, tmp_path):
    copy = shutil.copytree(episodes, tmp_path / "copy", ignore=shutil.ignore_patterns(".cache"))
    for options in (
        {"success_datasets": str(episodes)},
        {"success_datasets": [str(held_out), str(copy)]},
        {"datasets": [{"path": str(episodes), "only_successes": True}, str(episodes)]},
        {"datasets": [str(copy), str(episodes)], "holdout_from": "last"},
        {"success_datasets": str(episodes), "cross_fit": 2, "autoencoder": {"steps": 0}},
    ):
        with pytest.raises(ConfigError, match=r"world_model\.datasets: some episodes of .* are held out .* named once"):
            fit(config(episodes, **options), SPEC, tmp_path / "run")
    apart = {"datasets": [str(held_out), str(episodes)], "holdout_from": "last", "success_datasets": str(held_out)}
    assert len(FitData.open(config(episodes, **apart), SPEC, 4, seed=0).judged[0].episodes) == 24


def test_a_resumed_fit_keeps_holding_out_what_it_held_out(episodes, held_out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"run": "fit", "name": "fit", "device": "cpu", "env": ENV.model_dump(), "policy": {"kind": "openvla"}}
    values |= {"log": {"tensorboard": False, "console": False}}
    budget = stop_fitting(monkeypatch, 0)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["world-model", "fit", "recipe.yaml", *arguments])

    def stopped(folder: str, calibrate_on: str) -> None:
        options = config(episodes, calibrate_on=calibrate_on or [])
        Path("recipe.yaml").write_text(dump_yaml(read_recipe(values | {"world_model": options.model_dump()})))
        budget[0] = 4  # The first stage has three.
        assert run("-o", folder).exit_code != 0 and Path(folder, "stages/autoencoder").is_dir()
        budget[0] = 20

    another = collect(tmp_path / "another", noise=1.5, noise_hold=4, start_index=900)
    stopped("given", str(held_out))
    result = run("world_model.calibrate_on=[]", "-o", "given", "--resume")
    assert result.exit_code == 2 and "world_model.calibrate_on: there [{" in result.output, result.output
    assert "keep it given (it may name other episodes)" in " ".join(result.output.split())
    assert read_yaml(Path("given/config.yaml"))["world_model"]["calibrate_on"], "what is refused is not recorded"
    assert run(f"world_model.calibrate_on=[{another}]", "-o", "given", "--resume").exit_code == 0
    kept = f"world_model.calibrate_on=[{another}]"
    for name, options in (("max_false_success", [kept, "world_model.max_false_success=0.5"]), ("calibrate_on", [])):
        result = run(*options, "-o", "given", "--resume")
        assert result.exit_code == 2 and f"world_model.{name}: there" in result.output, result.output
        assert "is finished, and its threshold chosen" in " ".join(result.output.split())
    assert read_yaml(Path("given/config.yaml"))["world_model"]["max_false_success"] == 0.99
    assert run("world_model.save_every=3", kept, "-o", "given", "--resume").exit_code == 0
    stopped("empty", "")
    result = run(f"world_model.calibrate_on=[{held_out}]", "-o", "empty", "--resume")
    assert result.exit_code == 2 and "keep it empty" in " ".join(result.output.split())
    assert run("world_model.min_failures=2", "-o", "empty", "--resume").exit_code == 0


def test_a_value_is_fitted_on_top_resumed_measured_and_kept(episodes, fitted, tmp_path, monkeypatch):
    known = collect(tmp_path / "known", noise=1.5, noise_hold=4, episodes_per_task=32)  # Those, and a few others.
    kept = {"model": None, "start_from": str(fitted), "calibrate_on": str(known)}  # So few are known by heart.
    kept |= {name: {"steps": 0} for name in ("autoencoder", "dynamics", "success")}
    options = config(
        episodes,
        **kept,
        value=STAGE | {"steps": 30, "batch_size": 32, "optim": {"lr": 1e-2, "warmup_steps": 1}, "ema_decay": 0},
        save_every=10,
    )
    valued = fit(options, SPEC, tmp_path / "run")
    before, after = weights(fitted), weights(valued)
    assert {name: after[name] for name in before} == before and set(after) - set(before) == {"value_head.safetensors"}
    figures = load_world_model(valued).metadata.value_calibration
    assert figures["slope"] > 0 and len(figures["by_depth"]) == 4 and figures["by_number"][0]["num_episodes"] == 32
    assert figures["open_frames"]["auc"] > 0.6 and 0 < figures["open_frames"]["brier"] < 0.3
    budget = stop_fitting(monkeypatch, 15)
    with pytest.raises(KeyboardInterrupt):
        fit(options, SPEC, tmp_path / "cut")
    assert updates_kept(options, tmp_path / "cut") == 10
    budget[0] = 20
    assert weights(fit(options, SPEC, tmp_path / "cut")) == after
    budget[0] = 3  # Three of the value's are not needed again: a start's value is kept and measured anew.
    kept |= {"start_from": str(valued), "success": STAGE | {"steps": 1}}
    later = fit(config(episodes, **kept), SPEC, tmp_path / "later")
    assert weights(later)["value_head.safetensors"] == after["value_head.safetensors"]
    assert load_world_model(later).metadata.value_probability == load_world_model(valued).metadata.value_probability


def test_a_finished_fit_is_not_repeated(episodes, fitted, monkeypatch):
    monkeypatch.setattr(fit_module, "_Fit", None)
    assert fit(config(episodes), ENV.env_spec(), fitted.parent) == fitted


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"datasets": []}, ConfigError, "world_model.datasets: empty"),
        ({"min_failures": 40}, CalibrationError, "40 are needed"),
        ({"start_from": "nowhere"}, ConfigError, "no such folder"),
        ({"start_from": "FITTED", "model": MODEL | {"frame_steps": 2}}, ConfigError, "differs from that of start_from"),
    ],
)
def test_what_cannot_be_fitted_is_refused(episodes, fitted, tmp_path, options, error, message):
    options = {key: str(fitted) if value == "FITTED" else value for key, value in options.items()}
    with pytest.raises(error, match=message):
        fit(config(episodes, **options), ENV.env_spec(), tmp_path / "run")
    assert not (tmp_path / "run" / "stages").exists(), "before anything is fitted"


def test_a_fit_on_other_datasets_does_not_first_collect_its_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "meta").mkdir(parents=True)
    (tmp_path / "own" / "meta" / "info.json").write_text("{}")
    only_own = ["world_model.datasets=[own]", "world_model.calibrate_on=[]"]
    done = CliRunner().invoke(app, ["world-model", "fit", "tabletop_world_model", *only_own])
    assert done.exit_code == 2 and "own/meta/info.json" in done.stderr
    assert not (tmp_path / "datasets").exists()


def test_a_memory_that_no_clip_fills_is_refused(episodes):
    message = r"model\.dynamics\.memory: got 2 with clip_frames 3\..* at most 1 more.*clip_frames to at least 4"
    with pytest.raises(ConfigError, match=message):
        validate(FitConfig, {"model": MODEL, "datasets": str(episodes), "clip_frames": 3})
    for kept in ({"clip_frames": 4}, {"dynamics": {"steps": 0}}, {"start_from": "elsewhere"}):
        validate(FitConfig, {"model": MODEL, "datasets": str(episodes), "clip_frames": 3} | kept)


def test_a_start_of_another_robot_is_refused(episodes, fitted, tmp_path):
    spec = DummyConfig(cameras=("wrist",)).env_spec()
    with pytest.raises(ConfigError, match=r"has cameras \('agentview',\), the environment \('wrist',\)"):
        fit(config(episodes, model=None, start_from=str(fitted)), spec, tmp_path / "run")
    wider = replace(SPEC, action_high=2 * SPEC.action_high)
    with pytest.raises(ConfigError, match=r"has action_high \(1\.0, .*\), the environment \(2\.0, .*control mode"):
        fit(config(episodes, model=None, start_from=str(fitted)), wider, tmp_path / "run")


def test_episodes_without_failures_are_refused(tmp_path):
    perfect = collect(tmp_path / "perfect", keep="successes", episodes_per_task=12)
    with pytest.raises(CalibrationError, match="0 failed episodes"):
        fit(config(perfect), ENV.env_spec(), tmp_path / "run")


def test_actions_in_other_units_are_refused(episodes, tmp_path):
    spec = ENV.env_spec()
    small = type(spec)(**{**spec.__dict__, "action_low": spec.action_low / 100, "action_high": spec.action_high / 100})
    shutil.copytree(episodes, tmp_path / "episodes")
    with pytest.raises(DatasetError, match="other units"):
        fit(config(tmp_path / "episodes"), small, tmp_path / "run")


def test_a_dynamics_from_outside_is_fitted_saved_and_loaded(episodes, tmp_path):
    dynamics = {"kind": "my_dynamics:DriftConfig", "spread": 0.1}
    world_model = load_world_model(fit(config(episodes, model=MODEL | {"dynamics": dynamics}), SPEC, tmp_path / "run"))
    assert world_model.config.dynamics.kind == dynamics["kind"]
    with pytest.raises(ConfigError, match=r"clip_source: not for dynamics of kind my_dynamics"):
        own_frames = {"kind": "latent_bootstrap"}
        options = config(episodes, model=MODEL | {"dynamics": dynamics}, clip_source=own_frames, save_every=100)
        fit(options, SPEC, tmp_path / "other")


def with_projections(spec: EnvSpec, shift: float) -> EnvSpec:
    matrix = np.array([[1, 0, 0, 0.5 + shift], [0, 1, 0, 0.5], [0, 0, 0, 1.0]])
    return replace(spec, projections={"agentview": matrix})


@pytest.fixture(scope="module")
def drawn(episodes, tmp_path_factory) -> Path:
    """A world model that draws the gripper's path into its camera's picture."""
    model = MODEL | {"dynamics": MODEL["dynamics"] | {"kinematics": "delta_pose"}}
    run = tmp_path_factory.mktemp("fit") / "run"
    return fit(config(episodes, model=model), with_projections(SPEC, 0.0), run, seed=1)


def test_a_world_model_goes_on_to_other_tasks_of_its_scene(episodes, drawn, tmp_path):
    other = replace(
        with_projections(SPEC, 0.0), tasks={"reach_blue": "reach the blue block"}, horizon={"reach_blue": 9}
    )
    there = load_world_model(fit(config(episodes, **KEPT, start_from=str(drawn)), other, tmp_path / "run"))
    known = load_world_model(drawn).metadata
    assert there.metadata.tasks == known.tasks | other.tasks and there.metadata.horizon == known.horizon | other.horizon
    assert there.metadata.state_mean == known.state_mean
    assert there.metadata.env_spec(["reach_blue"]).horizon == {"reach_blue": 9}


def test_a_new_task_that_takes_the_state_far_is_normalized_with_the_known_ones(episodes, drawn, tmp_path, caplog):
    """As of a hand that turns for one object and not for another; of a known task such states are of other units."""
    known, fitted = load_world_model(drawn), tmp_path / "known"
    shutil.copytree(drawn, fitted)
    of_metadata = json.loads((fitted / "world_model.json").read_text())
    facts = of_metadata["facts"]
    facts["state_mean"][1] += 30 * facts["state_std"][1]
    (fitted / "world_model.json").write_text(json.dumps(of_metadata))
    spec, options = (
        with_projections(SPEC, 0.0),
        config(episodes, **KEPT | {"dynamics": {**STAGE, "steps": 1}}, start_from=str(fitted)),
    )
    with pytest.raises(DatasetError, match="state dimension 1 is about"):
        fit(options, spec, tmp_path / "refused")
    other = replace(spec, tasks={"reach_blue": "reach the blue block"}, horizon={"reach_blue": 9})
    there = load_world_model(fit(options, other, tmp_path / "run"))
    assert "knows dimension 1 of the state only far from" in caplog.text
    mean, std = there.metadata.state_mean, there.metadata.state_std
    (first, _, *rest), (own, spread) = (
        known.metadata.state_mean,
        (known.metadata.state_mean[1], known.metadata.state_std[1]),
    )
    assert [mean[0], *mean[2:]] == [first, *rest] and mean[1] == pytest.approx(own + 15 * spread, rel=0.02)
    assert std[1] == pytest.approx(spread * np.sqrt(1 + 15**2), rel=0.02)
    maps = there.dynamics.action_maps
    assert torch.equal(maps.state_mean, there.state_mean[:3]) and torch.equal(maps.state_std, there.state_std[:3])


def test_a_world_model_goes_on_in_another_scene(episodes, drawn, tmp_path, caplog):
    moved = with_projections(SPEC, 0.2)
    moved = replace(moved, tasks={"reach_blue": "reach the blue block"}, horizon={"reach_blue": 9})
    far = collect(tmp_path / "far", noise=0.1)
    options = config(far, **KEPT, start_from=str(drawn), calibrate_on=str(episodes))
    there = load_world_model(fit(options, moved, tmp_path / "run"))
    start = load_world_model(drawn)
    assert "of another scene (camera agentview stands elsewhere); its 1 tasks are left behind" in caplog.text
    assert there.metadata.tasks == moved.tasks and there.metadata.horizon == moved.horizon
    assert there.metadata.state_mean != start.metadata.state_mean
    maps, before = (model.dynamics.action_maps for model in (there, start))
    assert torch.equal(maps.state_mean, there.state_mean[:3]) and not torch.equal(maps.state_mean, before.state_mean)
    expected = torch.tensor(moved.projections["agentview"], dtype=torch.float32)
    assert torch.equal(maps.get_buffer("projection_agentview"), expected)
    assert torch.tensor(there.config.dynamics.projections["agentview"]).equal(expected)
    changed = {name for name, value in there.state_dict().items() if not torch.equal(value, start.state_dict()[name])}
    assert changed == {f"dynamics.action_maps.{name}" for name in ("state_mean", "state_std", "projection_agentview")}


def test_a_model_given_beside_a_start_of_another_scene_is_its_own(episodes, drawn, tmp_path):
    model = MODEL | {"dynamics": MODEL["dynamics"] | {"kinematics": "delta_pose"}}
    options = config(episodes, **KEPT | {"model": model}, start_from=str(drawn))
    moved = with_projections(SPEC, 0.2)
    there = load_world_model(fit(options, moved, tmp_path / "run"))
    assert there.metadata.projections["agentview"] == tuple(map(tuple, moved.projections["agentview"].tolist()))
