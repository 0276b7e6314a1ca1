"""Videos are read back with imageio: frame count, size, colours."""

from __future__ import annotations

import imageio.v3 as iio
import numpy as np
import pytest

from vla3_plugin.telemetry import video
from vla3_plugin.telemetry.video import FAILURE_COLOUR, SUCCESS_COLOUR, VideoError, parse_video_path, video_path


def _frames(length: int, height: int, width: int) -> np.ndarray:
    """A flat grey that brightens, so that a frame's number can be read from its colour."""
    levels = np.linspace(40, 200, length).astype(np.uint8)
    return np.broadcast_to(levels[:, None, None, None], (length, height, width, 3)).copy()


def test_a_video_keeps_its_frames_in_order_and_its_rate(tmp_path):
    frames = _frames(9, 256, 300)
    path = video.write_video(tmp_path / "a.mp4", frames, fps=20)
    back = iio.imread(path)
    assert back.shape == (9, 256, 300, 3)
    np.testing.assert_allclose(back.mean(axis=(1, 2, 3)), frames.mean(axis=(1, 2, 3)), atol=4)
    assert iio.immeta(path)["fps"] == pytest.approx(20)


@pytest.mark.parametrize("size, shown", [((64, 64), (256, 256)), ((96, 128), (288, 384)), ((257, 301), (258, 302))])
def test_small_frames_are_enlarged_and_odd_sides_made_even(tmp_path, size, shown):
    path = video.write_video(tmp_path / "a.mp4", _frames(2, *size), fps=10)
    assert iio.imread(path).shape == (2, *shown, 3)


def test_enlarging_keeps_pixels_square_and_sharp(tmp_path):
    frames = np.zeros((3, 64, 64, 3), np.uint8)
    frames[:, :, 32:] = 255
    back = iio.imread(video.write_video(tmp_path / "a.mp4", frames, fps=10)).astype(int)
    assert back[:, :, :120].max() < 20 and back[:, :, 136:].min() > 235


@pytest.mark.parametrize("success, colour", [(True, SUCCESS_COLOUR), (False, FAILURE_COLOUR)])
def test_the_border_has_the_colour_of_the_outcome_and_covers_nothing(tmp_path, success, colour):
    path = video.write_video(tmp_path / "a.mp4", np.full((4, 64, 64, 3), 128, np.uint8), fps=10, success=success)
    back = iio.imread(path).astype(int)
    assert back.shape[1:3] == (272, 272), "8 pixels on each side of 256"
    np.testing.assert_allclose(back[:, 2:6, 20:-20].mean(axis=(0, 1, 2)), colour, atol=12)
    np.testing.assert_allclose(back[:, 20:-20, 20:-20].mean(axis=(0, 1, 2)), 128, atol=6)


def test_a_grid_shows_every_episode_until_the_longest_ends(tmp_path):
    episodes = [np.full((length, 64, 64, 3), level, np.uint8) for length, level in ((2, 200), (6, 100), (4, 60))]
    path = video.write_grid(tmp_path / "grid.mp4", episodes, fps=10, successes=[True, False, None], columns=2)
    back = iio.imread(path).astype(int)
    cell = 264
    assert back.shape == (6, 2 * cell, 2 * cell, 3)

    def level(t: int, row: int, column: int) -> float:
        inside = slice(row * cell + 20, (row + 1) * cell - 20), slice(column * cell + 20, (column + 1) * cell - 20)
        return float(back[(t, *inside)].mean())

    assert level(0, 0, 0) == pytest.approx(200, abs=6)
    assert level(5, 0, 0) == pytest.approx(110, abs=6), "an episode that has ended stays, dimmed"
    assert level(5, 0, 1) == pytest.approx(100, abs=6)
    assert level(0, 1, 0) == pytest.approx(60, abs=6)
    assert level(0, 1, 1) == pytest.approx(24, abs=6), "an empty cell is dark"


@pytest.mark.parametrize(
    "frames, message",
    [
        (np.zeros((2, 8, 8, 3), np.float32), "float32, expected a numpy array of uint8"),
        (np.zeros((2, 3, 8, 8), np.uint8), r"shape \[2, 3, 8, 8\], expected \[T, H, W, 3\]"),
        (np.zeros((0, 8, 8, 3), np.uint8), "at least one frame"),
        ([1, 2], "list, expected a numpy array"),
    ],
)
def test_frames_of_another_type_or_shape_are_refused(tmp_path, frames, message):
    with pytest.raises(VideoError, match=message):
        video.write_video(tmp_path / "a.mp4", frames, fps=10)
    assert list(tmp_path.iterdir()) == []


def test_grids_and_arguments_that_make_no_sense_are_refused(tmp_path):
    one, other = _frames(2, 64, 64), _frames(2, 64, 96)
    with pytest.raises(VideoError, match=r"episodes\[1\]: images of \[64, 96\]"):
        video.write_grid(tmp_path / "a.mp4", [one, other], fps=10)
    with pytest.raises(VideoError, match="2 outcomes for 1 episodes"):
        video.write_grid(tmp_path / "a.mp4", [one], fps=10, successes=[True, False])
    with pytest.raises(VideoError, match="none given"):
        video.write_grid(tmp_path / "a.mp4", [], fps=10)
    with pytest.raises(VideoError, match="fps: 0"):
        video.write_video(tmp_path / "a.mp4", one, fps=0)
    with pytest.raises(VideoError, match="ends in .mp4"):
        video.write_video(tmp_path / "a.gif", one, fps=10)


def test_a_failed_write_leaves_the_old_video_and_no_rest(tmp_path, monkeypatch):
    path = video.write_video(tmp_path / "a.mp4", _frames(3, 64, 64), fps=10)
    before = path.read_bytes()
    calls = []

    def fails_later(frame: np.ndarray) -> np.ndarray:
        calls.append(1)
        if len(calls) > 2:
            raise OSError("disk full")
        return frame

    monkeypatch.setattr(video, "_even", fails_later)
    with pytest.raises(VideoError, match="disk full"):
        video.write_video(path, _frames(5, 64, 64), fps=10)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_without_ffmpeg_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    import imageio_ffmpeg

    def none_found() -> str:
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", none_found)
    with pytest.raises(VideoError, match="IMAGEIO_FFMPEG_EXE"):
        video.write_video(tmp_path / "a.mp4", _frames(2, 64, 64), fps=10)


def test_the_name_of_a_video_tells_step_task_episode_and_outcome(tmp_path):
    path = video_path(tmp_path, 40, "Pick up the milk!", 7, success=False)
    assert path == tmp_path / "videos/step-000040/pick-up-the-milk-ep7-failure.mp4"
    assert parse_video_path(path) == (40, "pick-up-the-milk", 7, False)
    assert parse_video_path(tmp_path / "videos/step-000040/grid.mp4") is None
    assert parse_video_path(tmp_path / "videos/mine.mp4") is None
