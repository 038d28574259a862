"""Flow policies with `cuda_graphs` act as without, by one function of tensors. On a CPU it is the plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from representatives import slow_but_for
from test_lerobot_flow import SPEC, make

from vla_rl.policies.fake_input import fake_observation
from vla_rl.policies.lerobot.options import FLOW_TYPES
from vla_rl.types import ActionPrefix

SAMPLERS = [("flow_sde", False), ("flow_sde", True), ("flow_noise", False), ("flow_noise", True)]
FIELDS = ("actions", "path", "log_prob", "value")


def pair(kind: str, **options: Any) -> tuple[Any, Any]:
    """The same policy, eager and with graphs."""
    return make(kind, value_head=True, **options), make(kind, value_head=True, cuda_graphs=True, **options)


def assert_equal(ours: Any, expected: Any) -> None:
    """To the rounding of kernels that depends on where memory lies; mostly to the bit."""
    for field in FIELDS:
        one, other = getattr(ours, field), getattr(expected, field)
        assert (one is None) == (other is None), field
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-4, err_msg=field)


@pytest.mark.parametrize("kind", slow_but_for(("pi0", "xvla"), FLOW_TYPES))
@pytest.mark.parametrize(("method", "joint"), SAMPLERS)
def test_chunks_paths_likelihoods_and_values_are_equal(kind, method, joint):
    eager, graphs = pair(kind, sampling={"method": method, "joint": joint})
    texts = ["push the blue block", "put the red block on the plate, then open the gripper and wait"]
    given = [fake_observation(SPEC, 3), fake_observation(SPEC, 2, 1), fake_observation(SPEC, 3, 2, texts)]
    for obs in (*given, given[0]):  # The last batch is smaller, prompts are longer, and a known shape comes again.
        for temperature in (0.0, 0.7):
            one, other = (p.act(obs, torch.Generator().manual_seed(1), temperature) for p in (graphs, eager))
            assert_equal(one, other)
            assert (one.path is None) == (one.log_prob is None) == (temperature == 0.0)
    guided = [p.act_guided(given[0], [given[2]], 1.7, torch.Generator().manual_seed(1), 1.0) for p in (graphs, eager)]
    assert_equal(*guided)
    assert np.abs(guided[0].actions - graphs.act(given[0], torch.Generator().manual_seed(1)).actions).max() > 1e-3
    log_prob = graphs.evaluate(given[0], guided[0]).log_prob
    log_prob.sum().backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in graphs.parameters())


@pytest.mark.parametrize("kind", FLOW_TYPES)
def test_steered_and_continued_chunks_are_equal(kind):
    eager, graphs = pair(kind)
    obs, rest = fake_observation(SPEC, 2), np.linspace(-0.5, 0.5, 56, dtype=np.float32).reshape(2, 4, 7)
    chosen = torch.randn((2, 3, *graphs.noise_shape), generator=torch.Generator().manual_seed(0))
    steered = [p.steer(obs, lambda features: chosen)[1] for p in (graphs, eager)]
    np.testing.assert_allclose(*steered, rtol=0, atol=1e-5)
    if kind != "xvla":
        continued = [p.act_with_prefix(obs, ActionPrefix(rest, 2)) for p in (graphs, eager)]
        assert_equal(*continued)


def test_images_with_special_tokens_around_them_are_lerobots():
    """Its tokens lie on the host until a pass takes them along."""
    policy = make(options={"add_image_special_tokens": True})
    assert policy.act(fake_observation(SPEC, 2), None, 0.0).actions.shape == (2, 8, 7)


def test_smolvlas_image_features_are_lerobots():
    model = make().core.model.vlm_with_expert
    image = torch.rand((2, 3, 64, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model.embed_image(image), type(model).embed_image(model, image))


@pytest.mark.parametrize("views", [1, 2])
def test_x_vlas_views_are_encoded_as_lerobots(views):
    policy: Any = make("xvla", options={"num_image_views": 3})
    network, generator = policy.network, torch.Generator().manual_seed(0)
    images = torch.rand((2, 3, 3, 64, 64), generator=generator)
    tokens = torch.randint(1, 20, (2, 6), generator=generator)
    mask = (torch.arange(3) < views).repeat(2, 1)
    with torch.no_grad():
        found, expected = network._encoded(tokens, images, views), policy.core.model.forward_vlm(tokens, images, mask)
    for one, other in zip(found, (expected["vlm_features"], expected["aux_visual_inputs"]), strict=True):
        torch.testing.assert_close(one, other)
    assert found[1].shape[1] > 0
