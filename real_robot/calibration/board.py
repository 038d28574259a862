"""The ChArUco board: printed to a picture, and found in a camera's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
from pydantic import Field, model_validator

from vla_rl.config import Config, ConfigError

MIN_CORNERS = 8  # of a board that counts as seen
MARGIN = 0.5  # white around the board, in squares


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
