"""Publication: the learner's weights to every policy worker, in line with training or in a lane of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vla3_plugin.telemetry.timeline import Timeline


class Publisher:
    """``background``: a snapshot is taken at once, and sent while training goes on; at most one is under way.

    ``published`` is called with each version that every policy worker serves.
    """

    def __init__(
        self,
        weight_plane: Any,
        learner: Any,
        published: Callable[[int], None],
        background: bool,
        timeline: Timeline,
        deadline_s: float,
    ) -> None:
        self.weight_plane, self.learner, self.published, self.timeline = weight_plane, learner, published, timeline
        self._lane = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publication") if background else None
        self._under_way: Future | None = None
        self._version, self.deadline_s = -1, deadline_s

    def publish(self, version: int) -> dict[str, float]:
        """Metrics of this publication, or in the background of the one before it."""
        if self._lane is None:
            return self._send(version)
        metrics = self.wait()
        self._version = version
        self.learner.snapshot(version)
        self._under_way = self._lane.submit(self._send, version)
        return metrics

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

    def close(self) -> None:
        if self._lane is not None:
            self._lane.shutdown(wait=True, cancel_futures=True)
