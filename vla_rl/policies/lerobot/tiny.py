"""Tiny SmolVLA, pi0 and pi0.5: LeRobot's own classes at sizes that a CPU trains, made without any download.

SmolVLA reads its sizes and tokenizer from a model folder, so a folder with small ones is enough. The
sizes and the tokenizer's name of pi0 and pi0.5 are written into LeRobot's code; the names that hold them are
exchanged while an object is built, and only then. Everything that computes is LeRobot's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lerobot.configs import NormalizationMode
from lerobot.policies.pi_gemma import PaliGemmaForConditionalGenerationWithPiGemma, PiGemmaForCausalLM
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import nn
from transformers import (
    GemmaConfig,
    PaliGemmaConfig,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from vla_rl.policies.lerobot import fast_tokens

VOCABULARY = 512
_PAD, _UNKNOWN, _IMAGE = "<pad>", "<unk>", "<image>"
_SPECIAL = (_PAD, _UNKNOWN, "<s>", "</s>", "<fake_token_around_image>", "<global-img>", _IMAGE)
# pi0.5 and pi0-FAST write the state into their prompt as numbers of 0 to 255.
_PROMPT_WORDS = ("task", "state", "action", ":", ",", ";", "-", ".", *map(str, range(256)))
_TEXT = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "head_dim": 16}
_VISION = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
_PATCH = {"smolvla": 8, "pi": 16}  # Both give a 64 x 64 image 16 tokens: SmolVLA merges 2 x 2 patches.


def tiny_tokenizer(instructions: Iterable[str], num_action_tokens: int = 0) -> Any:
    """A transformers tokenizer that knows the words of these instructions; any other is one unknown word.

    Args:
        num_action_tokens: words at its end that pi0-FAST writes actions with, after "|", which ends them.

    Raises:
        ValueError: more words than the tiny models have rows for.
    """
    split = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    words = {word for text in instructions for word, _ in split.pre_tokenize_str(text.lower())}
    vocabulary = list(dict.fromkeys([*_SPECIAL, *_PROMPT_WORDS, *sorted(words)]))
    if len(vocabulary) > VOCABULARY:
        most = VOCABULARY - len(_SPECIAL) - len(_PROMPT_WORDS)
        raise ValueError(f"the instructions have {len(words)} different words; the tiny preset has room for {most}")
    if num_action_tokens:
        vocabulary += ["|", *(f"<action{number}>" for number in range(num_action_tokens))]
    level = models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=_UNKNOWN)
    tokenizer = Tokenizer(level)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = split
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        unk_token=_UNKNOWN,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "image_token": _IMAGE,
        },
    )


def write_tiny_vlm(folder: Path, tokenizer: Any, image_size: int) -> None:
    """Write what SmolVLA reads of its vision-language model: config and processor, no weights."""
    text = {**_TEXT, "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    values = {
        "text_config": {**text, "vocab_size": VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 1024},
        "vision_config": {**_VISION, "image_size": image_size, "patch_size": _PATCH["smolvla"]},
        "scale_factor": 2,
        "pad_token_id": 0,
        "image_token_id": _SPECIAL.index(_IMAGE),
    }
    SmolVLMConfig.from_dict(values).save_pretrained(folder)
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(folder)


def write_tiny_tokenizers(folder: Path, tokenizer: Any, chunk_size: int, action_dim: int) -> dict[str, str]:
    """Write pi0-FAST's two tokenizers; returns the config fields that name them."""
    names = {"text_tokenizer_name": str(folder / "text"), "action_tokenizer_name": str(folder / "action")}
    tokenizer.save_pretrained(names["text_tokenizer_name"])
    fast_tokens.write(fast_tokens.tiny_fast_tokenizer(chunk_size, action_dim), Path(names["action_tokenizer_name"]))
    return names


