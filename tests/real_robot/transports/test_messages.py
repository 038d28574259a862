"""Messages and pictures: what goes in comes out, and nothing oversized, damaged or mislabeled gets in."""

from __future__ import annotations

import struct
import threading
import warnings
import zlib

import numpy as np
import pytest

from real_robot.bridge.codec import decode_image, encode_image
from real_robot.transports.messages import (
    MAX_IMAGE_BYTES,
    MAX_ITEMS,
    MESSAGES,
    Bool,
    CompressedImage,
    Float64MultiArray,
    Image,
    JointGroupCommand,
    JointJog,
    JointSingleCommand,
    JointState,
    JointTrajectory,
    Message,
    MessageError,
    PoseStamped,
    String,
    TwistStamped,
    WrenchStamped,
)

NONE = np.zeros(0)
HEADER = {"stamp": 1_700_000_000_123_456_789, "frame_id": "base"}
EXAMPLES: list[Message] = [
    Image(**HEADER, height=2, width=3, encoding="rgb8", step=9, data=bytes(range(18))),
    CompressedImage(**HEADER, format="jpeg", data=b"\xff\xd8\xff\xd9"),
    JointState(**HEADER, name=("a", "b"), position=np.array([1.0, -2.0]), velocity=NONE, effort=np.ones(2)),
    PoseStamped(**HEADER, position=np.array([1.0, 2.0, 3.0]), orientation=np.array([0.0, 0.6, 0.0, 0.8])),
    TwistStamped(**HEADER, linear=np.array([0.1, 0.2, 0.3]), angular=np.array([-1.0, 0.0, 1.0])),
    WrenchStamped(**HEADER, force=np.array([1.0, -20.0, 3.0]), torque=np.array([0.5, 0.0, -2.0])),
    JointTrajectory(**HEADER, joint_names=("a", "b"), positions=np.arange(4.0).reshape(2, 2), times=(5, 1_500_000_000)),
    JointJog(**HEADER, joint_names=("a", "b"), velocities=np.array([0.5, -1.0]), displacements=NONE, duration=0.1),
    JointGroupCommand(name="arm", cmd=np.array([0.5, -1.25])),
    JointSingleCommand(name="gripper", cmd=0.5),
    Float64MultiArray(data=np.array([1.5, 2.5])),
    Bool(data=True),
    String(data="put the red block on the plate"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_its_tree(message: Message) -> None:
    tree = message.tree()
    again = type(message).from_tree(tree)
    np.testing.assert_equal(again.tree(), tree)
    assert again.stamp == (HEADER["stamp"] if message.HAS_HEADER else 0)


def test_every_type_has_an_example() -> None:
    assert {type(m) for m in EXAMPLES} == set(MESSAGES.values())


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (JointState, {"position": [1.0]}, "1 values of position for 2 names"),
        (JointState, {"name": ["x"] * (MAX_ITEMS + 1)}, f"at most {MAX_ITEMS}"),
        (JointState, {"name": ["a" * 1000, "b"]}, "at most 256 characters"),
        (JointState, {"position": "high"}, "not readable"),
        (TwistStamped, {"twist": {"linear": {"x": 1.0}}}, "not readable: KeyError"),
        (TwistStamped, {"header": {"stamp": None, "frame_id": ""}}, "not readable"),
        (CompressedImage, {"data": bytes(MAX_IMAGE_BYTES + 1)}, f"at most {MAX_IMAGE_BYTES}"),
        (JointTrajectory, {"joint_names": ["a"]}, "not one for each of 1 joints"),
        (JointJog, {"velocities": [1.0]}, "1 values of velocities for 2 names"),
        (Float64MultiArray, {"data": [[1.0], [2.0]]}, "list of numbers"),
        (String, {"data": 3}, "expected text"),
    ],
)
def test_a_wrong_field_is_refused(kind: type[Message], change: dict, reason: str) -> None:
    tree = next(m for m in EXAMPLES if type(m) is kind).tree()
    with pytest.raises(MessageError, match=reason):
        kind.from_tree(tree | change)


