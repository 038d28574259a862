"""OpenVLA's published folder layout, read without torch: config, statistics, which files hold which tensors.

    config.json                     sizes and ids; may hold norm_stats
    model.safetensors               or model-0000N-of-M.safetensors with model.safetensors.index.json
    dataset_statistics.json         statistics by dataset, in place of config.json's norm_stats
    tokenizer.json, ...             Llama-2's tokenizer; preprocessor_config.json
    action_head--STEP_checkpoint.pt, proprio_projector--..., vision_backbone--...    OpenVLA-OFT's parts

Formats: openvla/openvla (`prismatic/extern/hf`), moojink/openvla-oft. What we add is one file more,
`vla_rl.json`, which their tools ignore: the policy's options here.
"""

from __future__ import annotations

import difflib
import json
import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.policies.base import CONFIG_FILE
from vla_rl.policies.openvla.options import (
    DINOV2_LARGE,
    IMAGENET_MEAN,
    IMAGENET_STD,
    SIGLIP_SO400M,
    Architecture,
    Decoder,
    LlamaSpec,
    TowerSpec,
)

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
STATISTICS_FILE = "dataset_statistics.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
COMPONENTS = ("action_head", "proprio_projector", "vision_backbone")

_TOWERS: dict[str, TowerSpec] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": DINOV2_LARGE,
    "vit_so400m_patch14_siglip_224": SIGLIP_SO400M,
}
# Keys under which a config may give the sizes of towers that no published id names.
_TOWER_SIZES = ("vision_sizes", "oracle_tiny_vision")
# What transformers' LlamaConfig takes where text_config is silent.
_LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32064,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


@dataclass(frozen=True)
class PublishedFolder:
    """A checkpoint in the published layout, as its small files describe it.

    Attributes:
        folder: where it lies. config: config.json.
        weight_map: tensor name -> file in the folder.
        components: "action_head", "proprio_projector" or "vision_backbone" -> OFT's file.
        statistics: dataset name -> {"action": {...}, "proprio": {...}}.
    """

    folder: Path
    config: dict[str, Any]
    weight_map: dict[str, str]
    components: dict[str, Path]
    statistics: dict[str, Any]

    @property
    def has_oft_code(self) -> bool:
        """Whether the modeling code beside the weights is OpenVLA-OFT's, which decodes in parallel."""
        code = self.folder / "modeling_prismatic.py"
        return code.is_file() and "NUM_ACTIONS_CHUNK" in code.read_text(encoding="utf-8", errors="replace")

    def guess_decoder(self) -> tuple[Decoder, str]:
        """The decoder the files speak for, and why. Base OpenVLA and discrete OFT differ in nothing but code."""
        if "action_head" in self.components:
            return "l1", f"{self.components['action_head'].name} is there"
        if self.has_oft_code:
            return "parallel", "modeling_prismatic.py is OpenVLA-OFT's, and there is no action head"
        return "autoregressive", "neither an action head nor OpenVLA-OFT's modeling code is there"


def is_published(folder: Path) -> bool:
    """Whether a folder's config.json says model_type "openvla"."""
    try:
        values = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("model_type") == "openvla"


