"""With fsdp, a policy that computes in bfloat16 gathers its layers so; what is held and stepped on is float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import launch
from narrow_gathers import passed
from safetensors.torch import load_file
from tiny_run import save_policy

from vla_rl.common.distributed.process_group import ALONE

HERE = Path(__file__).resolve().parent
TOLERANCE = 0.05  # Of a gradient's norm: bfloat16 has 8 bits, and two halves of a batch round where one whole does.


@pytest.mark.slow
def test_a_pass_with_narrow_gathers_is_that_with_wide_ones_and_of_one_process(tmp_path):
    result = launch(str(HERE / "narrow_gathers.py"), str(save_policy(tmp_path / "policy")), str(tmp_path))
    assert result.returncode == 0, result.stderr[-4000:]
    narrow, wide = (load_file(tmp_path / f"torch.{dtype}.safetensors") for dtype in ("bfloat16", "float32"))
    alone, seen = passed(ALONE)
    assert seen == {"torch.float32"}, "alone there is nothing to gather"
    assert narrow.keys() == wide.keys() == alone.keys() and len(narrow) > 100
    assert torch.equal(narrow["log_prob"], wide["log_prob"]), "autocast would have rounded the same weights"
    for name, value in wide.items():
        assert narrow[name].dtype == torch.float32
        assert (narrow[name] - value).norm() <= 1e-3 * value.norm() + 1e-6, name
        assert (narrow[name] - alone[name]).norm() <= TOLERANCE * alone[name].norm() + 1e-6, name
