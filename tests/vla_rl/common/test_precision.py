"""How float32 is multiplied on a GPU, and that a CPU is left alone."""

import pytest
import torch

from vla_rl.common.precision import set_float32_products


@pytest.mark.parametrize(
    ("asked", "device", "set_to"),
    [("auto", "cuda", ["high"]), ("bf16", "cuda", ["high"]), ("tf32", "cuda", ["high"]), ("fp32", "cuda", ["highest"]),
     ("auto", "cpu", []), ("tf32", "cpu", [])],
)  # fmt: skip
def test_tf32_is_for_gpus_and_not_where_full_float32_is_asked(monkeypatch, asked, device, set_to):
    calls = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)
    set_float32_products(asked, device)
    assert calls == set_to
