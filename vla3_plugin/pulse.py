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
_LEAST_S = 5.0  # silence that is never held against anybody
_FOLDER, _LISTENER = ".pulse", "listener"


def _mark(path: Path, count: int) -> None:
    second = 1_000_000_000 + 2 * count  # file systems know times to the nanosecond, or to two seconds
    os.utime(path, (second, second))


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
            with contextlib.suppress(OSError):
                _mark(self._path, count)


class PulseListener:
    """Looks at every pulse of a run, on a thread of its own: a file system may take its time.

    Who was never heard of is not missed; nor is anybody while the listener's own marks fail. Silence is counted in
    looks, so a listener that was suspended itself (a laptop's lid, Ctrl-Z) does not take its own absence for others'
    silence.
    """

    def __init__(self, run_dir: Path, silence_s: float) -> None:
        """``silence_s``: without a sign of life, after which a process is hung."""
        self._folder, self.silence_s = run_dir / _FOLDER, max(silence_s, _LEAST_S)
        self.silent: str | None = None  # the name of a process that is hung, if one is
        self._seen: dict[str, tuple[float, int | None]] = {}  # name -> its last sign, and the looks since then
        self._count, self._closed = 0, threading.Event()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Not the constructor's, because a fork comes in between: the child has no use for the thread."""
        threading.Thread(target=self._listen, name="pulses", daemon=True).start()

    def close(self) -> None:
        """Forget processes that have ended."""
        self._closed.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            self.silent = self.look()

    def look(self) -> str | None:
        """The name of a process that is hung, if one is; None also while that cannot be told."""
        before, self._seen, self._count = self._seen, {}, self._count + 1
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / _LISTENER).touch()
            _mark(self._folder / _LISTENER, self._count)
            for path in sorted(self._folder.iterdir()):
                with contextlib.suppress(FileNotFoundError):  # it has just ended
                    sign = path.stat().st_mtime
                    last, looks = before.get(path.name, (sign, None))
                    if sign != last:
                        looks = 0
                    self._seen[path.name] = (sign, None if looks is None else looks + 1)
        except OSError:
            self._seen = {}
        allowed = round(self.silence_s / _PERIOD_S)
        return next((name for name, (_, looks) in self._seen.items() if looks is not None and looks > allowed), None)
