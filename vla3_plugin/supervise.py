"""The process that a user's shell talks to: it starts the run in a child, restarts it, stops it and cleans up.

The child is a fork taken before Ray starts. Whatever happens to it, a kill included, this process is there to end what
it left behind, and to start it again from its newest checkpoint where ``vla3.max_restarts`` allows that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

STOP_FILE = "stop"  # in the run directory: asks the trainer to end, with a checkpoint
TAG, SWITCH = "VLA3_RUN_TAG", "VLA3_SUPERVISE"  # SWITCH=0: run in this process, for debuggers
GRACE_S = 25.0  # from the first signal to the hard end
_HARD_S = 8.0  # from asking the child's process to end to killing it
_LEFT_S = 5.0  # for Ray's processes to end by themselves
_REFUSED = 2  # the exit status of a run that could not start: starting it again would not help
_PR_SET_PDEATHSIG = 1


def supervise(config: DictConfig) -> None:
    """Returns in the child, where the run goes on; in the calling process it ends with the run's exit status."""
    stop = Path(config.vla3.run_dir) / STOP_FILE
    stop.unlink(missing_ok=True)
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "fork"):
        return
    os.environ[TAG] = secrets.token_hex(8)
    began, status, signalled = time.time(), 0, None
    for attempt in range(int(config.vla3.max_restarts) + 1):
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _become_child()
            if attempt and _has_checkpoint(Path(config.trainer.default_local_dir), began):
                config.trainer.resume_mode = "auto"
            return
        status, signalled = _Watch(child, stop).until_it_ends()
        left = _sweep(os.environ[TAG], wait_s=_LEFT_S)
        if left:
            print(f"vla3: ended {left} processes that the run had left behind", file=sys.stderr, flush=True)
        if status in (0, _REFUSED) or signalled is not None or attempt == config.vla3.max_restarts:
            break
        print(
            f"vla3: the run ended with status {status}; restart {attempt + 1} of vla3.max_restarts = "
            f"{config.vla3.max_restarts}",
            file=sys.stderr,
            flush=True,
        )
    stop.unlink(missing_ok=True)
    os._exit(status if signalled is None else 128 + signalled)  # hydra's and ray's exit handlers are the child's


def _become_child() -> None:
    os.setsid()  # a terminal's interrupt goes to the supervisor alone, which asks for an orderly end
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError, AttributeError):  # not Linux: then an orphan runs on
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _has_checkpoint(root: Path, since: float) -> bool:
    """Whether this run has saved: a directory may hold an older run's checkpoints, which it did not resume from."""
    return any(path.stat().st_mtime >= since for path in root.glob("global_step_*"))


class _Watch:
    """Waits for the child and passes a user's wish to stop on to it, first politely."""

    def __init__(self, child: int, stop: Path) -> None:
        self.child, self.stop = child, stop
        self.signalled: int | None = None
        self.hard_at = float("inf")
        self.kill_at = float("inf")

    def until_it_ends(self) -> tuple[int, int | None]:
        """(the child's exit status, the signal that this process got)."""
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            while True:
                pid, status = os.waitpid(self.child, os.WNOHANG)
                if pid:
                    code = os.waitstatus_to_exitcode(status)
                    return (code if code >= 0 else 128 - code), self.signalled
                self._hurry()
                time.sleep(0.2)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if self.signalled is None:
            self.signalled, self.hard_at = number, now + GRACE_S
            with contextlib.suppress(OSError):
                self.stop.touch()
            text = f"vla3: stopping at the next safe point; at once after {GRACE_S:g} s, or if asked again"
            print(text, file=sys.stderr, flush=True)
        else:
            self.hard_at = now

    def _hurry(self) -> None:
        now = time.monotonic()
        if now >= self.hard_at:
            self.hard_at, self.kill_at = float("inf"), now + _HARD_S
            os.kill(self.child, signal.SIGTERM)
        if now >= self.kill_at:
            self.kill_at = float("inf")
            os.kill(self.child, signal.SIGKILL)


def _sweep(tag: str, wait_s: float) -> int:
    """End every process that carries ``tag`` in its environment, this one apart; how many had to be ended."""
    import psutil

    def marked() -> list[Any]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    if process.environ().get(TAG) == tag:
                        found.append(process)
        return found

    deadline = time.monotonic() + wait_s
    while (left := marked()) and time.monotonic() < deadline:
        time.sleep(0.2)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(left)
