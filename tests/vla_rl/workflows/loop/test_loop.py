"""The outer loop on the dummy environment, every part real and tiny: what it leaves, and that a stopped one goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_here import run_jobs_here
from tiny_run import save_policy

from vla_rl.cli.options import PROGRAM
from vla_rl.common import atomic
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError, apply_overrides, read_yaml
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.results import Evaluation
from vla_rl.recipe.recipe import Recipe, load_recipe, read_recipe
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.workflows.collect import collect
from vla_rl.workflows.loop import closed_loop as loop
from vla_rl.workflows.loop import controls as loop_controls
from vla_rl.workflows.loop.rounds import (
    Round,
    RoundsTable,
)
from vla_rl.workflows.world_model import fit_world_model
from world_model.metadata import read_metadata

REAL = {"kind": "sim.dummy:DummyConfig", "num_envs": 8, "tasks": ["reach_red"], "horizon": 40}
STAGE = {"steps": 2, "batch_size": 4, "optim": {"warmup_steps": 1}}
FIT = {
    "kind": "latent_video",
    "model": {
        "autoencoder": {"channels": [4, 8], "blocks": [1, 1], "latent_channels": 4},
        "dynamics": {"width": 32, "depth": 1, "heads": 2, "patch": 4, "memory": 2},
        "success": {"width": 32, "depth": 1},
        "frame_steps": 4,
    },
    "clip_frames": 4,
    "holdout": 0.5,
    "autoencoder": STAGE,
    "dynamics": STAGE,
    "success": STAGE,
    "max_false_success": 0.99,
    "min_failures": 1,
    "measure": {"inverse_updates": 2},
}
RECIPE: dict[str, Any] = {
    "run": "loop",
    "name": "tiny_loop",
    "num_threads": 1,
    "env": {
        **{"kind": "world_model", "first_frames": REAL, "num_envs": 8, "trust": {"ignore": True}},
        "imagination": {"horizon": 40},  # Trust measures 0 steps after two updates.
    },
    "real_env": REAL,
    "algo": {"kind": "grpo", "optim": {"lr": 1e-3}, "minibatch_size": 24},
    "sampling": {"first_state": 7, "train_states": 2},
    "train": {"iterations": 1, "groups": 2, "group_size": 4, "allow_no_success": True},
    "loop": {"episodes": 24, "held_out": 24, "controls": ["shuffled_rewards"]},
    "world_model": FIT,
    "eval": {"episodes_per_task": 4, "videos": 0},
    "log": {"tensorboard": False, "console": False},
}


def make_recipe(folder: Path, *overrides: str) -> Any:
    """With a policy that moves at random and a world model fitted in two updates a stage."""
    policy = save_policy(folder / "policy")
    values = RECIPE | {"policy": {"kind": "openvla", "path": str(policy)}}
    fitting = {name: values[name] for name in ("name", "num_threads", "policy", "world_model", "log")}
    recipe: Any = read_recipe(fitting | {"run": "fit", "env": REAL})
    episodes = folder / "episodes"
    config = CollectConfig(source="policy", dataset=str(episodes), episodes_per_task=24)
    collect(recipe, config, lambda _: None)
    world_model = fit_world_model(recipe, folder / "fit", [episodes])
    values["env"] = RECIPE["env"] | {"path": str(world_model)}
    values["world_model"] = {**FIT, "model": None, "autoencoder": {"steps": 0}}
    return read_recipe(apply_overrides(values, overrides))


def started(recipe: Recipe, folder: Path) -> Path:
    """The loop's folder, as `vla-rl loop` opens it."""
    return open_run(recipe, folder, resume=False)


@pytest.fixture(scope="module")
def recipe(tiny_loop) -> Recipe:
    return tiny_loop


class Stopped(BaseException):
    """Stands for a kill."""


def stop(*_: object, **__: object) -> None:
    raise Stopped


