"""Every YAML block of the README and the docs loads as what it is: a recipe, a contract or a part of one, a hub's file.

A block with a `name` of its own, or with its file's name in its first line, is whole; others are put on a base that
ships. `...` in a list stands for the reader's own entries, and is filled from a contract that ships. Classes of
`my_lab` are the reader's own code: they are stood in for, with the options that the pages show. So are robots' URDFs.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from my_env import SliderConfig
from urdfs import chain

from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract, shipped_contracts
from real_robot.operator.hub.hub_server import load_hub
from real_robot.transports.base import TransportConfig
from vla_rl.config import RUNS, merge, read_yaml, resolve_kind
from vla_rl.recipe.recipe import load_recipe

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = {name for run in RUNS for name in resolve_kind("run", run).model_fields}
CONTRACT_ALONE = set(RobotContract.model_fields) - SECTIONS
# The first that has a block's sections is its base; of these pages it is another.
BASES = ("grpo", "world_model", "imagination", "offline", "online", "hil", "rac", "reward", "failure", "hub")
OF_PAGE = {"wan.md": "world_model", "trust.md": "imagination"}
CONTRACTS = {"lerobot": "so101"}  # By transport; else sim_robot.


def blocks() -> list[Any]:
    return [
        pytest.param(page, match[1], id=f"{page.stem}:{text[: match.start()].count(chr(10)) + 2}")
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for match in BLOCK.finditer(text)
    ]


class BenchConfig(SliderConfig):
    kind: str = "my_lab.bench:BenchConfig"  # type: ignore[assignment]
    friction: float = 0.5


class SerialConfig(TransportConfig):
    kind: str = "my_lab.serial:SerialConfig"
    port: str


@pytest.fixture(autouse=True)
def my_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    members = {
        "bench": {"BenchConfig": BenchConfig},
        "sim": {"MyConfig": BenchConfig},
        "serial": {"SerialConfig": SerialConfig},
    }
    monkeypatch.setitem(sys.modules, "my_lab", types.ModuleType("my_lab"))
    for name, classes in members.items():
        module = types.ModuleType(f"my_lab.{name}")
        vars(module).update(classes)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def filled(value: Any, base: Any) -> Any:
    """`value` with each `...` of a list replaced by what the base has in that list's place."""
    if isinstance(value, Mapping):
        return {key: filled(v, base.get(key) if isinstance(base, Mapping) else None) for key, v in value.items()}
    if isinstance(value, list):
        there = base if isinstance(base, list) else []
        if "..." in value:
            assert there, f"{value}: nothing to fill it from; write it out"
            return there
        return [filled(v, there[i] if i < len(there) else None) for i, v in enumerate(value)]
    return value


def base_of(sections: Mapping[str, Any]) -> str:
    """The shipped recipe of the tabletop that a block is put on."""
    return next(name for name in BASES if sections.keys() <= type(load_recipe(f"tabletop_{name}")).model_fields.keys())


def check_contract(block: str, values: dict[str, Any], file: Path) -> None:
    transport = values.get("transport", {}).get("kind", "")
    # An action without limits and observations is one of an arm that has those.
    meant = {"JointTrajectory": "ur5e_ros2", "TwistStamped": "franka_servo", "real_time_chunking": "ur5e_ros2"}
    meant = {} if {"safety", "name"} & set(values) else meant
    arm = next((name for kind, name in meant.items() if kind in block), "sim_robot")
    base = read_yaml(shipped_contracts()[CONTRACTS.get(transport, arm)])
    if "name" in values:
        file.write_text(yaml.safe_dump(filled(values, base)))
    else:
        whole = merge(base, filled(values, base))
        if "action" not in values and "model" not in values:  # As many numbers as the limits have.
            indices = list(range(len(whole["safety"]["dimensions"])))
            whole["action"] = [{"topic": "/command", "type": "std_msgs/Float64MultiArray", "indices": indices}]
        file.write_text(yaml.safe_dump(whole))
    if "model" in values:
        stand_in_for_model(yaml.safe_load(file.read_text()), file.parent)
    load_contract(file)


def stand_in_for_model(contract: dict[str, Any], folder: Path) -> None:
    """Write the URDF that the reader has: an arm with the joints that the contract commands."""
    known = contract["model"].get("joints", {})
    named = [known.get(joint, joint) for sink in contract["action"] for joint in sink.get("joints", ())]
    joints = [joint["joint"] if isinstance(joint, Mapping) else joint for joint in named]
    (folder / contract["model"]["file"]).write_text(chain(joints))


@pytest.mark.parametrize(("page", "block"), blocks())
def test_documented_yaml_loads(page: Path, block: str, tmp_path: Path) -> None:
    values = yaml.safe_load(block)
    file = tmp_path / "documented.yaml"
    if values is None:
        assert all(line.startswith("#") for line in block.splitlines()), "neither settings nor a comment"
    elif "robots" in values:
        file.write_text(block)
        load_hub(file)
    elif set(values) & CONTRACT_ALONE:
        check_contract(block, values, file)
    elif "name" in values or re.match(r"# \S+\.yaml\n", block):
        file.write_text(block)
        load_recipe(file)
    else:
        file.write_text(f"name: documented\nbase: tabletop_{OF_PAGE.get(page.name) or base_of(values)}\n{block}")
        load_recipe(file)


def test_there_are_such_blocks() -> None:
    assert len(blocks()) > 20
