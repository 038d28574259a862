"""MuJoCo's distances, as we ask for them, against a solver of our own: every pair of shapes, at every attitude."""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import nnls
from scipy.spatial.transform import Rotation

from real_robot.contract.model import ModelConfig
from real_robot.kinematics.arm_model import ArmModel

CORNERS = np.array(list(product((-1, 1), repeat=3)), np.float64)
CIRCLE = np.linspace(0, 2 * np.pi, 97)[:-1]
RIM = np.stack([np.cos(CIRCLE), np.sin(CIRCLE)], 1) * 0.06
SIZES = {"box": "0.05 0.1 0.15", "sphere": "0.08", "capsule": "0.04 0.12", "cylinder": "0.06 0.1"}
# The convex hull of these points, grown by that radius.
POINTS = {
    "box": (CORNERS * [0.05, 0.1, 0.15], 0.0),
    "sphere": (np.zeros((1, 3)), 0.08),
    "capsule": (np.array([[0, 0, -0.12], [0, 0, 0.12]]), 0.04),
    "cylinder": (np.concatenate([np.insert(RIM, 2, z, axis=1) for z in (-0.1, 0.1)]), 0.0),
}
JOINTS = "".join(f'<joint name="{k}{a}" type="{t}" axis="{a}"/>' for t, k in (("slide", "s"), ("hinge", "h")) for a in
                 ("1 0 0", "0 1 0", "0 0 1"))  # fmt: skip


def between_hulls(first: np.ndarray, second: np.ndarray) -> float:
    """Least distance of two convex hulls, by non-negative least squares over the weights of their points."""
    heavy = 100.0  # makes the weights of each add up to 1
    ones = [np.r_[np.ones(len(first)), np.zeros(len(second))], np.r_[np.zeros(len(first)), np.ones(len(second))]]
    matrix = np.vstack([np.hstack([first.T, -second.T]), *(heavy * row for row in ones)])
    weights, _ = nnls(matrix, np.array([0, 0, 0, heavy, heavy]), maxiter=20_000)
    a, b = weights[: len(first)], weights[len(first) :]
    return float(np.linalg.norm(first.T @ (a / a.sum()) - second.T @ (b / b.sum())))


@pytest.mark.parametrize(("still", "moving"), combinations_with_replacement(SIZES, 2))
def test_distances_of_two_shapes(tmp_path: Path, still: str, moving: str) -> None:
    path = tmp_path / "pair.xml"
    bodies = (("still", still, ""), ("moving", moving, JOINTS))
    path.write_text(
        '<mujoco><compiler angle="radian"/><worldbody>'
        + "".join(f'<body name="{n}">{j}<geom type="{s}" size="{SIZES[s]}"/></body>' for n, s, j in bodies)
        + "</worldbody></mujoco>"
    )
    far = {f"s{axis}": 1.0 for axis in ("1 0 0", "0 1 0", "0 0 1")}
    model = ArmModel(ModelConfig(file=str(path), neutral=far), path)
    generator, compared = np.random.default_rng(0), 0
    while compared < 25:
        joints = np.concatenate([generator.normal(size=3) * 0.2, generator.uniform(-3, 3, 3)])
        turn = Rotation.from_matrix(model.rotation(joints, model.link("moving")))
        (first, radius), (second, more) = POINTS[still], POINTS[moving]
        expected = between_hulls(first, turn.apply(second) + joints[:3]) - radius - more
        if expected < 1e-3:
            continue
        found = model.distances(joints).get(("moving", "still"))
        if expected > 0.0598:
            assert found is None or found > 0.059
            continue
        compared += 1
        assert found == pytest.approx(expected, abs=4e-4), "0.4 mm: the cylinder's rim is of 96 corners here"