@pytest.fixture(scope="module")
def before_rl(recipe, tmp_path_factory) -> Path:
    """A loop that was stopped where its RL would start."""
    folder = started(recipe, tmp_path_factory.mktemp("stopped") / "run")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(loop, "run_beside_controls", stop)
        loop.loop(recipe, folder, PROGRAM, lambda _: None)
    return folder


def test_a_round_goes_from_real_episodes_to_a_real_evaluation(recipe, before_rl, tmp_path, monkeypatch):
    run_jobs_here(monkeypatch)
    folder = Path(shutil.copytree(before_rl, tmp_path / "run"))
    kept = {path: path.stat().st_mtime_ns for path in (folder / "round_1" / "fit").rglob("*.safetensors")}
    assert kept and not (folder / "round_1" / "train").exists()

    done = loop.loop(recipe, folder, PROGRAM, lambda _: None)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "the world model was not fitted again"
    trust = json.loads((done.world_model / "trust.json").read_text())
    assert trust["figures"]["agreement"]["n"] == 24 and trust["provenance"]["chunk_frames"] == 1
    assert '<a href="../../train/report.html">' in (done.world_model / "trust.html").read_text()
    assert (done.world_model / "../../train/report.html").is_file()
    assert trust["figures"]["acting_gap"]["n"] == 24, "its own policy acted from where its held-out episodes began"
    admission = json.loads((done.run / "admission.json").read_text())
    assert Path(admission["report"]) == done.world_model / "trust.json" and admission["ignored"]
    base = Evaluation.load(done.run / "evaluations" / "base.json")
    assert base.meta.env == "dummy", "evaluated in the real environment"
    assert set(loop_controls.evaluations(recipe, done)) == {"none", "shuffled_rewards"}
    for page in (done.run / "report.html", folder / "report.html"):
        assert "Not trusted" in page.read_text() and "over shuffled rewards" in page.read_text()
    rounds = json.loads((folder / "rounds.json").read_text())
    assert [row["total"] for row in rounds["rows"]] == [48] and "48 real episodes" in page.read_text()


def test_an_untrusted_world_model_stops_the_loop(recipe, before_rl, tmp_path):
    values = recipe.model_dump(mode="json")
    values["env"]["trust"]["ignore"] = False
    with pytest.raises(ValueError, match="cannot be trusted enough"):
        loop.loop(read_recipe(values), shutil.copytree(before_rl, tmp_path / "run"), PROGRAM, lambda _: None)


def test_a_loop_needs_its_evaluations(recipe, tmp_path):
    quiet = recipe.model_copy(update={"train": recipe.train.model_copy(update={"evaluate": "never"})})
    with pytest.raises(ConfigError, match=r"train\.evaluate: got 'never'"):
        loop.loop(quiet, tmp_path, PROGRAM, lambda _: None)


def test_what_rl_or_a_fit_alone_may_be_told_is_refused(recipe, tmp_path):
    told = ["train.evaluate=after", "world_model.start_from=x", "world_model.calibrate_on=x"]
    asking = read_recipe(apply_overrides(recipe.model_dump(mode="json"), told))
    with pytest.raises(
        ConfigError, match=r"train\.evaluate: got 'after'(?s:.*)start_from: got 'x'(?s:.*)on: got \['x'\]"
    ):
        loop.loop(asking, tmp_path, PROGRAM, lambda _: None)


def test_a_loop_with_styles_records_what_guides_them(recipe, tmp_path):
    """Which the dummy environment cannot: the loop stops before any episode."""
    styled = read_recipe(apply_overrides(recipe.model_dump(mode="json"), ["world_model.style.share=0.5"]))
    with pytest.raises(ConfigError, match=r"collect\.structure: .*DummyConfig draws no segmentation"):
        loop.loop(styled, tmp_path, PROGRAM, lambda _: None)


# --- rounds ----------------------------------------------------------------------------------------

