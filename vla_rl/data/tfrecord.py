"""TensorFlow's record files and the tf.train.Example in them, read without TensorFlow.

A record is its length (8 bytes), that length's checksum (4), its bytes, and their checksum (4), little endian;
checksums are CRC-32C, rotated and offset (https://www.tensorflow.org/tutorials/load_data/tfrecord). An Example is a
protobuf message: one map from a feature's name to a list of bytes, floats or integers
(https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from vla_rl.data.config import DatasetError

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
    for number, (field, name) in enumerate(zip(("bytes_list", "float_list", "int64_list"), lists, strict=True), 1):
        add(feature, field, number, kinds.TYPE_MESSAGE, f".vla_rl.example.{name}").oneof_index = 0
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
