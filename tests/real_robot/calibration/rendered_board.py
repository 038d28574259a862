"""A ChArUco board as a camera sees it, rendered by MuJoCo: the board is a textured plane, camera poses are given."""

from __future__ import annotations

from pathlib import Path

import cv2
import mujoco
import numpy as np

from real_robot.calibration.intrinsics import BoardConfig, Intrinsics, draw_board

HEIGHT, WIDTH, FOVY = 480, 640, 50.0
FOCAL = HEIGHT / 2 / np.tan(np.radians(FOVY) / 2)
CAMERA = Intrinsics(width=WIDTH, height=HEIGHT, focal=(FOCAL, FOCAL), center=((WIDTH - 1) / 2, (HEIGHT - 1) / 2))
# MuJoCo's camera looks along its -z with y up; OpenCV's along z with y down.
FLIP = np.diag([1.0, -1.0, -1.0, 1.0])

SCENE = """
<mujoco>
  <visual><global offwidth="{width}" offheight="{height}"/><quality offsamples="8"/>
    <headlight ambient="0.9 0.9 0.9" diffuse="0.1 0.1 0.1" specular="0 0 0"/></visual>
  <asset><texture name="board" type="2d" file="{file}"/>
    <material name="board" texture="board" texrepeat="1 1" specular="0"/></asset>
  <worldbody>
    <body name="board" mocap="true"><geom type="plane" size="{half_width} {half_height} 0.01" material="board"/></body>
    <body name="camera" mocap="true"><camera name="camera" fovy="{fovy}"/></body>
  </worldbody>
</mujoco>
"""


class RenderedBoard:
    """Renders pictures of a board. Poses are (4, 4): the board's origin is its outer corner, as OpenCV has it."""

    def __init__(self, board: BoardConfig, folder: Path) -> None:
        self._board = board
        path = folder / "board.png"
        cv2.imwrite(str(path), cv2.cvtColor(draw_board(board, 200), cv2.COLOR_GRAY2BGR))
        width, height = board.extent
        text = SCENE.format(
            width=WIDTH, height=HEIGHT, file=path, half_width=width / 2, half_height=height / 2, fovy=FOVY
        )
        self._model = mujoco.MjModel.from_xml_string(text)
        self._data = mujoco.MjData(self._model)
        self._renderer = mujoco.Renderer(self._model, HEIGHT, WIDTH)
        # From OpenCV's board (origin at its top left corner, y down the print, z into it) to the plane's middle.
        self._middle = np.eye(4)
        self._middle[:3, :3] = np.diag([1.0, -1.0, -1.0])
        self._middle[:3, 3] = board.columns * board.square / 2, board.rows * board.square / 2, 0

    def picture(self, camera: np.ndarray, board: np.ndarray) -> np.ndarray:
        """uint8 (HEIGHT, WIDTH, 3). Both poses in the world's frame; the camera's as OpenCV has it."""
        self._put(0, board @ self._middle)
        self._put(1, camera @ FLIP)
        mujoco.mj_forward(self._model, self._data)
        self._renderer.update_scene(self._data, "camera")
        return self._renderer.render()

    def _put(self, body: int, pose: np.ndarray) -> None:
        self._data.mocap_pos[body] = pose[:3, 3]
        mujoco.mju_mat2Quat(self._data.mocap_quat[body], np.ascontiguousarray(pose[:3, :3]).reshape(9))

    def close(self) -> None:
        self._renderer.close()