TWO = (
    *("loop.rounds=2", "loop.episodes=16", "loop.held_out=24", "loop.controls=[online_grpo]"),
    *("sampling.keyframe_share=0.5", "train.groups=4", "gate.every=1", "gate.pairs=8", "loop.real_episodes=128"),
)


@pytest.fixture(scope="module")
def two(recipe) -> Recipe:
    """Two rounds, with keyframes and a gate, against RL in the simulator."""
    return read_recipe(apply_overrides(recipe.model_dump(mode="json"), TWO))


@pytest.fixture(scope="module")
def whole(two, tmp_path_factory) -> Path:
    folder = started(two, tmp_path_factory.mktemp("rounds") / "run")
    loop.loop(two, folder, PROGRAM, lambda _: None)
    return folder


@pytest.mark.slow
def test_rounds_start_from_one_another(whole, two):
    first, second = (Round(whole / f"round_{n}") for n in (1, 2))
    config = read_yaml(second.run / "config.yaml")
    assert config["policy"]["path"] == str(first.run / "policy")
    assert config["env"]["path"] == str(second.world_model)
    assert config["gate"]["start_index"] == two.gate.start_index + two.gate.pairs, "states that no gate has used"
    assert config["sampling"]["first_state"] == two.sampling.first_state, "of the same few states, where there are few"
    assert config["env"]["seed"] == 1, "noise of its own"
    fit = read_yaml(second.folder / "train.yaml")
    assert fit["sampling"]["keyframes"] == str(second.keyframes)
    notes = json.loads((second.rollouts / "collect.json").read_text())
    explorer = first.explorer.name
    assert notes["policy_version"].startswith(explorer) and notes["collect"]["start_index"] == 100_016
    before = json.loads((second.trust_before / "trust.json").read_text())
    after = json.loads((second.world_model / "trust.json").read_text())
    assert before["provenance"]["model"] == str(first.world_model) != after["provenance"]["model"]
    assert before["provenance"]["dataset_keys"] == after["provenance"]["dataset_keys"], "on the same held-out episodes"
    base = Evaluation.load(second.run / "evaluations" / "base.json")
    ended = Evaluation.load(first.run / "evaluations" / "final.json")
    assert base.meta.name == "base" and base.episodes == ended.episodes, "a round begins where the last one ended"
    row = json.loads((second.run / "metrics.jsonl").read_text().splitlines()[0])
    assert "train/success_from_keyframes" in row and "train/success_from_start" in row


@pytest.mark.parametrize("states", [None, 12])
def test_a_rounds_rl_begins_where_no_other_round_did(tmp_path, states):
    recipe = load_recipe("tabletop_imagination", [f"sampling.train_states={states or 'null'}"])
    rounds = [Round(tmp_path / f"round_{n}") for n in (1, 2)]
    first, second = (loop.in_round(recipe, rounds, number, "policy", "world_model") for number in (0, 1))
    drawn = recipe.train.iterations * recipe.train.groups
    assert first.sampling.first_state == 0 and second.sampling.first_state == (0 if states else drawn)
    assert (first.env.seed, second.env.seed) == (0, 1), "states that come back do so with other noise"


@pytest.mark.slow
def test_what_judged_a_round_teaches_the_next_and_judges_no_more(whole):
    """The newest held-out episodes are in no fit; those of the round before are in the newest."""
    learned, judged = [], []
    for done in (Round(whole / "round_1"), Round(whole / "round_2")):
        learned.append(set(json.loads((done.world_model / "world_model.json").read_text())["facts"]["datasets"]))
        judged.append(set(json.loads((done.world_model / "trust.json").read_text())["provenance"]["dataset_keys"]))
    assert judged[0].isdisjoint(learned[0]) and judged[1].isdisjoint(learned[1])
    assert judged[0] <= learned[1] and judged[0].isdisjoint(judged[1])
    first = Round(whole / "round_1")
    checks = json.loads((first.run / "gate.json").read_text())["checks"]
    assert sum(len(LeRobotSource(kept).lengths) for kept in first.gate_episodes) == sum(
        check["comparison"]["num_episodes"] for check in checks
    )
    new = len(first.gate_episodes) + 2
    assert len(learned[1]) == len(learned[0]) + new, "the new rollouts, what judged round 1, and what its gate saw"


