"""Camera intrinsics from pictures of a ChArUco board, or as the driver or maker tells; the board itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
from pydantic import Field, model_validator

from vla_rl.config import Config, ConfigError, read_yaml, validate

MIN_CORNERS = 8  # of a board that counts as seen
MARGIN = 0.5  # white around the board, in squares
MIN_PICTURES = 6
MIN_TILT = 10.0  # degrees between the two most different views: from one direction focal length and distance are one


class BoardConfig(Config):
    """A ChArUco board, as it was printed: measure its squares with a ruler before you trust it."""

    columns: int = Field(default=7, ge=3, le=30, description="Squares along its width.")
    rows: int = Field(default=5, ge=3, le=30, description="Squares along its height.")
    square: float = Field(default=0.03, gt=0, le=1, description="Side of a square, in meters, as measured.")
    marker: float = Field(default=0.022, gt=0, le=1, description="Side of a marker, in meters, as measured.")
    dictionary: Literal["4X4_50", "5X5_100", "6X6_250"] = Field(
        default="5X5_100", description="Markers: bits a side, and how many there are."
    )

    @model_validator(mode="after")
    def _check(self) -> BoardConfig:
        if not 0.4 * self.square < self.marker < 0.9 * self.square:
            raise ConfigError(f"board.marker: {self.marker} m; 0.4 to 0.9 of a square's {self.square} m are readable")
        if self.columns * self.rows // 2 > int(self.dictionary.split("_")[1]):
            raise ConfigError(f"board: {self.columns} x {self.rows} squares need more markers than {self.dictionary}")
        return self

    def build(self) -> Any:
        """OpenCV's board."""
        markers = cv2.aruco.getPredefinedDictionary(getattr(cv2.aruco, f"DICT_{self.dictionary}"))
        return cv2.aruco.CharucoBoard((self.columns, self.rows), self.square, self.marker, markers)

    @property
    def extent(self) -> tuple[float, float]:
        """Width and height in meters, with the white around."""
        return (self.columns + 2 * MARGIN) * self.square, (self.rows + 2 * MARGIN) * self.square


def draw_board(board: BoardConfig, dots_per_inch: int = 300) -> np.ndarray:
    """The board with white around, uint8 (height, width), to be printed at that resolution without scaling."""
    per_square = round(board.square / 0.0254 * dots_per_inch)
    size = (round((board.columns + 2 * MARGIN) * per_square), round((board.rows + 2 * MARGIN) * per_square))
    return board.build().generateImage(size, marginSize=round(MARGIN * per_square), borderBits=1)


@dataclass(frozen=True)
class Corners:
    """The board's inner corners in one picture: `ids` int (N,), `points` float32 (N, 2) in pixels."""

    ids: np.ndarray
    points: np.ndarray


class BoardFinder:
    """Finds one board in pictures."""

    def __init__(self, board: BoardConfig) -> None:
        self._board = board.build()
        self._detector = cv2.aruco.CharucoDetector(self._board)

    def find(self, picture: np.ndarray) -> Corners | None:
        """The corners in a picture, uint8 (height, width, 3) RGB or (height, width); None where too few are seen."""
        gray = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY) if picture.ndim == 3 else picture
        points, ids, _, _ = self._detector.detectBoard(gray)
        if ids is None or len(ids) < MIN_CORNERS:
            return None
        return Corners(ids.reshape(-1), points.reshape(-1, 2).astype(np.float32))

    def places(self, ids: np.ndarray) -> np.ndarray:
        """Where corners are on the board, float (N, 3) in meters."""
        return np.asarray(self._board.getChessboardCorners(), np.float64)[ids]


class Intrinsics(Config):
    """A pinhole camera with OpenCV's distortion."""

    width: int = Field(gt=0, description="Pixels.")
    height: int = Field(gt=0, description="Pixels.")
    focal: tuple[float, float] = Field(description="fx, fy in pixels.")
    center: tuple[float, float] = Field(description="cx, cy in pixels; a pixel's own middle is a whole number.")
    distortion: tuple[float, ...] = Field(default=(0.0,) * 5, description="k1, k2, p1, p2, k3 ..., as OpenCV has them.")

    @property
    def matrix(self) -> np.ndarray:
        """(3, 3)."""
        return np.array([[self.focal[0], 0, self.center[0]], [0, self.focal[1], self.center[1]], [0, 0, 1.0]])

    @property
    def coefficients(self) -> np.ndarray:
        return np.array(self.distortion)


