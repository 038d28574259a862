"""Every way to learn makes the same updates on the device as on the host, also from a state that was saved."""

from __future__ import annotations

import numpy as np
import pytest
from representatives import slow_but_for

from pretend_device import pretending
from vla_rl.workflows.gpu_bench.learner_matrix import (
    CASES,
    build,
    computes_in_bf16,
    difference,
    episodes,
    two_updates,
)


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretending() as name:
        yield name


# Values, tokens and denoising paths; the reference policy and Muon, whose steps are dear there, are slow.
@pytest.mark.parametrize("name", slow_but_for(("ppo", "ppo-smolvla"), CASES))
def test_updates_are_the_hosts(name):
    if name == "ppo-smolvla":
        pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    (here, learner), (there, device_learner) = build(name, "cpu"), build(name, "pretend")
    given = episodes(here)
    found, expected = two_updates(there, device_learner, given), two_updates(here, learner, given)
    assert expected["grad_norm/policy"].min() > 0
    if computes_in_bf16(name):
        np.testing.assert_allclose(found["grad_norm/policy"], expected["grad_norm/policy"], rtol=0.3)
        return
    assert difference(found, expected) < 1e-3
    weights = here.state_dict()
    for key, value in there.state_dict().items():
        assert value.device.type == "pretend"
        assert (value.cpu() - weights[key]).abs().max() < 1e-3, key
