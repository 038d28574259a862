"""A run's folder: what identifies the run, and which folders are refused, with a message that says why."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from vla_rl.common import run_folder as run
from vla_rl.common.pretrained import how_to_make
from vla_rl.common.progress import RunStatus
from vla_rl.common.run_folder import RunFolder, git_commit, is_free, open_run, read_changes, read_metrics
from vla_rl.config import Config, ConfigError, read_yaml, validate
from vla_rl.evaluation.report.report import change_texts


class Section(Config):
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)


class Asked(Config):
    name: str = "tiny"
    seed: int = 0
    num_threads: int = 0
    algo: Section = Section()
    log: Section | None = None


def test_a_new_folder_says_what_was_run_and_with_what(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vla-rl", "train", "my recipe.yaml", "seed=4"])
    folder = open_run(Asked(seed=4), tmp_path / "deep" / "run", resume=False)
    assert validate(Asked, read_yaml(folder / "config.yaml")) == Asked(seed=4)
    assert (folder / "command.txt").read_text() == "vla-rl train 'my recipe.yaml' seed=4\n"
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["python"].startswith("3.") and versions["torch"] and versions["cpus"] >= 1
    assert versions["git_commit"] == git_commit()
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {"checkpoints", "evaluations", "videos"}


def test_without_output_the_folder_is_named_by_recipe_and_time(tmp_path):
    folder = open_run(Asked(), None, resume=False, root=tmp_path)
    assert folder.parent == tmp_path and folder.name.startswith("tiny-20")


def test_the_commit_is_this_projects_own(tmp_path, monkeypatch):
    here = Path(run.__file__).parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert head.stdout.startswith((git_commit() or "missing").removesuffix("+changes"))
    monkeypatch.setattr(run, "__file__", str(tmp_path / "run.py"))
    assert git_commit() is None
    # Installed inside somebody's own repository, whose commit says nothing about us.
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert git_commit() is None


def test_a_folder_in_use_is_refused(tmp_path):
    folder = open_run(Asked(), tmp_path / "run", resume=False)
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"run is not empty\. Choose another --output, or add --resume"):
        open_run(Asked(), folder, resume=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"other is not empty\. Choose another --output\.$"):
        open_run(Asked(), tmp_path / "other", resume=False)
    with pytest.raises(ConfigError, match=r"thesis\.tex is a file\. Choose another --output\.$"):
        open_run(Asked(), tmp_path / "other" / "thesis.tex", resume=False)
    assert (tmp_path / "other" / "thesis.tex").read_text() == "precious"


def test_resuming_needs_a_run_of_the_same_recipe(tmp_path):
    folder = open_run(Asked(), tmp_path / "run", resume=False)
    assert open_run(Asked(), folder, resume=True) == folder
    assert open_run(Asked(num_threads=2), folder, resume=True) == folder, "a machine with other cores"
    (folder / "checkpoints" / "weights.safetensors").touch()
    with pytest.raises(ConfigError, match=r"another recipe: there algo\.lr: 1e-05, here algo\.lr: 0\.01\. Only what"):
        open_run(Asked(algo=Section(lr=0.01)), folder, resume=True)
    difference = r"there seed: 0, here seed: 1; there log: None, here log: '\(nothing\)'\. Only"
    with pytest.raises(ConfigError, match=difference):
        open_run(Asked(seed=1, log=Section()), folder, resume=True)
    with pytest.raises(ConfigError, match=r"there seed: 0, here seed: 1\. Only"):
        open_run(Asked(seed=1, algo=Section(lr=0.01)), folder, resume=True, free=("algo.lr",))
    assert open_run(Asked(algo=Section(lr=0.01)), folder, resume=True, free=("algo.lr",)) == folder
    assert read_yaml(folder / "config.yaml")["algo"]["lr"] == 0.01, "what it goes on with"
    for nowhere in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=r"--resume: .* holds no earlier run"):
            open_run(Asked(), nowhere, resume=True)
    (folder / "config.yaml").write_text("name: [tiny")
    with pytest.raises(ConfigError, match=r"config\.yaml: not valid YAML"):
        open_run(Asked(), folder, resume=True)


class Env(Config):
    num_workers: int = 2
    image_size: int = 64


class Log(Config):
    wandb: str = "disabled"


class Train(Config):
    iterations: int = 4
    save_every: int = 5


class Gate(Config):
    every: int = 0


class Algo(Config):
    lr: float = 1e-5
    micro_batch_size: int = 32


class Whole(Config):
    name: str = "tiny"
    device: str = "auto"
    env: Env = Env()
    log: Log = Log()
    train: Train = Train()
    gate: Gate = Gate()
    algo: Algo = Algo()


def begun(folder: Path, recipe: Config, step: int = 3) -> Path:
    """A run's folder with a checkpoint of that step."""
    open_run(recipe, folder, resume=False)
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text("{}")
    return folder