PICTURE = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)


def test_a_png_comes_back_exactly_and_a_jpeg_nearly() -> None:
    smooth = np.broadcast_to(np.linspace(0, 255, 64).astype(np.uint8)[None, :, None], (48, 64, 3)).copy()
    smooth[:, :, 2] = 30  # red and blue differ, so that swapped channels show
    np.testing.assert_array_equal(decode_image(CompressedImage(format="", data=encode_image(PICTURE, "png"))), PICTURE)
    back = decode_image(CompressedImage(format="", data=encode_image(smooth, "jpeg")))
    assert np.abs(back.astype(int) - smooth).mean() < 3


@pytest.mark.parametrize("encoding", ["rgb8", "bgr8", "rgba8", "bgra8", "mono8"])
def test_raw_encodings(encoding: str) -> None:
    channels = {"rgba8": 4, "bgra8": 4, "mono8": 1}.get(encoding, 3)
    rows = np.zeros((48, 64 * channels + 5), np.uint8)  # rows are padded
    pixels = PICTURE[..., ::-1] if encoding.startswith("bgr") else PICTURE
    pixels = np.concatenate([pixels, pixels[..., :1]], 2)[..., :channels] if channels != 1 else PICTURE[..., :1]
    rows[:, : 64 * channels] = pixels.reshape(48, -1)
    message = Image(height=48, width=64, encoding=encoding, step=rows.shape[1], data=rows.tobytes())
    expected = np.repeat(PICTURE[..., :1], 3, 2) if channels == 1 else PICTURE
    np.testing.assert_array_equal(decode_image(message), expected)


def test_resizing_gives_the_size_asked_for() -> None:
    message = CompressedImage(format="", data=encode_image(PICTURE, "png"))
    assert decode_image(message, (24, 32)).shape == (24, 32, 3)
    assert decode_image(message, (24, 32), (48, 64)).shape == (24, 32, 3)
    with pytest.raises(MessageError, match="image of 48 x 64, the contract says 480 x 640"):
        decode_image(message, (24, 32), (480, 640))


def huge_png() -> bytes:
    """A valid file that says it is 40,000 pixels a side."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


JPEG, PNG = encode_image(PICTURE, "jpeg"), encode_image(PICTURE, "png")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (JPEG[: len(JPEG) // 2], "cut off"),
        (JPEG[:100] + b"\xff\xd9", "not readable"),
        (JPEG[:2] + bytes(200) + JPEG[-2:], "not readable"),
        (PNG[: len(PNG) // 2], "not readable"),
        (PNG[:200] + bytes([PNG[200] ^ 255]) + PNG[201:], "not readable"),
        (b"", "not readable"),
        (b"GIF89a" + bytes(50), "not readable"),
        (huge_png(), "each side is 1 to 8192|not readable"),
    ],
    ids=["jpeg cut", "jpeg cut with end", "jpeg zeros", "png cut", "png bit", "empty", "gif", "huge"],
)
def test_damaged_files_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        decode_image(CompressedImage(format="jpeg", data=data))


def test_decoding_in_one_thread_makes_no_errors_of_warnings_in_another() -> None:
    threads = [
        threading.Thread(target=lambda: [decode_image(CompressedImage(format="png", data=PNG)) for _ in range(200)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert warnings.filters[0][0] != "error"
    assert warnings.filters[0][0] != "error"


@pytest.mark.parametrize(
    "change", [{"step": 5}, {"height": 3}, {"width": 0}, {"encoding": "16UC1"}, {"height": 10**6, "width": 10**6}]
)
def test_raw_images_that_do_not_fit_are_refused(change: dict) -> None:
    values = {"height": 2, "width": 3, "encoding": "rgb8", "step": 9, "data": bytes(18)} | change
    with pytest.raises(MessageError):
        decode_image(Image(**values))
