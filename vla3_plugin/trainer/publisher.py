"""Publication: the learner's weights to every policy worker, in line with training or in a lane of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vla3_plugin.telemetry.timeline import Timeline


class Publisher:
    """``background``: a snapshot is taken at once, and sent while training goes on; at most one is under way.

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
        timeline: Timeline,
        deadline_s: float,
    ) -> None:
        self.weight_plane, self.learner, self.timeline = weight_plane, learner, timeline
        self.published, self.failed = published, failed
        self.background, self.deadline_s = background, deadline_s
        self._under_way: Future | None = None
        self._version = -1

    def publish(self, version: int) -> dict[str, float]:
        """Metrics of this publication, or in the background of the one before it."""
        if not self.background:
            return self._send(version)
        metrics = self.wait()
        self.learner.snapshot(version)
        self._version, self._under_way = version, Future()
        # a daemon: one that hangs must not keep the process from ending
        threading.Thread(target=self._run, args=(version, self._under_way), name="publication", daemon=True).start()
        return metrics

    def _run(self, version: int, done: Future) -> None:
        try:
            done.set_result(self._send(version))
        except BaseException as error:
            done.set_exception(error)
            self.failed(error)

    def _send(self, version: int) -> dict[str, float]:
        start = time.time()
        metrics = dict(self.weight_plane.update_weights(version) or {})
        end = time.time()
        self.timeline.add("publication", "publish", start, end, version=version)
        self.published(version)
        return metrics | {"timing_s/publish": end - start}

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
