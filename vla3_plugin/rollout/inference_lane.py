"""The inference lane of a policy worker: the one thread that runs the policy, and lets weights in between two batches.

``DirectLane`` answers each request as a batch of its own, in order: synchronous interaction, where a request already is
the whole batch. ``BatchedLane`` puts a dynamic batcher in front: asynchronous interaction.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from vla3_plugin.policies.base import NoiseKey
from vla3_plugin.policies.serve import ServedPolicy
from vla3_plugin.rollout.batcher import Batcher, BatcherStats
from vla3_plugin.rollout.denoising import LANE, make_runner
from vla3_plugin.telemetry.timeline import Timeline

Arrays = dict[str, np.ndarray]


class DirectLane:
    def __init__(self, served: ServedPolicy, timeline: Timeline) -> None:
        self.served, self.timeline = served, timeline
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=LANE)

    async def act(self, inputs: Arrays, noise_keys: Sequence[NoiseKey], mode: str) -> Arrays:
        """See ``interaction.Act``."""

        def run() -> Arrays:
            with self.timeline.span(LANE, "batch", size=len(noise_keys), version=self.served.version):
                return self.served.act(inputs, noise_keys, mode)

        return await asyncio.get_running_loop().run_in_executor(self.thread, run)

    async def between_batches(self, change: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self.thread, change)

    def drain_stats(self) -> BatcherStats | None:
        return None

    def close(self, error: BaseException) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


class BatchedLane:
    """``stage``: keys of ``config.InteractionStage``. ``deadline_s``: how long a full queue may hold a sender."""

    def __init__(
        self, served: ServedPolicy, timeline: Timeline, stage: dict[str, Any], deadline_s: float = 300
    ) -> None:
        self.served, self.timeline, self.deadline_s = served, timeline, deadline_s
        self.batcher = Batcher(stage["max_batch_size"], stage["max_wait_ms"], stage["max_queue"])
        self.runner = make_runner(stage["batching"], served, self.batcher, stage["max_batch_size"], timeline)
        self._changes: deque[tuple[Callable[[], None], Future]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=LANE, daemon=True)
        self._thread.start()

    async def act(self, inputs: Arrays, noise_keys: Sequence[NoiseKey], mode: str) -> Arrays:
        """Each row is a request of its own: rows of one call may be answered in different batches."""
        rows = [({name: value[i] for name, value in inputs.items()}, key) for i, key in enumerate(noise_keys)]
        if self.batcher.has_room(len(rows)):
            tickets = self.batcher.submit(rows, mode)
        else:  # the sender is held back, not this process
            tickets = await asyncio.to_thread(self.batcher.submit, rows, mode, self.deadline_s)
        answers = [await asyncio.wrap_future(ticket.future) for ticket in tickets]
        return {name: np.stack([answer[name] for answer in answers]) for name in answers[0]}

    async def between_batches(self, change: Callable[[], None]) -> None:
        done: Future = Future()
        self._changes.append((change, done))
        self.batcher.interrupt()
        await asyncio.wrap_future(done)

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._serve_once()
        except BaseException as error:  # whoever waits must hear of it
            self._closed = True
            self.batcher.close(error)
            for _, done in self._changes:
                done.set_exception(error)
            raise

    def _serve_once(self) -> None:
        while self._changes:
            self.runner.drain()  # a denoising chain keeps the weights it began with
            change, done = self._changes.popleft()
            try:
                change()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
        self.runner.run_once()

    def drain_stats(self) -> BatcherStats | None:
        return self.batcher.drain_stats()

    def close(self, error: BaseException) -> None:
        self._closed = True
        self.batcher.close(error)
