"""Low-rank adapters through peft, put into a network's linear layers in place; their files in PEFT's format."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import peft
import safetensors.torch
import torch
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn
from torch.nn.functional import linear

from vla_rl.common.cuda_graphs import KeptParameters
from vla_rl.common.distributed.fsdp import is_sharded
from vla_rl.common.distributed.tensor_files import write_tensors
from vla_rl.config import ConfigError
from vla_rl.policies.openvla.options import LoraOptions

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_VISION_TARGETS = ("qkv", "proj", "fc1", "fc2")
_PREFIX = "base_model.model."  # What peft puts before a module's name.
_ADAPTER = "default"
_STARTS = ("gaussian", "eva", "orthogonal")  # What peft may start adapters from and leave the base's weights alone.


def add_adapters(network: nn.Module, options: LoraOptions) -> None:
    """Put adapters on the chosen linear layers; they change nothing until trained.

    Raises:
        ConfigError: a target names no linear layer of the language model.
    """
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if options.targets == "all-linear":
        targets = [n for n in linear if n.startswith(("language_model.model.", "projector.", "vision_backbone."))]
        targets = [n for n in targets if not n.startswith("vision_backbone.film")]
    else:
        targets = _named_targets(linear, options)
    _inject(network, targets, options)


def _named_targets(linear: list[str], options: LoraOptions) -> list[str]:
    targets = [n for n in linear if n.startswith("language_model.model.") and n.rsplit(".", 1)[-1] in options.targets]
    missing = set(options.targets) - {n.rsplit(".", 1)[-1] for n in targets}
    if missing:
        allowed = sorted({n.rsplit(".", 1)[-1] for n in linear if n.startswith("language_model.model.")})
        raise ConfigError(f"policy.lora.targets: got {sorted(missing)}, allowed: {', '.join(allowed)}, or all-linear")
    if options.vision:
        targets += [n for n in linear if n.startswith("vision_backbone.") and n.rsplit(".", 1)[-1] in _VISION_TARGETS]
    return targets


def _inject(network: nn.Module, targets: list[str], options: LoraOptions) -> None:
    inject(network, targets, options.rank, options.alpha, options.dropout)
    widen_adapters(network)


def widen_adapters(network: nn.Module) -> None:
    """Hold adapters in float32, also beside weights in bfloat16, whose steps would swallow small updates."""
    for name, parameter in network.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


@torch.no_grad()
def merge_adapters(network: nn.Module) -> None:
    """Add each adapter's product to its layer's weight, in float32, and put the plain layer back."""
    for name, module in list(network.named_modules()):
        if isinstance(module, LoraLayer):
            base = cast(nn.Linear, module.get_base_layer())
            base.weight.data = _merged_weight(module).data
            network.set_submodule(name, base)


# --- acting with merged weights ---------------------------------------------------------------------


class _Merged:
    """Adapted layers' weights with the adapters' products added, and the state of everything that they come from."""

    def __init__(self, policy: nn.Module) -> None:
        layers: list[LoraLayer] = [module for module in policy.modules() if isinstance(module, LoraLayer)]
        self.parameters = KeptParameters(policy, (m for layer in layers for m in cast(nn.Module, layer).modules()))
        self.layers, self.state, self.weights = layers, self.now(), [_merged_weight(layer) for layer in layers]
        self.bases: list[dict[str, Any]] = [cast(nn.Linear, each.get_base_layer())._parameters for each in layers]

    def __deepcopy__(self, memo: Any) -> None:
        """A copied policy makes its own."""

    def now(self) -> list[int]:
        read = self.parameters.read()
        return [p._version for p in read] + [p.data_ptr() for p in read]

    def renew(self) -> None:
        """Follow what has changed, in place where that is possible: graphs that read the weights then stay right."""
        now = self.now()
        for number, (layer, old) in enumerate(zip(self.layers, self.weights, strict=True)):
            new = _merged_weight(layer)
            if (old.device, old.dtype) == (new.device, new.dtype):
                old.data.copy_(new)
            else:
                self.weights[number] = new
        self.state = now

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In the block the layers have these weights, and peft computes the layers alone."""
        own = [base["weight"] for base in self.bases]
        for layer, base, weight in zip(self.layers, self.bases, self.weights, strict=True):
            base["weight"] = weight
            layer.merged_adapters.append(_ADAPTER)
        try:
            yield
        finally:
            for layer, base, weight in zip(self.layers, self.bases, own, strict=True):
                base["weight"] = weight
                layer.merged_adapters.remove(_ADAPTER)


