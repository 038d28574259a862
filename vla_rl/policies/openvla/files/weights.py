"""Weights of the published OpenVLA layout: read shard by shard into a network without memory, and written back.

A network made on the meta device gets its tensors one at a time, straight on their device and in
their dtype, so that there is never a second copy. Writing gives every file the keys, shapes and
dtypes it had.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vla_rl.common.distributed import tensor_files
from vla_rl.common.distributed.fsdp import whole
from vla_rl.common.distributed.tensor_files import write_tensors
from vla_rl.policies.base import OWN_FILE
from vla_rl.policies.checkpoint_files import some
from vla_rl.policies.openvla.files.layout import PublishedFolder, tensor_shapes

# What torch.load(weights_only=True) raises for a file that holds more than tensors.
_UnpicklingError = torch.serialization.pickle.UnpicklingError  # pyright: ignore[reportPrivateImportUsage]
# Rank of OFT's adapters -> their alpha (`finetune.py`): FiLM's file holds adapters, but not their options.
_OFT_ALPHA = 16
_BLOCK = re.compile(r"vision_backbone\.(featurizer|fused_featurizer)\.blocks\.(\d+)\.(block|scale|shift)\.(.*)")


class WeightsError(ValueError):
    """Weights that are damaged or do not fit; the message names the tensors or the file."""


def read_into(
    network: nn.Module, published: PublishedFolder, device: str | torch.device, dtype_of: Callable[[str], torch.dtype]
) -> None:
    """Give a network made on the meta device the checkpoint's tensors.

    Parts for which OFT has a file of their own come from there; all others must be in the shards.

    Args:
        dtype_of: name -> the dtype to hold it in.

    Raises:
        WeightsError: tensors missing, not known or of another shape (all by name); a truncated file; NaN or infinity.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    components = {name: read_component(name, file) for name, file in published.components.items()}
    from_files = {name for tensors in components.values() for name in tensors}
    _check_shards(published, expected)
    for name, tensors in components.items():
        wanted = {n: shape for n, shape in expected.items() if _component_of(n, published) == name}
        found = {n: tuple(tensor.shape) for n, tensor in tensors.items()}
        if name != "vision_backbone" and not wanted:
            continue  # Another decoder was chosen, or not to read the state.
        _complain(published.components[name], wanted, found)
        for key, tensor in tensors.items():
            _assign(network, key, tensor.to(device, dtype_of(key)), published.components[name])
    for file, names in _by_file(published.weight_map).items():
        with _open(published.folder / file, device) as shard:
            for name in names:
                if name in from_files:
                    continue
                if tensor_files.is_deferring():
                    source = (published.folder / file, name)
                    tensor_files.replace(
                        network, name, tensor_files.placeholder(expected[name], dtype_of(name), device, source)
                    )
                else:
                    _assign(network, name, shard.get_tensor(name).to(dtype_of(name)), published.folder / file)


def _check_shards(published: PublishedFolder, expected: Mapping[str, tuple[int, ...]]) -> None:
    found: dict[str, tuple[int, ...]] = {}
    for file, names in _by_file(published.weight_map).items():
        shapes = tensor_shapes(published.folder / file)
        if absent := [n for n in names if n not in shapes]:
            raise WeightsError(f"{published.folder / file}: the index puts {some(absent)} there, but they are not.")
        found |= {n: shapes[n] for n in names}
    wanted = {n: shape for n, shape in expected.items() if _component_of(n, published) is None or n in found}
    _complain(published.folder, wanted, found)


def _component_of(name: str, published: PublishedFolder) -> str | None:
    """Which of OFT's files a tensor of the network comes from; None: the shards."""
    part = name.split(".", 1)[0]
    return part if part in published.components else None


