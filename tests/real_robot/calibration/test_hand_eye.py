"""The camera's place from rendered pictures of a board: recovered, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from rendered_board import CAMERA, HEIGHT, WIDTH, RenderedBoard
from scipy.spatial.transform import Rotation

from real_robot.calibration.hand_eye import HandEyeError, Mount, Pair, angle_between, calibrate_hand_eye, inverse
from real_robot.calibration.intrinsics import BoardConfig, BoardFinder, calibrate_camera
from vla_rl.config import ConfigError

BOARD = BoardConfig()
MIDDLE = np.array([BOARD.columns * BOARD.square / 2, BOARD.rows * BOARD.square / 2, 0.0])
# Of what is recovered; 0.04 mm and 0.08 degrees when this was written.
MAX_MM, MAX_DEGREES = 0.5, 0.2


def pose(turn: tuple[float, float, float], position: tuple[float, float, float]) -> np.ndarray:
    """Degrees about x, y, z; meters."""
    made = np.eye(4)
    made[:3, :3], made[:3, 3] = Rotation.from_euler("xyz", turn, degrees=True).as_matrix(), position
    return made


CAMERA_ON_GRIPPER = pose((4, -7, 92), (0.05, -0.03, 0.08))
BOARD_ON_TABLE = pose((180, 0, 20), (0.5, 0.1, 0.02))  # its z points into the print, here down
CAMERA_AT_BASE = pose((-125, 3, 75), (1.0, 0.1, 0.6))
BOARD_ON_GRIPPER = pose((3, 5, 40), (-0.1, -0.07, 0.05))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RenderedBoard]:
    scene = RenderedBoard(BOARD, tmp_path_factory.mktemp("board"))
    yield scene
    scene.close()


@pytest.fixture(scope="module")
def finder() -> BoardFinder:
    return BoardFinder(BOARD)


@pytest.fixture(scope="module")
def seen(scene: RenderedBoard, finder: BoardFinder) -> list[Pair]:
    """Pairs of an arm that has its camera on the gripper."""
    return taken(scene, finder, "gripper", views(np.random.default_rng(2), 12))


def moved(pairs: list[Pair], shifts: np.ndarray) -> list[Pair]:
    """The same pictures, with other positions of the gripper, by (N, 3) meters."""
    others = [Pair(pair.gripper.copy(), pair.corners) for pair in pairs]
    for pair, shift in zip(others, shifts, strict=True):
        pair.gripper[:3, 3] += shift
    return others


def views(generator: np.random.Generator, count: int, turning: float = 25.0) -> list[np.ndarray]:
    """Poses (4, 4) of the board in the camera's frame, as a person might choose: around 0.35 m away, tilted."""
    poses = []
    for _ in range(count):
        middle = pose(tuple(generator.uniform(-turning, turning, 3)), (0, 0, 0))
        middle[:3, 3] = generator.uniform((-0.03, -0.03, 0.3), (0.03, 0.03, 0.42))
        middle[:3, 3] -= middle[:3, :3] @ MIDDLE
        poses.append(middle)
    return poses


def taken(scene: RenderedBoard, finder: BoardFinder, mount: Mount, boards: list[np.ndarray]) -> list[Pair]:
    """Pairs of an arm that brings the board to those poses in the camera's frame."""
    pairs = []
    for board in boards:
        if mount == "gripper":
            camera = BOARD_ON_TABLE @ inverse(board)
            gripper = camera @ inverse(CAMERA_ON_GRIPPER)
            picture = scene.picture(camera, BOARD_ON_TABLE)
        else:
            placed = CAMERA_AT_BASE @ board
            gripper = placed @ inverse(BOARD_ON_GRIPPER)
            picture = scene.picture(CAMERA_AT_BASE, placed)
        if (corners := finder.find(picture)) is not None:
            pairs.append(Pair(gripper, corners))
    assert len(pairs) >= len(boards) - 2
    return pairs


