"""Making, loading and saving LeRobot policies, in LeRobot's own layout.

A folder holds what LeRobot writes (config.json, model.safetensors, the two processors) and beside it
what only this package reads: vla_rl.json with our options, vla_rl.safetensors with heads and adapters, and
`vlm/`, `tokenizer/` and `action_tokenizer/`, so that a checkpoint needs no hub. LeRobot finds those by what
`portable_name` says.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from draccus.utils import DraccusException
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.processor import TokenizerProcessorStep
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from vla_rl.common.distributed import tensor_files
from vla_rl.common.precision import set_float32_products
from vla_rl.config import ConfigError
from vla_rl.policies.checkpoint_files import WEIGHTS_FILE
from vla_rl.policies.lerobot import fast_tokens
from vla_rl.policies.lerobot import lora as lerobot_lora
from vla_rl.policies.lerobot.act import LeRobotActPolicy
from vla_rl.policies.lerobot.diffusion import LeRobotDiffusionPolicy
from vla_rl.policies.lerobot.fast import LeRobotFastPolicy
from vla_rl.policies.lerobot.flow import ContinuingFlowPolicy, LeRobotFlowPolicy
from vla_rl.policies.lerobot.networks import FlowNetwork
from vla_rl.policies.lerobot.options import (
    CONTINUING_TYPES,
    EXTRAS_FILE,
    FLOW_TYPES,
    IMAGE_PREFIX,
    RL_TYPES,
    LeRobotOptions,
    check_not_adapters,
    saved_config,
)
from vla_rl.policies.lerobot.policy import ACTION, STATE, LeRobotPolicy
from vla_rl.policies.lerobot.processor_steps import PREPROCESSOR_FILE, read_steps
from vla_rl.policies.lerobot.tiny import (
    own_tokenizer,
    tiny_options,
    tiny_pi,
    tiny_tokenizer,
    tiny_xvla,
    write_tiny_tokenizers,
    write_tiny_vlm,
)
from vla_rl.policies.lerobot.writing import (
    ACTION_TOKENIZER_FOLDER,
    EXTRA_WEIGHTS_FILE,
    HEADS,
    TOKENIZER_FOLDER,
    VLM_FOLDER,
    extra_weights,
    portable_name,
    storage,
)
from vla_rl.types import EnvSpec

_OF_PROCESSORS = ("normalization_mapping", "tokenizer_max_length", "pad_language_to", "tokenizer_padding_side")


def create(config: LeRobotOptions, env_spec: EnvSpec, device: str | torch.device, seed: int) -> LeRobotPolicy:
    """Fresh weights, the same for the same seed. See `PolicyConfig.build`."""
    assert config.type is not None, "the config checks this"
    missing = [camera for camera in config.cameras if camera not in env_spec.cameras]
    if missing:
        raise ConfigError(
            f"policy.cameras: {missing} not in environment {env_spec.kind!r}, which has {list(env_spec.cameras)}"
        )
    options: dict[str, Any] = {"chunk_size": config.chunk_size, "n_action_steps": config.chunk_size}
    tokenizer = None
    with tempfile.TemporaryDirectory() as folder:
        vlm = config.vlm
        if config.preset == "tiny":
            sizes = config.image_size, env_spec.state_dim, env_spec.action_dim, config.chunk_size
            options |= tiny_options(config.type, *sizes)
            is_fast = config.type == "pi0_fast"
            tokenizer = tiny_tokenizer(env_spec.tasks.values(), fast_tokens.VOCABULARY if is_fast else 0)
            if config.type == "smolvla":
                write_tiny_vlm(Path(folder), tokenizer, config.image_size)
                vlm = folder
            if config.type == "xvla":
                options |= tiny_xvla(Path(folder), tokenizer)
            if is_fast:
                options |= write_tiny_tokenizers(Path(folder), tokenizer, config.chunk_size, env_spec.action_dim)
        core_config = _core_config(config.type, options | config.options, config.cameras, env_spec)
        core_config.device = str(device)
        if vlm is not None:
            core_config.vlm_model_name = vlm
        if config.type == "pi0_fast":
            _name_tokenizers(core_config, config)
        with torch.random.fork_rng(devices=[]), _as_it_is_built(config, tokenizer):
            torch.manual_seed(seed)
            core = _build(core_config)
            processors = _make_processors(core_config)
            size = getattr(core_config, "chunk_size", config.chunk_size)  # policy.options may say another.
            policy = _wrap(config.model_copy(update={"chunk_size": size}), core, *processors)
    return _finish(policy, device, seed)


def load(
    folder: Path, device: str | torch.device = "cpu", seed: int = 0, chosen: Mapping[str, Any] | None = None
) -> LeRobotPolicy:
    """The policy in a folder of LeRobot's or ours, with what a recipe `chosen` anew (critic, sampling, adapters, ...).

    Heads and adapters that the folder lacks are fresh from `seed`.

    Raises:
        ValueError: a file is missing or damaged. ConfigError: `chosen` contradicts the checkpoint.
    """
    folder = Path(folder)
    saved = saved_config(folder)
    check_not_adapters(folder)
    if not (folder / WEIGHTS_FILE).is_file():  # Before minutes are spent on building what they are for.
        raise ValueError(f"{folder / WEIGHTS_FILE}: not found. Copy the policy folder again, with all of its files.")
    config = saved.with_chosen(dict(chosen or {}))
    core_config = _read_core_config(folder, config, device)
    published = getattr(core_config, "vlm_model_name", None)
    if published is not None:
        core_config.vlm_model_name = config.vlm or _own(folder, VLM_FOLDER) or published
    if getattr(core_config, "load_vlm_weights", False):
        core_config.load_vlm_weights = False  # They are in the checkpoint.
    words = getattr(core_config, "text_tokenizer_name", None), getattr(core_config, "action_tokenizer_name", None)
    if config.type == "pi0_fast":
        _name_tokenizers(core_config, config, folder)
    with torch.random.fork_rng(devices=[]), _as_it_is_built(config):
        torch.manual_seed(seed)
        core = _build(core_config)
        read_core_weights(folder, core)
        processors = _read_processors(folder, core_config, config)
        if published is not None:
            core_config.vlm_model_name = portable_name(VLM_FOLDER, config.vlm, published)
        if config.type == "pi0_fast":
            core_config.text_tokenizer_name = portable_name(TOKENIZER_FOLDER, config.tokenizer, words[0])
            own = config.action_tokenizer
            core_config.action_tokenizer_name = portable_name(ACTION_TOKENIZER_FOLDER, own, words[1])
        policy = _wrap(config, core, *processors)
    if config.norm_key == "from_data":
        policy.forget_norm_stats()
    return _finish(policy, device, seed, folder, saved)


# --- building ----------------------------------------------------------------------------------


def _core_config(policy_type: str, options: dict[str, Any], cameras: tuple[str, ...], env_spec: EnvSpec) -> Any:
    config_class = _config_class(policy_type)
    known = {field.name for field in dataclasses.fields(config_class)}
    unknown = sorted(set(options) - known - {"chunk_size", "n_action_steps"})
    if unknown:
        raise ConfigError(f"policy.options: {unknown} not in LeRobot's {policy_type} config, which has {sorted(known)}")
    inputs = {IMAGE_PREFIX + name: PolicyFeature(FeatureType.VISUAL, (3, *env_spec.image_size)) for name in cameras} | {
        STATE: PolicyFeature(FeatureType.STATE, (env_spec.state_dim,))
    }
    outputs = {ACTION: PolicyFeature(FeatureType.ACTION, (env_spec.action_dim,))}
    given = {name: value for name, value in options.items() if name in known}
    return config_class(input_features=inputs, output_features=outputs, **given)


def _config_class(policy_type: str) -> Any:
    known = PreTrainedConfig.get_known_choices()
    if policy_type not in known:
        raise ConfigError(f"policy.type: got {policy_type!r}, LeRobot has: {', '.join(sorted(known))}")
    return known[policy_type]


def _read_core_config(folder: Path, config: LeRobotOptions, device: str | torch.device) -> Any:
    _config_class(str(config.type))
    try:
        core_config = PreTrainedConfig.from_pretrained(folder)
    except (DraccusException, ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'}: LeRobot cannot read it: {error.__cause__ or error}") from error
    for name, value in config.options.items():
        if not hasattr(core_config, name):
            known = sorted(field.name for field in dataclasses.fields(core_config))
            raise ConfigError(f"policy.options: {name!r} not in LeRobot's {config.type} config, which has {known}")
        if name in _OF_PROCESSORS and _plain(getattr(core_config, name)) != _plain(value):
            raise ConfigError(
                f"policy.options.{name}: got {value!r}, but LeRobot makes processors by it, and a checkpoint "
                f"brings its own, made with {_plain(getattr(core_config, name))!r}; remove it from the recipe"
            )
        setattr(core_config, name, value)
    core_config.device = str(device)
    return core_config


def _plain(value: Any) -> Any:
    """LeRobot's enumerations, in a mapping too, as the text that stands for them."""
    if isinstance(value, Mapping):
        return {_plain(name): _plain(each) for name, each in value.items()}
    return getattr(value, "value", value)


