"""Names of what ships with the package: one rule for policies and world models."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_rl.common.pretrained import pretrained_entry
from vla_rl.config import ConfigError
from vla_rl.policies.base import resolve_path as policy_folder
from world_model.metadata import resolve_path as world_model_folder


def test_an_entry_is_a_folder_with_the_marker(tmp_path: Path) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "whole" / "mark.json").touch()
    assert pretrained_entry("pretrained:whole", tmp_path, "mark.json", "thing", "thing") == tmp_path / "whole"
    assert pretrained_entry("runs/whole", tmp_path, "mark.json", "thing", "thing") is None
    with pytest.raises(ConfigError, match=r"^thing 'pretrained:broken': no such pretrained toy\. Available: whole\.$"):
        pretrained_entry("pretrained:broken", tmp_path, "mark.json", "thing", "toy")
    with pytest.raises(ConfigError, match="Available: none"):
        pretrained_entry("pretrained:whole", tmp_path / "nowhere", "mark.json", "thing", "toy")


def test_policies_and_world_models_name_what_ships() -> None:
    assert policy_folder("pretrained:tabletop_base").name == "tabletop_base"
    assert world_model_folder("pretrained:tabletop").name == "tabletop"
    with pytest.raises(ConfigError, match=r"^policy path 'pretrained:x': no such pretrained policy\. .*tabletop_base"):
        policy_folder("pretrained:x")
    with pytest.raises(ConfigError, match=r"^world model 'pretrained:x': no such pretrained world model\. .*tabletop"):
        world_model_folder("pretrained:x")
