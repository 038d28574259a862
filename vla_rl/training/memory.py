"""GPU memory estimate of a training run, by part, before anything is loaded (`vla-rl plan --memory`).

The recipe's network is made of fake tensors, which have shapes and no storage, and one micro-batch
is trained on them while every allocation is counted. So the figures follow the code that will run,
at any size, on a laptop. What they leave out: the CUDA context (about half a GB) and fragmentation.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vla_rl.common.distributed.fsdp import units
from vla_rl.common.distributed.process_group import parse_device
from vla_rl.common.precision import wants_bf16
from vla_rl.config import ConfigError
from vla_rl.policies import lora
from vla_rl.policies.base import CONFIG_FILE, OWN_FILE, describing_folder, read_json
from vla_rl.policies.normalization import NormStats
from vla_rl.policies.openvla.files import layout as openvla_layout
from vla_rl.policies.openvla.files.fake_checkpoint import FULL
from vla_rl.policies.openvla.files.folders import parse_config, published_architecture, published_config
from vla_rl.policies.openvla.files.layout import PublishedFolder
from vla_rl.policies.openvla.network.network import OpenVLANetwork
from vla_rl.policies.openvla.options import OpenVLAOptions
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.policies.openvla.tokenizer import WordTokenizer
from vla_rl.training.config import OptimizerName
from vla_rl.training.optimizers import optimizer_bytes, optimizer_step_bytes
from vla_rl.training.published_sizes import OPENVLA_7B, OPENVLA_OFT_7B, advice
from vla_rl.types import ActionChunk, EnvSpec, Observation

if TYPE_CHECKING:
    from vla_rl.recipe.recipe import Recipe

_MEGABYTE = 1024**2


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process at the peak of a training step, by part, on its device; of a rollout; and on the host.

    Attributes:
        weights: parameters. gradients, optimizer: of the trained ones. reference: the frozen copy for a KL term.
        activations: kept for the backward pass, up to the hidden states that actions are read from.
        logits: from there to the loss. working: the most that is alive beside all these, in either pass.
        gathered: with fsdp, parameters and gradients that are whole for the moment; 0 without.
        step: what the optimizer makes and drops within a step, beside gradients, when activations are gone.
        resuming: beside the weights, optimizer and reference that it fills, what loading a checkpoint needs. Its file
            is mapped, and read a tensor at a time.
        rollout: what acting needs beside weights, optimizer and reference (with fsdp the whole weights); not at the
            same time.
        host_last_good: the copy of the trained weights to go back to, pinned where the device is a GPU.
        host_saving: of process 0, the largest tensor of a checkpoint, which is written a tensor at a time; 0 where
            weights lie on the host anyway, whole.
        description: what was counted, for people.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    logits: int
    working: int
    gathered: int
    step: int
    resuming: int
    rollout: int
    host_last_good: int
    host_saving: int
    description: str

    @property
    def total(self) -> int:
        """The device's peak: of backward pass, optimizer step, rollout or resuming, whichever is the largest."""
        kept = self.weights + self.optimizer + self.reference
        return kept + max(self._beside, self.gradients + self.step, self.rollout, self.resuming)

    @property
    def acting(self) -> int:
        """Of a process that only rolls out, where this is the estimate for one alone."""
        return self.weights + self.rollout

    @property
    def host_total(self) -> int:
        """The host's peak in process 0, beside Python, the libraries and the episodes: when a checkpoint is written."""
        return self.host_last_good + self.host_saving

    @property
    def _beside(self) -> int:
        """What a training step needs beside what is always there."""
        return self.gradients + self.activations + self.logits + self.working + self.gathered

    def text(self) -> str:
        """A table for people."""
        parts = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "description"]
        device = [row for row in parts if not row[0].startswith("host_")] + [("peak", self.total)]
        host = [row for row in parts if row[0].startswith("host_")] + [("host's peak", self.host_total)]
        notes = {
            "step": "   (with gradients, when activations, logits, working and gathered are gone)",
            "resuming": "   (before gradients and activations)",
            "rollout": "   (not at the same time as gradients, activations, logits, working and gathered)",
        }
        lines = [
            f"  {name.removeprefix('host_'):<12}{size_text(value):>12}{notes.get(name, '')}" for name, value in device
        ]
        lines += ["  on the host, process 0:"]
        lines += [f"  {name.removeprefix('host_'):<12}{size_text(value):>12}" for name, value in host]
        return "\n".join([self.description, *lines, "  beside it: CUDA context, about 0.5 GB; fragmentation"])