@contextmanager
def _as_it_is_built(config: LeRobotOptions, tokenizer: PreTrainedTokenizerFast | None = None) -> Iterator[None]:
    """Where LeRobot's classes are built as the config wants them: tiny, and without running a tokenizer's code."""
    is_tiny_pi = config.preset == "tiny" and config.type in ("pi0", "pi05", "pi0_fast")
    names_its_own = config.preset is None and config.tokenizer and config.type in ("pi0", "pi05")
    with (
        tiny_pi(str(config.type), tokenizer, config.image_size) if is_tiny_pi else nullcontext(),
        own_tokenizer(str(config.type), tokenizer_name=config.tokenizer) if names_its_own else nullcontext(),
        fast_tokens.read_as_data() if config.type == "pi0_fast" else nullcontext(),
    ):
        yield


def _name_tokenizers(core_config: Any, config: LeRobotOptions, folder: Path | None = None) -> None:
    """Where pi0-FAST finds its two tokenizers: those of the recipe, the checkpoint's own, or those it names."""
    for name, chosen, own in (
        ("text_tokenizer_name", config.tokenizer, TOKENIZER_FOLDER),
        ("action_tokenizer_name", config.action_tokenizer, ACTION_TOKENIZER_FOLDER),
    ):
        found = chosen or (None if folder is None else _own(folder, own)) or getattr(core_config, name)
        setattr(core_config, name, found)


