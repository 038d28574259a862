"""Faults that a CPU forgives and a GPU does not, planted one at a time: the device finds each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pretend_device import NAME, DeviceTensor, pretending
from pretend_device.imagined import wan_frames
from vla_rl.algorithms import learner as learner_module
from vla_rl.algorithms import losses
from vla_rl.policies.fake_input import fake_observation
from vla_rl.policies.lerobot import flow_sampling
from vla_rl.policies.openvla import inputs
from vla_rl.policies.openvla import policy as policy_module
from vla_rl.policies.openvla.network import llama
from vla_rl.policies.openvla.network import network as network_module
from vla_rl.workflows.gpu_bench import learner_matrix, policy_matrix
from world_model.noise import NoiseStream

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module", autouse=True)
def device():
    with pretending() as name:
        yield name


# --- what is done with the fault ----------------------------------------------------------------


def acting(name: str) -> None:
    policy: Any = policy_matrix.build(name, NAME)
    obs = fake_observation(policy_matrix.SPEC, 2)
    policy.act(obs, torch.Generator().manual_seed(0), 1.0)


def parallel() -> None:
    acting("openvla-parallel")


def autoregressive() -> None:
    acting("openvla-autoregressive")


def flow() -> None:
    acting("pi05-noise")


def learning() -> None:
    policy, learner = learner_matrix.build("grpo-kl-muon", NAME)
    learner_matrix.two_updates(policy, learner, learner_matrix.episodes(policy))


def imagining() -> None:
    pytest.importorskip("diffusers")
    wan_frames(NAME)


# --- faults -------------------------------------------------------------------------------------


def to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, tuple):
        made = [to_host(part) for part in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_host(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def on_host(owner: Any, name: str) -> Plant:
    """What the function gives stays on the host."""
    made = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: to_host(made(*args, **kwargs)))


def draws_on_device(patch: pytest.MonkeyPatch) -> None:
    def draw(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> torch.Tensor:
        noise = torch.rand(logits.shape, generator=generator, device=logits.device)
        return (logits / temperature - (-noise.log()).log()).argmax(-1)

    patch.setattr(policy_module, "draw", draw)


def flow_draws_on_device(patch: pytest.MonkeyPatch) -> None:
    def normal(shape: Any, generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    patch.setattr(flow_sampling, "normal", normal)


def numpy_without_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceTensor, "cpu", lambda self: self)


def norm_left_behind(patch: pytest.MonkeyPatch) -> None:
    finish = policy_module.OpenVLAPolicy.finish

    def forgetful(self: Any, device: Any) -> Any:
        finish(self, device)
        self.network.language_model.model.norm.to("cpu")
        return self

    patch.setattr(policy_module.OpenVLAPolicy, "finish", forgetful)


def momentum_left_behind(patch: pytest.MonkeyPatch) -> None:
    restore = learner_module.restore_optimizer

    def forgetful(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        restore(optimizer, *args)
        for state in optimizer.state.values():
            state.update({key: to_host(value) for key, value in state.items()})

    patch.setattr(learner_module, "restore_optimizer", forgetful)


FAULTS: dict[str, tuple[Plant, Callable[[], None]]] = {
    "images": (on_host(inputs, "image_batch"), parallel),
    "state": (on_host(inputs, "state_batch"), parallel),
    "prompt": (on_host(inputs, "prompt_batch"), parallel),
    "attention mask": (on_host(network_module, "attention_mask"), autoregressive),
    "positions": (on_host(network_module, "token_positions"), autoregressive),
    "angles of the positions": (on_host(llama.LlamaModel, "rope"), parallel),
    "drawn tokens": (on_host(policy_module, "draw"), parallel),
    "the host's generator": (draws_on_device, parallel),
    "numpy() without cpu()": (numpy_without_cpu, parallel),
    "a part that was not moved": (norm_left_behind, parallel),
    "noise of a flow": (on_host(flow_sampling, "normal"), flow),
    "the host's generator of a flow": (flow_draws_on_device, flow),
    "advantages and weights": (on_host(losses, "tensor"), learning),
    "the optimizer's restored state": (momentum_left_behind, learning),
    "noise of imagination": (on_host(NoiseStream, "_normal"), imagining),
}


# Learning without a fault is in test_learners_on_device.py.
@pytest.mark.parametrize("use", [parallel, autoregressive, flow, imagining], ids=lambda use: use.__name__)
def test_without_a_fault_nothing_is_found(use):
    use()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, monkeypatch):
    plant, use = FAULTS[name]
    plant(monkeypatch)
    with pytest.raises((RuntimeError, TypeError), match=r"same device|for generator|to numpy"):
        use()
