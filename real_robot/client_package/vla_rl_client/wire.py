"""The wire format of a policy server: msgpack messages with arrays in them, everything bounded.

The layout is openpi's, so that its clients and ours talk to the same server. An array is a map with the bytes
keys `__ndarray__`, `data`, `dtype`, `shape`; a numpy scalar one with `__npgeneric__`, `data`, `dtype`. Only plain
numbers and booleans travel: no objects, no strings in arrays, no complex numbers, no msgpack extensions.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

PROTOCOL = 1  # its version: servers tell it, where they have one, and clients refuse another
MiB = 1024 * 1024

_DTYPE = re.compile(r"^(?:[<>=|]?(?:[iu][1248]|f[248])|[|]?b1|\?)$")
_ARRAY_KEYS = {b"__ndarray__", b"data", b"dtype", b"shape"}
_SCALAR_KEYS = {b"__npgeneric__", b"data", b"dtype"}


class ProtocolError(ValueError):
    """A message that breaks the wire format or its bounds; the text says which part and what is allowed."""


@dataclass(frozen=True)
class WireLimits:
    """What a message may hold. A message beyond is refused before memory is spent on it.

    Attributes:
        max_message_bytes: a whole message; WebSocket frames beyond are refused unread.
        max_text: characters of one string.
        max_dimensions, max_dimension: number of an array's dimensions, and the size of one.
        max_items: entries of one list or map.
        max_total_items: entries of all lists and maps of a message together.
    """

    max_message_bytes: int = 16 * MiB
    max_text: int = 4096
    max_dimensions: int = 5
    max_dimension: int = 65536
    max_items: int = 1024
    max_total_items: int = 65536


DEFAULT_LIMITS = WireLimits()


def pack(message: dict[Any, Any]) -> bytes:
    """Return a message as bytes.

    Raises:
        ProtocolError: it holds something that may not travel (objects, complex numbers, strings in arrays).
    """
    try:
        packed = msgpack.packb(message, default=_pack_array)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"message cannot be packed: {error}") from error
    assert packed is not None
    return packed


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        _check_dtype(value.dtype.str)
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        _check_dtype(value.dtype.str)
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} is neither a number, a string, a list, a map nor a numeric array")


def unpack(data: bytes | bytearray | memoryview, limits: WireLimits = DEFAULT_LIMITS) -> dict[Any, Any]:
    """Return the message in `data`. Its arrays are read-only views of `data` where the byte order allows.

    Raises:
        ProtocolError: not msgpack, no map at the top, or beyond `limits`.
    """
    size = memoryview(data).nbytes
    if size > limits.max_message_bytes:
        raise ProtocolError(f"message of {size} bytes, allowed: {limits.max_message_bytes}")
    counter = _Counter(limits)
    try:
        message = msgpack.unpackb(
            data,
            object_hook=counter.on_map,
            list_hook=counter.on_list,
            ext_hook=_refuse_extension,
            max_str_len=limits.max_text * 4,
            max_bin_len=limits.max_message_bytes,
            max_array_len=limits.max_items,
            max_map_len=limits.max_items,
            max_ext_len=0,
        )
    except ProtocolError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a valid msgpack message: {short(error) or type(error).__name__}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a message is a map of names to values, got {type(message).__name__}")
    return message


class _Counter:
    """Builds arrays while msgpack unpacks, and stops it when there are too many parts."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._items = 0

    def _count(self, items: int) -> None:
        self._items += items + 1
        if self._items > self._limits.max_total_items:
            raise ProtocolError(f"message has more than {self._limits.max_total_items} parts")

    def on_list(self, value: list[Any]) -> list[Any]:
        self._count(len(value))
        return value

    def on_map(self, value: dict[Any, Any]) -> Any:
        self._count(len(value))
        if b"__ndarray__" in value:
            return _read_array(value, self._limits)
        if b"__npgeneric__" in value:
            return _read_scalar(value)
        return value


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ProtocolError(f"msgpack extension type {code} is not allowed")


def _check_dtype(dtype: Any) -> np.dtype[Any]:
    if not isinstance(dtype, str) or not _DTYPE.match(dtype):
        raise ProtocolError(
            f"array dtype {short(dtype)}: allowed are booleans, integers of 1, 2, 4, 8 bytes and floats of 2, 4, 8"
        )
    return np.dtype(dtype)


def _read_array(value: dict[Any, Any], limits: WireLimits) -> np.ndarray:
    if set(value) != _ARRAY_KEYS or value[b"__ndarray__"] is not True:
        raise ProtocolError(f"array: expected the keys {sorted(_ARRAY_KEYS)}, got {short(list(value))}")
    dtype = _check_dtype(value[b"dtype"])
    shape, data = value[b"shape"], value[b"data"]
    if not isinstance(shape, list) or len(shape) > limits.max_dimensions:
        raise ProtocolError(f"array shape {short(shape)}: expected a list of at most {limits.max_dimensions} sizes")
    if not all(type(n) is int and 0 <= n <= limits.max_dimension for n in shape):
        raise ProtocolError(f"array shape {short(shape)}: sizes are whole numbers of 0 to {limits.max_dimension}")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
        size = len(data) if isinstance(data, bytes) else type(data).__name__
        raise ProtocolError(
            f"array of shape {shape} and dtype {dtype.str} needs {math.prod(shape) * dtype.itemsize} bytes, got {size}"
        )
    array = np.frombuffer(data, dtype).reshape(shape)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _read_scalar(value: dict[Any, Any]) -> Any:
    if set(value) != _SCALAR_KEYS or value[b"__npgeneric__"] is not True:
        raise ProtocolError(f"number: expected the keys {sorted(_SCALAR_KEYS)}, got {short(list(value))}")
    dtype = _check_dtype(value[b"dtype"]).newbyteorder("=")
    data = value[b"data"]
    if not isinstance(data, (bool, int, float)):
        raise ProtocolError(f"number: expected a number, got {type(data).__name__}")
    try:
        return dtype.type(data)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"number: {short(data)} does not fit {dtype.str}") from error


def short(value: Any, length: int = 80) -> str:
    """Return `repr` (or an error's text) cut to a length that is safe to send back and to log."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = str(value) if isinstance(value, BaseException) else repr(value)
    return text if len(text) <= length else f"{text[:length]}..."
