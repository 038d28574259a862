"""What openpi's clients send, and a client like theirs, written from the description of the protocol.

msgpack and websockets, nothing of ours.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
from websockets.sync.client import ClientConnection, connect

ALOHA = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")


def picture(number: int, channels_first: bool = False) -> np.ndarray:
    """uint8 (224, 224, 3), or (3, 224, 224): another one for each number."""
    values = np.arange(3 * 224 * 224) * (number + 3) // 7 % 256
    return values.astype(np.uint8).reshape((3, 224, 224) if channels_first else (224, 224, 3))


def request(robot: str) -> dict[str, Any]:
    """What the client of aloha, droid or libero sends; keys in its order."""
    if robot == "aloha":
        images = {camera: picture(i, True) for i, camera in enumerate(ALOHA)}
        return {"state": np.ones((14,)), "images": images, "prompt": "do something"}
    if robot == "droid":
        return {
            "observation/exterior_image_1_left": picture(0),
            "observation/wrist_image_left": picture(1),
            "observation/joint_position": np.arange(7) / 8,
            "observation/gripper_position": np.array([0.5]),
            "prompt": "do something",
        }
    return {
        "observation/state": np.arange(8) / 8,
        "observation/image": picture(0),
        "observation/wrist_image": picture(1),
        "prompt": "do something",
    }


def pack(message: dict[str, Any]) -> bytes:
    """As their clients pack it."""
    data = msgpack.packb(message, default=_encode)
    assert data is not None
    return data


def _encode(array: np.ndarray) -> dict[bytes, Any]:
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


class OpenpiClient:
    """An openpi client, written from the description of its protocol: msgpack and websockets, nothing of ours."""

    def __init__(self, port: int, headers: dict[str, str] | None = None) -> None:
        address = f"ws://127.0.0.1:{port}"
        self.connection: ClientConnection = connect(
            address, compression=None, max_size=None, additional_headers=headers
        )
        self.metadata = self._receive()

    def infer(self, message: dict[str, Any]) -> dict[str, Any]:
        self.connection.send(pack(message))
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        data = self.connection.recv(timeout=20)
        if isinstance(data, str):
            raise RuntimeError(data)
        return msgpack.unpackb(data, object_hook=self._decode)

    @staticmethod
    def _decode(value: dict[Any, Any]) -> Any:
        if b"__ndarray__" not in value:
            return value
        return np.ndarray(value[b"shape"], np.dtype(value[b"dtype"]), value[b"data"])
