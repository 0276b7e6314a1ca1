"""Signs of life that need neither Ray nor a clock: a thread of each watched process touches a file once a second.

A process that is stopped, or whose interpreter hangs, touches nothing. The file's time is a count, set without writing
a byte, so that neither a full disk nor a clock that jumps can pass for a death.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

_PERIOD_S = 1.0
_FOLDER = ".pulse"


class Pulse:
    """Beats as ``name`` in ``run_dir`` until ``close``, or until the process ends."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self._path, self._closed = run_dir / _FOLDER / name, threading.Event()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        count = 0
        while not self._closed.wait(_PERIOD_S):
            count += 1
            with contextlib.suppress(OSError):  # of the file system: the listener sees no file then, and does not judge
                os.utime(self._path, ns=(count, count))


class PulseListener:
    """Looks at every pulse of a run. Silence is counted in looks, so a listener that was suspended itself (a laptop's
    lid, Ctrl-Z) does not take its own absence for others' silence.
    """

    def __init__(self, run_dir: Path, period_s: float, silence_s: float) -> None:
        """``period_s``: between two looks. ``silence_s``: without a sign of life, after which a process is hung."""
        self._folder, self.silence_s, self._allowed = run_dir / _FOLDER, silence_s, max(1, round(silence_s / period_s))
        self._seen: dict[str, tuple[int, int]] = {}  # name -> its last sign, and the looks since then
        self.clear()

    def clear(self) -> None:
        """Forget processes that have ended."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def silent(self) -> str | None:
        """The name of a process that is hung, if one is."""
        before, self._seen = self._seen, {}
        for path in self._folder.glob("*"):
            with contextlib.suppress(OSError):
                sign = path.stat().st_mtime_ns
                last, looks = before.get(path.name, (sign, 0))
                self._seen[path.name] = (sign, looks + 1 if sign == last else 0)
        return next((name for name, (_, looks) in self._seen.items() if looks > self._allowed), None)
