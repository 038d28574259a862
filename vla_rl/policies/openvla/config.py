"""The OpenVLA policy as a recipe names it: how it is built, loaded, recognized and described. Imports no torch."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vla_rl.policies.base import CONFIG_FILE, OWN_FILE, CheckpointInfo, resolve_path
from vla_rl.policies.normalization import STATISTICS_FILE
from vla_rl.policies.openvla.files import layout
from vla_rl.policies.openvla.options import L1_AS_TOKENS, L1_WITHOUT_SCALE, Architecture, Decoder, OpenVLAOptions
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    import torch

    from vla_rl.policies.openvla.policy import OpenVLAPolicy

TOKEN_RL = ("grpo", "rloo", "reinforce_pp", "ppo (policy.value_head=true)")
_NAMES: dict[Decoder, str] = {
    "autoregressive": "OpenVLA (autoregressive action tokens)",
    "parallel": "OpenVLA-OFT, discrete (parallel action tokens)",
    "l1": "OpenVLA-OFT, continuous (L1 head)",
}


def describe(folder: Path) -> CheckpointInfo | None:
    """What the folder holds; None where it is not an OpenVLA policy.

    Raises:
        ValueError: it is one, but a file is missing or damaged.
    """
    if layout.is_published(folder) and not (folder / OWN_FILE).is_file():
        return _downloaded(folder)
    values = _json(folder / OWN_FILE) or _json(folder / CONFIG_FILE)
    return _saved_here(folder, values) if values.get("kind") == "openvla" else None


def _json(file: Path) -> dict[str, Any]:
    """A JSON file's mapping, empty where there is no such file."""
    try:
        values = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error}). Copy the folder again.") from error
    return values if isinstance(values, dict) else {}


def _downloaded(folder: Path) -> CheckpointInfo:
    published = layout.read_published(folder)
    decoder, why = published.guess_decoder()
    llm, towers = layout.language_model(published), layout.towers(published)
    keys = tuple(sorted(published.statistics))
    facts = {
        "decoder": f"{decoder}: {why}",
        "chunk": "1 action" if decoder == "autoregressive" else "8 actions (policy.chunk_size; ALOHA's have 25)",
        "cameras": "2 (agentview, wrist)" if decoder == "l1" else "1 (agentview)",
        "state": "read (proprio_projector)" if "proprio_projector" in published.components else "not read",
        "language model": f"Llama, {llm.num_layers} layers of {llm.hidden_size}, {llm.vocab_size} tokens",
        "vision": f"DINOv2 {towers[0].embed_dim} and SigLIP {towers[1].embed_dim}"
        + (", FiLM" if "vision_backbone" in published.components else ""),
        "weights": _weights(folder, published.weight_map),
        "tokenizer": "tokenizer.json" if (folder / "tokenizer.json").is_file() else "missing: cannot read instructions",
    }
    policy: dict[str, Any] = {"decoder": decoder}
    if len(keys) > 1:
        policy["norm_key"] = keys[0]
    warnings = ["the number of views is not in the files; set policy.cameras to what it was trained with"]
    if len(keys) > 1:
        warnings.append(f"statistics of {len(keys)} datasets: set policy.norm_key to your robot's")
    if not keys:
        policy["norm_key"] = "from_data"
        warnings.append("no action statistics: clone demonstrations first (`vla-rl sft`), which sets them")
    if decoder == "autoregressive":
        warnings.append("if it is a discrete OFT checkpoint (SimpleVLA-RL, RLinf), set policy.decoder=parallel")
    if decoder == "l1":
        policy["laplace"] = {}
        return CheckpointInfo(
            _NAMES[decoder], "openvla", facts, keys, TOKEN_RL,
            f"by the scale head that policy.laplace adds. On action tokens it cannot be trained: {L1_AS_TOKENS}.",
            policy, tuple(warnings),
        )  # fmt: skip
    return CheckpointInfo(_NAMES[decoder], "openvla", facts, keys, TOKEN_RL, "", policy, tuple(warnings))


def _weights(folder: Path, weight_map: dict[str, str]) -> str:
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(set(weight_map.values()))
    for file in files:
        shapes |= layout.tensor_shapes(folder / file)
    count = sum(prod(shapes[name]) for name in weight_map if name in shapes)
    return f"{count / 1e6:,.1f} M parameters, {len(weight_map)} tensors in {len(files)} file(s)"


def _saved_here(folder: Path, values: dict[str, Any]) -> CheckpointInfo:
    try:
        config = OpenVLAOptions.model_validate(values["config"])
        architecture = Architecture.model_validate(values["architecture"])
    except (KeyError, ValidationError) as error:
        raise ValueError(f"{folder}: not a config of this package's OpenVLA policy: {error}") from error
    decoder = architecture.decoder
    facts = {
        "decoder": decoder,
        "chunk": f"{architecture.chunk_size} actions of {architecture.action_dim}",
        "cameras": ", ".join(config.cameras),
        "state": "not read" if architecture.state_dim is None else f"{architecture.state_dim} numbers",
        "language model": f"Llama, {architecture.llm.num_layers} layers of {architecture.llm.hidden_size}",
        "critic": "yes" if config.value_head else "no",
    }
    if "base" in values:
        facts["adapters on"] = values["base"]
    elif config.lora is not None:
        facts["adapters"] = f"rank {config.lora.rank}"
    keys = tuple(sorted(_json(folder / STATISTICS_FILE)))
    needs_scale = decoder == "l1" and config.laplace is None
    return CheckpointInfo(
        family=f"{_NAMES[decoder]}, saved by vla-rl",
        kind="openvla",
        facts=facts,
        norm_keys=keys,
        rl=() if needs_scale else TOKEN_RL,
        rl_reason=L1_WITHOUT_SCALE if needs_scale else "",
    )


class OpenVLAConfig(OpenVLAOptions):
    """A policy of the OpenVLA architecture (arXiv:2406.09246) or OpenVLA-OFT's discrete one (arXiv:2502.19645)."""

    def build(self, env_spec: EnvSpec, device: str | torch.device = "cpu", seed: int = 0) -> OpenVLAPolicy:
        """See `PolicyConfig.build`."""
        from vla_rl.policies.openvla.policy import OpenVLAPolicy

        if self.path is None:
            policy = OpenVLAPolicy.create(self, env_spec, device, seed)
        else:
            chosen = {name: getattr(self, name) for name in self.model_fields_set}
            size = env_spec.action_dim
            policy = OpenVLAPolicy.load(
                resolve_path(self.path), device, seed, chosen, for_training=True, action_dim=size
            )
        policy.check_env(env_spec)
        return policy

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> OpenVLAPolicy:
        """See `PolicyConfig.load`."""
        from vla_rl.policies.openvla.policy import OpenVLAPolicy

        return OpenVLAPolicy.load(Path(folder), device)

    @classmethod
    def describe(cls, folder: Path) -> CheckpointInfo | None:
        """See `PolicyConfig.describe`."""
        return describe(folder)
