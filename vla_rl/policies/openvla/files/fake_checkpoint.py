"""Checkpoints of OpenVLA's published layout with random weights: to try the path before the download, and for tests.

    python -m vla_rl.policies.openvla.files.fake_checkpoint /tmp/tiny_oft --variant l1

Every file that a download has, in its names, shapes, dtypes and shards; the tokenizer knows only
words of robot instructions, and spells the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from vla_rl.policies.openvla.files import layout as openvla_layout
from vla_rl.policies.openvla.network.network import L1Head, OpenVLANetwork
from vla_rl.policies.openvla.network.vision import ProprioProjector
from vla_rl.policies.openvla.tokenizer import ROBOT_WORDS, prompt_text

Variant = Literal["base", "discrete", "l1", "film"]
STEP = 100

TINY: dict[str, Any] = {
    "text_config": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "vocab_size": 32064, "torch_dtype": "bfloat16", "pad_token_id": 32000,
    },
    "image_sizes": [56, 56],
    "vision_sizes": {
        "featurizer": {
            "embed_dim": 48, "depth": 3, "num_heads": 3, "mlp_ratio": 2.0, "class_token": True, "reg_tokens": 4,
            "layer_scale": True,
        },
        "fused_featurizer": {
            "embed_dim": 32, "depth": 3, "num_heads": 2, "mlp_ratio": 2.0, "class_token": False, "reg_tokens": 0,
            "layer_scale": False,
        },
    },
}  # fmt: skip

# The published sizes: 7.5 B parameters, 15 GB.
FULL: dict[str, Any] = {
    "text_config": {"model_type": "llama", "vocab_size": 32064, "torch_dtype": "bfloat16", "pad_token_id": 32000},
    "image_sizes": [224, 224],
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
}


def write_checkpoint(
    folder: Path,
    variant: Variant = "base",
    *,
    sizes: Mapping[str, Any] | None = None,
    statistics: Mapping[str, Any] | None = None,
    state_dim: int = 8,
    action_dim: int = 7,
    num_shards: int = 2,
    seed: int = 0,
) -> Path:
    """Write a checkpoint with random bfloat16 weights into a new folder.

    Args:
        sizes: of the network, over TINY's.
        statistics: of dataset_statistics.json; by default quantiles of -1 and 1 for one dataset, "fake".
    """
    folder = Path(folder)
    folder.mkdir(parents=True)
    config = {
        "model_type": "openvla", "architectures": ["OpenVLAForActionPrediction"], "n_action_bins": 256,
        "pad_to_multiple_of": 64, "pad_token_id": 32000, "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px", "image_resize_strategy": "resize-naive",
        "torch_dtype": "bfloat16", "norm_stats": {}, **(sizes or TINY),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    statistics = statistics or {"fake": _statistics(state_dim, action_dim)}
    (folder / "dataset_statistics.json").write_text(json.dumps(statistics, indent=2))
    _write_tokenizer(folder)
    architecture = openvla_layout.architecture(
        openvla_layout.PublishedFolder(folder, config, {}, {}, {}),
        decoder="parallel",
        chunk_size=8,
        action_dim=action_dim,
        state_dim=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = OpenVLANetwork(architecture)
        network.initialize()
        tensors = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in network.state_dict().items()}
        _write_shards(tensors, folder, num_shards)
        hidden = architecture.llm.hidden_size
        if variant in ("l1", "film"):
            _save_pt(L1Head(hidden, action_dim), folder, "action_head")
            _save_pt(ProprioProjector(state_dim, hidden), folder, "proprio_projector")
        if variant == "film":
            _write_film(tensors, architecture, folder)
    if variant != "base":
        (folder / "modeling_prismatic.py").write_text('"""Stands for OpenVLA-OFT\'s code."""\nNUM_ACTIONS_CHUNK = 8\n')
    return folder


def _statistics(state_dim: int, action_dim: int) -> dict[str, Any]:
    action = {"q01": [-1.0] * (action_dim - 1) + [0.0], "q99": [1.0] * action_dim}
    proprio = {"q01": [-1.0] * state_dim, "q99": [1.0] * state_dim}
    return {"action": {**action, "mask": [True] * (action_dim - 1) + [False]}, "proprio": proprio}


def _write_shards(tensors: Mapping[str, Tensor], folder: Path, num_shards: int) -> None:
    if num_shards == 1:
        safetensors.torch.save_file(dict(tensors), folder / openvla_layout.SINGLE_FILE, metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[number::num_shards]}
        weight_map |= dict.fromkeys(part, file)
        safetensors.torch.save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / openvla_layout.INDEX_FILE).write_text(json.dumps(index, indent=2))


def _save_pt(module: torch.nn.Module, folder: Path, name: str) -> None:
    """A state dict as distributed training leaves it: every key behind `module.`."""
    state = {f"module.{k}": v.detach().to(torch.bfloat16) for k, v in module.state_dict().items()}
    torch.save(state, folder / f"{name}--{STEP}_checkpoint.pt")


def _write_film(tensors: Mapping[str, Tensor], architecture: openvla_layout.Architecture, folder: Path) -> None:
    """OFT+'s vision file: its wrapped blocks' names, low-rank adapters on one layer of each, FiLM's projections."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith("vision_backbone."):
            continue
        tower, blocks, rest = name.partition(".blocks.")
        number, _, leaf = rest.partition(".")
        key = f"{tower}.blocks.{number}.block.{leaf}" if blocks else name
        if blocks and leaf == "mlp.fc1.weight":
            key = key.replace("fc1.weight", "fc1.base_layer.weight")
            for part, shape in (("A", (4, tensor.shape[1])), ("B", (tensor.shape[0], 4))):
                adapter = key.replace("base_layer.weight", f"lora_{part}.default.weight")
                state[adapter] = (0.02 * torch.randn(shape)).to(torch.bfloat16)
        elif blocks and leaf == "mlp.fc1.bias":
            key = key.replace("fc1.bias", "fc1.base_layer.bias")
        state[key] = tensor
    for tower, spec in zip(("featurizer", "fused_featurizer"), architecture.towers, strict=True):
        for number in range(spec.depth):
            for kind in ("scale", "shift"):
                linear = torch.nn.Linear(architecture.llm.hidden_size, spec.embed_dim)
                for leaf, value in linear.state_dict().items():
                    state[f"vision_backbone.{tower}.blocks.{number}.{kind}.{leaf}"] = value.to(torch.bfloat16)
    torch.save(state, folder / f"vision_backbone--{STEP}_checkpoint.pt")


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer.json of whole words and, for all others, letters; its ids are below Llama's 32000."""
    words = sorted({*ROBOT_WORDS, *prompt_text("").replace("?", " ? ").split()})
    letters = [chr(i) for i in range(33, 127)]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [*letters, *words, *(f"##{letter}" for letter in letters)]:
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a checkpoint from the command line."""
    parser = argparse.ArgumentParser(description="Write a checkpoint in OpenVLA's layout with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant", choices=("base", "discrete", "l1", "film"), default="base")
    parser.add_argument("--full", action="store_true", help="the published 7.5 B parameters (15 GB) instead of tiny")
    options = parser.parse_args(arguments)
    shards = 4 if options.full else 2
    write_checkpoint(options.folder, options.variant, sizes=FULL if options.full else TINY, num_shards=shards)
    print(options.folder)


if __name__ == "__main__":
    main()
