"""A robot's URDF or MJCF: its joints' limits, and a MuJoCo spec of it.

MuJoCo compiles both. Of a URDF it does not keep velocity limits, mimic joints, soft limits (safety_controller) or ROS's
mesh addresses (package://), so those are read here. Pictures of links (visual) are left out, with their meshes.
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse
from xml.etree import ElementTree

import mujoco

from vla_rl.config import ConfigError

MAX_BYTES = 16_000_000  # of the file; of each mesh, ten times that
MESHES = (".stl", ".obj", ".msh")  # what MuJoCo reads
MOVING = ("revolute", "continuous", "prismatic")


@dataclass(frozen=True)
class Mimic:
    """A joint that follows another: its position is multiplier * other + offset."""

    joint: str
    multiplier: float
    offset: float


@dataclass(frozen=True)
class JointFacts:
    """What the file says of a moving joint, in radians (meters for slides), seconds, Nm (N); infinite where nothing."""

    low: float
    high: float
    velocity: float
    effort: float
    is_slide: bool = False
    mimic: Mimic | None = None


def read_joints(path: Path) -> dict[str, JointFacts]:
    """The file's moving joints by name, in its order.

    Raises:
        ConfigError: no such file, neither URDF nor MJCF, or a joint without limits or of a kind that no arm has.
    """
    root = _parse(path)
    if root.tag == "mujoco":
        return _mjcf_joints(compile_spec(_load_mjcf(path), path))
    joints = [j for j in root.findall("joint") if j.get("type") != "fixed"]
    if not joints:
        raise ConfigError(f"model.file: {path} has no moving joint")
    return {str(j.get("name")): _urdf_joint(j, path) for j in joints}


def leader(name: str, fact: JointFacts, facts: dict[str, JointFacts]) -> tuple[str, float, float]:
    """The joint that this one follows, through any number of others: (name, factor, offset).

    Raises:
        ConfigError: it follows one that does not move, or itself.
    """
    factor, offset = 1.0, 0.0
    for _ in facts:
        if fact.mimic is None:
            return name, factor, offset
        offset += factor * fact.mimic.offset
        factor *= fact.mimic.multiplier
        name = fact.mimic.joint
        if name not in facts:
            raise ConfigError(f"model.file: a joint mimics {name!r}, which does not move; it has: {', '.join(facts)}")
        fact = facts[name]
    raise ConfigError(f"model.file: joint {name} mimics itself")


def load_spec(path: Path, packages: dict[str, str]) -> mujoco.MjSpec:
    """The robot with its collision shapes, not yet compiled; one body a link, also where links are fixed to each other.

    Raises:
        ConfigError: as for `read_joints`; or a mesh is missing, or of a kind that MuJoCo does not read.
    """
    root = _parse(path)
    if root.tag == "mujoco":
        return _load_mjcf(path)
    for link in root.findall("link"):
        for visual in link.findall("visual"):
            link.remove(visual)
    assets: dict[str, bytes] = {}
    names: dict[Path, str] = {}
    for mesh in root.iter("mesh"):
        found = _find_mesh(str(mesh.get("filename")), path, packages)
        if found not in names:
            names[found] = f"mesh{len(names)}{found.suffix.lower()}"
            assets[names[found]] = _read(found, 10 * MAX_BYTES)
        mesh.set("filename", names[found])
    try:
        spec = mujoco.MjSpec.from_string(ElementTree.tostring(root, encoding="unicode"))
    except ValueError as error:
        raise ConfigError(f"model.file: {path}: {error}") from error
    spec.assets = assets
    spec.compiler.fusestatic = False
    spec.compiler.balanceinertia = True
    spec.compiler.boundmass, spec.compiler.boundinertia = 1e-3, 1e-6  # links without inertia; nothing is simulated
    return spec


def _parse(path: Path) -> ElementTree.Element:
    try:
        root = ElementTree.fromstring(_read(path, MAX_BYTES))
    except ElementTree.ParseError as error:
        raise ConfigError(f"model.file: {path} is no XML: {error}") from error
    if root.tag not in ("robot", "mujoco"):
        raise ConfigError(f"model.file: {path}: root element {root.tag!r}; allowed: robot (URDF), mujoco (MJCF)")
    if any("xacro" in element.tag for element in root.iter()):
        raise ConfigError(f"model.file: {path} is a xacro file; make a URDF of it: xacro {path.name} > robot.urdf")
    return root


def _read(path: Path, most: int) -> bytes:
    try:
        if path.stat().st_size > most:
            raise ConfigError(f"model.file: {path} is larger than {most // 1_000_000} MB")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"model.file: {path} cannot be read: {error.strerror}") from error


def _urdf_joint(joint: ElementTree.Element, path: Path) -> JointFacts:
    name, kind = joint.get("name"), joint.get("type")
    if kind not in MOVING:
        raise ConfigError(f"model.file: {path}: joint {name} is {kind}; allowed: fixed, {', '.join(MOVING)}")
    limit, soft, mimic = joint.find("limit"), joint.find("safety_controller"), joint.find("mimic")
    low, high = -math.inf, math.inf
    if kind != "continuous":
        if limit is None:
            raise ConfigError(f"model.file: {path}: joint {name} is {kind} and has no <limit>")
        low, high = _number(limit, "lower", 0.0, path), _number(limit, "upper", 0.0, path)
        if soft is not None:
            low = max(low, _number(soft, "soft_lower_limit", low, path))
            high = min(high, _number(soft, "soft_upper_limit", high, path))
    # Exporters write 0 where they do not know.
    velocity = (_number(limit, "velocity", 0.0, path) if limit is not None else 0.0) or math.inf
    effort = (_number(limit, "effort", 0.0, path) if limit is not None else 0.0) or math.inf
    follows = None
    if mimic is not None:
        factor, offset = _number(mimic, "multiplier", 1.0, path), _number(mimic, "offset", 0.0, path)
        follows = Mimic(str(mimic.get("joint")), factor, offset)
    return JointFacts(low, high, abs(velocity), abs(effort), kind == "prismatic", follows)


def _number(element: ElementTree.Element, name: str, default: float, path: Path) -> float:
    text = element.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"model.file: {path}: <{element.tag}> {name}: {text!r} is no number")
    return value


def _find_mesh(address: str, path: Path, packages: dict[str, str]) -> Path:
    """The mesh's file, or one beside it with the same stem in a format that MuJoCo reads."""
    parts = urlparse(address)
    if parts.scheme in ("package", "model"):
        folders = _package_folders(parts.netloc, path, packages)
        candidates = [folder / unquote(parts.path).lstrip("/") for folder in folders]
        hint = f"; name the package's folder: model.packages: {{{parts.netloc}: FOLDER}}"
    else:
        candidates, hint = [path.parent / unquote(parts.path)], ""
    for candidate in candidates:
        for found in (candidate, *(candidate.with_suffix(s) for s in (*MESHES, *(s.upper() for s in MESHES)))):
            if found.suffix.lower() in MESHES and found.is_file():
                return found
    if any(c.is_file() for c in candidates):
        raise ConfigError(
            f"model.file: {path}: collision mesh {address}: MuJoCo reads {', '.join(MESHES)}; put the same mesh in "
            "one of these beside it"
        )
    raise ConfigError(f"model.file: {path}: collision mesh {address} not found{hint}")