def load_intrinsics(path: Path) -> Intrinsics:
    """Read what `vla-rl calibrate camera` wrote, or the same fields by hand.

    Raises:
        ConfigError: no such file, or a wrong field.
    """
    values = read_yaml(path)
    return validate(Intrinsics, values.get("intrinsics", values))


def board_pose(corners: Corners, finder: BoardFinder, camera: Intrinsics) -> tuple[np.ndarray, float]:
    """The board in the camera's frame (4, 4), and the reprojection error, root mean square in pixels."""
    places = finder.places(corners.ids)
    found, turn, shift = cv2.solvePnP(
        places, corners.points.astype(np.float64), camera.matrix, camera.coefficients, flags=cv2.SOLVEPNP_ITERATIVE
    )
    if not found:
        raise ValueError("the board's corners give no pose")
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = cv2.Rodrigues(turn)[0], shift.reshape(3)
    return pose, rms(project(places, pose, camera) - corners.points)


def project(places: np.ndarray, board: np.ndarray, camera: Intrinsics) -> np.ndarray:
    """Pixels (N, 2) of points (N, 3) on a board whose pose in the camera's frame is `board`."""
    turn, _ = cv2.Rodrigues(board[:3, :3])
    pixels, _ = cv2.projectPoints(places, turn, board[:3, 3], camera.matrix, camera.coefficients)
    return pixels.reshape(-1, 2)


def rms(differences: np.ndarray) -> float:
    """Root mean square of the lengths of differences (N, D)."""
    return float(np.sqrt((differences**2).sum(axis=-1).mean()))


def calibrate_camera(
    views: Sequence[Corners], finder: BoardFinder, size: tuple[int, int]
) -> tuple[Intrinsics, float, float]:
    """A camera's intrinsics from views of the board. `size`: (height, width).

    Returns:
        The intrinsics of all views; their reprojection error; and that of every second view under the
        intrinsics of the others, root mean square in pixels.

    Raises:
        ConfigError: too few views, or all from one direction.
    """
    if len(views) < MIN_PICTURES:
        raise ConfigError(f"calibrate camera: the board is seen in {len(views)} pictures; at least {MIN_PICTURES}")
    camera, error = _fit(views, finder, size)
    poses = [board_pose(view, finder, camera)[0] for view in views]
    tilt = max(_tilt(a, b) for a in poses for b in poses)
    if tilt < MIN_TILT:
        raise ConfigError(
            f"calibrate camera: all pictures show the board from one direction (at most {tilt:.0f} degrees apart); "
            f"tilt it by {MIN_TILT:.0f} degrees and more, else focal length and distance cannot be told apart"
        )
    half, _ = _fit(views[::2], finder, size)
    return camera, error, rms_of_views(views[1::2], finder, half)


def rms_of_views(views: Sequence[Corners], finder: BoardFinder, camera: Intrinsics) -> float:
    """Reprojection error over views, each with its own best pose."""
    errors = [board_pose(view, finder, camera)[1] for view in views]
    return float(np.sqrt(np.mean(np.square(errors))))


def _fit(views: Sequence[Corners], finder: BoardFinder, size: tuple[int, int]) -> tuple[Intrinsics, float]:
    places = [finder.places(view.ids).astype(np.float32) for view in views]
    points = [view.points for view in views]
    start = np.eye(3)
    error, matrix, distortion, _, _ = cv2.calibrateCamera(places, points, size[::-1], start, np.zeros(5))
    camera = Intrinsics(
        width=size[1],
        height=size[0],
        focal=(float(matrix[0, 0]), float(matrix[1, 1])),
        center=(float(matrix[0, 2]), float(matrix[1, 2])),
        distortion=tuple(float(v) for v in distortion.reshape(-1)),
    )
    return camera, float(error)


def _tilt(first: np.ndarray, second: np.ndarray) -> float:
    """Degrees between the normals of two boards."""
    return float(np.degrees(np.arccos(np.clip(first[:3, 2] @ second[:3, 2], -1, 1))))
