"""Inference requests, read from a message: our keys and openpi's, checked before inference.

Ours:    images {camera: uint8 (height, width, 3)}, state (S,), instruction;
         optional: embedding (true: `Policy.embed`'s features too); for real-time chunking prefix (P, A) and num_frozen,
         with them execution_horizon, max_guidance_weight, prefix_attention_schedule (LeRobot's names).
openpi:  LIBERO: observation/image, observation/wrist_image, observation/state.
         DROID: observation/exterior_image_1_left, observation/wrist_image_left; the state in two parts,
         observation/joint_position and observation/gripper_position.
         ALOHA: images {cam_high, cam_low, cam_left_wrist, cam_right_wrist}, channels first; state.
         All: prompt, which ALOHA's simulator leaves to the server.
Every answer says who made it (`PolicyIdentity`), so that a swap in mid-run is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from real_robot.client_package.vla_rl_client.wire import PROTOCOL, WireLimits, short
from vla_rl.types import PREFIX_SCHEDULES, ActionPrefix, Observation

POLICY_KEY = "policy"  # of an answer
_OURS = {"images", "state", "instruction"}
GUIDANCE = ("execution_horizon", "max_guidance_weight", "prefix_attention_schedule")
_OPTIONS = {"embedding", "prefix", "num_frozen", *GUIDANCE}
MAX_IMAGE_SIDE = 2048
MAX_GUIDANCE = 1000.0
MAX_HORIZON = 10_000  # More than the prefix has means all of it.
PREFIX = "observation/"
STATE_PARTS = (f"{PREFIX}joint_position", f"{PREFIX}gripper_position")
_MAIN = (f"{PREFIX}image", f"{PREFIX}exterior_image_1_left", "images/cam_high")
_WRIST = (f"{PREFIX}wrist_image", f"{PREFIX}wrist_image_left")
_NUMBERS = (np.ndarray, np.number, int, float)


@dataclass(frozen=True)
class PolicyIdentity:
    """A policy as its server names it. All fields are "" where the server does not say, as openpi's own.

    Attributes:
        name: the checkpoint's folder, or 'pretrained:NAME'. version: what recordings say of who acted.
        hash: SHA-256 of the checkpoint.
    """

    name: str = ""
    version: str = ""
    hash: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the server said anything."""
        return bool(self.name or self.version or self.hash)

    def __str__(self) -> str:
        if not self.is_known:
            return "an unknown policy (its server does not say which)"
        return self.version or f"{self.name} {self.hash[:12]}".strip()

    def to_wire(self) -> dict[str, str]:
        """The map that travels in an answer."""
        return asdict(self)


UNKNOWN = PolicyIdentity()


def read_identity(reply: Mapping[Any, Any], metadata: Mapping[Any, Any]) -> PolicyIdentity:
    """Who made an answer: what it says itself, else what the connection's metadata said, else `UNKNOWN`."""
    told = reply.get(POLICY_KEY)
    if not isinstance(told, Mapping):
        told = {
            "name": metadata.get("checkpoint"),
            "version": metadata.get("policy_version"),
            "hash": metadata.get("policy_hash"),
        }
    texts = {name: told.get(name) for name in ("name", "version", "hash")}
    return PolicyIdentity(**{name: text for name, text in texts.items() if isinstance(text, str)})


class RequestError(ValueError):
    """A well-formed message that this policy cannot answer; the text names the key, what came and what is allowed."""