def _package_folders(name: str, path: Path, packages: dict[str, str]) -> list[Path]:
    if name in packages:
        return [path.parent / Path(packages[name]).expanduser()]
    parents = path.resolve().parents[:5]
    above = [folder for folder in parents if folder.name == name]
    beside = [folder / name for folder in parents]
    ament = [Path(p) / "share" / name for p in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if p]
    ros = [Path(p) / name for p in os.environ.get("ROS_PACKAGE_PATH", "").split(os.pathsep) if p]
    unpacked = parents  # the package's folder by another name, as of a download
    return [folder for folder in (*above, *beside, *ament, *ros, *unpacked) if folder.is_dir()]


def _load_mjcf(path: Path) -> mujoco.MjSpec:
    try:
        return mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        raise ConfigError(f"model.file: {path}: {error}") from error


def compile_spec(spec: mujoco.MjSpec, path: Path) -> mujoco.MjModel:
    """
    Raises:
        ConfigError: MuJoCo does not take it; its reason.
    """
    try:
        return spec.compile()
    except ValueError as error:
        raise ConfigError(f"model.file: {path}: {error}") from error


def _mjcf_joints(model: mujoco.MjModel) -> dict[str, JointFacts]:
    hinge, slide = int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)
    joints: dict[str, JointFacts] = {}
    for i in range(model.njnt):
        name = model.joint(i).name
        if int(model.jnt_type[i]) not in (hinge, slide) or not name:
            raise ConfigError(f"model.file: joint {name or i}: allowed: hinge and slide joints, with a name")
        low, high = model.jnt_range[i] if model.jnt_limited[i] else (-math.inf, math.inf)
        effort, is_slide = _mjcf_effort(model, i), int(model.jnt_type[i]) == slide
        joints[name] = JointFacts(float(low), float(high), math.inf, effort, is_slide, _mjcf_mimic(model, i))
    if not joints:
        raise ConfigError("model.file: no moving joint")
    return joints


def _mjcf_effort(model: mujoco.MjModel, joint: int) -> float:
    efforts = [float(model.jnt_actfrcrange[joint, 1])] if model.jnt_actfrclimited[joint] else []
    for i in range(model.nu):
        if model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT and model.actuator_trnid[i, 0] == joint:
            limit = model.actuator_forcerange[i, 1] if model.actuator_forcelimited[i] else math.inf
            efforts.append(float(limit * abs(model.actuator_gear[i, 0])))
    return min(efforts, default=math.inf)


def _mjcf_mimic(model: mujoco.MjModel, joint: int) -> Mimic | None:
    for i in range(model.neq):
        if model.eq_type[i] == mujoco.mjtEq.mjEQ_JOINT and model.eq_obj1id[i] == joint and model.eq_obj2id[i] >= 0:
            offset, multiplier, *rest = model.eq_data[i, :5]
            if any(rest):
                raise ConfigError(f"model.file: joint {model.joint(joint).name}: follows another one not in a line")
            other = int(model.eq_obj2id[i])
            here, there = model.qpos0[model.jnt_qposadr[[joint, other]]]  # the polynomial is about these
            return Mimic(model.joint(other).name, float(multiplier), float(offset + here - multiplier * there))
    return None