def size_text(value: float) -> str:
    """Bytes for people."""
    return f"{value / _MEGABYTE:,.1f} MB" if value < 1024 * _MEGABYTE else f"{value / 1024**3:,.2f} GB"


class AllocationCounter(TorchDispatchMode):
    """Bytes of the storages that operations make, while they live.

    Attributes:
        live, peak: bytes now, and the most so far.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        """`known`: tensors that are not counted, such as parameters."""
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()
        for tensor in known:
            self._register(tensor, counted=False)

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Iterable[object] = (), kwargs: dict | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._register(value, counted=True)
        return result

    def _register(self, tensor: Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes() if counted else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def estimate(recipe: Recipe, processes: int = 1) -> MemoryEstimate:
    """The memory that `vla-rl train` (or `sft`, without an algo) of a recipe will need on each process's device.

    Args:
        processes: that train together, as the recipe's `parallel` says.

    Raises:
        ConfigError: the policy is of a family that cannot be counted.
    """
    return estimate_apart(recipe, processes)[0]


def estimate_apart(recipe: Recipe, processes: int) -> tuple[MemoryEstimate, MemoryEstimate]:
    """As `estimate`; and of one process alone, whose policy is whole, as it is where a process only rolls out."""
    config = recipe.policy
    if not isinstance(config, OpenVLAOptions):
        raise ConfigError(
            f"policy.kind: {config.kind!r} cannot be counted by part; `vla-rl plan --memory` knows OpenVLA's family "
            f"alone (openvla). By the number of parameters: {advice()}"
        )
    algo = getattr(recipe, "algo", None)
    section = algo if algo is not None else getattr(recipe, "sft", None)
    if section is None:
        raise ConfigError("algo: the recipe trains nothing; `vla-rl plan --memory` needs an algo or sft section")
    env = recipe.env
    spec: EnvSpec = env.env_spec()
    if algo is not None:
        batch, has_reference = algo.micro_batch_size, algo.has_reference
    else:
        batch, has_reference = -(-section.batch_size // (processes * section.grad_accumulation)), False
    device = counted_device(recipe.device)
    policy = skeleton(config, spec, device)
    with without_values(policy):
        whole = measure(
            policy,
            spec,
            batch_size=batch,
            rollout_batch=getattr(env, "num_envs", 1) if algo is not None else 0,
            optimizer=section.optim.name,
            has_reference=has_reference,
            device_type=device,
            keeps_last_good=algo is not None,
        )
    return (per_process(whole, policy, processes) if processes > 1 and recipe.parallel == "fsdp" else whole), whole


def per_process(whole: MemoryEstimate, policy: nn.Module, processes: int) -> MemoryEstimate:
    """What is left to each of several processes with fsdp, from the estimate for one.

    When most activations are there, what is in no unit is whole, and so are two units: the one at work, and the next,
    which is gathered meanwhile. When the backward pass ends and they are gone, there are instead the whole gradients
    of what is in no unit, twice: the others' are added up in a second buffer.
    """
    parts = [_bytes(unit.parameters()) for unit in units(policy)]
    largest, in_units = max(parts, default=(0, 0)), tuple(map(sum, zip(*parts, strict=True))) or (0, 0)
    rest = [all_ - part for all_, part in zip(_bytes(policy.parameters()), in_units, strict=True)]
    beside = whole.activations + whole.logits + whole.working
    tensor = _largest(policy)
    gathered = max(rest[0] + 2 * largest[0], rest[0] + 2 * rest[1] - beside)
    return replace(
        whole,
        weights=whole.weights // processes,
        gradients=whole.gradients // processes,
        optimizer=whole.optimizer // processes,
        reference=whole.reference // processes,
        resuming=whole.resuming // processes + tensor,  # Whole on the device, before it is cut.
        gathered=gathered,
        host_last_good=whole.host_last_good // processes,
        host_saving=tensor,
        rollout=whole.rollout + whole.weights if whole.rollout else 0,
        description=f"{whole.description}; each of {processes} processes",
    )


def _largest(policy: nn.Module) -> int:
    """Bytes of the largest trained parameter, and so of the largest tensor in a checkpoint."""
    return max((p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad), default=0)


def _bytes(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Of parameters, and of those of them that are trained."""
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in parameters]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


