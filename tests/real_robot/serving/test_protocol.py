"""The wire format: openpi's layout, and nothing unbounded or executable in it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_robot.client_package.vla_rl_client.wire import DEFAULT_LIMITS, ProtocolError, WireLimits, pack, unpack
from real_robot.serving.network import read_token

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<i4", "<i8", "<u8", "<f2", "<f4", "<f8", "?", ">f4", ">i8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_arrays_come_back_the_same(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.array(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, dtype)
    back = unpack(pack({"a": array}))["a"]
    np.testing.assert_array_equal(back, array)
    assert back.shape == shape and back.dtype == array.dtype.newbyteorder("=")


def test_plain_values_come_back_the_same() -> None:
    message = {"text": "pick up", "n": -3, "x": 0.5, "yes": True, "none": None, "list": [1, "a"], "map": {"b": 2}}
    assert unpack(pack(message)) == message
    number = unpack(pack({"x": np.float32(0.1)}))["x"]
    assert number == np.float32(0.1) and number.dtype == np.float32


def test_the_bytes_are_those_of_openpi() -> None:
    """Worked out from the description of its format, with msgpack alone."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    theirs = {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": "<f4", b"shape": [2, 3]}
    assert pack({"actions": array}) == msgpack.packb({"actions": theirs})
    np.testing.assert_array_equal(unpack(msgpack.packb({"actions": theirs}))["actions"], array)


@pytest.mark.parametrize(
    "value",
    [
        np.array([1j]),
        np.array(["a"]),
        np.array([None]),
        np.zeros(1, [("a", "f4")]),
        object(),
        {1, 2},
        np.datetime64("now"),
    ],
    ids=["complex", "text", "object", "void", "any object", "set", "time"],
)
def test_what_may_not_travel_is_not_packed(value: Any) -> None:
    with pytest.raises(ProtocolError, match="cannot be packed"):
        pack({"a": value})


def array_of(**changes: Any) -> bytes:
    fields: dict[Any, Any] = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    fields |= {key.encode(): value for key, value in changes.items()}
    packed = msgpack.packb({"a": fields})
    assert packed is not None
    return packed


def test_a_message_has_as_many_parts_as_its_lists_and_maps_and_what_they_hold() -> None:
    data = msgpack.packb({"a": [1, 2, 3]})  # A map with one, a list with three.
    assert unpack(data, WireLimits(max_total_items=6)) == {"a": [1, 2, 3]}
    with pytest.raises(ProtocolError, match="more than 5 parts"):
        unpack(data, WireLimits(max_total_items=5))


SMALL = WireLimits(max_message_bytes=4000, max_text=50, max_items=20, max_total_items=60, max_dimension=100)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a valid msgpack message"),
        (b"\xc1", "not a valid msgpack message"),
        (b"\x81\xa1", "not a valid msgpack message"),
        (b"\x80\x80", "extra data"),
        (msgpack.packb([1, 2]), "a message is a map"),
        (msgpack.packb({"a": msgpack.ExtType(5, b"12")}), "not a valid msgpack message|extension"),
        (msgpack.packb({"a": msgpack.Timestamp(1, 2)}), "not a valid msgpack message|extension"),
        (b"\x81\x90\x01", "list is not allowed"),
        (b"\x81\xa1a" + b"\x91" * 2000 + b"\x01", "not a valid msgpack message"),
        (msgpack.packb({"a": [0] * 21}), "max_array_len"),
        (msgpack.packb({"a": [[0] * 20] * 5}), "more than 60 parts"),
        (msgpack.packb({str(i): i for i in range(21)}), "max_map_len"),
        (msgpack.packb({"a": "x" * 300}), "max_str_len"),
        (b"\x81\xa1a\xa2\xff\xff", "utf-8"),
        (msgpack.packb({"a": b"0" * 5000}), "allowed: 4000"),
        (array_of(dtype="|O"), "array dtype"),
        (array_of(dtype="<c8"), "array dtype"),
        (array_of(dtype="|V4"), "array dtype"),
        (array_of(dtype="<U2"), "array dtype"),
        (array_of(dtype="<M8[s]"), "array dtype"),
        (array_of(dtype=4), "array dtype"),
        (array_of(dtype="f4,f4"), "array dtype"),
        (array_of(shape=[3]), "needs 12 bytes, got 8"),
        (array_of(shape=[-1]), "sizes are whole numbers"),
        (array_of(shape=[101]), "0 to 100"),
        (array_of(shape=[True]), "sizes are whole numbers"),
        (array_of(shape=[2.0]), "sizes are whole numbers"),
        (array_of(shape=[1] * 6), "at most 5"),
        (array_of(shape=2), "expected a list"),
        (array_of(data="text"), "got str"),
        (array_of(__ndarray__=1), "expected the keys"),
        (array_of(more=1), "expected the keys"),
        (msgpack.packb({"a": {b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"}}), "expected a number"),
        (msgpack.packb({"a": {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}}), "does not fit"),
        (msgpack.packb({"a": {b"__npgeneric__": True, b"data": 1, b"dtype": "|O"}}), "array dtype"),
    ],
)
def test_what_breaks_the_bounds_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        unpack(data, SMALL)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_give_a_map_or_a_protocol_error(data: bytes) -> None:
    try:
        assert isinstance(unpack(data), dict)
    except ProtocolError as error:
        assert len(str(error)) < 400


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6), st.integers(0, 10_000))
def test_changed_bytes_of_a_good_message_too(changes: list[tuple[int, int]], end: int) -> None:
    data = bytearray(
        pack({"images": {"front": np.zeros((4, 4, 3), np.uint8)}, "state": np.zeros(8), "instruction": "go"})
    )
    for place, value in changes:
        data[place % len(data)] = value
    with contextlib.suppress(ProtocolError):
        assert isinstance(unpack(bytes(data[: end % (2 * len(data))]), DEFAULT_LIMITS), dict)


def test_a_token_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ValueError, match="cannot be read"):
        read_token(path)
    path.write_text("0123456789abcdef0123\n")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == "0123456789abcdef0123"
    for text in ("short", "with a space in it", ""):
        path.write_text(text)
        with pytest.raises(ValueError, match="16 characters"):
            read_token(path)


def test_the_robots_side_needs_no_torch() -> None:
    """One after the other in one process, so that the first that imports it is named."""
    code = """
import importlib, json, sys
heavy = {"torch", "transformers", "lerobot", "mujoco", "matplotlib", "pandas", "cv2", "scipy", "cryptography"}
light = ["types", "serving.client", "control.supervisor", "control.chunk_executor", "failure.watch"]
found = {name: (importlib.import_module(f"real_robot.{name}"), sorted(heavy & set(sys.modules)))[1] for name in light}
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    found = json.loads(done.stdout)
    assert len(found) == 5 and not any(found.values()), found