@pytest.mark.slow
def test_after_rl_the_world_model_is_calibrated_and_measured_where_rl_has_led(whole):
    table = RoundsTable.model_validate_json((whole / "rounds.json").read_text())
    for row, done in zip(table.rows, (Round(whole / "round_1"), Round(whole / "round_2")), strict=True):
        (_, before), (_, after) = read_metadata(done.world_model), read_metadata(done.calibrated)
        assert before.datasets == after.datasets and set(before.calibrated_on) != set(after.calibrated_on)
        assert len(after.calibrated_on) == len(done.calibrating) == len(done.gate_episodes)
        for file in ("dynamics", "success", "clip"):
            assert (done.world_model / f"{file}.safetensors").read_bytes() == (
                done.calibrated / f"{file}.safetensors"
            ).read_bytes(), "no weight changes"
        measured = json.loads((done.calibrated / "trust.json").read_text())
        assert measured["provenance"]["datasets"] == [str(done.newest_episodes)]
        assert measured["provenance"]["model"] == str(done.calibrated)
        assert set(measured["provenance"]["dataset_keys"]).isdisjoint(after.calibrated_on)
        assert row.newest["agreement"][0] == measured["figures"]["agreement"]["value"]
    assert "trust after RL" in (whole / "report.html").read_text()


@pytest.mark.slow
def test_every_real_episode_is_counted_once(whole, two):
    table = RoundsTable.model_validate_json((whole / "rounds.json").read_text())
    for row, done in zip(table.rows, (Round(whole / "round_1"), Round(whole / "round_2")), strict=True):
        checks = json.loads((done.run / "gate.json").read_text())["checks"]
        assert (row.episodes.rollouts, row.episodes.held_out) == (16, 24)
        assert [check["executed"]["num_episodes"] for check in checks] == [8] * len(checks)
        assert row.episodes.gate == sum(check["comparison"]["num_episodes"] + 8 for check in checks) > 8
        assert row.verdict == checks[-1]["verdict"] in ("better", "worse", "undecided")
        assert row.num_keyframes and row.after and bool(row.before) == (row.number == 2)
    assert table.total == sum(row.episodes.total for row in table.rows) <= 128 == table.budget
    online = read_yaml(whole / "online_grpo" / "config.yaml")
    played = sum(
        json.loads(line)["train/episodes"]
        for line in (whole / "online_grpo" / "metrics.jsonl").read_text().splitlines()
    )
    assert online["env"]["kind"] == "sim.dummy:DummyConfig" and online["policy"]["path"] == str(two.policy.path)  # type: ignore[attr-defined]
    assert table.total - 4 * online["train"]["iterations"] < played == table.online <= table.total
    page = (whole / "report.html").read_text()
    assert (
        "RL in the simulator, as many real episodes" in page and f"{table.total} real episodes of at most 128" in page
    )
    assert "<h2>Rounds</h2>" in page and "Controls" in page


@pytest.mark.slow
def test_stopped_at_every_stage_it_ends_the_same(whole, two, tmp_path, monkeypatch):
    """Stopped before whatever it would have published next, again and again."""
    folder = started(two, tmp_path / "run")
    publish, allowed, stops = atomic._publish, [0], 0

    def limited(*args: Any) -> None:
        if allowed[0] == 0:
            raise Stopped
        allowed[0] -= 1
        publish(*args)

    monkeypatch.setattr(atomic, "_publish", limited)
    for _ in range(200):
        allowed[0] = 3 + stops % 6  # A check of the gate, which a stop loses whole, publishes several times.
        try:
            loop.loop(two, folder, PROGRAM, lambda _: None)
            break
        except Stopped:
            stops += 1
    assert stops >= 6
    same_result(whole, folder)