def _build(core_config: Any) -> Any:
    """LeRobot's policy with fresh weights.

    Raises:
        ValueError: a package is missing, or a file that neither the disk nor a hub has.
    """
    try:
        return get_policy_class(core_config.type)(core_config)
    except ImportError as error:
        raise ValueError(
            f"LeRobot's {core_config.type!r} needs a package that is missing: {error}. Run: pip install '.[flow]'"
        ) from error
    except RuntimeError as error:
        if core_config.type != "pi0_fast" or error.__cause__ is None:
            raise
        raise ValueError(
            f"LeRobot's 'pi0_fast' cannot be built: {error.__cause__}. Give folders with its tokenizers: "
            f"policy.tokenizer=FOLDER (now {core_config.text_tokenizer_name!r}), policy.action_tokenizer=FOLDER "
            f"(now {core_config.action_tokenizer_name!r})."
        ) from error
    except OSError as error:
        name = getattr(core_config, "vlm_model_name", None)
        hint = f" Give a folder with its config and tokenizer: policy.vlm=FOLDER (now {name!r})." if name else ""
        raise ValueError(f"LeRobot's {core_config.type!r} cannot be built: {error}{hint}") from error


def _wrap(config: LeRobotOptions, core: Any, preprocessor: Any, postprocessor: Any) -> LeRobotPolicy:
    if core.config.type in FLOW_TYPES:
        kind = ContinuingFlowPolicy if core.config.type in CONTINUING_TYPES else LeRobotFlowPolicy
        return kind(config, core, preprocessor, postprocessor)
    if config.cuda_graphs:
        raise ConfigError(f"policy.cuda_graphs: only for {', '.join(FLOW_TYPES)}; got {core.config.type!r}")
    if core.config.type == "pi0_fast":
        return LeRobotFastPolicy(config, core, preprocessor, postprocessor)
    if core.config.type in ("diffusion", "act"):
        return _wrap_small(config, core, preprocessor, postprocessor)
    wanted = [name for name in ("value_head", "lora", "gradient_checkpointing") if getattr(config, name)]
    if wanted:
        raise ConfigError(f"policy.{wanted[0]}: only for {', '.join(RL_TYPES)}, which can be trained here")
    return LeRobotPolicy(config, core, preprocessor, postprocessor)


