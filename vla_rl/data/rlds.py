"""RLDS datasets as TensorFlow Datasets writes them (OpenVLA's modified_libero_rlds, Open X), read without TensorFlow.

    vla-rl import modified_libero_rlds/libero_spatial_no_noops -o datasets/libero_spatial

A folder holds dataset_info.json (splits and files), features.json (names, shapes) and NAME-SPLIT.tfrecord-I-of-N. A
record is an episode: a tf.train.Example whose `steps/...` features hold all steps' values one after another
(https://github.com/google-research/rlds, https://www.tensorflow.org/datasets/external_tfrecord).

TensorFlow's record files and the tf.train.Example in them, read without TensorFlow.

A record is its length (8 bytes), that length's checksum (4), its bytes, and their checksum (4), little endian;
checksums are CRC-32C, rotated and offset (https://www.tensorflow.org/tutorials/load_data/tfrecord). An Example is a
protobuf message: one map from a feature's name to a list of bytes, floats or integers
(https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto).
"""

from __future__ import annotations

import functools
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetError
from vla_rl.data.importing import Gripper, demonstration, our_gripper, write_episodes
from vla_rl.data.lerobot_io import RecordedEpisode, decode_image, encode_png

INFO, FEATURES = "dataset_info.json", "features.json"
INSTRUCTIONS = ("language_instruction", "observation/natural_language_instruction", "observation/instruction")
LIBERO_CAMERAS, LIBERO_HZ = {"agentview": "image", "wrist": "wrist_image"}, 20
LastStep = Literal["action", "observation"]
Success = Literal["reward", "all"]


@dataclass(frozen=True)
class RldsOptions:
    """What an RLDS dataset does not say, or says in its own names; features are named as after `steps/`.

    Attributes:
        fps: control steps per second; 0: 20 for LIBERO's, which are known, else an error.
        cameras: our name -> feature below `observation`; empty: every picture there by its own name (LIBERO's two by
            ours).
        state: features that make the state, one after another; empty: observation/state where there is one.
        action: likewise; empty: action.
        language: the feature of the text; empty: the first of `INSTRUCTIONS` that is there.
        gripper: the last number of the action. as_is: left alone (LIBERO's is -1 open, 1 closed, as ours);
            one_opens: 1 open, 0 closed; one_closes: 0 open, 1 closed; both become -1 open, 1 closed.
        rotate: cameras whose pictures are upside down, by our name.
        last_step: what the last step holds. action: one to learn from (LIBERO's and most of Open X);
            observation: only what was seen at the end, as RLDS defines it.
        success: reward: an episode with a positive reward succeeded; all: every one did.
        split: which to read. episodes: at most so many; 0: all.
    """

    fps: int = 0
    cameras: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    action: tuple[str, ...] = ()
    language: str = ""
    gripper: Gripper = "as_is"
    rotate: tuple[str, ...] = ()
    last_step: LastStep = "action"
    success: Success = "reward"
    split: str = "train"
    episodes: int = 0


def import_rlds(
    folder: Path, dataset: Path, options: RldsOptions, report: Callable[[str], None] = print
) -> dict[str, int]:
    """Write a LeRobotDataset v3 with an episode for each record; it appears whole.

    Args:
        folder: with features.json, or one above it with a single version.
        dataset: folder to make; must not exist.
        report: told how it is read, and what deserves a look.

    Returns:
        {"episodes": ..., "frames": ...}.

    Raises:
        DatasetError: not such a dataset, incomplete or damaged; the message names the file, record and feature.
        ConfigError: an option names what is not there, or is needed.
    """
    source = RldsSource(folder, options)
    report(source.text())
    fps = options.fps or (LIBERO_HZ if source.is_libero else 0)
    if fps <= 0:
        raise ConfigError("import: RLDS does not say how fast a robot is controlled; give --fps (steps a second)")
    notes = {"source": "RLDS", "name": source.name, "split": options.split, **asdict(options)}
    has_gripper = source.is_libero or options.gripper != "as_is"
    asked = "--gripper" if options.gripper == "as_is" else ""
    return write_episodes(
        source.episodes(),
        dataset,
        fps=fps,
        robot=source.name,
        notes=notes,
        has_gripper=has_gripper,
        gripper_option=asked,
        report=report,
    )


