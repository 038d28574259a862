"""The keys and pictures that openpi's clients send for LIBERO, DROID and ALOHA, so that they need no change.

LIBERO: observation/image, observation/wrist_image, observation/state.
DROID:  observation/exterior_image_1_left, observation/wrist_image_left; the state in two parts,
        observation/joint_position and observation/gripper_position.
ALOHA:  images {cam_high, cam_low, cam_left_wrist, cam_right_wrist}, channels first; state.
All:    prompt, which ALOHA's simulator leaves to the server.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PREFIX = "observation/"
STATE_PARTS = (f"{PREFIX}joint_position", f"{PREFIX}gripper_position")
_MAIN = (f"{PREFIX}image", f"{PREFIX}exterior_image_1_left", "images/cam_high")
_WRIST = (f"{PREFIX}wrist_image", f"{PREFIX}wrist_image_left")
_NUMBERS = (np.ndarray, np.number, int, float)


def camera_keys(cameras: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Where a camera's picture may stand in a request: its own name first, then openpi's.

    The wrist's keys are the first camera's with "wrist" in its name (else the second's), the main ones the first
    other's; ALOHA's two wrists are told by "left" and "right". `images/NAME` is an entry of the map `images`.
    """
    wrist = next((c for c in cameras if "wrist" in c), cameras[1] if len(cameras) > 1 else None)
    main = next((c for c in cameras if c != wrist), None)
    keys = {}
    for camera in cameras:
        theirs = _MAIN if camera == main else _WRIST if camera == wrist else ()
        sides = [side for side in ("left", "right") if side in camera] if "wrist" in camera else []
        own = (f"images/{camera}", f"{PREFIX}{camera}")
        keys[camera] = tuple(dict.fromkeys((*own, *theirs, *(f"images/cam_{side}_wrist" for side in sides))))
    return keys


def find_image(message: dict[Any, Any], keys: tuple[str, ...]) -> Any:
    """The picture under the first of the keys that the request has; None where it has none."""
    images = message.get("images", {})
    for key in keys:
        name = key.removeprefix("images/")
        if name != key and name in images:
            return images[name]
        if key in message:
            return message[key]
    return None


def upright(image: np.ndarray) -> np.ndarray:
    """Channels last, and uint8: of (3, height, width), and of floats from 0 to 1, as LeRobot stores them.

    What is neither comes back as it is.
    """
    if image.ndim == 3 and image.shape[0] == 3 and image.shape[2] != 3:
        image = image.transpose(1, 2, 0)
    if image.dtype.kind == "f" and image.size and image.min() >= 0 and image.max() <= 1:  # False for NaN too
        image = np.rint(image.astype(np.float32) * 255).astype(np.uint8)
    return image


def state_parts(message: dict[Any, Any]) -> dict[str, Any]:
    """DROID's parts of the state that the request has, in order; a lone number is a list of one."""
    parts = {key: message[key] for key in STATE_PARTS if key in message}
    return {key: np.atleast_1d(part) if isinstance(part, _NUMBERS) else part for key, part in parts.items()}