@dataclass(frozen=True)
class PolicyFacts:
    """What a client must know of the policy that is served; sent first, as metadata.

    Attributes:
        checkpoint: the folder's name or 'pretrained:NAME'. version: what recordings say of who acted, with the first
            digits of its hash.
        cameras: names, in the policy's order. image_size: (height, width) that it works at; others are resized.
        state_dim: S, None where the policy does not say. uses_state: whether it reads the state.
        chunk_size: H. action_dim: A. action_names: A names, or None where not told.
        control_hz: steps a second that a chunk is meant for, None where not told.
        can_embed: `embedding` may be asked for. can_continue: `prefix` may be given (real-time chunking).
        policy_hash: SHA-256 of the checkpoint, the one that evaluations and failure detectors record; "": not known.
        default_prompt: instruction of requests that hold none; None: they are refused.
        camera_keys: (camera, key) pairs: that camera's picture is read from that key alone.
        action_range: (lowest, highest), of A numbers each, of the actions that it has learned from; None: not known.
    """

    checkpoint: str
    version: str
    cameras: tuple[str, ...]
    image_size: tuple[int, int] | None
    state_dim: int | None
    uses_state: bool
    chunk_size: int
    action_dim: int
    action_names: tuple[str, ...] | None = None
    control_hz: float | None = None
    can_embed: bool = True
    can_continue: bool = False
    policy_hash: str = ""
    default_prompt: str | None = None
    camera_keys: tuple[tuple[str, str], ...] = ()
    action_range: tuple[list[float], list[float]] | None = None

    @property
    def identity(self) -> PolicyIdentity:
        """What every answer says of who made it."""
        return PolicyIdentity(self.checkpoint, self.version, self.policy_hash)

    def metadata(self, limits: WireLimits) -> dict[str, Any]:
        """The first message to a client: plain strings, numbers, lists."""
        return {
            "server": "vla-rl",
            "protocol": PROTOCOL,
            "checkpoint": self.checkpoint,
            "policy_version": self.version,
            "policy_hash": self.policy_hash,
            "cameras": list(self.cameras),
            "image_size": None if self.image_size is None else list(self.image_size),
            "state_dim": self.state_dim,
            "uses_state": self.uses_state,
            "chunk_size": self.chunk_size,
            "action_dim": self.action_dim,
            "action_names": None if self.action_names is None else list(self.action_names),
            "control_hz": self.control_hz,
            "action_range": None if self.action_range is None else list(self.action_range),
            "default_prompt": self.default_prompt,
            "embedding": self.can_embed,
            "real_time_chunking": self.can_continue,
            "max_message_bytes": limits.max_message_bytes,
        }


