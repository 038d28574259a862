"""LeRobot's robots and teleoperators by their registered names: found, configured, connected, or refused with a reason.

LeRobot's registries know a class once its module has been imported; here the module is found by its name, a user's own
by the contract's `modules`, and plugins (packages called lerobot_robot_...) as LeRobot finds them.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Family = Literal["robots", "teleoperators"]
INSTALL = "For the SO arms: pip install '.[lerobot]'"
_EXTRAS = {"gamepad": "gamepad", "phone": "phone"}  # of teleoperators
_CAMERA_LIBRARIES = {"intelrealsense": "For RealSense: pip install 'lerobot[intelrealsense]'"}
_CAMERAS = {"opencv": "opencv", "intelrealsense": "realsense", "zmq": "zmq", "reachy2_camera": "reachy2_camera"}


class DeviceError(RuntimeError):
    """A device that LeRobot does not know, whose library is missing, that does not answer or is not calibrated."""


def make_device(family: Family, kind: str, values: Mapping[str, Any], modules: Sequence[str] = ()) -> Any:
    """A robot or teleoperator, not connected yet.

    Args:
        kind: its registered name, such as so101_follower.
        values: fields of its config class; cameras as {name: {"type": ..., ...}}.
        modules: imported first; they may register classes of their own.

    Raises:
        DeviceError: see there; the message lists what is known, or the config's fields.
    """
    try:
        package = importlib.import_module(f"lerobot.{family}")
        draccus = importlib.import_module("draccus")
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise DeviceError(f"{kind}: {error}. {INSTALL}") from error
    registry = package.RobotConfig if family == "robots" else package.TeleoperatorConfig
    _find(registry, family, package, kind)
    for camera in dict(values.get("cameras") or {}).values():
        _import_camera(kind, camera)
    try:
        config = draccus.decode(registry, {"type": kind, **values})
    except draccus.utils.DraccusException as error:
        fields = ", ".join(inspect.signature(registry.get_choice_class(kind)).parameters)
        reason = f"{error} {error.__cause__ or ''}".strip()
        raise DeviceError(f"{kind}: {reason.rstrip('.')}. Its settings are: {fields}") from error
    make = package.make_robot_from_config if family == "robots" else _make_teleoperator()
    try:
        return make(config)
    except (ImportError, ValueError) as error:
        how = f"pip install '.[{_EXTRAS[kind]}]'" if kind in _EXTRAS else INSTALL
        raise DeviceError(f"{kind}: {error}. {how if isinstance(error, ImportError) else ''}".rstrip()) from error


def _make_teleoperator() -> Any:
    return importlib.import_module("lerobot.teleoperators.utils").make_teleoperator_from_config


def _find(registry: Any, family: Family, package: Any, kind: str) -> None:
    """Import LeRobot's own module that registers `kind`, the likeliest first; then plugins."""
    folders = [m.name for m in pkgutil.iter_modules(package.__path__) if m.ispkg]
    folders.sort(key=lambda name: -difflib.SequenceMatcher(None, name, kind).ratio())
    for folder in folders:
        if kind in registry.get_known_choices():
            return
        try:
            importlib.import_module(f"lerobot.{family}.{folder}")
        except ImportError:
            continue  # Another device's library is missing.
    if kind not in registry.get_known_choices():
        importlib.import_module("lerobot.utils.import_utils").register_third_party_plugins()
    known = sorted(registry.get_known_choices())
    if kind not in known:
        nearest = difflib.get_close_matches(kind, known, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise DeviceError(
            f"LeRobot has no {family[:-1]} {kind!r}.{hint} Known: {', '.join(known)}; name the module that registers "
            "another one in `modules`"
        )


def _import_camera(kind: str, camera: Any) -> None:
    if not isinstance(camera, Mapping) or "type" not in camera:
        raise DeviceError(f"{kind}: cameras: each has a `type`, such as opencv, and its settings; got {camera!r}")
    if folder := _CAMERAS.get(str(camera["type"])):
        try:
            importlib.import_module(f"lerobot.cameras.{folder}")
        except ImportError as error:
            raise DeviceError(f"{kind}: camera {camera['type']}: {error}") from error


def make_camera(kind: str, values: Mapping[str, Any]) -> Any:
    """One of LeRobot's cameras ("opencv", "intelrealsense"), not connected yet.

    Raises:
        DeviceError: its library is missing, or a field of its config is wrong; the message lists them.
    """
    _import_camera(kind, {"type": kind})
    configs = importlib.import_module("lerobot.cameras.configs")
    draccus = importlib.import_module("draccus")
    try:
        config = draccus.decode(configs.CameraConfig, {"type": kind, **values})
        return importlib.import_module("lerobot.cameras.utils").make_cameras_from_configs({kind: config})[kind]
    except ImportError as error:
        raise DeviceError(f"{kind}: {error}. {_CAMERA_LIBRARIES.get(kind, '')}".rstrip()) from error
    except ValueError as error:
        raise DeviceError(f"{kind}: {error}") from error
    except draccus.utils.DraccusException as error:
        fields = ", ".join(inspect.signature(configs.CameraConfig.get_choice_class(kind)).parameters)
        raise DeviceError(f"{kind}: {error} {error.__cause__ or ''}. Its settings are: {fields}") from error


def connect_device(device: Any, kind: str, how_to_calibrate: str) -> None:
    """Connect, without LeRobot's calibration, which asks questions in the terminal.

    Raises:
        DeviceError: it does not answer, or has not been calibrated.
    """
    takes_calibrate = "calibrate" in inspect.signature(device.connect).parameters
    try:
        device.connect(**({"calibrate": False} if takes_calibrate else {}))
        calibrated = device.is_calibrated
        calibrated = calibrated() if callable(calibrated) else calibrated  # Some of LeRobot's have it as a method.
    except Exception as error:  # A driver's own; whatever it is, the device cannot be used.
        let_go(device)
        raise DeviceError(f"{kind}: cannot connect: {' '.join(str(error).split()) or type(error).__name__}") from error
    if calibrated is False:  # None: it says nothing.
        let_go(device)
        raise DeviceError(
            f"{kind}: {device.id!r} is not calibrated, or its motors hold another calibration than "
            f"{device.calibration_fpath}. Run: {how_to_calibrate}"
        )


def let_go(device: Any) -> str:
    """Disconnect, which turns the motors off where the device does so. Returns what went wrong, or ""."""
    try:
        if device.is_connected:
            device.disconnect()
    except Exception as error:  # A driver's own, with its cable pulled for instance: there is no more to be done.
        return f"{type(error).__name__}: {error}"
    return ""


def number_names(features: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a device's features that are one number each, in the device's order."""
    return tuple(name for name, kind in features.items() if isinstance(kind, type))


def camera_names(features: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of a robot's color pictures: features of shape (height, width, 3)."""
    return tuple(n for n, shape in features.items() if isinstance(shape, tuple) and len(shape) == 3 and shape[2] == 3)