@contextlib.contextmanager
def without_values(policy: nn.Module) -> Iterator[None]:
    """Inside the block, a policy from `skeleton` computes with fake tensors: shapes without storage."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy.to_empty(device="cpu")
        yield


def counted_device(device: str) -> str:
    """The type that is counted for: a GPU's, here or not, unless the recipe says otherwise."""
    return "cuda" if device == "auto" else parse_device(device).type


def skeleton(config: OpenVLAOptions, spec: EnvSpec, device: str) -> OpenVLAPolicy:
    """The policy that a config builds for a device, on the meta device; see `without_values`."""
    bf16 = wants_bf16(config.precision, device)
    config, architecture, is_published = sizes_of(config, spec)
    kernel = ("eager" if device == "cpu" else "sdpa") if config.attention == "auto" else config.attention
    fixed = {"precision": "bf16" if bf16 else "fp32", "attention": kernel}
    with torch.device("meta"):
        network = OpenVLANetwork(architecture)
        network.add_heads(config.value_head, config.keyframe_loss_weight > 0, config.laplace)
    tokenizer = WordTokenizer.for_instructions([], architecture.llm.vocab_size - architecture.action_bins)
    policy = OpenVLAPolicy(config.model_copy(update=fixed), architecture, tokenizer, None, network)
    if is_published and bf16 and config.weights != "fp32":
        trained = policy.trained_names()
        for name, parameter in network.named_parameters():
            if config.weights == "bf16" or name not in trained:
                parameter.data = parameter.data.bfloat16()
    if config.lora is not None:
        lora.add_adapters(network, config.lora)
    return policy.finish("meta")


def sizes_of(config: OpenVLAOptions, spec: EnvSpec) -> tuple[OpenVLAOptions, Any, bool]:
    """The options and the architecture that a config comes to, and whether its checkpoint is in the published layout.

    Of a checkpoint on the hub, the small files and the headers of the weights are read; of OpenVLA's own, and of
    OpenVLA-OFT's for LIBERO, nothing.
    """
    if config.path is None:
        return config, config.architecture(spec.action_dim, spec.state_dim), False
    if config.path.startswith((OPENVLA_7B, OPENVLA_OFT_7B)) and not Path(config.path).is_dir():
        published = _openvla_7b(config)
        config = published_config(published, {n: getattr(config, n) for n in config.model_fields_set})
        return config, published_architecture(published, config, spec.action_dim)[0], True
    with describing_folder(config.path) as (folder, _):
        if not openvla_layout.is_published(folder) or (folder / OWN_FILE).is_file():
            return *_saved_here(folder, config), False
        published = openvla_layout.read_published(folder)
        config = published_config(published, {n: getattr(config, n) for n in config.model_fields_set})
        return config, published_architecture(published, config, spec.action_dim)[0], True


def _openvla_7b(config: OpenVLAOptions) -> Any:
    """The published OpenVLA of 7 billion parameters as its small files describe it, which are not read."""
    folder = Path(str(config.path))
    dims = {"action": 7, "proprio": 8}
    statistics = {name: {"q01": [-1.0] * dim, "q99": [1.0] * dim} for name, dim in dims.items()}
    parts = ("action_head", "proprio_projector") if str(config.path).startswith(OPENVLA_OFT_7B) else ()
    components = {name: folder / f"{name}--_checkpoint.pt" for name in parts}
    return PublishedFolder(folder, FULL, {}, components, {config.norm_key or "any": statistics})


def _saved_here(folder: Any, config: OpenVLAOptions) -> tuple[OpenVLAOptions, Any]:
    file = folder / OWN_FILE if (folder / OWN_FILE).is_file() else folder / CONFIG_FILE
    saved, architecture = parse_config(read_json(file), file)
    return saved.with_chosen({n: getattr(config, n) for n in config.model_fields_set}), architecture