@pytest.mark.parametrize(("mount", "camera"), [("gripper", CAMERA_ON_GRIPPER), ("base", CAMERA_AT_BASE)])
def test_the_cameras_place_is_recovered(
    scene: RenderedBoard, finder: BoardFinder, seen: list[Pair], mount: Mount, camera: np.ndarray
) -> None:
    pairs = seen if mount == "gripper" else taken(scene, finder, mount, views(np.random.default_rng(0), 16))
    found = calibrate_hand_eye(pairs, finder, CAMERA, mount)
    assert np.linalg.norm(found.camera[:3, 3] - camera[:3, 3]) * 1e3 < MAX_MM
    assert np.degrees(angle_between(found.camera, camera)) < MAX_DEGREES
    assert found.fit_pixels < 0.3 and found.held_out_pixels < 0.5
    assert found.held_out_mm < 2 and found.held_out_degrees < 0.5
    assert found.num_pairs == len(found.pair_pixels) == len(pairs)


def test_the_held_out_error_tells_of_an_arm_that_does_not_know_where_it_is(
    seen: list[Pair], finder: BoardFinder
) -> None:
    """Poses that are off by 3 mm: the error that is reported is of that size, and not the fit's smaller one."""
    pairs = moved(seen, np.random.default_rng(1).normal(0, 0.003, (len(seen), 3)))
    found = calibrate_hand_eye(pairs, finder, CAMERA, "gripper")
    assert 3 < found.held_out_mm < 12
    assert found.held_out_pixels > found.fit_pixels


def test_a_pair_that_was_misread_stands_out(seen: list[Pair], finder: BoardFinder) -> None:
    pairs = moved(seen, np.outer(np.arange(len(seen)) == 5, (0.03, 0, 0)))
    found = calibrate_hand_eye(pairs, finder, CAMERA, "gripper")
    assert np.argmax(found.pair_pixels) == 5
    assert found.pair_pixels[5] > 10 * np.median(found.pair_pixels)
    assert np.linalg.norm(found.camera[:3, 3] - CAMERA_ON_GRIPPER[:3, 3]) * 1e3 < 1, "one outlier does not spoil it"


def test_motion_without_turning_is_refused(scene: RenderedBoard, finder: BoardFinder) -> None:
    pairs = taken(scene, finder, "gripper", views(np.random.default_rng(3), 12, turning=0.5))
    with pytest.raises(HandEyeError, match=r"turned by at most \d\.\d degrees.*about different axes"):
        calibrate_hand_eye(pairs, finder, CAMERA, "gripper")


def test_turning_about_one_axis_is_refused(scene: RenderedBoard, finder: BoardFinder) -> None:
    boards = []
    for angle in np.linspace(-30, 30, 12):
        board = pose((0, 0, angle), (0, 0, 0.35))
        board[:3, 3] -= board[:3, :3] @ MIDDLE
        boards.append(board)
    pairs = taken(scene, finder, "gripper", boards)
    with pytest.raises(HandEyeError, match="about one axis alone"):
        calibrate_hand_eye(pairs, finder, CAMERA, "gripper")


def test_poses_that_do_not_belong_to_the_pictures_are_refused(seen: list[Pair], finder: BoardFinder) -> None:
    mixed = [Pair(a.gripper, b.corners) for a, b in zip(seen, [*seen[3:], *seen[:3]], strict=True)]
    with pytest.raises(HandEyeError, match=r"typically .* degrees apart"):
        calibrate_hand_eye(mixed, finder, CAMERA, "gripper")


def test_few_pairs_are_refused(finder: BoardFinder) -> None:
    with pytest.raises(HandEyeError, match="in 0 pairs; at least 8"):
        calibrate_hand_eye([], finder, CAMERA, "gripper")


def test_the_lens_is_recovered_from_pictures_of_the_board(scene: RenderedBoard, finder: BoardFinder) -> None:
    boards = views(np.random.default_rng(5), 14, turning=35)
    seen = [finder.find(scene.picture(inverse(board), np.eye(4))) for board in boards]
    camera, error, held_out = calibrate_camera([c for c in seen if c], finder, (HEIGHT, WIDTH))
    assert camera.focal == pytest.approx(CAMERA.focal, rel=0.01)
    assert camera.center == pytest.approx(CAMERA.center, abs=4)
    assert error < 0.3 and error <= held_out < 0.5


def test_views_from_one_direction_are_refused(scene: RenderedBoard, finder: BoardFinder) -> None:
    boards = views(np.random.default_rng(6), 10, turning=1)
    seen = [finder.find(scene.picture(inverse(board), np.eye(4))) for board in boards]
    with pytest.raises(ConfigError, match="from one direction"):
        calibrate_camera([c for c in seen if c], finder, (HEIGHT, WIDTH))