@dataclass(frozen=True)
class Request:
    """One observation to act on.

    Attributes:
        observation: batch of one.
        embedding: features are asked for too.
        prefix: the actions that run from this observation on, for real-time chunking; batch of one.
    """

    observation: Observation
    embedding: bool = False
    prefix: ActionPrefix | None = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Requests of the same signature can share one forward pass."""
        images = tuple(sorted((name, image.shape) for name, image in self.observation.images.items()))
        how = None
        if (given := self.prefix) is not None:
            options = (given.execution_horizon, given.max_guidance_weight, given.prefix_attention_schedule)
            how = given.actions.shape, given.num_frozen, *options
        return images, self.observation.state.shape, self.embedding, how


def read_request(message: dict[Any, Any], facts: PolicyFacts) -> Request:
    """The request in an unpacked message.

    Raises:
        RequestError: an unknown or missing key, or a value of the wrong type, shape, size or range.
    """
    unknown = [key for key in message if not _is_known(key)]
    if unknown:
        raise RequestError(
            f"unknown key {short(unknown[0])}; allowed: {', '.join(sorted(_OURS | _OPTIONS))}, or openpi's prompt and "
            f"{PREFIX}..."
        )
    images = {camera: _image(message, camera, keys)[None] for camera, keys in _keys(message, facts).items()}
    state = _state(message, facts)
    instruction = message.get("instruction", message.get("prompt", facts.default_prompt))
    if not isinstance(instruction, str) or not instruction.strip():
        raise RequestError(f"instruction (or prompt): expected a text, got {short(instruction)}")
    prefix = _prefix(message, facts)
    embedding = message.get("embedding", False)
    if not isinstance(embedding, bool | np.bool_):
        raise RequestError(f"embedding: expected true or false, got {short(embedding)}")
    if embedding and not facts.can_embed:
        raise RequestError("embedding: this policy has no features to give")
    return Request(Observation(images, state[None], [instruction]), bool(embedding), prefix)


def _is_known(key: Any) -> bool:
    return isinstance(key, str) and (key in _OURS | _OPTIONS or key == "prompt" or key.startswith(PREFIX))


def _keys(message: dict[Any, Any], facts: PolicyFacts) -> dict[str, tuple[str, ...]]:
    """Camera -> the keys that its picture may have."""
    if not isinstance(message.get("images", {}), dict):
        raise RequestError(f"images: expected a map of camera to image, got {short(message['images'])}")
    return camera_keys(facts.cameras) | {camera: (key,) for camera, key in facts.camera_keys}


def _image(message: dict[Any, Any], camera: str, keys: tuple[str, ...]) -> np.ndarray:
    """uint8 (height, width, 3)."""
    value = find_image(message, keys)
    if value is None:
        raise RequestError(f"images: no image of camera {camera!r}; send one of the keys {', '.join(keys)}")
    if not isinstance(value, np.ndarray):
        raise RequestError(f"image of {camera}: expected an array, got {short(value)}")
    image = upright(value)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise RequestError(
            f"image of {camera}: expected RGB, (height, width, 3) or (3, height, width), uint8 or floats from 0 to 1, "
            f"got {value.dtype} {value.shape}" + _range(value)
        )
    if not 1 <= min(image.shape[:2]) <= max(image.shape[:2]) <= MAX_IMAGE_SIDE:
        raise RequestError(f"image of {camera}: {image.shape[:2]} pixels; allowed are 1 to {MAX_IMAGE_SIDE} a side")
    return image


def _range(image: np.ndarray) -> str:
    return f" from {image.min():g} to {image.max():g}" if image.dtype.kind == "f" and image.size else ""


def _state(message: dict[Any, Any], facts: PolicyFacts) -> np.ndarray:
    whole = message.get("state", message.get(f"{PREFIX}state"))
    parts = state_parts(message)
    if parts and whole is not None:
        raise RequestError(f"state: given twice, whole and as {' and '.join(parts)}; send one")
    if whole is None and not parts and not facts.uses_state:
        return np.zeros(facts.state_dim or 0, np.float32)
    if parts and (missing := [key for key in STATE_PARTS if key not in parts]):
        raise RequestError(f"state: {' and '.join(parts)} without {' and '.join(missing)}; send both, or state whole")
    numbers = [_numbers(part, key, 1) for key, part in (parts or {"state": whole}).items()]
    state = np.concatenate(numbers)
    expected = facts.state_dim
    if expected is not None and facts.uses_state and state.shape != (expected,):
        raise RequestError(f"state: expected {expected} numbers, got {state.shape[0]}")
    return state


def _numbers(value: Any, name: str, dimensions: int) -> np.ndarray:
    """float32 array with so many dimensions, all finite."""
    if isinstance(value, list) and all(isinstance(x, int | float) for x in value):
        try:
            value = np.asarray(value, np.float64)
        except OverflowError:
            raise RequestError(f"{name}: holds a number that is too large") from None
    if not isinstance(value, np.ndarray) or value.ndim != dimensions or value.dtype == np.bool_:
        what = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else short(value)
        raise RequestError(f"{name}: expected numbers with {dimensions} dimension(s), got {what}")
    with np.errstate(over="ignore"):
        numbers = value.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise RequestError(f"{name}: holds NaN, infinity or a number too large")
    return numbers


def _prefix(message: dict[Any, Any], facts: PolicyFacts) -> ActionPrefix | None:
    if message.get("prefix") is None:
        return None
    if not facts.can_continue:
        raise RequestError("prefix: this policy cannot continue given actions (no real-time chunking); leave it out")
    prefix = _numbers(message["prefix"], "prefix", 2)
    if not 1 <= prefix.shape[0] <= facts.chunk_size or prefix.shape[1] != facts.action_dim:
        raise RequestError(
            f"prefix: expected 1 to {facts.chunk_size} actions of {facts.action_dim} numbers, got shape {prefix.shape}"
        )
    frozen = message.get("num_frozen", 0)
    if type(frozen) is not int or not 0 <= frozen <= prefix.shape[0]:
        raise RequestError(f"num_frozen: expected 0 to {prefix.shape[0]} (the prefix's length), got {short(frozen)}")
    horizon, weight, schedule = (message.get(name) for name in GUIDANCE)
    if horizon is not None and (type(horizon) is not int or not 1 <= horizon <= MAX_HORIZON):
        raise RequestError(f"execution_horizon: expected 1 to {MAX_HORIZON} actions, got {short(horizon)}")
    if weight is not None and (type(weight) not in (int, float) or not 0 < weight <= MAX_GUIDANCE):
        raise RequestError(f"max_guidance_weight: expected a number above 0, to {MAX_GUIDANCE:g}, got {short(weight)}")
    if schedule is not None and schedule not in PREFIX_SCHEDULES:
        raise RequestError(
            f"prefix_attention_schedule: expected one of {', '.join(PREFIX_SCHEDULES)}, got {short(schedule)}"
        )
    return ActionPrefix(prefix[None], frozen, horizon, weight, schedule)


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
