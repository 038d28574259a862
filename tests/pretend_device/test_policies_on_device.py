"""Every policy acts, is evaluated, cloned, embeds, is saved, loaded and merged on the device as on the host."""

from __future__ import annotations

import pytest
import torch
from representatives import slow_but_for

from pretend_device import pretending
from vla_rl.policies.fake_input import fake_observation
from vla_rl.policies.load import load_policy
from vla_rl.workflows.gpu_bench.policy_matrix import (
    ON_DEVICES,
    QUESTIONS,
    SPEC,
    build,
    computes_in_bf16,
    difference,
)


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretending() as name:
        yield name


# What breaks on a device and not on a CPU: decoding, rounding and recomputing, merged adapters, denoising paths.
FAST = (
    "openvla-parallel", "openvla-autoregressive", "openvla-lora-bf16-checkpointing", "openvla-graphs-merged",
    "smolvla-sde", "diffusion-ddim", "act",
)  # fmt: skip


@pytest.fixture(scope="module", params=slow_but_for(FAST, ON_DEVICES))
def pair(request):
    """The same policy on the host and on the device, and how far their answers may be apart."""
    if request.param.startswith("smolvla"):
        pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    # bfloat16 has 8 bits, and the host's autocast rounds elsewhere than the device's.
    tolerance = 0.1 if computes_in_bf16(request.param) else 1e-4
    return build(request.param, "cpu"), build(request.param, "pretend"), tolerance


@pytest.fixture(autouse=True)
def lerobot_knows_the_device(monkeypatch):
    """It takes another device for one that it does not know by name."""
    monkeypatch.setattr("lerobot.configs.policies.is_torch_device_available", lambda device: True)


def places(policy) -> set[str]:
    return {tensor.device.type for tensor in (*policy.parameters(), *policy.buffers())}


# The last merges adapters, and so changes the policy. Those that change or load one ask for its greedy actions too.
@pytest.mark.parametrize(
    "question", slow_but_for([q for q in QUESTIONS if q not in ("act greedy", "act without generator")], QUESTIONS)
)
def test_answers_are_the_hosts(pair, question):
    here, there, tolerance = pair
    assert places(there) == {"pretend"}
    expected = QUESTIONS[question](here)
    assert expected or question == "merge"
    assert difference(QUESTIONS[question](there), expected, drawn_alike=tolerance < 0.01) < tolerance
    assert places(there) == {"pretend"}


@pytest.mark.parametrize("name", ["openvla-lora", "pi0-lora"])
def test_the_devices_own_generator_and_a_way_back_to_the_host(name, tmp_path):
    there = build(name, "pretend")
    obs = fake_observation(SPEC, 2)
    drawn = there.act(obs, torch.Generator("pretend").manual_seed(0), 1.0)
    assert drawn.log_prob is not None
    there.save(tmp_path / "policy")
    again, back = load_policy(tmp_path / "policy", "pretend"), load_policy(tmp_path / "policy", "cpu")
    assert places(again) == {"pretend"} and places(back) == {"cpu"}
    weights = back.state_dict()
    assert all(torch.equal(value.cpu(), weights[name]) for name, value in again.state_dict().items())
