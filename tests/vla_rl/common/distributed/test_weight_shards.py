"""The weights that go to Ray's workers: in shards, exact, and whole or refused. Needs no Ray."""

from __future__ import annotations

import pytest
import torch

from vla_rl.common.distributed.tensor_files import CheckpointError, trained_weights
from vla_rl.rollout.actors.weights import load_shards, pack, shards


def model() -> torch.nn.Module:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    layers[0].requires_grad_(False)
    return layers


def num_bytes(parts: list) -> int:
    return sum(data.nbytes for part in parts for _, _, data in part.values())


@pytest.mark.parametrize("size", [1, 100, 2**20])
def test_shards_give_back_the_weights_to_the_bit(size: int) -> None:
    torch.manual_seed(0)
    one, other = model(), model()
    parts = list(shards(trained_weights(one), size=size))
    largest = max(tensor.nbytes for tensor in trained_weights(one).values())
    assert all(num_bytes([part]) <= max(size, largest) for part in parts)
    assert (len(parts) > 1) == (size < 2**20)
    load_shards(other, parts, "these")  # type: ignore[arg-type]
    for name, tensor in trained_weights(one).items():
        assert torch.equal(tensor, trained_weights(other)[name]), name
    assert not torch.equal(one[0].weight, other[0].weight)  # Frozen, so it did not travel.


def test_a_shard_that_is_missing_or_broken_is_refused() -> None:
    one = model()
    parts = list(shards(trained_weights(one), size=1))
    with pytest.raises(CheckpointError, match="update 3: weights do not fit this model: 1 missing"):
        load_shards(model(), parts[1:], "update 3")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"0 missing \[\], 1 unknown"):
        load_shards(model(), [*parts, pack({"policy.more": torch.zeros(2)})], "update 3")  # type: ignore[arg-type]
    nan = trained_weights(one) | {"policy.2.bias": torch.full((4,), torch.nan)}
    with pytest.raises(CheckpointError, match=r"2\.bias"):
        load_shards(model(), shards(nan, size=1), "update 3")  # type: ignore[arg-type]
