"""`vla-rl reproduce`: published figures as the docs have them; from nothing to the row; cut off, resumed, tampered."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml
from tiny_run import RECIPE, save_policy
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner, Result

from sim.dummy import DummyConfig
from vla_rl.cli.app import app
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.verdict import Claim
from vla_rl.policies.fake_input import fake_env_spec, fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.openvla.files.fake_checkpoint import write_checkpoint
from vla_rl.workflows.reproduce import PACKETS, Packet

ROOT = Path(__file__).resolve().parents[3]
needs_libero = pytest.mark.skipif(importlib.util.find_spec("libero") is None, reason="the libero extra is missing")


class WatchedConfig(DummyConfig):
    """The dummy environment, which looks for the claim whenever it is built, and may then be cut off."""

    kind: Literal["test_reproduce:WatchedConfig"] = "test_reproduce:WatchedConfig"
    folder: ClassVar[Path]
    is_cut: ClassVar[bool] = False

    def build(self, *args: Any, **options: Any) -> Any:
        assert (self.folder / "claim.json").is_file(), "an episode is about to be run, and nothing is claimed"
        if self.is_cut:
            raise KeyboardInterrupt
        return super().build(*args, **options)


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["reproduce", *map(str, words)])


def row_of(folder: Path) -> dict[str, Any]:
    """The row, which the table of docs/support.md must take as it is."""
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "scripts" / "support_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (row,) = yaml.safe_load((folder / "row.yaml").read_text())
    assert module.problems({"combinations": [row]}) == []
    return row


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packet of a fresh policy in the dummy environment; its run's folder."""
    monkeypatch.setitem(sys.modules, "test_reproduce", sys.modules[__name__])
    monkeypatch.chdir(tmp_path)
    values = {key: RECIPE[key] for key in ("name", "seed", "num_threads", "eval", "log")}
    env = {**RECIPE["env"], "kind": "test_reproduce:WatchedConfig"}
    recipe = {"run": "eval", **values, "env": env, "policy": {"kind": "openvla"}}
    Path("tiny.yaml").write_text(yaml.safe_dump(recipe))
    claim, policy = Claim(rate=0.5, num_episodes=40), str(save_policy(tmp_path / "base"))
    packet = Packet("A walk", "walk", "tiny.yaml", "nowhere", claim, policy, "SmolVLA", ("eval.samples_per_state=1",))
    monkeypatch.setitem(PACKETS, "tiny", packet)
    monkeypatch.setattr(WatchedConfig, "folder", tmp_path / "runs" / "tiny", raising=False)
    return WatchedConfig.folder


def test_figures_are_those_of_the_docs() -> None:
    page = (ROOT / "docs" / "published_checkpoints.md").read_text()
    for name, packet in PACKETS.items():
        assert f"`{name}`" in page, name
        for row in re.findall(rf"^\| `{re.escape(packet.checkpoint)}` .*$", page, re.MULTILINE):
            assert f" {100 * packet.claim.rate:g} %, {packet.claim.num_episodes} " in row, name
    assert sum(packet.checkpoint in page for packet in PACKETS.values()) >= 4
    assert PACKETS["smolvla_libero"].claim.rate * 400 == 90 + 96 + 92 + 71


@needs_libero
@pytest.mark.parametrize("name", PACKETS)
def test_each_says_what_it_takes(name: str) -> None:
    said = call(name, "env.num_envs=8")
    assert said.exit_code == 0, said.output
    packet = PACKETS[name]
    for text in (packet.checkpoint, packet.recipe, *packet.caveats, "in 8 environments", "env.num_envs=8 --execute"):
        assert text in said.output
    hours = dict(re.findall(r"^  (\w+) +([0-9.]+)  ", said.output, re.MULTILINE))
    assert list(hours) == ["H200", "H100", "A100"] and 0 < float(hours["H200"]) <= float(hours["A100"])
    assert f"{500 * max(len(packet.suites), 1)} episodes find a drop" in said.output


def test_names_are_listed_and_another_is_refused() -> None:
    assert all(name in call().output for name in PACKETS)
    assert "got 'oft'; there are: oft_libero_spatial" in call("oft").output


def test_torchrun_takes_none_of_its_options_for_an_own() -> None:
    words = ["reproduce", "grpo_libero_10", "--execute", "--resume", "--output", "runs/x"]
    assert get_args_parser().parse_args(["-m", "vla_rl", *words]).training_script_args == words


