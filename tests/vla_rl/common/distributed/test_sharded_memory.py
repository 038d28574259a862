"""With fsdp no process ever holds a policy or its optimizer state whole; what it loads and writes is that of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import TIME_LIMIT, launch
from safetensors.torch import load_file
from sharded_memory import SPEC, run
from together import save_smolvla

from vla_rl.common.distributed.process_group import ALONE
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.files.fake_checkpoint import write_checkpoint
from vla_rl.training.memory import _unit_statistics

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(4 * TIME_LIMIT)


def save_policy(folder: Path, preset: str) -> Path:
    policy = OpenVLAConfig(preset=preset, precision="fp32").build(SPEC)  # type: ignore[arg-type]
    policy.norm_stats = _unit_statistics(policy, SPEC)
    policy.save(folder)
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """What two processes made of a policy of a few megabytes and of one of 200."""
    folder = tmp_path_factory.mktemp("sharded")
    policies = [save_policy(folder / f"{preset}_policy", preset) for preset in ("tiny", "small")]
    write_checkpoint(published := folder / "published")
    policies.append(published)  # Its weights, and the next one's, are compared with those that one process reads.
    policies.append(save_smolvla(folder / "smolvla_policy"))
    result = launch(str(HERE / "sharded_memory.py"), *map(str, policies), str(folder))
    assert result.returncode == 0, result.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("what", ["save_policy", "save_checkpoint"])
def test_saving_gathers_one_tensor_at_a_time(output, what):
    found = json.loads((output / "large.json").read_text())
    for process in found:
        assert process[what] < process["shards"] / 2, f"{what} grew by {process[what] >> 20} MiB: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["load", "again_load"])
def test_loading_takes_the_own_part_and_one_tensor(output, what):
    for process in json.loads((output / "large.json").read_text()):
        assert process[what] < 1.5 * process["shards"], f"{what} grew by {process[what] >> 20} MiB: {process}"


@pytest.mark.slow
def test_files_are_those_of_one_process(output, tmp_path):
    run(output / "tiny_policy", ALONE, tmp_path)
    for file in ("policy/model.safetensors", "step_00000001/tensors.safetensors", "step_00000002/tensors.safetensors"):
        ours, theirs = load_file(output / "small" / file), load_file(tmp_path / file)
        assert ours.keys() == theirs.keys() and len(ours) > 50
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == [], file
