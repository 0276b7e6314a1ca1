"""The process that a user's shell talks to: it starts the run in a child, restarts it, stops it and cleans up.

The child is a fork taken before Ray starts. Whatever happens to it, a kill included, this process is there to end what
it left behind, and to start it again from its newest checkpoint where ``vla3.max_restarts`` allows that.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from vla3_plugin.pulse import Pulse, PulseListener
from vla3_plugin.telemetry import clock  # noqa: F401  one clock for every process that starts from here

STOP_FILE = "stop"  # in the run directory: asks the trainer to end, with a checkpoint
LISTENS_FILE = ".listens"  # there too: the run has begun and looks for the stop file
LOCK_FILE = ".lock"  # there too: held by a run's supervisor and driver while one of them lives
TAG, SWITCH = "VLA3_RUN_TAG", "VLA3_SUPERVISE"  # SWITCH=0: run in this process, for debuggers
GRACE_S = 25.0  # from the first signal to the hard end
_HARD_S = 8.0  # from asking the child's process to end to killing it
_LEFT_S = 5.0  # for Ray's processes to end by themselves
_LOCK_S = 15.0  # for the run before, which may be ending
_LOOK_S = 0.2  # between two looks at the child
_REFUSED = 2  # the exit status of a run that could not start: starting it again would not help
_PR_SET_PDEATHSIG = 1
_locked: set[Path] = set()  # by this process, which may start one run after another


def supervise(config: DictConfig) -> None:
    """Returns in the child, where the run goes on; in the calling process it ends with the run's exit status."""
    run_dir, checkpoints = Path(config.vla3.run_dir), Path(config.trainer.default_local_dir)
    stop = run_dir / STOP_FILE
    _lock(run_dir)
    stop.unlink(missing_ok=True)
    if os.environ.get(SWITCH) == "0" or not hasattr(os, "fork"):
        return
    os.environ[TAG] = secrets.token_hex(8)
    before, status, watch = _checkpoints(checkpoints), 0, _Watch(stop)
    for attempt in range(int(config.vla3.max_restarts) + 1):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        pulses = PulseListener(run_dir, config.vla3.heartbeat_s)
        watch.listens.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            watch.forget()
            _become_child()
            Pulse(run_dir, "driver")
            # what this run has saved, and not what an older one has that it did not resume from
            if attempt and _checkpoints(checkpoints) - before:
                config.trainer.resume_mode = "auto"
            return
        pulses.start()
        status = watch.until_it_ends(child, pulses)
        left = _sweep(os.environ[TAG], wait_s=_LEFT_S)
        pulses.close()
        if left:
            _say(f"ended {left} processes that the run had left behind")
        if status in (0, _REFUSED) or watch.signalled is not None or attempt == config.vla3.max_restarts:
            break
        restarts = f"restart {attempt + 1} of vla3.max_restarts = {config.vla3.max_restarts}"
        _say(f"the run ended with status {status}; {restarts}")
    stop.unlink(missing_ok=True)
    # hydra's and ray's exit handlers are the child's
    os._exit(status if watch.signalled is None else 128 + watch.signalled)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # who listened has gone: a closed terminal, a ``tee`` that was interrupted too
        print(f"vla3: {text}", file=sys.stderr, flush=True)


def _lock(run_dir: Path) -> None:
    """Refuse a second run in the same directory: each would clear away what the other is about to save."""
    if run_dir in _locked:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    handle = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)  # closed when its last process ends
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locked.add(run_dir)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                _say(f"vla3.run_dir: another run is under way in {run_dir}; stop it first, or name another directory")
                raise SystemExit(_REFUSED) from None
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return


def _become_child() -> None:
    os.setsid()  # a terminal's interrupt goes to the supervisor alone, which asks for an orderly end
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError, AttributeError):  # not Linux: then an orphan runs on
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _checkpoints(root: Path) -> set[tuple[str, int, int]]:
    """Those below ``root``, one that was replaced told from the one before; no clock is asked."""
    return {(path.name, (at := path.stat()).st_ino, at.st_mtime_ns) for path in root.glob("global_step_*")}


class _Watch:
    """Waits for the child and passes a user's wish to stop on to it, first politely.

    It hears signals from its making on, also between two children and while leftovers are ended.
    """

    def __init__(self, stop: Path) -> None:
        self.stop, self.listens = stop, stop.with_name(LISTENS_FILE)
        self.signalled: int | None = None  # the first signal that this process got
        self.hard_at = self.kill_at = float("inf")
        self._before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_signal)

    def forget(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def until_it_ends(self, child: int, pulses: PulseListener) -> int:
        """The child's exit status. It is killed when it, or the trainer that it started, shows no sign of life."""
        killed = False
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            self._hurry(child)
            if pulses.silent is not None and not killed:
                _say(f"the {pulses.silent} gave no sign of life for vla3.heartbeat_s = {pulses.silence_s:g} s")
                os.kill(child, signal.SIGKILL)
                killed = True
            time.sleep(_LOOK_S)

    def _on_signal(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if self.signalled is None:
            begun = self.listens.exists()
            self.signalled, self.hard_at = number, now + GRACE_S * begun
            with contextlib.suppress(OSError):
                self.stop.touch()
            if begun:
                _say(f"stopping at the next safe point; at once after {GRACE_S:g} s, or if asked again")
            else:
                _say("stopping at once: the run was still starting")
        else:
            self.hard_at = now

    def _hurry(self, child: int) -> None:
        now = time.monotonic()
        if now >= self.hard_at:
            self.hard_at, self.kill_at = float("inf"), now + _HARD_S
            os.kill(child, signal.SIGTERM)
        if now >= self.kill_at:
            self.kill_at = float("inf")
            os.kill(child, signal.SIGKILL)


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
