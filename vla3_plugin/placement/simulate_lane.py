"""Inference lanes on the virtual clock: the decisions are ``rollout.batcher.BatchRule``'s, the time is the policy's.

The counterparts of ``rollout.inference_lane`` and ``rollout.denoising``: one batch a call, a batch a whole chain, or
a batch a denoising step. New weights enter between two batches.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from vla3_plugin.placement.simulate_clock import Clock, Device, Event, Process
from vla3_plugin.placement.simulate_model import Workload
from vla3_plugin.rollout.batcher import BatchRule, worth_joining

_SOON = 1e-9  # a sleep that moves the clock, where rounding leaves a wait of nothing


class Call:
    """Rows that an interaction loop asks for at once; ``version`` is the oldest that answered one of them."""

    __slots__ = ("rows", "missing", "answered", "version")

    def __init__(self, clock: Clock, rows: int) -> None:
        self.rows = self.missing = rows
        self.answered = Event(clock)
        self.version = sys.maxsize

    def answer(self, version: int) -> None:
        self.version = min(self.version, version)
        self.missing -= 1
        if not self.missing:
            self.answered.set()


class Request:
    """One row, as ``BatchRule`` wants it; nobody cancels here."""

    __slots__ = ("call", "kind", "arrival", "order", "overtaken", "steps")

    def __init__(self, call: Call) -> None:
        self.call, self.kind = call, "train"
        self.arrival, self.order, self.overtaken, self.steps = 0.0, 0, 0, 0

    def claim(self) -> bool:
        return True


class Lane:
    """One replica. ``batches`` counts trips through the network and ``rows`` their requests, whole chains or steps."""

    def __init__(self, clock: Clock, work: Workload, device: Device) -> None:
        self.clock, self.work, self.device, self.policy = clock, work, device, work.policy
        self.version = 0
        self.batches = self.rows = 0
        self.changes: deque[tuple[int, Event]] = deque()
        self.wake = Event(clock)
        clock.start(self.serve())

    def submit(self, call: Call) -> None:
        raise NotImplementedError

    def serve(self) -> Process:
        raise NotImplementedError

    def swap(self, version: int) -> Event:
        """Take in ``version`` between two batches; the event says when it serves."""
        done = Event(self.clock)
        self.changes.append((version, done))
        self.wake.set()
        return done

    def _change(self) -> Process:
        while self.changes:
            version, done = self.changes.popleft()
            yield self.policy.sync_ms / 1e3
            self.version = version
            done.set()

    def _sleep(self, seconds: float | None = None) -> Event:
        self.wake = Event(self.clock)
        if seconds is not None:
            self.clock.call(max(seconds, _SOON), self.wake.set)
        return self.wake

    def _network(self, ms: float, rows: int) -> Process:
        self.batches += 1
        self.rows += rows
        yield from self.device.use((ms + self.work.host.batch_ms) / 1e3, "rollout")


class DirectLane(Lane):
    """Each call is a batch of its own, in order."""

    def __init__(self, clock: Clock, work: Workload, device: Device) -> None:
        self.calls: deque[Call] = deque()
        super().__init__(clock, work, device)

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        self.wake.set()

    def serve(self) -> Process:
        while True:
            yield from self._change()
            if not self.calls:
                yield self._sleep()
                continue
            call, version = self.calls.popleft(), self.version
            yield from self._network(self.policy.inference_ms(call.rows), call.rows)
            for _ in range(call.rows):
                call.answer(version)


class BatchedLane(Lane):
    """Batches as the rule makes them, each kept together from its first denoising step to its last."""

    def __init__(self, clock: Clock, work: Workload, device: Device) -> None:
        stage = work.schedule
        # senders are held back by their own closed loop long before a queue of this length
        self.rule = BatchRule(stage.max_batch_size, stage.max_wait_ms, max_queue=max(1 << 20, stage.max_batch_size))
        super().__init__(clock, work, device)

    def submit(self, call: Call) -> None:
        if self.rule.append([Request(call) for _ in range(call.rows)], "train", self.clock.now):
            self.wake.set()

    def serve(self) -> Process:
        while True:
            yield from self._change()
            batch = yield from self._take()
            if not batch:
                continue
            version = self.version
            yield from self._network(self.policy.inference_ms(len(batch)), len(batch))
            for request in batch:
                request.call.answer(version)

    def _take(self) -> Any:
        """A batch, or nothing when there is a change to make first or it is not time yet."""
        batch = self.rule.fire(self.clock.now)
        if not batch:
            due = self.rule.due_in(self.clock.now)
            yield self._sleep(None if due == float("inf") else due)
        return batch


class StepJoinLane(BatchedLane):
    """Requests join and leave between denoising steps, by the rule of ``rollout.denoising.StepJoin``."""

    join_share = 0.25

    def serve(self) -> Process:
        running: list[Request] = []
        while True:
            while self.changes and running:  # a chain keeps the weights it began with
                running = yield from self._step(running)
            yield from self._change()
            room = self.work.schedule.max_batch_size - len(running)
            if not running:
                joined = yield from self._take()
                if not joined:
                    continue
            elif worth_joining(self.rule.depth, room, len(running), self.join_share):
                joined = self.rule.join(room, self.clock.now)
            else:
                joined = []
            while joined:
                yield from self.device.use(self.policy.prefix_ms(len(joined)) / 1e3, "rollout")
                running += joined
                room = self.work.schedule.max_batch_size - len(running)
                joined = self.rule.join(room, self.clock.now)
            running = yield from self._step(running)

    def _step(self, running: list[Request]) -> Any:
        version = self.version
        yield from self._network(self.policy.step_ms(len(running)), len(running))
        for request in running:
            request.steps += 1
            if request.steps == self.policy.denoising_steps:
                request.call.answer(version)
        return [request for request in running if request.steps < self.policy.denoising_steps]


def make_lane(clock: Clock, work: Workload, device: Device) -> Lane:
    if not work.schedule.interaction:
        return DirectLane(clock, work, device)
    kind = StepJoinLane if work.schedule.batching == "step_join" else BatchedLane
    return kind(clock, work, device)