def _wrap_small(config: LeRobotOptions, core: Any, preprocessor: Any, postprocessor: Any) -> LeRobotPolicy:
    """Diffusion Policy or ACT, all of which is trained."""
    wanted = [name for name in ("lora", "gradient_checkpointing") if getattr(config, name)]
    if wanted:
        raise ConfigError(f"policy.{wanted[0]}: not for {core.config.type!r}, whose networks are small")
    kind = LeRobotActPolicy if core.config.type == "act" else LeRobotDiffusionPolicy
    return kind(config, core, preprocessor, postprocessor)


def _finish(
    policy: LeRobotPolicy,
    device: str | torch.device,
    seed: int,
    folder: Path | None = None,
    saved: LeRobotOptions | None = None,
) -> LeRobotPolicy:
    """Adapters, heads from the folder, what is trained, and the device."""
    config = policy.config
    trainable = {name for name, parameter in policy.core.named_parameters() if parameter.requires_grad}
    if config.lora is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lerobot_lora.add_adapters(policy.core, config.lora, cast(FlowNetwork, policy.network))
    if folder is not None and saved is not None:
        _read_extra_weights(folder, policy, saved)
    for name, parameter in policy.core.named_parameters():
        adapter = lerobot_lora.is_adapter(name)
        free = config.trainable == "lerobot" and ".base_layer." not in name and name in trainable
        parameter.requires_grad_(adapter or free)
    if config.gradient_checkpointing and hasattr(policy.core.model, "gradient_checkpointing_enable"):
        policy.core.model.gradient_checkpointing_enable()
    policy.to(device).eval()
    set_float32_products(config.precision, policy.device.type)
    return policy


# --- weights -----------------------------------------------------------------------------------