def test_what_cannot_change_the_result_so_far_may_change_and_is_recorded(tmp_path, monkeypatch):
    folder = begun(tmp_path / "run", Whole())
    command = (folder / "command.txt").read_text()
    changed = Whole(
        device="cpu",
        env=Env(num_workers=0),
        log=Log(wandb="offline"),
        train=Train(iterations=6, save_every=1),
        algo=Algo(micro_batch_size=8),
    )
    monkeypatch.setattr(sys, "argv", ["vla-rl", "train", "--resume"])
    assert open_run(changed, folder, resume=True, free=("train.iterations",)) == folder
    (change,) = read_changes(RunFolder(folder))
    assert change["after"] == 3 and change["command"] == "vla-rl train --resume"
    assert change["changed"] == {
        "device": {"from": "auto", "to": "cpu"},
        "env.num_workers": {"from": 2, "to": 0},
        "log.wandb": {"from": "disabled", "to": "offline"},
        "train.iterations": {"from": 4, "to": 6},
        "train.save_every": {"from": 5, "to": 1},
        "algo.micro_batch_size": {"from": 32, "to": 8},
    }
    assert validate(Whole, read_yaml(folder / "config.yaml")) == changed, "what it goes on with"
    assert (folder / "command.txt").read_text() == command, "how it was started"
    open_run(changed, folder, resume=True)
    assert len(read_changes(RunFolder(folder))) == 1, "nothing has changed"
    open_run(changed.model_copy(update={"device": "cuda"}), folder, resume=True)
    assert [change["changed"].keys() for change in read_changes(RunFolder(folder))][1] == {"device"}
    assert re.search(r", after step 3: device from cpu to cuda$", change_texts(RunFolder(folder))[1])


def test_a_resumed_run_may_use_another_cluster_but_not_other_workers():
    assert all(
        is_free(f"rollout.{name}") for name in ("address", "hosts", "host_gpus", "worker_gpus", "start_timeout_s")
    )
    assert not any(is_free(f"rollout.{name}") for name in ("workers", "staleness", "kind"))


@pytest.mark.parametrize("section", ["env", "real_env"])
def test_a_run_may_go_on_with_its_simulator_elsewhere(section):
    names = ("num_hosts", "hosts", "token_file", "devices", "assets_path")
    assert all(is_free(f"{section}.{name}") for name in names)
    assert not any(is_free(f"{section}.{name}") for name in ("env", "python", "kwargs", "num_envs", "expert_check"))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Whole(env=Env(image_size=32)), r"there env\.image_size: 64, here env\.image_size: 32\. Only what leaves"),
        (Whole(algo=Algo(lr=1e-4)), r"`--resume --output \S+/run` alone reads the run's own recipe"),
        (Whole(train=Train(iterations=2)), r"train\.iterations: there 4, here 2; 3 are done: give at least as many"),
    ],
)
def test_what_could_change_the_result_so_far_is_refused(tmp_path, recipe, message):
    folder = begun(tmp_path / "run", Whole())
    before = (folder / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=message):
        open_run(recipe, folder, resume=True, free=("train.iterations",))
    assert (folder / "config.yaml").read_text() == before and not read_changes(RunFolder(folder))