def measure(
    policy: OpenVLAPolicy,
    spec: EnvSpec,
    *,
    batch_size: int,
    rollout_batch: int = 0,
    optimizer: OptimizerName = "adamw",
    has_reference: bool = False,
    device_type: str = "cpu",
    keeps_last_good: bool = True,
) -> MemoryEstimate:
    """Count what one micro-batch's training step and one decision of a rollout allocate.

    Args:
        policy: with real tensors, or fake ones inside FakeTensorMode.
        rollout_batch: observations acted on at once; 0: none.
        device_type: that is counted for: "cuda" has a fused AdamW, and the copy beside it is pinned.
        keeps_last_good: as RL does, and cloning does not.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in trained)
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    policy.norm_stats = _unit_statistics(policy, spec)
    chunk = _chunk(policy, batch_size)
    with AllocationCounter(policy.parameters()) as counter:
        with policy._autocast():
            hidden = policy.network.hidden(
                policy._prefix(_observation(policy, spec, batch_size)), _tokens(policy, chunk)
            )
        activations = counter.live
        del hidden
    for parameter in trained:  # As from the second micro-batch on: gradients are there, and are added to.
        parameter.grad = torch.empty_like(parameter)
    known = [*policy.parameters(), *(p.grad for p in trained if p.grad is not None)]
    with AllocationCounter(known) as counter:
        out = policy.evaluate(_observation(policy, spec, batch_size), chunk)
        loss = out.log_prob.sum() + out.entropy.sum() + (0.0 if out.value is None else out.value.sum())
        del out
        activations = min(activations, counter.live)  # Not what ends with the pass, such as masks.
        logits = counter.live - activations
        loss.backward()
        peak = counter.peak
    for parameter in trained:
        parameter.grad = None
    rollout = _count(lambda: _act(policy, spec, rollout_batch), policy) if rollout_batch else 0
    if rollout_batch and policy.config.merge_lora:
        rollout += lora.adapted_bytes(policy)
    named = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    reference = size if has_reference else 0
    kept = [_pinned(p.numel() * p.element_size()) if device_type == "cuda" else p.nbytes for p in trained]
    return MemoryEstimate(
        weights=weights,
        gradients=size,
        optimizer=optimizer_bytes(optimizer, named),
        reference=reference,
        activations=activations,
        logits=logits,
        working=peak - activations - logits,
        gathered=0,
        step=optimizer_step_bytes(optimizer, named, device_type=device_type),
        resuming=reference,  # The one that the run began with is there until the checkpoint's has been read.
        rollout=rollout,
        host_last_good=sum(kept) if keeps_last_good else 0,
        host_saving=0 if device_type == "cpu" else _largest(policy),
        description=(
            f"{sum(p.numel() for p in policy.parameters()) / 1e6:,.2f} M parameters, "
            f"{sum(p.numel() for p in trained) / 1e6:,.2f} M trained, micro-batch of {batch_size} decisions"
        ),
    )


def _pinned(size: int) -> int:
    """What torch takes of the host for a pinned tensor: the next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def _count(run: Callable[[], None], policy: nn.Module) -> int:
    with AllocationCounter(policy.parameters()) as counter:
        run()
    return counter.peak


@torch.no_grad()
def _act(policy: OpenVLAPolicy, spec: EnvSpec, batch_size: int) -> None:
    chunk = _chunk(policy, batch_size)
    with policy._autocast():
        policy.network.hidden(policy._prefix(_observation(policy, spec, batch_size)), _tokens(policy, chunk))


def _tokens(policy: OpenVLAPolicy, chunk: ActionChunk) -> Tensor | None:
    return None if chunk.tokens is None else torch.from_numpy(chunk.tokens).flatten(1)


def _chunk(policy: OpenVLAPolicy, batch_size: int) -> ActionChunk:
    shape = (batch_size, policy.chunk_size, policy.action_dim)
    if policy.network.action_head is not None:
        return ActionChunk(np.zeros(shape, np.float32), path=np.zeros(shape, np.float32))
    return ActionChunk(np.zeros(shape, np.float32), tokens=np.zeros(shape, np.int64))


def _observation(policy: OpenVLAPolicy, spec: EnvSpec, batch_size: int) -> Observation:
    size = policy.architecture.image_size
    images = {camera: np.zeros((batch_size, size, size, 3), np.uint8) for camera in policy.cameras}
    state = np.zeros((batch_size, policy.architecture.state_dim or spec.state_dim), np.float32)
    longest = max(spec.tasks.values(), key=len)
    return Observation(images, state, [longest] * batch_size, is_prepared=True)  # A fake tensor has no pixels.


def _unit_statistics(policy: OpenVLAPolicy, spec: EnvSpec) -> Any:
    sizes = {"action": policy.action_dim, "proprio": policy.architecture.state_dim or spec.state_dim}
    values = {name: {"q01": [-1.0] * n, "q99": [1.0] * n} for name, n in sizes.items()}
    return NormStats.of("unit", values, policy.action_dim, policy.architecture.state_dim)