def read_published(folder: Path, statistics_of: Path | None = None) -> PublishedFolder:
    """The small files of a checkpoint, checked. `statistics_of`: a folder whose statistics count in its place.

    Raises:
        ValueError: naming the file, what is wrong with it and what to do.
    """
    folder = Path(folder)
    config = _read_json(folder / CONFIG_FILE)
    statistics = config.get("norm_stats") or {}
    for place in (folder, statistics_of):
        if place is not None and (place / STATISTICS_FILE).is_file():
            statistics = _read_json(place / STATISTICS_FILE)
    return PublishedFolder(folder, config, _weight_map(folder), _components(folder), statistics)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file}: not found. Copy or download the checkpoint again, with all of its files.")
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error}). Copy or download it again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected a mapping, found {type(values).__name__}.")
    return values


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: has no 'weight_map'. Download it again.")
        missing = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
        if missing:
            raise ValueError(f"{index}: names files that are not in the folder: {', '.join(missing)}. Download them.")
        return weight_map
    if not (folder / SINGLE_FILE).is_file():
        old = sorted(p.name for p in folder.glob("pytorch_model*.bin"))
        hint = f" {old[0]} is a pickle, which is not read: convert it to safetensors first." if old else ""
        raise ValueError(f"{folder}: holds neither {INDEX_FILE} nor {SINGLE_FILE}.{hint} Download the weights.")
    return dict.fromkeys(tensor_shapes(folder / SINGLE_FILE), SINGLE_FILE)


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a safetensors file, from its header alone.

    Raises:
        ValueError: truncated, or not a safetensors file.
    """
    broken = f"{file}: truncated or not a safetensors file. Copy or download it again."
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(broken)
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(broken) from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end > size:
        raise ValueError(f"{broken} It should have {8 + length + end} bytes and has {size}.")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def _components(folder: Path) -> dict[str, Path]:
    if diffusion := sorted(folder.glob("noisy_action_projector--*.pt")):
        raise ValueError(f"{diffusion[0]}: OFT's diffusion head is not supported; use an L1 or a discrete checkpoint.")
    found = {}
    for name in COMPONENTS:
        files = sorted(folder.glob(f"{name}--*checkpoint.pt"))
        if len(files) > 1:
            raise ValueError(
                f"{folder}: {len(files)} files of {name} ({', '.join(f.name for f in files)}); keep the one that "
                "belongs to these weights and move the others away."
            )
        if files:
            found[name] = files[0]
    return found


# --- the architecture ---------------------------------------------------------------------------


def towers(published: PublishedFolder) -> tuple[TowerSpec, ...]:
    """The vision towers of a checkpoint.

    Raises:
        ValueError: unknown towers, or a single one.
    """
    config = published.config
    file = published.folder / CONFIG_FILE
    if not config.get("use_fused_vision_backbone", True):
        raise ValueError(f"{file}: use_fused_vision_backbone is false; only the fused DINOv2 and SigLIP is supported.")
    sizes = next((config[key] for key in _TOWER_SIZES if key in config), None)
    if sizes is not None:
        dino, siglip = _tower(sizes["featurizer"]), _tower(sizes["fused_featurizer"])
    else:
        ids = config.get("timm_model_ids") or []
        unknown = [i for i in ids if i not in _TOWERS]
        if unknown or len(ids) != 2:
            raise ValueError(f"{file}: timm_model_ids is {ids}; supported are {list(_TOWERS)}, in this order.")
        dino, siglip = (_TOWERS[i] for i in ids)
    means, stds = _normalization(published.folder)
    dino = dino.model_copy(update={"mean": means[0], "std": stds[0]})
    return dino, siglip.model_copy(update={"mean": means[1], "std": stds[1], "attention_pool": True})


def _tower(sizes: Mapping[str, Any]) -> TowerSpec:
    return TowerSpec(
        embed_dim=sizes["embed_dim"],
        depth=sizes["depth"],
        num_heads=sizes["num_heads"],
        mlp_ratio=sizes["mlp_ratio"],
        patch_size=sizes.get("patch_size", 14),
        class_token=sizes["class_token"],
        reg_tokens=sizes["reg_tokens"],
        layer_scale=sizes["layer_scale"],
    )


def _normalization(folder: Path) -> tuple[Any, Any]:
    """Means and deviations of the two towers, from preprocessor_config.json where there is one."""
    half = (0.5, 0.5, 0.5)
    if not (folder / PREPROCESSOR_FILE).is_file():
        return (IMAGENET_MEAN, half), (IMAGENET_STD, half)
    values = _read_json(folder / PREPROCESSOR_FILE)
    means, stds = values.get("means"), values.get("stds")
    if not (isinstance(means, list) and isinstance(stds, list) and len(means) == len(stds) == 2):
        raise ValueError(f"{folder / PREPROCESSOR_FILE}: 'means' and 'stds' must each hold two lists of three.")
    strategy = values.get("image_resize_strategy", "resize-naive")
    if strategy != "resize-naive":
        raise ValueError(
            f"{folder / PREPROCESSOR_FILE}: image_resize_strategy {strategy!r} is not supported; OpenVLA's "
            "checkpoints have 'resize-naive'."
        )
    return tuple(map(tuple, means)), tuple(map(tuple, stds))


def language_model(published: PublishedFolder) -> LlamaSpec:
    """The language model of a checkpoint.

    Raises:
        ValueError: not a plain Llama, or sizes that cannot be.
    """
    file = published.folder / CONFIG_FILE
    text = {**_LLAMA_DEFAULTS, **(published.config.get("text_config") or {})}
    for key, wanted in (("rope_scaling", None), ("tie_word_embeddings", False), ("attention_bias", False)):
        if text.get(key, wanted) != wanted:
            raise ValueError(f"{file}: text_config.{key} is {text[key]!r}; only {wanted!r} is supported.")
    padding = published.config.get("pad_to_multiple_of", 64)
    if text["vocab_size"] <= padding:
        raise ValueError(
            f"{file}: text_config.vocab_size is {text['vocab_size']}, of which pad_to_multiple_of={padding} are padding"
        )
    return LlamaSpec(
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_layers=text["num_hidden_layers"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
        vocab_size=text["vocab_size"] - padding,
        padded_vocab_size=text["vocab_size"],
        rms_norm_eps=text["rms_norm_eps"],
        rope_theta=text["rope_theta"],
    )


def architecture(
    published: PublishedFolder,
    *,
    decoder: Decoder,
    chunk_size: int,
    action_dim: int,
    state_dim: int | None,
    end_token: bool = True,
) -> Architecture:
    """What decides the names and shapes of the network's weights. Raises ValueError as `towers` does."""
    sizes = published.config.get("image_sizes") or [224]
    return Architecture(
        towers=towers(published),
        llm=language_model(published),
        image_size=sizes[0],
        action_dim=action_dim,
        state_dim=state_dim,
        chunk_size=chunk_size,
        action_bins=published.config.get("n_action_bins", 256),
        decoder=decoder,
        placeholder="zero",
        end_token=end_token,
        film="vision_backbone" in published.components,
    )


