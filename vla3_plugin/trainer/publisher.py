"""Publication: the learner's weights to every policy worker, in line with training or in a lane of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from vla3_plugin.learner.weights import WeightError
from vla3_plugin.telemetry import clock
from vla3_plugin.telemetry.timeline import Timeline

_LOOK_S = 5.0  # how long an attempt runs before somebody asks whether a receiver has died
_ATTEMPTS = 3


class Publisher:
    """``background``: a version is sent while training goes on; at most one is under way. ``snapshots``: the learner
    copies its weights first, because it moves on before they are sent, or in the middle of a step. ``trained_only``:
    what training does not change is sent once, and again after a receiver was restarted.

    ``published`` is called with each version that every policy worker serves; ``failed`` with what went wrong in the
    background, since nobody may be waiting for it.
    """

    def __init__(
        self,
        weight_plane: Any,
        learner: Any,
        published: Callable[[int], None],
        failed: Callable[[BaseException], None],
        background: bool,
        snapshots: bool,
        timeline: Timeline,
        deadline_s: float,
        trained_only: bool = True,
    ) -> None:
        self.weight_plane, self.learner, self.timeline = weight_plane, learner, timeline
        self.published, self.failed, self.trained_only = published, failed, trained_only
        self.background, self.snapshots, self.deadline_s = background, snapshots or background, deadline_s
        # the supervisor's: see there
        self.recovered_since: Callable[[float, float], bool] = lambda start, asked: False
        self._lane = threading.RLock()  # one publication at a time
        self._repeating = threading.Lock()
        self._under_way: Future | None = None
        self._version = -1
        self._served = -1  # the newest version that all policy workers got
        self.moved = False  # the learner's weights are no longer those it published

    def publish(self, version: int) -> dict[str, float]:
        """Metrics of this publication, or in the background of the one before it."""
        metrics = self.wait()
        with self._lane:
            if self.snapshots:
                self.learner.snapshot(version)
            self._version, self.moved = version, False
        if not self.background:
            return self._send(version)
        self._under_way = Future()
        _start("publication", self._run, version, self._under_way)
        return metrics

    def learner_moves(self) -> None:
        """From here to the next publication the learner is in the middle of a step."""
        with self._lane:
            self.moved = True

    def republish(self) -> None:
        """Send the current version once more, on a thread, for a policy worker that was restarted.

        Where that is not possible, because the learner has moved on and keeps no copy, the next version comes soon.
        """
        if not self._repeating.acquire(blocking=False):
            return

        def repeat() -> None:
            try:
                with self._lane:
                    if self._served == self._version >= 0 and (self.snapshots or not self.moved):
                        self._send(self._version, anew=True)
            except BaseException as error:
                self.failed(error)
            finally:
                self._repeating.release()

        _start("republication", repeat)

    def _run(self, version: int, done: Future) -> None:
        try:
            done.set_result(self._send(version))
        except BaseException as error:
            done.set_exception(error)
            self.failed(error)

    def _send(self, version: int, anew: bool = False) -> dict[str, float]:
        """``anew``: somebody holds nothing yet."""
        with self._lane:
            start = clock.now()
            metrics = self._until_received(version, anew or not self.trained_only)
            end = clock.now()
            self.timeline.add("publication", "publish", start, end, version=version)
            self._served = version
        self.published(version)
        return metrics | {"timing_s/publish": end - start}

    def _until_received(self, version: int, everything: bool) -> dict[str, float]:
        """Send ``version``; anew when a receiver died meanwhile or could not verify it (it keeps the version it has).

        An attempt that hangs on a dead receiver is left behind.
        """
        for last in [False] * (_ATTEMPTS - 1) + [True]:
            if everything:
                self.learner.publish_all()
            everything = True  # whoever died has lost all of it
            start, attempt = time.monotonic(), Future[dict[str, float]]()
            _start("send", _resolve, attempt, lambda: dict(self.weight_plane.update_weights(version) or {}))
            while True:
                wait([attempt], timeout=_LOOK_S)
                if attempt.done() and attempt.exception() is None:
                    return attempt.result()
                refused = attempt.done() and isinstance(attempt.exception(), WeightError)
                asked = time.monotonic() if attempt.done() else start
                if not last and (refused or self.recovered_since(start, asked)):
                    break
                if attempt.done():
                    return attempt.result()  # raises
                if time.monotonic() - start > self.deadline_s:
                    raise TimeoutError(
                        f"version {version} was not received by all policy workers within vla3.deadline_s = "
                        f"{self.deadline_s} s"
                    )
        raise AssertionError("the last attempt returns or raises")

    def wait(self) -> dict[str, float]:
        """Until nothing is under way; raises what went wrong with it."""
        if self._under_way is None:
            return {}
        with self.timeline.span("step", "wait:weights"):
            try:
                metrics = self._under_way.result(timeout=self.deadline_s)
            except TimeoutError:
                if self._under_way.done():  # its own
                    raise
                raise TimeoutError(
                    f"version {self._version} was not served by all policy workers within vla3.deadline_s = "
                    f"{self.deadline_s} s after it was sent"
                ) from None
        self._under_way = None
        return metrics


def _start(name: str, target: Callable[..., None], *args: Any) -> None:
    # a daemon: one that hangs must not keep the process from ending
    threading.Thread(target=target, args=args, name=name, daemon=True).start()


def _resolve(future: Future, function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
