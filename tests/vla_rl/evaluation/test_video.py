"""Videos: sizes, borders, captions, tiles, files that decode."""

import imageio.v2 as imageio
import numpy as np
import pytest

from vla_rl.evaluation.video import FAILURE_COLOR, SUCCESS_COLOR, decorate, tile, upscale, write_mp4


def frames(count=5, height=64, width=64, value=100):
    return np.full((count, height, width, 3), value, np.uint8)


def test_upscale_repeats_pixels_by_whole_factors():
    video = np.arange(2 * 3 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3, 3)
    large = upscale(video, 7)
    assert large.shape == (2, 9, 9, 3) and (large[:, ::3, ::3] == video).all() and (large[:, 2::3, 2::3] == video).all()
    assert upscale(frames(height=300), 256).shape == (5, 300, 64, 3)


def test_decorate_marks_the_outcome_and_keeps_the_picture():
    for success, color in ((True, SUCCESS_COLOR), (False, FAILURE_COLOR)):
        video = decorate(frames(), "put the red block into the bowl and push the bowl away", success, hold=3)
        assert video.shape == (8, 256 + 8 + 22, 264, 3)
        assert tuple(video[0, 0, 0]) == color and tuple(video[-1, 263, 263]) == color
        assert (video[:, 4:260, 4:260] == 100).all()
        assert video[0, 264:].min() < 100 < video[0, 264:].max() == 255, "a caption is drawn on white"
    assert decorate(frames()).shape == (5, 256, 256, 3)


def test_tile_holds_the_shorter_video():
    short, long = frames(2, value=10), frames(4, value=200)
    short[1] = 20
    both = tile([short, long])
    assert both.shape == (4, 64, 132, 3)
    assert both[0, 0, 0, 0] == 10 and both[3, 0, 0, 0] == 20 and both[3, 0, -1, 0] == 200
    assert (both[:, :, 64:68] == 255).all()
    assert tile([short, long, short], columns=2).shape == (4, 132, 132, 3)
    with pytest.raises(ValueError, match="one size"):
        tile([short, frames(width=32)])
    with pytest.raises(ValueError, match="at least one"):
        tile([])


def test_mp4_decodes_to_the_same_pictures(tmp_path):
    video = decorate(frames(6), "push", True)[:, :, :-1]  # An odd width.
    video[3:, 100:150, 100:150] = (250, 20, 20)
    path = write_mp4(tmp_path / "new/a.mp4", video, fps=10)
    with imageio.get_reader(path) as reader:
        decoded = np.stack([frame for frame in reader])
        assert reader.get_meta_data()["fps"] == 10
    assert decoded.shape == (6, 286, 264, 3)
    assert np.abs(decoded[:, :, :263].astype(int) - video).mean() < 4


def test_refuses_what_is_no_video(tmp_path):
    for wrong in (frames().astype(np.float32), frames()[0], frames(0)):
        with pytest.raises(ValueError, match="frames must be uint8"):
            write_mp4(tmp_path / "a.mp4", wrong, 10)
