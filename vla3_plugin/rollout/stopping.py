"""A run that is asked to stop ends at the next safe point, with a checkpoint: how it is asked, and what ends it."""

from __future__ import annotations

import time
from pathlib import Path

from vla3_plugin.supervise import LISTENS_FILE, STOP_FILE

_PERIOD_S = 0.25  # between two looks at the file


class Stopped(Exception):
    """Somebody asked the run to stop, and this is a safe point."""


class StopRequest:
    """True once ``run_dir/stop`` exists. A file, so that the supervisor, a job script or a person can make it."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._next, self._found = run_dir / STOP_FILE, 0.0, False

    def listen(self) -> None:
        """From now on somebody looks, and what was trained would be saved: there is reason to wait for the run."""
        self._path.with_name(LISTENS_FILE).touch()

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._found and now >= self._next:
            self._found, self._next = self._path.exists(), now + _PERIOD_S
        return self._found
