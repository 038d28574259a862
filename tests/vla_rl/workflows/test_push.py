"""Policies and datasets onto the Hub, by a server here that speaks its API, through huggingface_hub's own client."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tiny_run import make_recipe, save_policy
from typer.testing import CliRunner, Result
from upload_hub import TOKEN, UploadHub, upload_hub

from sim.dummy import DummyConfig
from vla_rl.cli.app import app
from vla_rl.cli.options import PROGRAM
from vla_rl.common.run_folder import RunFolder, open_run
from vla_rl.config import ConfigError
from vla_rl.evaluation.compare import compare
from vla_rl.evaluation.results import Evaluation
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.training.train import train
from vla_rl.workflows.push import push
from vla_rl.workflows.record_dataset import collect_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push")
    options = ("train.iterations=1", "train.evaluate=before_and_after", "eval.temperatures=[1.0]")
    recipe = make_recipe(save_policy(folder / "policy"), *options)
    train(recipe, open_run(recipe, folder / "run", resume=False), resume=False)
    return folder / "run"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "dataset"
    config = CollectConfig(source="expert", dataset=str(folder), episodes_per_task=8)
    collect_dataset(DummyConfig(num_envs=4), config)
    return folder


def pushed(hub: UploadHub, *arguments: str, token: str = TOKEN) -> Result:
    """`vla-rl push` in this process, where huggingface_hub has read its settings long ago."""
    settings = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_TOKEN_PATH": os.devnull}
    settings |= {"HF_HUB_DISABLE_IMPLICIT_TOKEN": False}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(f"huggingface_hub.constants.{name}", value)
        patch.setenv("HF_TOKEN", token)
        return CliRunner().invoke(app, ["push", *arguments])


def front(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_policys_card_has_its_figures_and_its_recipe(run: Path) -> None:
    card = push(run, "lab/tiny", license_name="mit", card_only=True)
    assert front(card)["license"] == "mit" and {"grpo", "vla-rl"} <= set(front(card)["tags"])
    evaluations = [Evaluation.load(RunFolder(run).evaluation(name)) for name in ("base", "final")]
    result = compare(*evaluations).result("sampled")
    low, high = result.bootstrap
    rates = f"| {100 * result.rate_a:.1f} % | {100 * result.rate_b:.1f} % |"
    wanted = f"{rates} {100 * result.difference:+.1f} [{100 * low:+.1f}"
    assert wanted in card and f"{100 * high:+.1f}] | {result.num_pairs} |" in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert recipe["algo"]["kind"] == "grpo" and recipe["train"]["iterations"] == 1
    assert "policy.path=lab/tiny" in card


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        ("train", {}, "A policy post-trained by `grpo` with"),
        (
            "train",
            {"train": {"control": "shuffled_rewards"}},
            "`grpo`, a negative control (`train.control=shuffled_",
        ),
        ("train", {"train": {"control": "continue_bc"}}, "cloned from demonstrations, a negative control (`train.c"),
        ("sft", {}, "A policy cloned from demonstrations with"),
        (
            "train",
            {"run": "offline", "offline": {"method": "best_of_n"}},
            "A policy improved from logged episodes by `best_of_n` with",
        ),
        ("train", {"run": "online"}, "A policy improved by a critic that learned from its own episodes with"),
        ("train", {"run": "hil"}, "from its own episodes and a person's corrections with"),
    ],
)
def test_a_card_says_what_made_the_policy(
    run: Path, tmp_path: Path, command: str, options: dict[str, Any], says: str
) -> None:
    """A recipe may have the sections of several commands; which of them ran is in command.txt."""
    shutil.copytree(run, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    recipe = yaml.safe_load(folder.config.read_text())
    for section, values in options.items():
        recipe[section] = values if isinstance(values, str) else (recipe.get(section) or {}) | values
    folder.config.write_text(yaml.safe_dump(recipe))
    folder.command.write_text(f"vla-rl {command} recipe.yaml\n")
    card = push(folder.path, "lab/tiny", card_only=True)
    assert says in card
    assert ("grpo" in front(card)["tags"]) == (command == "train" and "run" not in options)
    assert ("- This is one run without its controls." in card) == ("train" not in options)
    assert ("- This run is a negative control" in card) == ("train" in options)


def test_two_seeds_have_no_interval(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    gain = {"of": "RL", "over": "base", "mode": "sampled", "mean": 0.1, "per_seed": [0.1, 0.1], "p_values": [0.5, 0.5]}
    gains = [gain | {"interval": [None, None]}]
    values = {"recipe": "x", "seeds": [0, 1], "num_episodes": 4, "rates": {}, "gains": gains}
    RunFolder(tmp_path / "run").ablation.write_text(json.dumps(values))
    card = push(tmp_path / "run", "lab/tiny", card_only=True)
    assert "+10.0 no interval over seeds: needs three" in card and "one run" not in card


def test_a_policy_is_uploaded_whole_with_its_run(run: Path) -> None:
    """By the program itself, which finds the Hub and the token in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with upload_hub() as hub:
        environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        command = [*PROGRAM, "push", str(run), "lab/tiny"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().startswith(f"{hub.url}/lab/tiny/commit/")
        assert hub.repos == {("model", "lab/tiny"): True}
        files = hub.files["model", "lab/tiny"]
    policy = RunFolder(run).policy
    for file in policy.rglob("*"):
        if file.is_file():
            assert files[file.relative_to(policy).as_posix()] == file.read_bytes()
    assert files["run/config.yaml"] == (run / "config.yaml").read_bytes()
    assert files["run/evaluations/final.json"] == RunFolder(run).evaluation("final").read_bytes()
    assert files["README.md"].decode() == push(run, "lab/tiny", card_only=True)
    assert not [name for name in files if "checkpoints" in name or name.endswith(".mp4")]


def test_a_dataset_is_uploaded_with_what_is_in_it(dataset: Path) -> None:
    with upload_hub() as hub:
        done = pushed(hub, str(dataset), "lab/reaching", "--public")
        assert done.exit_code == 0, done.stderr
        assert hub.repos == {("dataset", "lab/reaching"): False}
        files = hub.files["dataset", "lab/reaching"]
    for file in dataset.rglob("*"):
        if file.is_file():
            assert files[file.relative_to(dataset).as_posix()] == file.read_bytes()
    card = files["README.md"].decode()
    assert "LeRobot" in front(card)["tags"]
    tasks = len(DummyConfig().env_spec().tasks)
    assert f"| episodes | {8 * tasks} |" in card and f"| successes | {8 * tasks} of {8 * tasks} |" in card
    assert "| numbers | ok | no episode with NaN" in card


@pytest.mark.parametrize(
    ("refuses", "token", "said"),
    [
        ("create", TOKEN, "don't have the rights"),
        ("commit", TOKEN, "storage limit reached"),
        ("", "", "logged in|rights|401|token"),
    ],
)
def test_what_the_hub_refuses_is_said_and_nothing_is_there(run: Path, refuses: str, token: str, said: str) -> None:
    import re

    with upload_hub() as hub:
        hub.refuses = refuses
        done = pushed(hub, str(run), "lab/tiny", token=token)
        assert done.exit_code == 2, done.output
        assert re.search(said, done.stderr) and "Traceback" not in done.stderr
        assert not hub.files


def test_a_hub_that_cannot_be_reached_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise httpx.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", unreachable)
    with pytest.raises(ConfigError, match=r"did not take lab/tiny: .*service not known\. .* is the connection up"):
        push(run, "lab/tiny")


def test_what_is_nothing_to_push_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a run with a policy"):
        push(tmp_path, "lab/tiny")
    with pytest.raises(ConfigError, match="'tiny' is no name on the Hub"):
        push(run, "tiny")
