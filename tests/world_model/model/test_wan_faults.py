"""Wan: damaged folders, and what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_wan import make_dynamics, publish


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path) / "transformer"
    config, shard = folder / "config.json", sorted(folder.glob("*.safetensors"))[0]
    whole, weights = config.read_text(), shard.read_bytes()
    more = json.loads(whole) | {"num_layers": 3}
    for text, message in (
        ("{", r"config\.json: not the config of a diffusers model \(JSONDecodeError"),
        ("{}", r"config\.json: not the config of a diffusers model \(KeyError"),
        (json.dumps(more), r"transformer: its weights are not those of its config\.json: missing \['blocks\.2"),
        (json.dumps(more | {"num_layers": 1}), r"not those of its config\.json: missing \[\], unknown \['blocks\.1"),
        (json.dumps(more | {"num_layers": "x"}), "cannot be loaded as WanTransformer3DModel"),
        (json.dumps(more | {"num_layers": 2, "ffn_dim": 50}), r"cannot be loaded .* shape"),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=message):
            make_dynamics(path=tmp_path)
    config.write_text(whole)
    shard.write_bytes(weights[:100])
    with pytest.raises(ValueError, match=r"transformer: cannot be loaded .* Copy the folder again"):
        make_dynamics(path=tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"cannot be loaded .*{shard.name}"):
        make_dynamics(path=tmp_path)


def test_lora_without_peft_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"dynamics\.lora_rank: got 2, which needs peft .*pip install peft"):
        make_dynamics(lora_rank=2)