def read_core_weights(folder: Path, core: nn.Module) -> None:
    """Load model.safetensors into a LeRobot policy, strictly; openpi's names are translated as LeRobot does.

    Raises:
        ValueError: the file is missing or truncated; tensors are missing, unknown, of another shape, or hold NaN.
    """
    file = folder / WEIGHTS_FILE
    found = stored = _read_tensors(file)
    expected = core.state_dict()
    if core.config.type == "xvla":
        from lerobot.policies.xvla import modeling_xvla as xvla

        if xvla._is_vendored_florence_state_dict(found):  # As published: Florence-2's own layout.
            found = xvla._remap_vendored_florence_state_dict(found)
    fix = getattr(core, "_fix_pytorch_state_dict_keys", None)
    if fix is not None and not found.keys() <= expected.keys():
        fixed = fix(found, core.config)
        found = {name if name.startswith("model.") else f"model.{name}": value for name, value in fixed.items()}
    present = {storage(expected[name]) for name in found if name in expected}
    problems = [f"{n}: missing" for n, t in expected.items() if n not in found and storage(t) not in present]
    problems += [f"{name}: not part of this policy" for name in found if name not in expected]
    problems += [
        f"{name}: found shape {tuple(value.shape)}, expected {tuple(expected[name].shape)}"
        for name, value in found.items()
        if name in expected and value.shape != expected[name].shape
    ]
    if problems:
        raise ValueError(f"{file}: does not fit its config.json: {_some(problems)}. Copy the checkpoint again.")
    if tensor_files.is_deferring():
        own = dict(core.named_parameters(remove_duplicate=False))
        keys = {id(tensor): key for key, tensor in stored.items()}
        waiting = {name: (file, keys[id(value)]) for name, value in found.items() if name in own and id(value) in keys}
        tensor_files.leave_in_files(core, waiting)
        found = {name: value for name, value in found.items() if name not in waiting}
    broken = [name for name, value in found.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise ValueError(f"{file}: NaN or infinity in {_some(broken)}. Use an earlier checkpoint.")
    core.load_state_dict(found, strict=False)


def _read_extra_weights(folder: Path, policy: LeRobotPolicy, saved: LeRobotOptions) -> None:
    file = folder / EXTRA_WEIGHTS_FILE
    if not (folder / EXTRAS_FILE).is_file():
        return
    found = _read_tensors(file)
    expected = policy.state_dict()
    needed = [name for name in extra_weights(policy) if name not in found]
    new = tuple(prefix for prefix, had in ((HEADS[0], saved.value_head), (HEADS[1], _has_noise_head(saved))) if not had)
    missing = [
        n for n in needed if not n.startswith(new or ("\0",)) and (saved.lora is not None or n.startswith(HEADS))
    ]
    wrong = [n for n, value in found.items() if n in expected and value.shape != expected[n].shape]
    if missing or wrong:
        raise ValueError(f"{file}: does not fit {EXTRAS_FILE}: {_some(missing + wrong)}. Copy the policy folder again.")
    found = {name: value for name, value in found.items() if name in expected}
    waiting = (
        tensor_files.sources(policy).keys() & found.keys()
    )  # What adapters adapt: the folder's other file has it merged.
    tensor_files.leave_in_files(policy, {name: (file, name) for name in waiting})
    policy.load_state_dict({name: value for name, value in found.items() if name not in waiting}, strict=False)


def _has_noise_head(config: LeRobotOptions) -> bool:
    return config.sampling.method == "flow_noise"


def _read_tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise ValueError(f"{file}: not found. Copy the policy folder again, with all of its files.")
    try:
        return safetensors.torch.load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated or not a safetensors file ({error}). Copy it again.") from error


def _some(items: Iterable[str], limit: int = 8) -> str:
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


# --- processors --------------------------------------------------------------------------------


def _make_processors(core_config: Any) -> tuple[Any, Any]:
    try:
        return make_pre_post_processors(core_config)
    except OSError as error:
        raise ValueError(f"the tokenizer of LeRobot's {core_config.type!r} is not at hand: {error}") from error


def _read_processors(folder: Path, core_config: Any, config: LeRobotOptions) -> tuple[Any, Any]:
    """The saved pipelines, on this device, with the tokenizer of the recipe's or the folder's own if there is one."""
    file, configs = folder / PREPROCESSOR_FILE, read_steps(folder, core_config.type)
    overrides: dict[str, Any] = {}
    if "device_processor" in configs:
        overrides["device_processor"] = {"device": core_config.device}
    published = configs.get("tokenizer_processor", {}).get("tokenizer_name")
    tokenizer = config.tokenizer or config.vlm or _own(folder, TOKENIZER_FOLDER) or published
    if "tokenizer_processor" in configs:
        overrides["tokenizer_processor"] = {"tokenizer_name": tokenizer}
    if "action_tokenizer_processor" in configs:  # LeRobot saves neither the text's tokenizer nor the skipped tokens.
        overrides["action_tokenizer_processor"] = {
            "action_tokenizer_name": core_config.action_tokenizer_name,
            "paligemma_tokenizer_name": tokenizer,
            "fast_skip_tokens": core_config.fast_skip_tokens,
        }
    try:
        processors = make_pre_post_processors(
            core_config, pretrained_path=str(folder), preprocessor_overrides=overrides
        )
    except (OSError, ValueError) as error:
        why = str(error.__cause__ or error).rstrip(".")
        raise ValueError(
            f"{file}: LeRobot cannot read it: {why}. If its tokenizer ({tokenizer!r}) is not at hand, give a folder "
            "with it: policy.tokenizer=FOLDER."
        ) from error
    steps: list[Any] = list(processors[0].steps)
    for step in steps:
        if isinstance(step, TokenizerProcessorStep):
            step.tokenizer_name = portable_name(TOKENIZER_FOLDER, config.tokenizer, config.vlm, published)
    return processors


def _own(folder: Path, name: str) -> str | None:
    return str(folder / name) if (folder / name).is_dir() else None
