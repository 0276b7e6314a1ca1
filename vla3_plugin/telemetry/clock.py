"""One clock for all processes of a run on one machine, which nobody can set: spans of different processes compare."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

ANCHOR = "VLA3_CLOCK"  # in the environment: what the monotonic clock counts from, and in which life of the machine
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def _anchor() -> float:
    """Wall time at which the monotonic clock was 0: as the run's first process on this machine saw it."""
    boot = ""
    with contextlib.suppress(OSError):  # not Linux
        boot = _BOOT.read_text().strip()
    known, _, where = os.environ.get(ANCHOR, "").partition("@")
    with contextlib.suppress(ValueError):
        if known and where == boot:
            return float(known)
    found = time.time() - time.monotonic()
    os.environ[ANCHOR] = f"{found}@{boot}"  # for the processes that this one starts
    return found


_origin = _anchor()


def now() -> float:
    """Seconds since the epoch as of the run's start, steady: the clock may be set, this goes on."""
    return _origin + time.monotonic()