KILLED = """
import os, signal, sys
from pathlib import Path
from vla_rl.cli.options import PROGRAM
from vla_rl.common import atomic
from vla_rl.recipe.recipe import load_recipe, read_recipe
from vla_rl.workflows.loop import closed_loop as loop
publish, allowed = atomic._publish, [int(sys.argv[3])]
def limited(*args):
    if allowed[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    allowed[0] -= 1
    publish(*args)
atomic._publish = limited
loop.loop(load_recipe(sys.argv[1]), Path(sys.argv[2]), PROGRAM, lambda _: None)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_every_stage_it_ends_the_same(whole, two, tmp_path):
    """SIGKILL, in a process of its own, in the middle of each stage in turn."""
    folder = started(two, tmp_path / "run")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    kills = 0
    for _ in range(60):
        command = [sys.executable, "-c", KILLED, str(folder / "config.yaml"), str(folder), str(3 + kills % 6)]
        code = subprocess.run(command, env=environment, check=False).returncode
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
    assert kills >= 6
    same_result(whole, folder)


def same_result(one: Path, other: Path) -> None:
    """The same policies to the bit, and the same count of real episodes."""
    for run in ("round_1/train", "round_2/train", "online_grpo"):
        weights = [(folder / run / "policy" / "model.safetensors").read_bytes() for folder in (one, other)]
        assert weights[0] == weights[1], run
    tables = [RoundsTable.model_validate_json((folder / "rounds.json").read_text()) for folder in (one, other)]
    assert [row.episodes for row in tables[0].rows] == [row.episodes for row in tables[1].rows]
    assert tables[0].online == tables[1].online


@pytest.mark.slow
def test_without_refits_later_rounds_stay_in_the_first_world_model(recipe, tmp_path, monkeypatch):
    overrides = [*TWO, "loop.refit=false", "loop.controls=[]", "gate.every=0", "sampling.keyframe_share=0"]
    two = read_recipe(apply_overrides(recipe.model_dump(mode="json"), overrides))
    folder = started(two, tmp_path / "run")
    done = loop.loop(two, folder, PROGRAM, lambda _: None)
    config = read_yaml(done.run / "config.yaml")
    assert config["env"]["path"] == str(folder / "round_1" / "fit" / "world_model")
    assert config["env"]["trust"]["report"] == str(done.trust_before / "trust.json")
    assert not done.world_model.exists() and done.rollouts.is_dir()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["loop.real_episodes=50"],
            r"got 50, too few for 2 rounds: each takes up to 64 \(16 to fit on, 24 held out, 24",
        ),
        (["loop.real_episodes=70"], r"all of them 128\. Raise it, set loop\.rounds=1, or lower"),
        (["loop.real_episodes=128", "train.validate_every=1"], "40 for validation"),
        (["loop.controls=[online]"], "loop.controls"),
        (["loop.old_weight=0"], "loop.old_weight"),
    ],
)
def test_a_budget_that_is_too_small_is_refused_before_anything_runs(two, tmp_path, overrides, message):
    values = apply_overrides(two.model_dump(mode="json"), overrides)
    with pytest.raises(ConfigError, match=message):
        loop.loop(read_recipe(values), tmp_path / "run", PROGRAM, lambda _: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("notes", "message"),
    [
        (
            {"policy_version": "policy 0123456789ab"},
            r"collected with other settings \(policy_version: there 'policy 01",
        ),
        ({"env": {"cameras": ["wrist"]}}, r"env\.cameras: there \['wrist'\], now \['agentview'\]"),
    ],
)
def test_a_rounds_episodes_of_another_policy_or_camera_are_refused(whole, two, tmp_path, notes, message):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("train", "fit", ".cache", "online_grpo"))
    file = folder / "round_1" / "held_out" / "collect.json"
    values = json.loads(file.read_text())
    for key, value in notes.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        loop.loop(two, folder, PROGRAM, lambda _: None)
