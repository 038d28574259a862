"""Options of datasets, and a disk without room for the cache."""

# ruff: noqa: F811  (fixtures of the file beside this one)

from __future__ import annotations

import shutil

import pytest
from test_data import demos, read, shared  # noqa: F401  (fixtures)

from vla_rl.config import ConfigError, validate
from vla_rl.data import cache as cache_module
from vla_rl.training.sft import SFTConfig


def test_no_room_is_noticed_before_the_disk_is_full(demos, monkeypatch):
    usage = shutil.disk_usage(demos)._replace(free=1000)
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"decoded images of 'agentview' \(0 MiB needed\)"):
        read(demos)


def test_options():
    config = validate(SFTConfig, {"datasets": ["a", {"path": "b", "weight": 2}]})
    assert [d.path for d in config.datasets] == ["a", "b"] and config.datasets[1].weight == 2
    assert validate(SFTConfig, {"datasets": "a"}).datasets[0].path == "a"
    with pytest.raises(ConfigError, match=r"datasets"):
        validate(SFTConfig, {"datasets": []})
    with pytest.raises(ConfigError, match=r"wieght: unknown key.*Did you mean 'weight'"):
        validate(SFTConfig, {"datasets": [{"path": "b", "wieght": 2}]}, prefix="sft")
