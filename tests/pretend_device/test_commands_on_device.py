"""`train --resume`, `sft` and `eval` with `device=pretend`: the same numbers as with `device=cpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import make_recipe, metrics, save_policy
from typer.testing import CliRunner

from pretend_device import counting, pretending
from sim.dummy import DummyConfig
from vla_rl.cli import app as cli
from vla_rl.common.run_folder import RunFolder, open_run
from vla_rl.config import dump_yaml
from vla_rl.evaluation.results import Evaluation
from vla_rl.policies.load import load_policy
from vla_rl.training.train import train
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

FEW = ("train.iterations=2", "train.groups=2", "algo.optim.name=muon", "algo.kl_coef=0.01")
EXACT = 1e-3


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretending() as name:
        yield name


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("on_device") / "base")


def run(*arguments: str) -> None:
    """A command, which must have used the device."""
    with counting() as counts:
        result = CliRunner().invoke(cli.app, [*arguments, "device=pretend"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert counts.totals["kernels"] > 0


def write_recipe(folder: Path, policy: Path, *overrides: str) -> str:
    path = folder / "tiny.yaml"
    path.write_text(dump_yaml(make_recipe(policy, *overrides)))
    return str(path)


class StoppedError(Exception):
    """Ends a run in its middle."""


def stop() -> None:
    raise StoppedError


def test_a_run_that_was_stopped_is_resumed(policy, tmp_path):
    train(make_recipe(policy, *FEW), tmp_path / "host")
    recipe = make_recipe(policy, *FEW, "device=pretend")
    with pytest.raises(StoppedError):
        train(recipe, open_run(recipe, tmp_path / "device", resume=False), on_iteration=stop)
    assert len(metrics(tmp_path / "device")) == 1
    run("train", write_recipe(tmp_path, policy, *FEW), "--output", str(tmp_path / "device"), "--resume")
    here, there = metrics(tmp_path / "host"), metrics(tmp_path / "device")
    assert len(here) == len(there) == 2
    for on_host, on_device in zip(here, there, strict=True):
        learned = {k: v for k, v in on_host.items() if k.startswith(("loss/", "grad_norm/", "train/", "update/"))}
        assert learned["loss/policy"] != 0
        assert {k: on_device[k] for k in learned} == pytest.approx(learned, rel=EXACT, abs=EXACT)


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("on_device") / "demonstrations"
    env = DummyConfig(num_envs=4, tasks=("reach_red",), horizon=8, image_size=32)
    collect_dataset(env, CollectConfig(dataset=str(folder), episodes_per_task=6))
    return folder


def test_cloning(policy, demonstrations, tmp_path):
    options = (f"sft.datasets={demonstrations}", "sft.steps=3", "sft.batch_size=4", "sft.log_every=1")
    recipe = write_recipe(tmp_path, policy, *options, "sft.ema_decay=0.9")
    for device in ("pretend", "cpu"):
        output = tmp_path / device
        if device == "pretend":
            run("sft", recipe, "--output", str(output))
        else:
            CliRunner().invoke(cli.app, ["sft", recipe, "--output", str(output)], catch_exceptions=False)
    losses = [[row["loss"] for row in metrics(tmp_path / device) if "loss" in row] for device in ("cpu", "pretend")]
    assert len(losses[0]) >= 3 and losses[1] == pytest.approx(losses[0], rel=EXACT)
    found, expected = (load_policy(tmp_path / device / "policy").state_dict() for device in ("pretend", "cpu"))
    for name, value in expected.items():
        assert (found[name] - value).abs().max() < EXACT, name


def test_evaluation(policy, tmp_path):
    recipe = write_recipe(tmp_path, policy)
    successes = {}
    for device in ("pretend", "cpu"):
        output = tmp_path / device
        if device == "pretend":
            run("eval", recipe, "--output", str(output))
        else:
            CliRunner().invoke(cli.app, ["eval", recipe, "--output", str(output)], catch_exceptions=False)
        successes[device] = [e.success for e in Evaluation.load(RunFolder(output).evaluation("policy")).episodes]
    assert successes["pretend"] == successes["cpu"] and successes["cpu"]