def test_a_length_that_the_past_depends_on_is_refused(tmp_path):
    folder = begun(tmp_path / "run", Whole(gate=Gate(every=2)))
    longer = Whole(gate=Gate(every=2), train=Train(iterations=6))
    with pytest.raises(ConfigError, match=r"here 6; gate\.every is 2, .* start a new run from policy\.path=\S+/policy"):
        open_run(longer, folder, resume=True, free=("train.iterations",))
    with pytest.raises(ConfigError, match=r"made by another recipe: there train\.iterations: 4, here .*: 6"):
        open_run(longer, folder, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_failed_before_it_began_leaves_its_folder_free(tmp_path, resume):
    folder = open_run(Asked(), tmp_path / "run", resume=False)
    assert open_run(Asked(seed=1), folder, resume=resume) == folder
    assert validate(Asked, read_yaml(folder / "config.yaml")) == Asked(seed=1)
    for file in (RunFolder(folder).status, RunFolder(folder).claim):  # Which say nothing of a step either.
        file.write_text("{}")
    assert open_run(Asked(seed=2), folder, resume=resume) == folder
    (folder / "metrics.jsonl").touch()
    with pytest.raises(ConfigError):
        open_run(Asked(seed=3), folder, resume=resume)


def test_the_result_is_the_runs_policy_or_that_of_its_last_round(tmp_path):
    assert RunFolder(tmp_path).result is None
    for number in (2, 10, 9):
        (tmp_path / f"round_{number}" / "train" / "policy").mkdir(parents=True)
    assert RunFolder(tmp_path).result == tmp_path / "round_10" / "train" / "policy"
    (tmp_path / "policy").mkdir()
    assert RunFolder(tmp_path).result == tmp_path / "policy"


def test_metrics_are_read_but_for_a_line_cut_off_and_a_damaged_one_is_named(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"a": 1}\n{"a": null}\n{"a":')
    first, second = read_metrics(file)
    assert first == {"a": 1} and math.isnan(second["a"])
    file.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not valid JSON .*Remove the line"):
        read_metrics(file)


def test_a_recipes_first_run_lies_where_other_recipes_look_for_it_and_later_ones_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vla-rl", "sft", "tiny"])
    first = open_run(Asked(), None, resume=False, root=tmp_path, first=True)
    assert first == tmp_path / "tiny"
    (first / "metrics.jsonl").touch()
    assert open_run(Asked(), None, resume=True, root=tmp_path) == first
    second = open_run(Asked(), None, resume=False, root=tmp_path, first=True)
    assert second.parent == tmp_path and second.name.startswith("tiny-20")
    assert open_run(Asked(), None, resume=True, root=tmp_path) == second


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("runs/libero_object_bc/policy", "`vla-rl collect libero_object_bc`, then `vla-rl sft libero_object_bc`"),
        ("runs/libero_world_model/world_model", "`vla-rl world-model fit libero_world_model`"),
        ("runs/tabletop_grpo", "`vla-rl train tabletop_grpo`"),
    ],
)
def test_what_a_shipped_recipe_makes_is_offered_where_it_is_missing(path, said):
    assert how_to_make(path) == f" To make it: {said}."
    assert how_to_make("elsewhere/policy") == ""


