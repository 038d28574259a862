"""Folders of OpenVLA policies: published, saved here, or adapters alone, told apart by their files.

- ours: config.json with a `kind`, model.safetensors, tokenizer.json (a policy trained from scratch);
- the published layout (`openvla_layout.py`), read from a download and written back as it was, with
  vla_rl.json for our options and heads.safetensors for heads of ours;
- adapters on a published checkpoint: PEFT's two files, vla_rl.json that names the base, heads.safetensors, which also
  has what else was trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import nn

from vla_rl.common.distributed import tensor_files
from vla_rl.common.distributed.tensor_files import write_tensors
from vla_rl.common.precision import wants_bf16
from vla_rl.config import ConfigError
from vla_rl.policies import checkpoint_files, lora
from vla_rl.policies.base import CONFIG_FILE, OWN_FILE, read_policy_config
from vla_rl.policies.normalization import STATISTICS_FILE, NormStats
from vla_rl.policies.openvla.files import layout as openvla_layout
from vla_rl.policies.openvla.files import weights as openvla_weights
from vla_rl.policies.openvla.files.layout import PublishedFolder
from vla_rl.policies.openvla.network.network import OpenVLANetwork
from vla_rl.policies.openvla.options import L1_AS_TOKENS, OPENVLA_CHAIN, Architecture, LoraOptions, OpenVLAOptions
from vla_rl.policies.openvla.tokenizer import LlamaTokenizer, PromptTokenizer, WordTokenizer

HEADS_FILE = "heads.safetensors"
NORM_FROM_DATA = "from_data"
NEW_HEADS = ("value_head.", "keyframe_head.", "scale_head.")
# OFT's own heads: trained whole where the rest only gets adapters, as upstream does.
TRAINED_WHOLE = ("action_head.", "proprio_projector.")


@dataclass
class SavedPolicy:
    """What a folder holds of a policy.

    Attributes:
        published: the checkpoint in the published layout that it came from; None for our own.
        trained_beside: names of weights that were trained whole beside adapters.
    """

    config: OpenVLAOptions
    architecture: Architecture
    tokenizer: PromptTokenizer
    norm_stats: NormStats | None
    network: OpenVLANetwork
    published: PublishedFolder | None = None
    trained_beside: set[str] = field(default_factory=set)

    @property
    def no_rl_reason(self) -> str | None:
        """Why RL cannot train it, for the user; None where it can."""
        regresses = self.published is not None and "action_head" in self.published.components
        return L1_AS_TOKENS if self.config.decoder == "parallel" and regresses else None


def load(
    folder: Path,
    device: str | torch.device,
    seed: int,
    chosen: Mapping[str, Any],
    for_training: bool,
    action_dim: int | None = None,
) -> SavedPolicy:
    """Read a folder of any of the three kinds. See `OpenVLAPolicy.load`."""
    folder = Path(folder)
    if (folder / OWN_FILE).is_file():
        values = _read_own(folder / OWN_FILE)
        base = Path(values.get("base", folder))
        if not base.is_dir():
            raise ValueError(
                f"{folder / OWN_FILE}: its base checkpoint {base} is not there any more. Put it back, or write its new "
                f"place into 'base' of {OWN_FILE}."
            )
        published = openvla_layout.read_published(base, statistics_of=folder)
        config = parse_config(values, folder / OWN_FILE)[0].with_chosen(dict(chosen))
        return _load_published(folder, published, config, device, seed, for_training, action_dim)
    if openvla_layout.is_published(folder):
        published = openvla_layout.read_published(folder)
        config = published_config(published, chosen)
        return _load_published(folder, published, config, device, seed, for_training, action_dim)
    return _load_ours(folder, device, seed, chosen)


def _read_own(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error}). Copy the policy folder again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected a mapping. Copy the policy folder again.")
    return values


def parse_config(values: Mapping[str, Any], file: Path) -> tuple[OpenVLAOptions, Architecture]:
    try:
        return OpenVLAOptions.model_validate(values["config"]), Architecture.model_validate(values["architecture"])
    except (KeyError, ValidationError) as error:
        raise ValueError(f"{file}: not a config of this package's OpenVLA policy: {error}") from error


def trained_names(network: OpenVLANetwork, config: OpenVLAOptions) -> set[str]:
    """Names in the network of the parameters that `config.trainable` selects."""
    unused = network.vision_backbone.unused_parameters()
    if network.action_head is not None:
        unused |= {id(p) for p in network.language_model.lm_head.parameters()}
    mode = config.trainable
    heads = NEW_HEADS if config.decoder != "l1" else (*NEW_HEADS, *TRAINED_WHOLE)
    chosen = set()
    for name, parameter in network.named_parameters():
        adapted = lora.is_adapter(name) or name.startswith(heads)
        full = mode == "full" or (mode == "frozen_vision" and not name.startswith("vision_backbone."))
        base_of_adapter = ".base_layer." in name
        if id(parameter) not in unused and (adapted or (full and not base_of_adapter)):
            chosen.add(name)
    return chosen


# --- our own layout -----------------------------------------------------------------------------


def _load_ours(folder: Path, device: str | torch.device, seed: int, chosen: Mapping[str, Any]) -> SavedPolicy:
    saved, architecture = parse_config(read_policy_config(folder), folder / CONFIG_FILE)
    config = saved.with_chosen(dict(chosen))
    stats = NormStats.read(folder, architecture.action_dim, architecture.state_dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with tensor_files.without_memory(device) if tensor_files.is_deferring() else nullcontext():
            network = OpenVLANetwork(architecture)
        _add_heads(network, config)
        if saved.lora is not None:
            lora.add_adapters(network, saved.lora)
        checkpoint_files.read_weights(folder, network, may_miss=NEW_HEADS)
        if saved.lora is None and config.lora is not None:
            lora.add_adapters(network, config.lora)
    return SavedPolicy(config, architecture, WordTokenizer.read(folder), stats, network)


def make_network(config: OpenVLAOptions, architecture: Architecture) -> OpenVLANetwork:
    """A network with the heads that a config asks for; random weights."""
    network = OpenVLANetwork(architecture)
    _add_heads(network, config)
    return network


def _add_heads(network: OpenVLANetwork, config: OpenVLAOptions) -> None:
    network.add_heads(config.value_head, config.keyframe_loss_weight > 0, config.laplace)


# --- the published layout -----------------------------------------------------------------------


def published_config(published: PublishedFolder, chosen: Mapping[str, Any]) -> OpenVLAOptions:
    """The options of a downloaded checkpoint: what its files speak for, with what a recipe chose.

    Raises:
        ConfigError: a chosen value contradicts the files.
    """
    decoder, _ = published.guess_decoder()
    decoder = chosen.get("decoder", decoder)
    values: dict[str, Any] = {
        "decoder": decoder,
        "chunk_size": 1 if decoder == "autoregressive" else 8,
        "cameras": ("agentview", "wrist") if decoder == "l1" else ("agentview",),
        "images": OPENVLA_CHAIN,
        "gripper": "open_is_one",
        "use_state": "proprio_projector" in published.components,
        "placeholder": "zero",
        "action_bins": published.config.get("n_action_bins", 256),
    }
    base = OpenVLAOptions.model_validate(values)
    if chosen.get("use_state") and not values["use_state"]:
        raise ConfigError(f"policy.use_state: true, but {published.folder} has no proprio_projector file; remove it")
    if decoder == "l1" and "action_head" not in published.components:
        raise ConfigError(f"policy.decoder: got 'l1', but {published.folder} has no action_head--*_checkpoint.pt")
    if chosen.get("laplace") is not None and decoder != "l1":
        raise ConfigError(f"policy.laplace: a scale head belongs to the l1 decoder; here the decoder is {decoder!r}")
    return base.with_chosen(dict(chosen), published=True)


def published_architecture(
    published: PublishedFolder, config: OpenVLAOptions, wanted_dim: int | None = None
) -> tuple[Architecture, NormStats | None]:
    """What decides the network, and the statistics in use (None: to be set from data).

    Args:
        wanted_dim: A with statistics to be set from data, where no head of continuous actions has decided it; None: the
            checkpoint's.

    Raises:
        ValueError: unknown `norm_key`, or statistics that cannot be used.
    """
    if config.norm_key == NORM_FROM_DATA:
        known = next(iter(published.statistics.values()), None)
        name = NORM_FROM_DATA
    else:
        name, known = openvla_layout.choose_statistics(published, config.norm_key)
    stats = None
    try:
        action_dim = 7 if known is None else len(known["action"]["q01"])
        if config.norm_key == NORM_FROM_DATA and config.decoder != "l1":
            action_dim = wanted_dim or action_dim
        state_dim = _state_dim(published, known) if config.use_state else None
        if config.norm_key != NORM_FROM_DATA:
            assert known is not None, "choose_statistics found them"
            stats = NormStats.of(name, in_range(known, config.norm_range), action_dim, state_dim)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{published.folder}: statistics of {name!r}: {error}") from error
    if stats is not None and config.decoder == "autoregressive":
        stats = stats.without_epsilon()
    architecture = openvla_layout.architecture(
        published,
        decoder=config.decoder,
        chunk_size=config.chunk_size,
        action_dim=action_dim,
        state_dim=state_dim,
        end_token=config.end_token,
    )
    return architecture, stats


def _state_dim(published: PublishedFolder, known: Mapping[str, Any] | None) -> int:
    file = published.components["proprio_projector"]
    is_there = file.is_file() and file.stat().st_size > 0
    if not is_there and known is not None:  # Only its name is known (`hub.described`, `training.memory`).
        return len(known["proprio"]["q01"])
    tensors = openvla_weights.read_component("proprio_projector", file)
    if "proprio_projector.fc1.weight" not in tensors:
        raise ValueError(f"{file.name} has no fc1.weight; found {sorted(tensors)}")
    return tensors["proprio_projector.fc1.weight"].shape[1]


def in_range(known: Mapping[str, Any], norm_range: str) -> dict[str, Any]:
    """Statistics {"action": ..., "proprio": ...} whose q01 and q99 are what -1 and +1 stand for by `norm_range`."""
    parts = {name: dict(part) for name, part in known.items() if isinstance(part, Mapping)}
    if norm_range == "min_max":
        for part in parts.values():
            part |= {"q01": part.get("min", part.get("q01")), "q99": part.get("max", part.get("q99"))}
    return parts


def _load_published(
    folder: Path,
    published: PublishedFolder,
    config: OpenVLAOptions,
    device: str | torch.device,
    seed: int,
    for_training: bool,
    action_dim: int | None,
) -> SavedPolicy:
    architecture, stats = published_architecture(published, config, action_dim)
    with torch.device("meta"):
        network = OpenVLANetwork(architecture)
    tokenizer = LlamaTokenizer(published.folder, architecture.llm.vocab_size)
    bf16 = wants_bf16(config.precision, torch.device(device).type)
    trained = trained_names(network, config) if for_training else set()

    def dtype_of(name: str) -> torch.dtype:
        """auto: what is trained in float32, since small updates would vanish in bfloat16; the rest as it computes."""
        narrow = config.weights == "bf16" or (config.weights == "auto" and bf16 and name not in trained)
        return torch.bfloat16 if narrow and not name.startswith(TRAINED_WHOLE) else torch.float32

    openvla_weights.read_into(network, published, device, dtype_of)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _add_heads(network, config)
        if (folder / lora.ADAPTER_CONFIG_FILE).is_file():
            lora.read_adapters(network, folder)
        elif config.lora is not None:
            lora.add_adapters(network, config.lora)
    beside = _read_heads(folder / HEADS_FILE, network)
    return SavedPolicy(config, architecture, tokenizer, stats, network, published, beside)


def _read_heads(file: Path, network: nn.Module) -> set[str]:
    """Our heads, and whatever else was trained beside adapters; heads that the file lacks stay fresh.

    Returns:
        Names in the network of what the file had.
    """
    if not file.is_file():
        return set()
    try:
        stored = safetensors.torch.load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated or not a safetensors file ({error}). Copy it again.") from error
    known = dict(network.named_parameters())
    for name, tensor in stored.items():
        if name not in known:
            continue  # A head that the recipe turned off.
        if known[name].shape != tensor.shape:
            raise ValueError(f"{file}: {name} has shape {tuple(tensor.shape)}, expected {tuple(known[name].shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{file}: NaN or infinity in {name}. Use an earlier checkpoint of the run.")
        if tensor_files.is_placeholder(known[name]):  # Trained whole beside adapters: this file's, not the base's.
            tensor_files.replace(network, name, tensor.to(known[name].device, known[name].dtype))
        else:
            with torch.no_grad():  # Seen by who keeps something made of it, as `.data` is not.
                known[name].copy_(tensor)
    return stored.keys() & known.keys()


# --- writing ------------------------------------------------------------------------------------


def save(policy: SavedPolicy, folder: Path, dtype: torch.dtype | None) -> None:
    """Write a policy as it was read: ours, published, or adapters on a published checkpoint."""

    def write(path: Path) -> None:
        config = {
            "format": 1,
            "kind": policy.config.kind,
            "config": _config_to_keep(policy).model_dump(mode="json"),
            "architecture": policy.architecture.model_dump(mode="json"),
        }
        published = policy.published
        if published is None:
            assert isinstance(policy.tokenizer, WordTokenizer), "policies of our own layout have our tokenizer"
            checkpoint_files.write_weights(path, policy.network, config, dtype)
            policy.tokenizer.write(path)
        elif policy.config.lora is not None:
            config["base"] = str(published.folder.resolve())
            _write_adapters(policy, policy.config.lora, config["base"], path)
        else:
            drop = () if policy.config.decoder == "l1" else ("action_head",)
            openvla_weights.write_published(policy.network, published, path, drop, dtype)
            _write_heads(policy, path, NEW_HEADS)
        if published is not None:
            (path / OWN_FILE).write_text(json.dumps(config, indent=2))
        if policy.norm_stats is not None:
            _write_statistics(policy.norm_stats, published, policy.config.norm_range, path)

    checkpoint_files.write_folder(Path(folder), write)


def _config_to_keep(policy: SavedPolicy) -> OpenVLAOptions:
    changes: dict[str, Any] = {"path": None}
    if policy.published is not None and policy.norm_stats is not None:
        changes["norm_key"] = policy.norm_stats.name
    return policy.config.model_copy(update=changes)


def _write_adapters(policy: SavedPolicy, options: LoraOptions, base: str, folder: Path) -> None:
    lora.write_adapters(policy.network, options, base, folder)
    trained = {
        name for name in trained_names(policy.network, policy.config) if not lora.is_adapter(name)
    } | policy.trained_beside
    _write_heads(policy, folder, (*NEW_HEADS, *TRAINED_WHOLE), trained)


def _write_heads(policy: SavedPolicy, folder: Path, prefixes: tuple[str, ...], also: Set[str] = frozenset()) -> None:
    """Write the parameters whose names begin like that, and `also` those of these names."""
    heads = {n: p for n, p in policy.network.named_parameters() if n.startswith(prefixes) or n in also}
    if heads:
        write_tensors(folder / HEADS_FILE, heads, metadata={"format": "pt"})


def _write_statistics(stats: NormStats, published: PublishedFolder | None, norm_range: str, folder: Path) -> None:
    """Ours alone; or, where they are not the published checkpoint's own, beside or in place of its."""
    if published is None:
        stats.write(folder)
    elif not _are_published(stats, published, norm_range):
        everything = {**published.statistics, stats.name: stats.to_json()}
        (folder / STATISTICS_FILE).write_text(json.dumps(everything, indent=2))


def _are_published(stats: NormStats, published: PublishedFolder, norm_range: str) -> bool:
    """Whether the checkpoint, read again, gives these statistics: a dataset of one's own may have the same name."""
    known = published.statistics.get(stats.name)
    if known is None:
        return False
    sizes = len(stats.action.q01), None if stats.state is None else len(stats.state.q01)
    try:
        return NormStats.of(stats.name, in_range(known, norm_range), *sizes).to_json() == stats.to_json()
    except ValueError:  # Of another robot.
        return False
