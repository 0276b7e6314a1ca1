"""Rollout videos: mp4 (H.264, playable in a browser) through the ffmpeg binary that imageio-ffmpeg's wheel carries.

Frames are scaled and bordered one at a time on their way to ffmpeg, so that a long video costs no memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

MIN_SIDE = 256  # pixels; simulators render at 64 to 128 for the policy, which is too small to look at
# Okabe and Ito's bluish green and vermillion: told apart with any colour vision.
SUCCESS_COLOUR = (0, 158, 115)
FAILURE_COLOUR = (213, 94, 0)
_EMPTY = (24, 24, 24)
_COLOURS = {True: SUCCESS_COLOUR, False: FAILURE_COLOUR, None: _EMPTY}
_NAME = re.compile(r"(?P<task>.+)-ep(?P<episode>\d+)-(?P<outcome>success|failure)$")


class VideoError(RuntimeError):
    """A video that could not be written."""


def video_path(run_dir: Path | str, step: int, task: str, episode_id: int, success: bool) -> Path:
    """``videos/step-000040/<task>-ep<episode>-success.mp4``: the report reads step, task and outcome from the name."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", task).strip("-").lower()[:60] or "task"
    outcome = "success" if success else "failure"
    return Path(run_dir) / "videos" / f"step-{step:06d}" / f"{slug}-ep{episode_id}-{outcome}.mp4"


def parse_video_path(path: Path) -> tuple[int, str, int, bool] | None:
    """(step, task slug, episode id, success) of a ``video_path``; None for a file named otherwise."""
    folder, name = re.fullmatch(r"step-(\d+)", path.parent.name), _NAME.fullmatch(path.stem)
    if folder is None or name is None:
        return None
    return int(folder[1]), name["task"], int(name["episode"]), name["outcome"] == "success"


def _check_frames(frames: np.ndarray, name: str) -> np.ndarray:
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8:
        kind = frames.dtype if isinstance(frames, np.ndarray) else type(frames).__name__
        raise VideoError(f"{name}: {kind}, expected a numpy array of uint8 (0 to 255)")
    if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise VideoError(f"{name}: shape {list(frames.shape)}, expected [T, H, W, 3] with at least one frame")
    return frames


def _enlarge(frame: np.ndarray) -> np.ndarray:
    """Nearest-neighbour, by the smallest whole factor that brings the shorter side to ``MIN_SIDE``."""
    factor = max(1, math.ceil(MIN_SIDE / min(frame.shape[:2])))
    return frame.repeat(factor, axis=0).repeat(factor, axis=1) if factor > 1 else frame


def _border(frame: np.ndarray, colour: tuple[int, int, int], thickness: int) -> np.ndarray:
    """A border around the image; nothing of it is covered."""
    height, width = frame.shape[0] + 2 * thickness, frame.shape[1] + 2 * thickness
    framed = np.empty((height, width, 3), np.uint8)
    framed[:] = colour
    framed[thickness:-thickness, thickness:-thickness] = frame
    return framed


def _even(frame: np.ndarray) -> np.ndarray:
    """H.264 with 4:2:0 colour needs even sides: repeat the last row or column."""
    height, width = frame.shape[:2]
    if height % 2 or width % 2:
        frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return frame


def _encode(path: Path | str, frames: Callable[[], Iterator[np.ndarray]], fps: float) -> Path:
    import imageio_ffmpeg

    path = Path(path)
    if path.suffix != ".mp4":
        raise VideoError(f"path: {path.name!r}, expected a name that ends in .mp4")
    if not fps > 0 or not math.isfinite(fps):
        raise VideoError(f"fps: {fps}, expected a number above 0")
    try:
        imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise VideoError(
            "no ffmpeg: the wheel of imageio-ffmpeg for this platform carries none; install ffmpeg with the system's "
            "package manager, or set IMAGEIO_FFMPEG_EXE to a binary"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.tmp.mp4")  # renamed when complete: no half-written video
    writer = None
    try:
        for frame in frames():
            frame = _even(frame)
            if writer is None:
                writer = imageio_ffmpeg.write_frames(
                    str(unfinished),
                    (frame.shape[1], frame.shape[0]),
                    fps=fps,
                    codec="libx264",
                    quality=7,
                    macro_block_size=2,
                    ffmpeg_log_level="error",
                    output_params=["-movflags", "+faststart", "-threads", "2"],
                )
                writer.send(None)
            writer.send(np.ascontiguousarray(frame))
        assert writer is not None  # _check_frames: at least one frame
        writer.close()
        if not unfinished.exists() or unfinished.stat().st_size == 0:
            raise VideoError(f"ffmpeg wrote nothing to {path}")
        os.replace(unfinished, path)
    except OSError as error:
        raise VideoError(f"{path}: {error}") from error
    finally:
        if writer is not None:
            writer.close()
        unfinished.unlink(missing_ok=True)
    return path


def write_video(path: Path | str, frames: np.ndarray, fps: float, success: bool | None = None) -> Path:
    """Write one episode's frames, uint8 [T, H, W, 3], upright RGB; ``success`` draws a border in the outcome's colour.

    Raises:
        VideoError: frames of another type or shape, no ffmpeg, or a failed write; nothing is left at ``path`` then.
    """
    _check_frames(frames, "frames")
    if success is None:
        return _encode(path, lambda: (_enlarge(f) for f in frames), fps)
    return _encode(path, lambda: (_border(_enlarge(f), _COLOURS[success], thickness=8) for f in frames), fps)


def write_grid(
    path: Path | str,
    episodes: Sequence[np.ndarray],
    fps: float,
    successes: Sequence[bool | None] | None = None,
    columns: int | None = None,
) -> Path:
    """Tile several episodes [T_i, H, W, 3] of one image size into one video as long as the longest.

    An episode that has ended keeps its last frame, dimmed. ``columns`` defaults to a near-square grid; empty cells are
    dark.

    Raises:
        VideoError: no episode, images of different sizes, outcomes that do not match, or a failed write.
    """
    if not episodes:
        raise VideoError("episodes: none given, expected at least one array of frames")
    for i, episode in enumerate(episodes):
        _check_frames(episode, f"episodes[{i}]")
        if episode.shape[1:] != episodes[0].shape[1:]:
            raise VideoError(
                f"episodes[{i}]: images of {list(episode.shape[1:3])}, expected {list(episodes[0].shape[1:3])} as in "
                "episodes[0]; one grid shows one image size"
            )
    outcomes = list(successes) if successes is not None else [None] * len(episodes)
    if len(outcomes) != len(episodes):
        raise VideoError(f"successes: {len(outcomes)} outcomes for {len(episodes)} episodes")
    if columns is not None and columns < 1:
        raise VideoError(f"columns: {columns}, expected at least 1")
    columns = columns or math.ceil(math.sqrt(len(episodes)))
    return _encode(path, lambda: _grid_frames(episodes, outcomes, columns), fps)


def _grid_frames(episodes: Sequence[np.ndarray], outcomes: Sequence[bool | None], columns: int) -> Iterator[np.ndarray]:
    for t in range(max(len(e) for e in episodes)):
        cells = []
        for episode, success in zip(episodes, outcomes, strict=True):
            cell = _enlarge(episode[min(t, len(episode) - 1)])
            if t >= len(episode):
                cell = (cell * 0.55).astype(np.uint8)
            cells.append(_border(cell, _COLOURS[success], thickness=4))
        cells += [np.full_like(cells[0], _EMPTY[0])] * (-len(cells) % columns)
        rows = [np.concatenate(cells[i : i + columns], axis=1) for i in range(0, len(cells), columns)]
        yield np.concatenate(rows, axis=0)
