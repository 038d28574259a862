"""Saving LeRobot policies in LeRobot's own layout."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lerobot.processor import ActionTokenizerProcessorStep, TokenizerProcessorStep
from torch import Tensor, nn

from vla_rl.common.distributed.fsdp import local
from vla_rl.common.distributed.tensor_files import write_tensors
from vla_rl.policies.checkpoint_files import WEIGHTS_FILE, write_folder
from vla_rl.policies.lerobot import fast_tokens
from vla_rl.policies.lerobot import lora as lerobot_lora
from vla_rl.policies.lerobot.options import EXTRAS_FILE, LeRobotOptions

VLM_FOLDER, TOKENIZER_FOLDER, ACTION_TOKENIZER_FOLDER = "vlm", "tokenizer", "action_tokenizer"
EXTRA_WEIGHTS_FILE = "vla_rl.safetensors"
HEADS = ("value_head.", "noise_head.")


def save(
    folder: Path, options: LeRobotOptions, core: Any, preprocessor: Any, postprocessor: Any, extra: dict[str, Tensor]
) -> None:
    """Write a policy so that `load_policy(folder)` and LeRobot restore it. The folder appears whole or not at all.

    Adapters are merged into model.safetensors, which so acts like the policy in LeRobot too; vla_rl.safetensors keeps
    them and the weights that they adapt, so that training goes on exactly.

    Args:
        core, preprocessor, postprocessor: LeRobot's policy and its pipelines. extra: as `extra_weights` gives them.
    """

    def write(path: Path) -> None:
        core_config = copy.copy(core.config)
        core_config.pretrained_path = None
        if hasattr(core_config, "vlm_model_name"):
            towers = core.model.vlm_with_expert
            towers.config.save_pretrained(path / VLM_FOLDER)
            towers.processor.save_pretrained(path / VLM_FOLDER)
            core_config.vlm_model_name = portable_name(VLM_FOLDER, core_config.vlm_model_name)
        if hasattr(core, "action_tokenizer"):
            core_config.text_tokenizer_name = portable_name(TOKENIZER_FOLDER, core_config.text_tokenizer_name)
            core_config.action_tokenizer_name = portable_name(
                ACTION_TOKENIZER_FOLDER, core_config.action_tokenizer_name
            )
            fast_tokens.write(core.action_tokenizer, path / ACTION_TOKENIZER_FOLDER)
        if hasattr(core_config, "tokenizer_name"):
            core_config.tokenizer_name = portable_name(TOKENIZER_FOLDER, core_config.tokenizer_name)
        core_config._save_pretrained(path)
        weights = _without_aliases(lerobot_lora.plain_state(core))
        write_tensors(path / WEIGHTS_FILE, weights, metadata={"format": "pt"})
        _write_processors(preprocessor, postprocessor, path)
        config = options.model_copy(
            update={"path": None, "norm_key": None, "options": {}}
            | dict.fromkeys(("vlm", "tokenizer", "action_tokenizer"))
        )
        extras = {"format": 1, "kind": "lerobot", "config": config.model_dump(mode="json")}
        (path / EXTRAS_FILE).write_text(json.dumps(extras, indent=2))
        write_tensors(path / EXTRA_WEIGHTS_FILE, extra)

    write_folder(folder, write)


def extra_weights(policy: nn.Module) -> dict[str, Tensor]:
    """Heads, and adapters with the weights that they adapt, by name."""
    return {
        name: value
        for name, value in policy.state_dict().items()
        if name.startswith(HEADS) or lerobot_lora.is_adapter(name) or ".base_layer." in name
    }


def storage(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """What tied weights share."""
    return local(tensor).data_ptr(), tuple(tensor.shape)


def _without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each storage once, under its first name: tied weights are written once, as LeRobot does."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    result = {}
    for name in sorted(tensors):
        key = storage(tensors[name])
        if tensors[name].numel() and key in seen:
            continue
        seen.add(key)
        result[name] = tensors[name]
    return result


def _write_processors(preprocessor: Any, postprocessor: Any, path: Path) -> None:
    """Both pipelines and their tokenizer."""
    for step in preprocessor.steps:
        if isinstance(step, ActionTokenizerProcessorStep):
            step.action_tokenizer_name = portable_name(ACTION_TOKENIZER_FOLDER, step.action_tokenizer_name)
        if isinstance(step, TokenizerProcessorStep):
            step.input_tokenizer.save_pretrained(path / TOKENIZER_FOLDER)
            step.tokenizer, step.tokenizer_name = None, portable_name(TOKENIZER_FOLDER, step.tokenizer_name)
    preprocessor.save_pretrained(path)
    postprocessor.save_pretrained(path)


def portable_name(own: str, *names: str | None) -> str:
    """What a checkpoint says of where its vision-language model or tokenizer is: the first Hub id of `names`.

    LeRobot looks a name up in the current folder, then in the Hub, never in the checkpoint's folder. So a Hub id is
    kept, whatever copy of it this machine used. Without one it is `./own`: right on any machine once LeRobot is
    started in the checkpoint's folder, and no Hub id by accident.
    """
    return next((name for name in names if name and not _is_folder(name)), f"./{own}")


def _is_folder(name: str) -> bool:
    """Whether a model's name is a folder, perhaps of another machine, and no Hub id."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or Path(name).is_dir()