def test_the_claim_comes_first_and_the_row_last(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "runs/tiny holds no earlier run" in call("tiny", "--execute", "--resume").output
    monkeypatch.setattr(WatchedConfig, "is_cut", True)
    cut = call("tiny", "env.num_envs=2", "--execute")
    assert (
        cut.exit_code == 130 and f"vla-rl reproduce tiny --execute --resume --output {Path('runs/tiny')}" in cut.output
    )
    claimed = (tiny / "claim.json").read_bytes()
    assert json.loads(claimed)["num_episodes"] == 4 and not [*(tiny / "evaluations").iterdir()]
    monkeypatch.setattr(WatchedConfig, "is_cut", False)
    ended = call("tiny", "--execute", "--resume")
    assert ended.exit_code == 0, ended.output
    assert (tiny / "claim.json").read_bytes() == claimed
    rate = Evaluation.load(tiny / "evaluations" / "final.json").rate("greedy")
    finding = PACKETS["tiny"].claim.judge(rate.num_successes, 4)
    assert ended.output.splitlines()[-4].startswith(f"{finding}: {rate.text()}; 50 % published")
    row = row_of(tiny)
    assert row["note"].startswith(f"tiny, with env.num_envs=2: {finding}: ") and row["weights"] == "random"
    assert call("tiny", "--execute").exit_code == 2, "the folder is in use"


def test_what_is_to_be_shown_cannot_be_changed_afterwards(tiny: Path) -> None:
    assert call("tiny", "--execute").exit_code == 0
    claim = json.loads((tiny / "claim.json").read_text())
    (tiny / "claim.json").write_text(json.dumps({**claim, "reproduced_from_successes": 0}))
    again = call("tiny", "--execute", "--resume")  # A rule that would accept anything.
    assert again.exit_code == 2 and "differs in reproduced_from_successes, and episodes have been run" in again.output
    (tiny / "claim.json").unlink()
    assert "claim.json: is not there, and episodes have been run" in call("tiny", "--execute", "--resume").output


def statistics(suite: str) -> dict[str, Any]:
    return {f"{suite}_no_noops": {"action": fake_statistics(7), "proprio": fake_statistics(8, gripper=False)}}


def checkpoint(name: str, folder: Path) -> Path:
    """A tiny checkpoint in the layout of the packet's."""
    if name != "smolvla_libero":
        variant, suite = ("discrete", "libero_10") if name == "grpo_libero_10" else ("l1", "libero_goal")
        return write_checkpoint(folder, variant, statistics=statistics(suite))
    cameras = ("image", "image2")
    policy = LeRobotConfig(type="smolvla", preset="tiny", cameras=cameras).build(fake_env_spec(cameras))
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.save(folder)
    return folder


@pytest.mark.slow
@needs_libero
@pytest.mark.parametrize("name", ["oft_libero_goal", "grpo_libero_10", "smolvla_libero"])
def test_in_libero_from_nothing_to_the_row(name: str, tmp_path: Path) -> None:
    from libero_setup import ASSETS

    if ASSETS is None:
        pytest.skip("LIBERO's assets are not here")
    if name == "smolvla_libero":
        pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    few = ['env.tasks=["0"]', "env.horizon=8", "eval.episodes_per_task=2", "eval.videos=0"]
    here = [f"env.assets_path={ASSETS}", "env.num_envs=1", "env.num_workers=0", "device=cpu", "policy.precision=fp32"]
    learn = [*("train.iterations=1", "train.groups=1", "train.group_size=2"), "train.allow_no_success=true"]
    path = f"policy.path={checkpoint(name, tmp_path / 'tiny')}"
    words = [name, path, *few, *here, *(learn if PACKETS[name].trains else ())]
    ended = call(*words, "--execute", "-o", tmp_path / "run")
    assert ended.exit_code == 0, ended.output
    claim = json.loads((tmp_path / "run" / "claim.json").read_text())
    assert claim["num_episodes"] == 2 * max(len(PACKETS[name].suites), 1) and "env.horizon=8" in claim["settings"]
    row = row_of(tmp_path / "run")
    level = "no gain" if PACKETS[name].trains else "measured"
    assert (row["simulator"], row["level"], row["weights"]) == ("LIBERO", level, "random")
    assert "not reproduced: 0.0 % [0.0, " in row["note"] and not re.search("policy.path|device", row["note"])