# --- statistics ---------------------------------------------------------------------------------


def choose_statistics(published: PublishedFolder, key: str | None) -> tuple[str, dict[str, Any]]:
    """The statistics of a dataset by name, `NAME_no_noops` for NAME; None: the only ones there are.

    Raises:
        ValueError: unknown or needed name; lists those there are.
    """
    known = published.statistics
    listed = ", ".join(sorted(known)) or "none"
    if key is None:
        if len(known) == 1:
            return next(iter(known.items()))
        raise ValueError(
            f"policy.norm_key: {published.folder} has the statistics of {len(known)} datasets, so name the one of your "
            f"robot. There are: {listed}."
        )
    for name in (key, f"{key}_no_noops"):
        if name in known:
            return name, known[name]
    nearest = difflib.get_close_matches(key, known, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"policy.norm_key: {key!r} is not in {published.folder}.{hint} There are: {listed}.")


def warn_of_other_suite(published: PublishedFolder, key: str, suite: str) -> None:
    """Warn where statistics `key` are in use, and the checkpoint has those of the environment's suite, too."""
    suite = suite.partition("+")[0]
    own = [name for name in (suite, f"{suite}_no_noops") if name in published.statistics]
    if own and key not in own:
        log.warning(
            f"policy.norm_key: actions are scaled by the statistics of {key}, and the environment is {suite}, whose "
            f"{published.folder} has too: is policy.norm_key={own[0]} meant?"
        )