class RldsSource:
    """One version of an RLDS dataset.

    Attributes:
        name: the dataset's. is_libero: whether it is one of OpenVLA's LIBERO datasets, by its name.
        cameras: our name -> the picture's feature. state, action: features. instruction: the text's.
    """

    def __init__(self, folder: Path, options: RldsOptions) -> None:
        self.folder, self.options = _version(folder), options
        info, tree = self._json(INFO), self._json(FEATURES)
        self.name = str(info.get("name", self.folder.parent.name))
        self.is_libero = self.name.startswith("libero")
        self.features = dict(_flat(tree))
        steps = {name: f for name, f in self.features.items() if name.startswith("steps/")}
        if not steps:
            raise DatasetError(
                f"{self.folder / FEATURES}: has no steps, so it is not RLDS; found {sorted(self.features)}"
            )
        self.files = self._files(info)
        pictures = [name for name, feature in steps.items() if _is_picture(feature)]
        self.cameras = self._cameras(pictures)
        has_state = bool(options.state) or "steps/observation/state" in steps
        self.state = self._named(options.state or ("observation/state",), "--state") if has_state else ()
        self.action = self._named(options.action or ("action",), "--action")
        texts = [options.language] if options.language else [n for n in INSTRUCTIONS if f"steps/{n}" in steps]
        if not texts:
            raise ConfigError(f"import: which feature is the instruction? Give --language, one of {_below(steps)}")
        (self.instruction,) = self._named(tuple(texts[:1]), "--language")
        if unknown := set(options.rotate) - set(self.cameras):
            raise ConfigError(f"import: --rotate {sorted(unknown)[0]}: the cameras are {', '.join(self.cameras)}")

    def text(self) -> str:
        """How the dataset is read, a line."""
        cameras = ", ".join(f"{name} = {feature.removeprefix('steps/')}" for name, feature in self.cameras.items())
        state = " + ".join(n.removeprefix("steps/") for n in self.state) or "none"
        action = " + ".join(n.removeprefix("steps/") for n in self.action)
        return f"{self.name}: cameras {cameras}; state {state}; action {action}"

    def episodes(self) -> Iterator[tuple[str, RecordedEpisode]]:
        """Each episode, with its file and record for errors."""
        number, of_task = 0, Counter()
        for file, expected in self.files:
            if not file.is_file():
                lacking = [path.name for path, _ in self.files if not path.is_file()]
                raise DatasetError(
                    f"{file}: missing ({len(lacking)} of {len(self.files)} files are); download them all"
                )
            count = 0
            for count, data in enumerate(records(file), 1):
                origin = f"{file}: record {count - 1}"
                try:
                    episode = self._episode(origin, parse_example(data), of_task)
                except ValueError as error:
                    raise error if isinstance(error, DatasetError) else DatasetError(f"{origin}: {error}") from error
                yield origin, episode
                number += 1
                if number == self.options.episodes:
                    return
            if expected is not None and count != expected:
                raise DatasetError(f"{file}: {count} records, {INFO} says {expected}. Download the file again.")

    def _episode(self, origin: str, values: dict[str, Any], of_task: Counter[str]) -> RecordedEpisode:
        encoded = {camera: self._bytes(origin, values, name) for camera, name in self.cameras.items()}
        texts = self._bytes(origin, values, self.instruction)
        length = len(texts)
        state = self._numbers(origin, values, self.state, length)
        actions = self._numbers(origin, values, self.action, length)
        for camera, frames in encoded.items():
            if len(frames) != length:
                raise DatasetError(f"{origin}: {self.cameras[camera]} has {len(frames)} pictures of {length} steps")
            if camera in self.options.rotate:
                encoded[camera] = [encode_png(decode_image(frame)[::-1, ::-1]) for frame in frames]
        reward = values.get("steps/reward")
        success = self.options.success == "all" or reward is None or bool(np.max(reward) > 0)
        try:
            instruction = texts[0].decode("utf-8")
        except UnicodeDecodeError as error:
            raise DatasetError(f"{origin}: {self.instruction} is no UTF-8 text") from error
        final: dict[str, Any] = {}
        if self.options.last_step == "observation":
            if length < 2:
                raise DatasetError(f"{origin}: has {length} step, and of the last only the observation counts")
            final = {"final_png": {camera: frames[-1] for camera, frames in encoded.items()}}
            final["final_state"] = state[-1] if self.state else None
            encoded = {camera: frames[:-1] for camera, frames in encoded.items()}
            state, actions = state[:-1], actions[:-1]
        index = of_task[instruction]
        of_task[instruction] += 1
        actions = our_gripper(origin, actions, self.options.gripper)
        return demonstration(instruction, index, encoded, state, actions, success=success, **final)

    def _bytes(self, origin: str, values: dict[str, Any], name: str) -> list[bytes]:
        found = values.get(name)
        if not isinstance(found, list) or not found:
            raise DatasetError(f"{origin}: {name} is missing or empty; found {', '.join(sorted(values))}")
        return found

    def _numbers(self, origin: str, values: dict[str, Any], names: tuple[str, ...], length: int) -> np.ndarray:
        """float32 (length, D), the named features beside one another."""
        columns = [np.zeros((length, 0), np.float32)]
        for name in names:
            size = int(np.prod(_dimensions(self.features[name]), dtype=int))
            found = values.get(name)
            if not isinstance(found, np.ndarray) or found.size != length * size:
                got = "nothing" if found is None else f"{len(found)} numbers"
                raise DatasetError(f"{origin}: {name} has {got}, expected {length} steps of {size}")
            if len(bad := np.flatnonzero(~np.isfinite(found))):
                raise DatasetError(f"{origin}: {name} is NaN or infinite at step {bad[0] // size}")
            columns.append(found.reshape(length, size).astype(np.float32))
        return np.concatenate(columns, axis=1)

    def _cameras(self, pictures: list[str]) -> dict[str, str]:
        below = {name.removeprefix("steps/observation/"): name for name in pictures}
        if self.options.cameras:
            wanted = dict(self.options.cameras)
        elif self.is_libero and set(LIBERO_CAMERAS.values()) <= set(below):
            wanted = LIBERO_CAMERAS
        else:
            wanted = {name.replace("/", "_"): name for name in below}
        if not wanted:
            raise DatasetError(f"{self.folder / FEATURES}: no color pictures below steps/observation")
        if unknown := [name for name in wanted.values() if name not in below]:
            raise ConfigError(f"import: --camera {unknown[0]}: the pictures are {', '.join(below)}")
        return {camera: below[name] for camera, name in wanted.items()}

    def _named(self, names: tuple[str, ...], option: str) -> tuple[str, ...]:
        for name in names:
            feature = self.features.get(f"steps/{name}")
            if feature is None:
                there = _below(name for name in self.features if name.startswith("steps/"))
                raise ConfigError(f"import: {option} {name}: no such feature; there are {there}")
            if feature.get("tensor", {}).get("encoding", "none") not in ("none", "") or -1 in _dimensions(feature):
                raise ConfigError(f"import: {option} {name}: is compressed, or of no fixed size; not supported")
        return tuple(f"steps/{name}" for name in names)

    def _files(self, info: Mapping[str, Any]) -> list[tuple[Path, int | None]]:
        """The split's files in order, each with how many records it has."""
        splits = {str(split.get("name")): split for split in info.get("splits", ())}
        if self.options.split not in splits:
            raise ConfigError(f"import: --split {self.options.split}: there are {', '.join(splits) or 'none'}")
        if info.get("fileFormat", "tfrecord") != "tfrecord":
            raise DatasetError(f"{self.folder / INFO}: its files are {info['fileFormat']}, only tfrecord is read")
        lengths = [int(length) for length in splits[self.options.split].get("shardLengths", ())]
        stem, total = f"{self.name}-{self.options.split}.tfrecord", len(lengths)
        if not lengths:
            raise DatasetError(f"{self.folder / INFO}: names no files of the split {self.options.split}")
        return [(self.folder / f"{stem}-{i:05d}-of-{total:05d}", length) for i, length in enumerate(lengths)]

    def _json(self, name: str) -> dict[str, Any]:
        try:
            values = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DatasetError(f"{self.folder / name}: missing or damaged ({error}). Download it again.") from error
        if not isinstance(values, dict):
            raise DatasetError(f"{self.folder / name}: holds no mapping. Download it again.")
        return values