def test_resuming_without_a_folder_takes_the_newest_run_of_the_recipe_and_command(tmp_path, monkeypatch, capsys):
    def runs(command: str, place: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["vla-rl", "--debug", command, "tiny"])
        return open_run(Asked(), tmp_path / place, resume=False)

    runs("train", "tiny-20260101-000000")
    newest = runs("train", "tiny-20260102-000000")
    runs("train", "tiny-ablation")
    runs("train", "tiny-long-20260103-000000")
    runs("eval", "tiny-20260104-000000")
    (tmp_path / "tiny-20260105-000000").mkdir()
    monkeypatch.setattr(sys, "argv", ["vla-rl", "train", "tiny", "--resume"])
    assert open_run(Asked(), None, resume=True, root=tmp_path) == newest
    assert str(newest) in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match=r"--resume: no run .*other or other-DATE-TIME of this command is here; .*--output"
    ):
        open_run(Asked(name="other"), None, resume=True, root=tmp_path)
    within = open_run(Asked(name="lab/tiny"), None, resume=False, root=tmp_path)  # A name with a folder in it.
    assert open_run(Asked(name="lab/tiny"), None, resume=True, root=tmp_path) == within


def test_from_python_the_newest_run_is_found_whatever_the_kernel_is_called(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/lib/ipykernel_launcher.py", "-f", "/tmp/kernel-1.json"])
    folder = open_run(Asked(), None, resume=False, root=tmp_path)
    assert (folder / "command.txt").read_text() == "python /lib/ipykernel_launcher.py -f /tmp/kernel-1.json\n"
    monkeypatch.setattr(sys, "argv", ["/lib/ipykernel_launcher.py", "-f", "/tmp/kernel-2.json"])
    assert open_run(Asked(), None, resume=True, root=tmp_path) == folder
    monkeypatch.setattr(sys, "argv", ["/lib/vla_rl/__main__.py", "train", "tiny", "--resume"])
    assert open_run(Asked(), None, resume=True, root=tmp_path) == folder


def test_a_run_is_resumed_by_the_command_that_made_it(tmp_path, monkeypatch):
    """Another one ended with a KeyError, at checkpoints that are not its own."""
    monkeypatch.setattr(sys, "argv", ["vla-rl", "sft", "tiny"])
    folder = open_run(Asked(), tmp_path / "run", resume=False)
    monkeypatch.setattr(sys, "argv", ["vla-rl", "train", "--resume"])
    with pytest.raises(ConfigError, match=r"run is a run of `vla-rl sft`, not of train\. .* policy\.path=.*run/policy"):
        open_run(Asked(), folder, resume=True)
    monkeypatch.setattr(sys, "argv", ["vla-rl", "eval", "tiny"])
    assert open_run(Asked(), folder, resume=True) == folder, "which adds an evaluation"


def test_a_run_that_another_process_is_at_is_not_resumed(tmp_path):
    """Two in one folder: the second one's metrics replaced the file that the first went on writing to."""
    folder = open_run(Asked(), tmp_path / "run", resume=False)
    status = RunFolder(folder).status
    RunStatus(step="iterations", number=1, of=2, done=3, total=20).write(status)
    own = json.loads(status.read_text())
    assert open_run(Asked(), folder, resume=True) == folder, "its own process, as a loop's"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    later, earlier = (datetime.now() + timedelta(seconds=seconds) for seconds in (1, -60))

    def says(**changes: object) -> None:
        status.write_text(json.dumps(own | {"process": other.pid, "updated": f"{later:%Y-%m-%dT%H:%M:%S}"} | changes))

    try:
        says()
        with pytest.raises(ConfigError, match=rf"run is still running, as process {other.pid} of this machine.*End"):
            open_run(Asked(), folder, resume=True)
        with pytest.raises(ConfigError, match=rf"run has just begun, as process {other.pid} of this machine.*End"):
            open_run(Asked(), folder, resume=False)  # Before its first evaluation has ended.
        for changes in (
            {"state": "stopped"},
            {"host": "another machine"},
            {"word": "of another version"},
            {"updated": f"{earlier:%Y-%m-%dT%H:%M:%S}"},  # It has the number of a process that is long gone.
        ):
            says(**changes)
            assert open_run(Asked(), folder, resume=True) == folder
    finally:
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    says()
    assert open_run(Asked(), folder, resume=True) == folder, "dead, though nobody has asked how it ended"
    other.communicate()