def acts_merged[**P, R](act: Callable[P, R]) -> Callable[P, R]:
    """Make a policy's `act` use merged weights where its config says `merge_lora`.

    They are made anew when a weight or an adapter has changed, in float32, and rounded to the weight's dtype. What the
    policy's other methods see does not change by a bit. A change through `.data` is hidden from everyone: who makes
    one calls `forget_merged`.
    """

    @functools.wraps(act)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        policy = cast(nn.Module, args[0])
        if not getattr(policy.config, "merge_lora", False):
            return act(*args, **kwargs)
        made: _Merged | None = policy.__dict__.get("_merged_lora")
        if made is None or not made.parameters.is_current:
            forget_merged(policy)  # Before there are new ones: never two copies.
            made = policy.__dict__["_merged_lora"] = _Merged(policy)
        elif made.state != made.now():
            made.renew()
        with made.in_place():
            return act(*args, **kwargs)

    return wrapped


def adapted_bytes(network: nn.Module) -> int:
    """Bytes of the weights that have adapters: what a merged copy of them takes."""
    layers = [module for module in network.modules() if isinstance(module, LoraLayer)]
    return sum(cast(nn.Linear, layer.get_base_layer()).weight.nbytes for layer in layers)


def forget_merged(policy: nn.Module) -> None:
    """Free the merged weights, where training is about to need the memory; the next `act` makes them anew."""
    policy.__dict__["_merged_lora"] = None


@torch.no_grad()
def _merged_weight(layer: LoraLayer) -> nn.Parameter:
    weight = cast(nn.Linear, layer.get_base_layer()).weight
    if is_sharded(weight):  # Gathered, it would take the merged one's place.
        raise ConfigError("policy.merge_lora: got true, but with parallel=fsdp a process acts alone; set it to false")
    a, b = (cast(Any, part)[_ADAPTER].weight for part in (layer.lora_A, layer.lora_B))
    total = weight.float() + layer.scaling[_ADAPTER] * (b.float() @ a.float())
    return nn.Parameter(total.to(weight.dtype), requires_grad=False)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return ".lora_" in name


# --- PEFT's files -------------------------------------------------------------------------------


def write_adapters(network: nn.Module, options: LoraOptions, base: str, folder: Path) -> None:
    """Write adapter_model.safetensors and adapter_config.json, as peft does."""
    adapters = {n: p for n, p in network.named_parameters() if is_adapter(n)}
    tensors = {_PREFIX + n.replace(f".{_ADAPTER}.", "."): p for n, p in adapters.items()}
    write_tensors(folder / ADAPTER_FILE, tensors, metadata={"format": "pt"})
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=sorted({n.partition(".lora_")[0] for n in adapters}),
        base_model_name_or_path=base,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))


def read_adapters(network: nn.Module, folder: Path) -> LoraOptions:
    """Put the adapters of a PEFT folder into a network that has none.

    Raises:
        ValueError: files missing or damaged, not plain LoRA, or adapters of layers that the network lacks.
    """
    options = _read_adapter_config(folder / ADAPTER_CONFIG_FILE)
    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise ValueError(f"{file}: not found. Copy the adapters' folder again, with all of its files.")
    try:
        stored = safetensors.torch.load_file(file)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file}: truncated or not a safetensors file ({error}). Copy it again.") from error
    named = {_adapter_name(key): tensor for key, tensor in stored.items()}
    modules = dict(network.named_modules())
    targets = sorted({n.partition(".lora_")[0] for n in named})
    unknown = [n for n in targets if not isinstance(modules.get(n), nn.Linear)]
    if unknown:
        raise ValueError(
            f"{file}: adapts {len(unknown)} layers that this network lacks, such as {unknown[0]}; it belongs to "
            "another base checkpoint"
        )
    _inject(network, targets, options)
    _fill(network, named, file)
    return options