def versions(folder: Path) -> list[Path]:
    """The folders with features.json: the given one, or those below."""
    if (folder / FEATURES).is_file():
        return [folder]
    return sorted(path.parent for path in (*folder.glob(f"*/{FEATURES}"), *folder.glob(f"*/*/{FEATURES}")))


def _version(folder: Path) -> Path:
    """The folder with features.json: the given one, or the only one below."""
    found = versions(folder)
    if len(found) == 1:
        return found[0]
    if not found:
        raise DatasetError(f"{folder}: holds no {FEATURES}, so it is no dataset of TensorFlow Datasets")
    raise DatasetError(f"{folder}: holds {len(found)}: {', '.join(map(str, found))}; name one of them")


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A feature's name, as in the records, with what features.json says of it."""
    if "featuresDict" in node:
        for name, inner in node["featuresDict"].get("features", {}).items():
            yield from _flat(inner, f"{prefix}/{name}" if prefix else name)
    elif "sequence" in node:
        yield from _flat(node["sequence"].get("feature", {}), prefix)
    else:
        yield prefix, node


def _dimensions(feature: Mapping[str, Any]) -> list[int]:
    shape = (feature.get("tensor") or feature.get("image") or {}).get("shape") or {}
    return [int(size) for size in shape.get("dimensions", ())]


def _is_picture(feature: Mapping[str, Any]) -> bool:
    image = feature.get("image")
    return image is not None and image.get("dtype", "uint8") == "uint8" and _dimensions(feature)[-1:] == [3]


