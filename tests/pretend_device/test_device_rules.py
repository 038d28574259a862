"""The pretend device itself: what it lets through, what it refuses as CUDA would, and what it counts."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from pretend_device import counting, pretending
from pretend_device.backend import DeviceTensor


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretending() as name:
        yield name


def on(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to("pretend")


def test_values_are_the_hosts():
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    product = x.to("pretend") @ y.to("pretend")
    assert product.device.type == "pretend"
    torch.testing.assert_close(product.cpu(), x @ y)


@pytest.mark.parametrize(
    "mixing",
    [
        lambda x: x + torch.ones(3),
        lambda x: x @ torch.ones(3, 3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch.ones(3) + x.sum(),
        lambda x: torch.zeros(()).add_(x.sum()),
        lambda x: torch.ones(3)[x.long()],
        lambda x: x.index_put_((torch.tensor([0, 1]),), torch.ones(2)),
        lambda x: torch.where(x > 0, x, torch.zeros(3)),
        lambda x: nn.functional.linear(x, torch.ones(3, 3)),
        lambda x: torch._foreach_add([x], [torch.ones(3)]),
        lambda x: nn.functional.embedding(torch.zeros(2, dtype=torch.long), x[None]),
    ],
    ids=range(11),
)
def test_mixed_devices_raise(mixing):
    with pytest.raises(RuntimeError, match="same device"):
        mixing(on(3))


@pytest.mark.parametrize(
    "fine",
    [
        lambda x: x * torch.tensor(2.0),
        lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x[[0, 2]],
        lambda x: x.index_put_((torch.tensor([0, 1]),), torch.tensor(1.0)),
        lambda x: x.copy_(torch.ones(3)),
    ],
    ids=range(6),
)
def test_what_cuda_allows_passes(fine):
    assert fine(on(3)).device.type == "pretend"


@pytest.mark.parametrize("convert", [lambda x: x.numpy(), np.asarray, lambda x: np.add(1, x)], ids=range(3))
def test_numpy_of_a_device_tensor_raises(convert):
    with pytest.raises(TypeError, match="numpy"):
        convert(on(3))


def test_generators_must_be_the_devices():
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, generator=torch.Generator(), device="pretend")
    with pytest.raises(RuntimeError, match="generator"):
        on(3).uniform_(generator=torch.Generator())
    own = torch.Generator("pretend").manual_seed(3)
    drawn = torch.randn(3, generator=own, device="pretend")
    assert own.device.type == drawn.device.type == "pretend" and isinstance(own, torch.Generator)
    with pytest.raises(RuntimeError, match="generator"):
        torch.ones(3).to("pretend").multinomial(1, generator=torch.Generator())


@pytest.mark.parametrize(
    "reads, num",
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: float(x[0]), 1),
        (lambda x: bool((x > 0).all()), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 1], 1),
        (torch.unique, 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: torch.pretend.synchronize(), 1),
        (lambda x: x.to("cpu", non_blocking=True), 0),
        (lambda x: torch.ones(3).pin_memory().copy_(x, non_blocking=True), 0),
        (lambda x: torch.ones(3).copy_(x, non_blocking=True), 1),
        (lambda x: (x * 2).sum().sqrt().detach(), 0),
    ],
    ids=range(14),
)
def test_waits_are_counted(reads, num):
    x = on(3)
    with counting() as counts:
        reads(x)
    assert counts.totals["syncs"] == num, counts.places()


def test_copies_are_counted_with_their_bytes():
    x = on(3)
    with counting() as outer:
        with counting() as counts:
            torch.zeros(2, 3).to("pretend")
            torch.tensor([1.0, 2.0], device="pretend")
            x[torch.tensor([0, 1])]
            x.cpu()
            torch.zeros(4, device="pretend")
            torch.zeros(2).pin_memory().to("pretend", non_blocking=True)
        torch.as_tensor([1], device="pretend")
    assert counts.totals["uploads"] == 4 and counts.totals["downloads"] == 1
    assert counts.totals["slow_uploads"] == 3
    assert counts.uploaded_bytes == 24 + 8 + 16 + 8 and counts.downloaded_bytes == 12
    assert outer.totals["uploads"] == 5


def test_kernels_are_counted_and_views_are_not():
    x = on(2, 3)
    with counting() as counts:
        (x.view(3, 2).t()[0].unsqueeze(0) + 1).relu()
    assert counts.kernels == {"add": 1, "relu": 1}


def test_what_comes_back_shares_no_memory():
    x = on(3)
    x.cpu().zero_()
    assert x.sum().item() == 3.0


def test_a_module_moves_learns_and_is_copied():
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    there = copy.deepcopy(here).to("pretend")
    assert all(p.device.type == "pretend" and isinstance(p, nn.Parameter) for p in there.parameters())
    twin = copy.deepcopy(there)
    x = torch.randn(5, 3)
    for module, batch in ((here, x), (there, x.to("pretend"))):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            module(batch).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    for name, value in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[name].cpu(), value)
        assert not torch.equal(twin.state_dict()[name].cpu(), value)
    twin.load_state_dict(here.state_dict())
    torch.testing.assert_close(twin(x.to("pretend")).cpu(), here(x))
    assert not isinstance(twin.cpu()[0].weight.data, DeviceTensor)


def test_autocast_lowers_products_and_keeps_norms():
    layer, norm = nn.Linear(4, 4).to("pretend"), nn.LayerNorm(4).to("pretend")
    with torch.autocast("pretend", torch.bfloat16):
        low = layer(on(2, 4))
        assert low.dtype == torch.bfloat16 and norm(low).dtype == torch.float32
    assert layer(on(2, 4)).dtype == torch.float32


def test_a_place_is_a_line_of_ours():
    from vla_rl.training.optimizers import clip_gradients

    parameter = nn.Parameter(on(3))
    parameter.sum().backward()
    with counting() as counts:
        clip_gradients([parameter], 1.0)
    places = {place for _, place in counts.syncs}
    assert all(place.startswith("vla_rl/training/optimizers.py:") for place in places), places
