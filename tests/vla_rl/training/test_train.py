"""RL runs in the dummy environment: the folder they write, resuming, controls, and what goes wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import make_recipe, metrics, save_policy, save_small_policy, small_recipe

from sim.dummy import DummyConfig
from vla_rl.algorithms import losses
from vla_rl.algorithms.learner import Learner
from vla_rl.common.atomic import DiskFullError
from vla_rl.common.run_folder import RunFolder, open_run, read_changes
from vla_rl.config import ConfigError, dump_yaml, read_yaml
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.evaluation.results import Evaluation
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import load_recipe
from vla_rl.rollout import runner
from vla_rl.training import run as training
from vla_rl.training.checkpoint import check_whole, list_checkpoints, load_checkpoint
from vla_rl.training.config import OptimizedConfig
from vla_rl.training.run import NoSuccessError, TrainingRun
from vla_rl.training.train import train
from vla_rl.training.trainer import TrainingDivergedError

# Everything that has state: a sampler that learns, resampling, reuse, validation, an optimizer with momentum.
STATEFUL = (
    "sampling.kind=vade",
    "train.resample_budget=2",
    "train.reuse=1",
    "train.validate_every=2",
    "train.validation_episodes=4",
    "train.keep=best",
    "algo.optim.name=muon",
    "algo.kl_coef=0.01",
)
# One control step from a distant start: nobody succeeds.
HOPELESS = (
    *("env.horizon=1", "sampling.first_state=0", "sampling.train_states=null"),
    *("train.iterations=1", "train.groups=3", "train.group_size=2"),
)
ONE = ("train.iterations=1", "train.groups=2", "train.group_size=4")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_small_policy(tmp_path_factory.mktemp("train") / "base")


def run_in(folder: Path, recipe, resume: bool = False) -> Path:
    train(recipe, open_run(recipe, folder, resume), resume)
    return folder


@pytest.fixture(scope="module")
def whole(policy, tmp_path_factory) -> Path:
    """The folder of an uninterrupted run with everything on."""
    recipe = small_recipe(
        policy, *STATEFUL, "train.evaluate=before_and_after", "eval.videos=1", "eval.temperatures=[1]"
    )
    return run_in(tmp_path_factory.mktemp("train") / "whole", recipe)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def is_policy_of(folder: Path, checkpoint: Path) -> bool:
    """Whether a saved policy has the trained weights of a checkpoint."""
    kept, (tensors, _) = load_policy(folder).state_dict(), load_checkpoint(checkpoint)
    return all(torch.equal(kept[n[7:]], t) for n, t in tensors.items() if n.startswith("policy."))


def test_the_folder_holds_all_that_came_of_the_run(whole, policy):
    assert {p.name for p in whole.iterdir()} == {
        *("config.yaml", "command.txt", "versions.json", "metrics.jsonl", "report.html", "status.json"),
        *("checkpoints", "evaluations", "videos", "policy", "best"),
    }
    assert read_yaml(whole / "config.yaml")["policy"]["path"] == str(policy)
    assert "git_commit" in json.loads((whole / "versions.json").read_text())
    assert {p.name for p in (whole / "evaluations").iterdir()} == {"base.json", "final.json"}
    base, final = (Evaluation.load(whole / "evaluations" / f"{name}.json") for name in ("base", "final"))
    assert (base.meta.name, final.meta.name, final.meta.split) == ("base", "final", "eval")
    assert base.meta.policy_hash == policy_hash(policy) and final.meta.policy_hash == policy_hash(whole / "policy")
    assert list((whole / "videos").glob("final__*.mp4"))
    assert "tiny" in (whole / "report.html").read_text()
    assert weights(whole / "policy") == weights(whole / "best") != weights(policy)
    assert [p.name for p in list_checkpoints(whole / "checkpoints")] == ["step_00000003", "step_00000004"]


def test_the_resolved_recipe_is_a_recipe_that_repeats_the_run(whole, policy):
    again = load_recipe(whole / "config.yaml")
    assert open_run(again, whole, resume=True) == whole
    built, saved = again.policy.build(again.env.env_spec()).state_dict(), load_policy(policy).state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(built[name], saved[name]) for name in saved)


def test_what_is_logged(whole):
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], "train/success" in r) for r in rows] == [
        *((1, True), (2, True), (2, False)),
        *((3, True), (4, True), (4, False)),
    ]
    for row in rows:
        if "train/success" not in row:
            assert set(row) == {"step", "validation/sampled", "validation/greedy"}
            continue
        stages = ("simulation", "inference", "forward_backward", "optimizer", "other")
        assert sum(row.get(f"time/{stage}", 0.0) for stage in stages) == pytest.approx(row["time/total"])
        overhead = (row["time/other"] + row.get("time/optimizer", 0.0)) / row["time/total"]
        assert row["time/overhead_fraction"] == pytest.approx(overhead) and 0 < overhead < 1
        assert row["train/success"] == row["train/success/reach_red"] and row["train/lost"] == 0
        assert 16 <= row["train/episodes"] <= 24 and row["time/episodes_per_second"] > 0
        assert ("loss/policy" in row) == (row["update/num_steps"] > 0)
    assert sum(row.get("update/num_steps", 0) for row in rows) >= 2


class _Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


def test_a_run_cut_off_anywhere_goes_on_and_equals_the_uninterrupted_one(whole, policy, tmp_path, monkeypatch):
    recipe = small_recipe(policy, *STATEFUL)
    folder = open_run(recipe, tmp_path / "cut", False)
    finish = TrainingRun.finish_iteration

    def finish_and_die(self, episodes, values):
        finish(self, episodes, values)
        if self.iteration == 3:  # Logged, but not yet saved.
            raise _Killed

    with monkeypatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(TrainingRun, "finish_iteration", finish_and_die)
        train(recipe, folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/succ')  # A line that a kill cut off.
    torch.manual_seed(123)  # Global random states must not matter.
    np.random.seed(123)
    train(recipe, folder, resume=True)
    assert metrics(folder) == metrics(whole)
    ours, theirs = (load_checkpoint(f / "checkpoints" / "step_00000004") for f in (folder, whole))
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys() and all(torch.equal(ours[0][n], theirs[0][n]) for n in ours[0])
    assert weights(folder / "policy") == weights(whole / "policy")


def test_a_finished_run_resumes_to_its_end_and_another_recipe_does_not(whole, policy, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    (folder / "policy" / "model.safetensors").unlink()
    recipe = small_recipe(
        policy, *STATEFUL, "train.evaluate=before_and_after", "eval.videos=1", "eval.temperatures=[1]"
    )
    with pytest.raises(ConfigError, match=r"there algo\.optim\.lr: 0\.001, here algo\.optim\.lr: 0\.01"):
        open_run(small_recipe(policy, *STATEFUL, "algo.optim.lr=0.01"), folder, resume=True)
    with pytest.raises(ConfigError, match="is not empty"):
        open_run(recipe, folder, resume=False)
    run_in(folder, recipe, resume=True)
    assert metrics(folder) == metrics(whole) and weights(folder / "policy") == weights(whole / "policy")


def test_a_finished_run_that_is_given_more_iterations_equals_one_that_had_them_at_once(policy, tmp_path):
    options = ("sampling={kind: vade, first_state: 18, train_states: 2}", "algo.optim.name=muon", "algo.kl_coef=0.01")
    short = run_in(tmp_path / "short", small_recipe(policy, *options, "train.iterations=2"))
    longer = ("train.iterations=4", "train.save_every=2", "log.tensorboard=true", "device=cpu")
    grown = small_recipe(policy, *options, *longer)
    train(grown, open_run(grown, short, resume=True, free=("train.iterations",)), resume=True)
    whole = run_in(tmp_path / "whole", small_recipe(policy, *options, "train.iterations=4"))
    assert metrics(short) == metrics(whole) and weights(short / "policy") == weights(whole / "policy")
    (change,) = read_changes(RunFolder(short))
    assert change["after"] == 2 and change["changed"]["train.iterations"] == {"from": 2, "to": 4}
    assert "after step 2: " in (short / "report.html").read_text()


def test_a_schedule_belongs_to_the_recipe_and_is_not_stretched(policy, tmp_path):
    options = ("algo.decay_iterations=2", "train.iterations=2")
    folder = run_in(tmp_path / "run", small_recipe(policy, *options))
    with pytest.raises(ConfigError, match=r"algo\.decay_iterations: got 2: .*a resumed run keeps its schedule"):
        small_recipe(policy, *options, "train.iterations=4")
    stretched = small_recipe(policy, "algo.decay_iterations=4", "train.iterations=4")
    with pytest.raises(ConfigError, match=r"there algo\.decay_iterations: 2, here algo\.decay_iterations: 4"):
        open_run(stretched, folder, resume=True, free=("train.iterations",))


def test_the_best_by_validation_is_kept(policy, tmp_path, monkeypatch):
    rates = iter([math.nan, 0.5, 0.8, 0.8, 0.2])
    monkeypatch.setattr(training, "evaluate", lambda *a, **k: _fake_evaluation(next(rates)))
    options = ("train.iterations=5", "train.groups=2", "train.allow_no_success=true", "train.keep_checkpoints=9")
    folder = run_in(tmp_path / "run", small_recipe(policy, *options, "train.validate_every=1", "train.keep=best"))
    _, state = load_checkpoint(folder / "checkpoints" / "step_00000005")
    assert state["best"] == [0.8, 3]
    at = {step: is_policy_of(folder / "policy", folder / "checkpoints" / f"step_0000000{step}") for step in (2, 3, 5)}
    assert at == {2: False, 3: True, 5: False}


def _fake_evaluation(sampled: float) -> Any:
    return SimpleNamespace(rate=lambda mode: SimpleNamespace(rate=sampled if mode == "sampled" else 0.0))


def test_rl_needs_an_algorithm_and_keeping_the_best_needs_validation(policy):
    with pytest.raises(ConfigError, match="train: keep 'best' needs validate_every"):
        small_recipe(policy, "train.keep=best")
    with pytest.raises(ConfigError, match=r"algo: got None\. A section is needed"):
        small_recipe(policy, "algo=null")


def test_validation_leaves_no_trace_in_the_training(whole, policy, tmp_path):
    options = [o for o in STATEFUL if "valid" not in o and "keep" not in o]
    folder = run_in(tmp_path / "run", small_recipe(policy, *options))
    assert metrics(folder) == [row for row in metrics(whole) if "train/success" in row]


# --- rollouts ------------------------------------------------------------------------------------


def test_a_policy_that_never_succeeds_is_refused_unless_allowed(policy, tmp_path, capsys):
    with pytest.raises(NoSuccessError, match=r"solved none of 6 .* temperature 1, .*nothing to learn from"):
        run_in(tmp_path / "refused", small_recipe(policy, *HOPELESS))
    recipe = small_recipe(policy, *HOPELESS, "train.allow_no_success=true", "log.console=true", "train.evaluate=after")
    folder = run_in(tmp_path / "allowed", recipe)
    (row,) = metrics(folder)
    assert row["train/success"] == 0 and row["update/num_steps"] == 0
    assert weights(folder / "policy") == weights(policy)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) < 40 and any("iteration 1 of 1" in line for line in shown), "output into a file must stay short"


class Imagined(DummyConfig):
    """Stands for a world model beside which a recipe names no simulator."""

    is_imagined = True
    kind: str = f"{__name__}:Imagined"


def test_in_imagination_the_world_model_is_blamed_first(policy, tmp_path):
    recipe = small_recipe(
        policy, *HOPELESS, f"env={{kind: '{__name__}:Imagined', num_envs: 4, tasks: [reach_red], horizon: 1}}"
    )
    with pytest.raises(NoSuccessError, match=r"solved none of 6 .* from\. .* model does not imagine it"):
        run_in(tmp_path / "run", recipe)


def test_resampling_respects_its_budget(policy, tmp_path):
    recipe = small_recipe(policy, *HOPELESS, "train.resample_budget=2", "train.allow_no_success=true")
    with TrainingRun(recipe, tmp_path, resume=False) as run:
        episodes = run.roll_out()
    assert len(episodes) == (3 + 2) * 2
    assert [e.group for e in episodes] == [group for group in range(5) for _ in range(2)]
    by_group = {e.group: e.spec.index for e in episodes}
    assert len(set(by_group.values())) == 5, "resampled groups start from other states"


def test_lost_episodes_are_not_failures(policy, tmp_path, monkeypatch):
    real = runner.collect
    monkeypatch.setattr("vla_rl.rollout.source.collect", lambda *a, **k: [replace(e, lost=True) for e in real(*a, **k)])
    with pytest.raises(ValueError, match="no episode to learn from: all 8 of the rollout were lost"):
        run_in(tmp_path / "run", small_recipe(policy, *ONE))


def test_shuffled_rewards_permutes_advantages_and_nothing_else(policy, tmp_path):
    dealt = {}
    for control in ("none", "shuffled_rewards"):
        recipe = small_recipe(policy, f"train.control={control}", "algo.filter_groups=false")
        with TrainingRun(recipe, tmp_path / control, resume=False) as run:
            episodes = run.roll_out()
            batch = run.learner.prepare(episodes)
            first = batch.chunk == 0
            dealt[control] = (batch.advantage[first, 0], [e.chunks.actions for e in episodes])
    (true, played), (shuffled, replayed) = dealt["none"], dealt["shuffled_rewards"]
    assert all(np.array_equal(a, b) for a, b in zip(played, replayed, strict=True))
    assert not np.array_equal(true, shuffled)
    np.testing.assert_array_equal(np.sort(true), np.sort(shuffled))


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["loss", "weight"])
def test_nan_stops_the_run_and_the_last_good_policy_is_kept(policy, tmp_path, monkeypatch, what):
    folder, first = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_00000001"
    policy_loss, apply = losses.policy_loss, Learner._apply

    def poisoned_loss(*args, **kwargs):
        loss, values = policy_loss(*args, **kwargs)
        return (loss * math.nan if what == "loss" and first.exists() else loss), values

    def poisoned_apply(self, *args):
        result = apply(self, *args)
        if what == "weight" and first.exists():
            next(iter(self._parameters.values())).data.view(-1)[0] = math.nan
        return result

    monkeypatch.setattr(OptimizedConfig, "max_bad_steps", 1)
    monkeypatch.setattr(losses, "policy_loss", poisoned_loss)
    monkeypatch.setattr(Learner, "_apply", poisoned_apply)
    problem = {"loss": "1 steps in a row had a NaN or infinite loss", "weight": "an update made weights NaN"}[what]
    advice = rf"{problem}.* in iteration 1.*smaller algo\.optim\.lr.*policy\.path=.*last_good and these changes"
    with pytest.raises(TrainingDivergedError, match=advice):
        run_in(folder, small_recipe(policy, "algo.minibatch_size=64", "train.iterations=2"))
    assert is_policy_of(folder / "last_good", first) and not is_policy_of(policy, first)


def test_disk_full_while_saving_leaves_the_earlier_checkpoint_whole(policy, tmp_path, monkeypatch):
    from vla_rl.common.distributed.tensor_files import write_tensors

    def save_until_full(path, *tensors, **options):
        if "step_00000002" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write_tensors(path, *tensors, **options)

    monkeypatch.setattr("vla_rl.training.checkpoint.write_tensors", save_until_full)
    with pytest.raises(
        DiskFullError, match=r"disk full while writing the checkpoint .*step_00000002 .*Free some space"
    ):
        run_in(tmp_path / "run", small_recipe(policy, "train.iterations=2", "train.groups=2"))
    (kept,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert kept.name == "step_00000001"
    check_whole(kept)


def test_ctrl_c_finishes_the_iteration_and_saves_it(policy, tmp_path, monkeypatch):
    real = runner.collect

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr("vla_rl.rollout.source.collect", interrupted)
    recipe = small_recipe(policy, "train.save_every=4")
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path / "run", recipe)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1]
    assert [p.name for p in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step_00000001"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_stops_at_once(policy, tmp_path, monkeypatch):
    def impatient(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    monkeypatch.setattr("vla_rl.rollout.source.collect", impatient)
    with pytest.raises(KeyboardInterrupt):
        run_in(tmp_path / "run", small_recipe(policy))
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")


# --- in processes of their own -------------------------------------------------------------------


def start(recipe_file: Path, folder: Path, resume: bool = False) -> subprocess.Popen:
    command = [sys.executable, "-m", "vla_rl", "train", str(recipe_file), "--output", str(folder)]
    return subprocess.Popen(
        command + ["--resume"] * resume,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_for(condition, process: subprocess.Popen, what: str) -> None:
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode} before {what}: {process.communicate()[0]}")
        time.sleep(0.02)


def num_logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def children(pid: int) -> list[int]:
    found = [int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]
    return found + [c for child in found for c in children(child)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ctrl_c_in_a_terminal_exits_130_and_leaves_no_process(tmp_path):
    recipe_file, folder = tmp_path / "tiny.yaml", tmp_path / "run"
    recipe = make_recipe(save_policy(tmp_path / "base"), "env.num_workers=1", "train.iterations=1000")
    recipe_file.write_text(dump_yaml(recipe))
    process = start(recipe_file, folder)
    wait_for(lambda: num_logged(folder) >= 2, process, "its second iteration")
    workers = children(process.pid)
    assert workers
    os.killpg(process.pid, signal.SIGINT)  # As a terminal does: to the worker processes too.
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 130, output
    assert f"vla-rl train {recipe_file} --output {folder} --resume" in output
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))
    last = list_checkpoints(folder / "checkpoints")[-1]
    check_whole(last)
    assert load_checkpoint(last)[1]["iteration"] == num_logged(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sigkill_at_random_moments(tmp_path):
    options = [o for o in STATEFUL if "keep" not in o]
    recipe = make_recipe(save_policy(tmp_path / "base"), *options, "train.iterations=12", "train.save_every=2")
    recipe_file = tmp_path / "tiny.yaml"
    recipe_file.write_text(dump_yaml(recipe))
    run_in(tmp_path / "whole", recipe)
    folder, moments = tmp_path / "cut", random.Random(0)
    for kill in range(3):
        process, before = start(recipe_file, folder, resume=kill > 0), num_logged(folder)
        wait_for(lambda: num_logged(folder) != before, process, "its first iteration")  # noqa: B023
        time.sleep(moments.uniform(0, 1.0))
        assert process.poll() is None, process.communicate()[0]
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    last = start(recipe_file, folder, resume=True)
    output = last.communicate()[0]
    assert last.returncode == 0, output
    assert metrics(folder) == metrics(tmp_path / "whole")
    assert weights(folder / "policy") == weights(tmp_path / "whole" / "policy")