def _read_adapter_config(file: Path) -> LoraOptions:
    if not file.is_file():
        raise ValueError(f"{file}: not found. Give the folder that holds a PEFT adapter.")
    try:
        values: Mapping[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error}). Copy it again.") from error
    if values.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type is {values.get('peft_type')!r}; only 'LORA' is supported.")
    for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out"):
        if values.get(key):
            raise ValueError(f"{file}: {key} is {values[key]!r}, which is not supported; only plain LoRA is.")
    start = values.get("init_lora_weights", True)
    if isinstance(start, str) and start not in _STARTS:
        raise ValueError(
            f"{file}: init_lora_weights is {start!r}, which changes the base's own weights when adapters are made, so "
            "they do not fit the base as it is. Merge them with peft (merge_and_unload), or save them as plain ones "
            "there (save_pretrained with path_initial_model_for_weight_conversion)."
        )
    return LoraOptions(rank=values["r"], alpha=values["lora_alpha"], dropout=values.get("lora_dropout", 0.0))


def _adapter_name(key: str) -> str:
    name = key.removeprefix(_PREFIX)
    for part in ("lora_A", "lora_B"):
        name = name.replace(f".{part}.weight", f".{part}.{_ADAPTER}.weight")
    return name


def _fill(network: nn.Module, named: Mapping[str, Tensor], file: Path) -> None:
    parameters = {n: p for n, p in network.named_parameters() if is_adapter(n)}
    problems = [f"{n}: missing" for n in parameters if n not in named]
    problems += [f"{n}: not an adapter here" for n in named if n not in parameters]
    problems += [
        f"{n}: found shape {tuple(t.shape)}, expected {tuple(parameters[n].shape)}"
        for n, t in named.items()
        if n in parameters and t.shape != parameters[n].shape
    ]
    if problems:
        raise ValueError(f"{file}: {len(problems)} tensors do not fit: {'; '.join(problems[:8])}")
    if broken := [n for n, t in named.items() if not bool(torch.isfinite(t).all())]:
        raise ValueError(f"{file}: NaN or infinity in {broken[0]}. Use an earlier checkpoint of the run.")
    with torch.no_grad():
        for name, tensor in named.items():
            parameters[name].copy_(tensor)


ADAPTER = "default"


class LoraLinear(Linear):
    """W x + s B (A x), where peft's own takes the input to float32 and back, and scales and adds a product apart.

    On large batches these copies, each as large as the layer's input or output, cost a GPU more than the adapter's own
    products. What it computes is peft's but for the order of rounding; whatever is unusual is left to peft.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., in) -> (..., out)."""
        down, up = (cast(nn.Linear, part[ADAPTER]).weight for part in (self.lora_A, self.lora_B))
        is_cast = torch.is_autocast_enabled(x.device.type)
        if args or kwargs or self.merged or self.disable_adapters or not (is_cast or x.dtype == down.dtype):
            return super().forward(x, *args, **kwargs)
        flat = x.reshape(-1, x.shape[-1])
        result: Tensor = cast(nn.Linear, self.get_base_layer())(flat)
        low = linear(self.lora_dropout[ADAPTER](flat), down)
        if result.dtype != low.dtype:  # A layer that autocast leaves alone.
            return super().forward(x)
        return result.addmm_(low, up.to(low.dtype).t(), alpha=self.scaling[ADAPTER]).view(
            *x.shape[:-1], result.shape[-1]
        )


def inject(network: nn.Module, targets: list[str], rank: int, alpha: int, dropout: float) -> None:
    """Put adapters on linear layers, by their names, in place; they change nothing until trained."""
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets)
    config._register_custom_module({nn.Linear: LoraLinear})
    peft.inject_adapter_in_model(config, network)
