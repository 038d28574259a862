"""Datasets on the Hub, by a server here that speaks its API: what is fetched, what a run records, what is refused."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from local_hub import LocalHub, answer, asking, local_hub

from sim.dummy import DummyConfig
from vla_rl.common.hub import HubName
from vla_rl.config import apply_overrides
from vla_rl.data.config import DatasetError
from vla_rl.data.hub import HubDataset, converter, on_hub, pinned
from vla_rl.recipe.recipe import read_recipe
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

REPO = "someone/reaching"
RECIPE = """
run: sft
name: tiny
description: For tests.
num_threads: 1
env: {kind: 'sim.dummy:DummyConfig', image_size: 32}
policy: {kind: openvla, image_size: 32, chunk_size: 2, precision: fp32}
sft: {datasets: someone/reaching, steps: 2, batch_size: 4, log_every: 1}
log: {tensorboard: false}
"""


class Hub(NamedTuple):
    """`commits`: by revision. `folder`: where commands run."""

    server: LocalHub
    commits: dict[str, str]
    folder: Path

    def run_all(self, commands: list[list[str]], offline: bool = False) -> list[tuple[int, str, str]]:
        """Each one's exit code, output and errors."""
        self.server.sent.clear()
        with chdir(self.folder), asking(self.server, self.folder / "home", offline):
            return [answer(command) for command in commands]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    env = DummyConfig(num_envs=2, image_size=32, horizon=6)
    for number, name in enumerate(("new", "old")):
        config = CollectConfig(dataset=str(folder / name), episodes_per_task=2, keep="all")
        collect_dataset(env, config, seed=number)
        (folder / name / "README.md").write_text("A card.")
        (folder / name / "extra").mkdir()
        (folder / name / "extra" / "large.bin").write_bytes(bytes(1000))
    shutil.copytree(folder / "new", folder / "v21")
    info = json.loads((folder / "v21/meta/info.json").read_text())
    (folder / "v21/meta/info.json").write_text(json.dumps({**info, "codebase_version": "v2.1"}))
    (folder / "none").mkdir()
    (folder / "none" / "train.csv").write_text("a,b\n")
    (folder / "recipe.yaml").write_text(RECIPE)
    with local_hub() as server:
        commits = {
            "main": server.add(f"datasets/{REPO}", folder / "new", "main"),
            "first": server.add(f"datasets/{REPO}", folder / "old", "first"),
        }
        server.add("datasets/someone/v21", folder / "v21", "main")
        server.add("datasets/someone/table", folder / "none", "main")
        yield Hub(server, commits, folder)


def test_cloning_from_the_hub_records_the_commit_and_fetches_what_it_reads(hub: Hub) -> None:
    ((code, _, errors),) = hub.run_all([["sft", "recipe.yaml", "-o", "run"]])
    assert code == 0, errors
    assert f"sft.datasets: {REPO}@{hub.commits['main']} from the hub" in errors
    recorded = yaml.safe_load((hub.folder / "run/config.yaml").read_text())
    assert [one["path"] for one in recorded["sft"]["datasets"]] == [f"{REPO}@{hub.commits['main']}"]
    names = [name for name, _ in hub.server.sent]
    assert names and not [name for name in names if name.startswith(("README", "extra"))]
    assert len(names) == len(set(names)), "a file was sent twice"
    statistics = json.loads((hub.folder / "run/policy/dataset_statistics.json").read_text())
    assert list(statistics) == ["reaching"]
    snapshot = hub.folder / f"home/hub/datasets--someone--reaching/snapshots/{hub.commits['main']}"
    assert snapshot.is_dir() and not (snapshot / ".cache").exists()

    ((code, _, errors),) = hub.run_all([["sft", "recipe.yaml", "-o", "offline"]], offline=True)  # From the cache.
    assert code == 0 and not hub.server.sent, errors
    assert (hub.folder / "offline/config.yaml").read_text() == (hub.folder / "run/config.yaml").read_text()


def test_a_revision_and_what_is_refused_before_any_work(hub: Hub) -> None:
    shutil.copytree(hub.folder / "old", hub.folder / "here/reaching", ignore=shutil.ignore_patterns(".cache"))
    paths = (f"{REPO}@third", "someone/nothing", "someone/table", "datasets/demos", "someone/v21")
    commands = [["sft", "recipe.yaml", f"sft.datasets={path}", "-o", "refused"] for path in paths]
    commands += [["doctor", "--dataset", name, "--json"] for name in (f"{REPO}@first", "here/reaching")]
    answers = hub.run_all(commands)
    assert [code for code, _, _ in answers[:5]] == [2] * 5 and not (hub.folder / "refused").exists(), answers
    revision, nothing, table, local, old = (errors for _, _, errors in answers[:5])
    assert f"dataset '{REPO}@third': the hub has {REPO}, and no revision 'third' of it" in revision
    assert "dataset 'someone/nothing': no such folder, and the hub did not give a dataset" in nothing
    assert "the hub has it, but without meta/info.json, so it is no LeRobotDataset" in table
    assert "sft.datasets: datasets/demos is not there" in local
    assert "someone/v21@" in old and "is LeRobotDataset v2.1; v3.0 is needed" in old
    assert "--repo-id=someone/v21 --root=datasets/v21" in old
    (code, theirs, errors), (_, ours, _) = answers[5:]
    assert code in (0, 1), errors
    assert json.loads(theirs) == json.loads(ours)  # The folder of such a name is read without asking.


def test_offline_what_is_not_in_the_cache_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetError, match=r"not whole in the hub's cache; HF_HUB_OFFLINE is set"):
        on_hub("someone/never_fetched")


def test_a_folder_of_that_name_wins_and_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here/reaching").mkdir(parents=True)
    said: list[str] = []
    recipe = read_recipe(apply_overrides(yaml.safe_load(RECIPE), ["sft.datasets=here/reaching"]))
    assert pinned(recipe, said.append, "sft.datasets") == recipe
    assert said == ["sft.datasets: here/reaching is the folder here of that name; the hub is not asked"]


def test_folders_of_recipes_are_no_names_on_the_hub(tmp_path: Path) -> None:
    assert on_hub("datasets/demos") is None and on_hub(tmp_path) is None and on_hub("a/b/c") is None
    assert on_hub("data/run1") is None


def test_a_name_beside_datasets_that_lie_here_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/code").mkdir(parents=True)
    assert not HubName("mine/run2").may_be_local, "such as a clone of LeRobot beside its datasets on the Hub"
    (tmp_path / "mine/run1/meta").mkdir(parents=True)
    (tmp_path / "mine/run1/meta/info.json").touch()
    assert on_hub("mine/run2") is None


def test_the_converters_command_is_lerobots(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The command that an error names is taken by LeRobot's own program."""
    command = converter(HubDataset(HubName("a/b"))).split()
    assert command[:2] == ["python", "-m"]
    monkeypatch.setattr(sys, "argv", [*command[2:3], "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(command[2], run_name="__main__")
    said = capsys.readouterr().out
    assert all(word.partition("=")[0] in said for word in command[3:])