def _complain(where: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    problems = [f"{n}: missing" for n in expected if n not in found]
    problems += [f"{n}: not part of this architecture" for n in found if n not in expected]
    problems += [
        f"{n}: found shape {shape}, expected {expected[n]}"
        for n, shape in found.items()
        if n in expected and shape != expected[n]
    ]
    if not problems:
        return
    hint = ""
    if any("embed_tokens" in p or "lm_head" in p for p in problems):
        hint = " The rows of embed_tokens and lm_head are text_config.vocab_size, padding included."
    raise WeightsError(f"{where}: the weights do not fit config.json: {some(problems)}.{hint}")


def _by_file(weight_map: Mapping[str, str]) -> dict[str, list[str]]:
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name, file in weight_map.items():
        files[file].append(name)
    return dict(files)


def _open(file: Path, device: str | torch.device = "cpu"):
    try:
        return safe_open(file, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{file}: truncated or not a safetensors file ({error}). Copy or download it again."
        ) from error


def _assign(network: nn.Module, name: str, tensor: Tensor, file: Path) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise WeightsError(f"{file}: NaN or infinity in {name}. Use an earlier checkpoint, or download it again.")
    tensor_files.replace(network, name, tensor)


# --- OFT's parts --------------------------------------------------------------------------------


def read_component(name: str, file: Path) -> dict[str, Tensor]:
    """The network's tensors that one of OFT's `.pt` files holds, by the network's names.

    Raises:
        WeightsError: truncated, or holding anything but tensors.
    """
    return _as_network(name, load_pt(file))


def load_pt(file: Path) -> dict[str, Tensor]:
    """A state dict saved by torch, without unpickling anything but tensors.

    Raises:
        WeightsError: truncated, or holding anything but tensors by name.
    """
    try:
        values = torch.load(file, map_location="cpu", weights_only=True)
    except _UnpicklingError as error:
        raise WeightsError(
            f"{file}: holds Python objects, which are not loaded from a file, because they can run code. Save it "
            "again as a plain state dict: torch.save(module.state_dict(), FILE)."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise WeightsError(f"{file}: truncated or not a torch file ({error}). Copy it again.") from error
    if not isinstance(values, dict) or not all(isinstance(v, Tensor) for v in values.values()):
        raise WeightsError(f"{file}: expected a state dict of tensors, found {type(values).__name__}")
    return values


def _as_network(component: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names of the network; adapters in FiLM's file are added to the weights that they adapt."""
    tensors = {}
    adapters: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in stored.items():
        name = _network_name(component, key)
        if ".lora_" in name:
            owner, _, rest = name.partition(".lora_")
            adapters[f"{owner}.weight"][rest[0]] = tensor
        else:
            tensors[name] = tensor
    for name, pair in adapters.items():
        rank = pair["A"].shape[0]
        change = (min(rank, _OFT_ALPHA) / rank) * (pair["B"].float() @ pair["A"].float())
        if change.any():
            tensors[name] = tensors[name].float() + change
    return tensors


def _network_name(component: str, key: str) -> str:
    key = key.removeprefix("module.")
    if component != "vision_backbone":
        return f"{component}.{key}"
    key = key.replace(".base_layer.", ".")
    match = _BLOCK.fullmatch(key)
    if match is None:
        return key
    tower, number, kind, rest = match.groups()
    if kind == "block":
        return f"vision_backbone.{tower}.blocks.{number}.{rest}"
    return f"vision_backbone.film.{int(tower == 'fused_featurizer')}.{number}.{kind}.{rest}"


# --- writing ------------------------------------------------------------------------------------


def write_published(
    network: nn.Module,
    published: PublishedFolder,
    folder: Path,
    drop: Iterable[str] = (),
    dtype: torch.dtype | None = None,
) -> None:
    """Write a network into an empty folder as `published` was: same files, keys, shapes and dtypes.

    Args:
        drop: parts of OFT whose file is left out.
        dtype: of the shards' tensors; None: as each was.
    """
    tensors = dict(network.state_dict())
    from_files = {n for n in tensors if _component_of(n, published) is not None}
    for file, names in _by_file(published.weight_map).items():
        with _open(published.folder / file) as shard:
            metadata = shard.metadata() or {"format": "pt"}
            found = {name: shard.get_tensor(name) for name in names}  # Mapped, not read.
            values = {name: stored if name in from_files else tensors[name] for name, stored in found.items()}
            dtypes = {n: s.dtype if n in from_files else dtype or s.dtype for n, s in found.items()}
            write_tensors(folder / file, values, dtypes, metadata)
    for name, file in published.components.items():
        if name not in drop:
            own = {n: whole(tensor) for n, tensor in tensors.items() if _component_of(n, published) == name}
            torch.save(_as_stored(name, load_pt(file), own), folder / file.name)
    _copy_small_files(published, folder)


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype).contiguous()


def _as_stored(component: str, stored: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part's state dict with the network's values. Where adapters were trained on, their change goes to zero."""
    before = _as_network(component, stored)
    changed = {n for n, t in before.items() if not torch.equal(_stored(t, tensors[n].dtype), tensors[n].cpu())}
    result = {}
    for key, tensor in stored.items():
        name = _network_name(component, key)
        owner = f"{name.partition('.lora_')[0]}.weight" if ".lora_" in name else name
        if owner not in changed:
            result[key] = tensor
        elif ".lora_" in name:
            result[key] = torch.zeros_like(tensor) if ".lora_B" in name else tensor
        else:
            result[key] = _stored(tensors[name], tensor.dtype)
    return result


def _copy_small_files(published: PublishedFolder, folder: Path) -> None:
    """Config, index, statistics, tokenizer, preprocessor and code, as they are."""
    for file in sorted(published.folder.iterdir()):
        is_weights = file.suffix in {".safetensors", ".pt", ".bin", ".pth", ".gguf"}
        if file.is_file() and not is_weights and file.name != OWN_FILE and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)