def tiny_xvla(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """X-VLA's vision-language model as config fields, and its tokenizer, written to the folder."""
    tokenizer.save_pretrained(folder)
    ends = {"pad_token_id": 0, "bos_token_id": _SPECIAL.index("<s>"), "eos_token_id": _SPECIAL.index("</s>")}
    width, wide = _TEXT["hidden_size"], _TEXT["intermediate_size"]
    text = {"model_type": "bart", "vocab_size": VOCABULARY, "d_model": width, "max_position_embeddings": 256, **ends}
    for side in ("encoder", "decoder"):
        text |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": wide}
    vision = {
        "embed_dim": [32, 32, 64, width],
        "depths": [1, 1, 1, 1],
        "num_heads": [2, 2, 4, 4],
        "num_groups": [2, 2, 4, 4],
        "patch_stride": [4, 2, 2, 1],  # 2 x 2 tokens of 32 x 32 pixels.
        "window_size": 4,
        "projection_dim": width,
    }
    florence = {"text_config": text, "vision_config": vision, **ends, "image_token_id": _SPECIAL.index(_IMAGE)}
    return {"florence_config": florence, "tokenizer_name": str(folder)}


def _tiny_resnet(policy_type: str, chunk_size: int) -> dict[str, Any]:
    """ACT and Diffusion Policy: LeRobot's smallest image network, not pretrained, and little behind it."""
    vision = {"vision_backbone": "resnet18", "pretrained_backbone_weights": None}
    if policy_type == "act":
        small = {"dim_model": 64, "n_heads": 4, "dim_feedforward": 192, "latent_dim": 8}
        return vision | small | {"n_encoder_layers": 2, "n_decoder_layers": 1, "n_vae_encoder_layers": 1}
    return vision | {
        "n_obs_steps": 1,
        "horizon": -(-chunk_size // 4) * 4,  # The network halves it for each of its widths.
        "n_action_steps": chunk_size,
        "down_dims": (64, 128),
        "diffusion_step_embed_dim": 32,
        "use_group_norm": True,
        "spatial_softmax_num_keypoints": 8,
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 5,
    }


def tiny_options(
    policy_type: str, image_size: int, state_dim: int, action_dim: int, chunk_size: int = 8
) -> dict[str, Any]:
    """LeRobot config fields of the tiny preset: no padded dimensions, few steps, everything trained.

    Raises:
        ValueError: the image cannot be cut into patches.
    """
    if policy_type in ("act", "diffusion"):
        return _tiny_resnet(policy_type, chunk_size)
    patch = _PATCH["smolvla"] * 2 if policy_type == "smolvla" else _PATCH["pi"]
    if image_size % patch:
        raise ValueError(f"policy.image_size: got {image_size}, must be a multiple of {patch} in the tiny preset")
    common: dict[str, Any] = {"max_state_dim": state_dim, "max_action_dim": action_dim}
    if policy_type == "pi0_fast":
        quantiles = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
        return common | {
            "image_resolution": (image_size, image_size),
            "tokenizer_max_length": 64,
            "max_action_tokens": 64,
            "max_decoding_steps": 64,
            "fast_skip_tokens": 0,
            "validate_action_token_prefix": False,  # It wants a capital A, and the tiny tokenizer knows none.
            "normalization_mapping": {name: NormalizationMode(mode) for name, mode in quantiles.items()},
        }
    if policy_type == "xvla":
        scaled = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
        return common | {
            "resize_imgs_with_padding": (image_size, image_size),
            "action_mode": "auto",
            "num_denoising_steps": 5,
            "normalization_mapping": {name: NormalizationMode(mode) for name, mode in scaled.items()},
            **{"tokenizer_max_length": 32, "hidden_size": 64, "depth": 4, "num_heads": 4},
            **{"num_domains": 2, "len_soft_prompts": 4, "dim_time": 32, "max_len_seq": 128},
        }
    common |= {"freeze_vision_encoder": False, "train_expert_only": False}
    if policy_type == "smolvla":
        return common | {
            "resize_imgs_with_padding": (image_size, image_size),
            "num_steps": 5,
            "num_vlm_layers": _TEXT["num_hidden_layers"],
            "tokenizer_max_length": 32,
        }
    return common | {
        "image_resolution": (image_size, image_size),
        "num_inference_steps": 5,
        "tokenizer_max_length": 32 if policy_type == "pi0" else 64,
    }


@contextmanager
def tiny_pi(policy_type: str, tokenizer: PreTrainedTokenizerFast | None = None, image_size: int = 64) -> Iterator[None]:
    """Inside the block LeRobot's pi0, pi0.5 or pi0-FAST is built at tiny sizes; `tokenizer` is of the former two.

    Changes names in LeRobot's modules for as long, so no other thread may build one meanwhile.
    """
    modeling = importlib.import_module(f"lerobot.policies.{policy_type}.modeling_{policy_type}")
    gemma = modeling.GemmaConfig(
        width=_TEXT["hidden_size"],
        depth=_TEXT["num_hidden_layers"],
        mlp_dim=_TEXT["intermediate_size"],
        num_heads=8,  # LeRobot's attention is written for 8.
        num_kv_heads=1,
        head_dim=_TEXT["head_dim"],
    )
    with _exchanged(modeling, "get_gemma_config", lambda variant: gemma):
        if policy_type == "pi0_fast":  # Its tokenizers are read from folders.
            with _exchanged(modeling, "PI0FastPaliGemma", _tiny_fast_paligemma(modeling, image_size)):
                yield
            return
        with (
            _exchanged(modeling, "PaliGemmaWithExpertModel", _tiny_paligemma(modeling)),
            own_tokenizer(policy_type, tokenizer=tokenizer),
        ):
            yield


@contextmanager
def own_tokenizer(policy_type: str, **given: Any) -> Iterator[None]:
    """Inside the block LeRobot's pi0 or pi0.5 is built with the tokenizer `given`: `tokenizer` or `tokenizer_name`."""
    processing = importlib.import_module(f"lerobot.policies.{policy_type}.processor_{policy_type}")
    step_class = processing.TokenizerProcessorStep

    def make(tokenizer_name: str, **options: Any) -> Any:
        return step_class(**given, **options)

    with _exchanged(processing, "TokenizerProcessorStep", make):
        yield


@contextmanager
def _exchanged(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _gemma(sizes: Any, adaptive: bool, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Gemma's config from LeRobot's sizes; `adaptive`: its norms depend on the noise level."""
    return {
        "hidden_size": sizes.width,
        "intermediate_size": sizes.mlp_dim,
        "num_hidden_layers": sizes.depth,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": vocabulary,
        "pad_token_id": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "use_adarms": adaptive,
        "adarms_cond_dim": sizes.width if adaptive else None,
    }


def _paligemma(text: dict[str, Any], image_size: int) -> Any:
    """PaliGemma with a small vision tower."""
    width = text["hidden_size"]
    vision = {**_VISION, "image_size": image_size, "patch_size": _PATCH["pi"], "vision_use_head": False}
    config = PaliGemmaConfig(
        text_config={**text, "model_type": "gemma"},
        vision_config={**vision, "model_type": "siglip_vision_model", "projection_dim": width},
        projection_dim=width,
        image_token_index=_SPECIAL.index(_IMAGE),
    )
    return PaliGemmaForConditionalGenerationWithPiGemma(config=config)


def _tiny_fast_paligemma(modeling: ModuleType, image_size: int) -> type[nn.Module]:
    """LeRobot's PI0FastPaliGemma with a small vision tower and vocabulary."""

    class TinyFastPaliGemma(modeling.PI0FastPaliGemma):
        def __init__(self, vlm_config: Any, use_adarms: list[bool], precision: str) -> None:
            nn.Module.__init__(self)
            rows = VOCABULARY + fast_tokens.VOCABULARY + 1
            self.paligemma = _paligemma(_gemma(vlm_config, use_adarms[0], rows), image_size)
            _start_small(self)
            self.to_bfloat16_for_selected_params(precision)

    return TinyFastPaliGemma


def _tiny_paligemma(modeling: ModuleType) -> type[nn.Module]:
    """LeRobot's PaliGemmaWithExpertModel with a small vision tower and vocabulary."""

    class TinyPaliGemmaWithExpert(modeling.PaliGemmaWithExpertModel):
        def __init__(
            self,
            vlm_config: Any,
            action_expert_config: Any,
            use_adarms: list[bool],
            precision: str,
            image_size: int,
            freeze_vision_encoder: bool,
            train_expert_only: bool,
        ) -> None:
            nn.Module.__init__(self)
            self.freeze_vision_encoder, self.train_expert_only = freeze_vision_encoder, train_expert_only
            self.paligemma = _paligemma(_gemma(vlm_config, use_adarms[0]), image_size)
            self.gemma_expert = PiGemmaForCausalLM(config=GemmaConfig(**_gemma(action_expert_config, use_adarms[1])))
            self.gemma_expert.model.embed_tokens = None  # pyright: ignore[reportAttributeAccessIssue]
            _start_small(self)
            self.to_bfloat16_for_selected_params(precision)
            self._set_requires_grad()

    return TinyPaliGemmaWithExpert


@torch.no_grad()
def _start_small(module: nn.Module) -> None:
    """Linear layers and embeddings as transformers starts them: N(0, 0.02), biases 0.

    LeRobot exchanges submodules after transformers has initialized them.
    """
    for each in module.modules():
        if isinstance(each, nn.Linear):
            nn.init.normal_(each.weight, std=0.02)
            if each.bias is not None:
                nn.init.zeros_(each.bias)
        elif isinstance(each, nn.Embedding):
            nn.init.normal_(each.weight, std=0.02)