def _below(names: Any) -> str:
    return ", ".join(name.removeprefix("steps/") for name in names)


_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed.
_MASK_OFFSET = 0xA282EAD8
_LANES = 1024  # Parts of a long record whose checksums are computed together.


def records(file: Path) -> Iterator[bytes]:
    """The records of a file, in order, their checksums compared.

    Raises:
        DatasetError: cut off, or damaged; the message has the record's number, from 0.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        number = 0
        while head := stream.read(12):
            length, check = struct.unpack("<QI", head) if len(head) == 12 else (size, 0)
            if stream.tell() + length + 4 > size or check != _masked(head[:8]):
                raise _damaged(file, number, "is cut off or damaged")
            data, (check,) = stream.read(length), struct.unpack("<I", stream.read(4))
            if check != _masked(data):
                raise _damaged(file, number, "is damaged: its checksum is another")
            yield data
            number += 1


def parse_example(data: bytes) -> dict[str, list[bytes] | np.ndarray]:
    """An Example's features by name: a list of bytes, or a flat array, float32 or int64.

    Raises:
        ValueError: the bytes are no Example.
    """
    try:
        features = _example_class().FromString(data).features.feature
    except DecodeError as error:
        raise ValueError(f"no tf.train.Example ({error})") from None
    found: dict[str, list[bytes] | np.ndarray] = {}
    for name, feature in features.items():
        kind = feature.WhichOneof("kind")
        if kind == "bytes_list":
            found[name] = list(feature.bytes_list.value)
        elif kind is not None:
            found[name] = np.array(getattr(feature, kind).value, np.float32 if kind == "float_list" else np.int64)
    return found


def _damaged(file: Path, number: int, what: str) -> DatasetError:
    return DatasetError(f"{file}: record {number} {what}. Download the file again.")


@functools.cache
def _example_class() -> Any:
    """The message class of tf.train.Example, described here since only TensorFlow ships its description."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="vla_rl/example.proto", package="vla_rl.example", syntax="proto3")

    def add(
        message: Any, name: str, number: int, kind: int, type_name: str | None = None, repeated: bool = False
    ) -> Any:
        label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        return message.field.add(name=name, number=number, type=kind, type_name=type_name, label=label)

    lists = {"BytesList": kinds.TYPE_BYTES, "FloatList": kinds.TYPE_FLOAT, "Int64List": kinds.TYPE_INT64}
    for name, kind in lists.items():
        add(file.message_type.add(name=name), "value", 1, kind, repeated=True)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (wire, name) in enumerate(zip(("bytes_list", "float_list", "int64_list"), lists, strict=True), 1):
        add(feature, wire, number, kinds.TYPE_MESSAGE, f".vla_rl.example.{name}").oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    add(entry, "key", 1, kinds.TYPE_STRING)
    add(entry, "value", 2, kinds.TYPE_MESSAGE, ".vla_rl.example.Feature")
    add(features, "feature", 1, kinds.TYPE_MESSAGE, ".vla_rl.example.Features.FeatureEntry", repeated=True)
    add(file.message_type.add(name="Example"), "features", 1, kinds.TYPE_MESSAGE, ".vla_rl.example.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("vla_rl.example.Example"))


# --- checksums ---------------------------------------------------------------------------------


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_OFFSET) & 0xFFFFFFFF


@functools.cache
def _table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


def crc32c(data: bytes) -> int:
    """The CRC-32C of bytes (RFC 3720, appendix B.4).

    Long data is cut into lanes of equal length. A checksum is linear: that of a lane, continued over the lanes after
    it, is a sum of what the 32 single bits become over so many zeros, which are computed beside the lanes.
    """
    values, crc, table = np.frombuffer(data, np.uint8), 0xFFFFFFFF, _table()
    step = len(values) // _LANES
    if step:
        lanes = np.zeros((_LANES + 32, step), np.uint8)
        lanes[:_LANES] = values[: _LANES * step].reshape(_LANES, step)
        state = np.zeros(_LANES + 32, np.uint32)
        state[_LANES:] = np.uint32(1) << np.arange(32, dtype=np.uint32)
        state[0] = crc
        for column in np.ascontiguousarray(lanes.T):
            state = table[(state ^ column) & 0xFF] ^ (state >> 8)
        bits = [int(value) for value in state[_LANES:]]
        crc = int(state[0])
        for lane in state[1:_LANES]:
            crc = functools.reduce(int.__xor__, (bits[i] for i in range(32) if crc >> i & 1), int(lane))
    plain = table.tolist()
    for value in data[_LANES * step :]:
        crc = plain[(crc ^ value) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF
