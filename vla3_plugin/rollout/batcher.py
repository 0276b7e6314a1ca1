"""The dynamic batcher: requests of many shards in, batches of one inference lane out.

Any number of threads submit, one thread takes. The taker sleeps until a batch may fire and is woken by the event that
lets it; nothing polls. Requests leave in the order in which they came, except that a batch holds one kind only, so a
request of another kind may be passed over: by one batch at most.

``BatchRule`` holds all decisions and knows neither threads nor clocks, so that the placement planner runs the very same
code on a virtual clock; ``Batcher`` is that rule between threads.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla3_plugin.telemetry.metrics import histogram

KEY = "vla3.stages.interaction"
BATCH_SIZE_EDGES = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257)  # requests
WAIT_MS_EDGES = (0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
KEPT = 1 << 16  # newest batch sizes and waits kept between two drains: a run that never drains must not grow


class BatcherFull(RuntimeError):
    """The queue stayed full for the whole timeout of a submission; none of its requests was accepted."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request: one row of one shard.

    Once taken, ``future`` is running and can no longer be cancelled: the inference lane owes it a result or an
    exception, exactly one. A request that its sender cancels before that is dropped.
    """

    payload: Any
    kind: Hashable  # "train" | "eval"; a batch has one kind
    arrival: float  # seconds on the batcher's clock, when the queue accepted it
    future: Future[Any] = field(default_factory=Future)
    overtaken: int = 0  # batches that left with a later arrival while this one waited; never more than one
    order: int = 0  # place in the line of all arrivals

    def claim(self) -> bool:
        """Whether the request is still wanted; from here on its sender can no longer cancel it."""
        return self.future.set_running_or_notify_cancel()


@dataclass
class BatcherStats:
    """What passed through a batcher since the last drain.

    ``batch_sizes`` are those of ``take``; requests that ``take_now`` added to a running batch count as ``joined``.
    ``waits_ms`` run from arrival to being taken, either way. Of both lists the newest 65,536 are kept; counts are
    exact.
    """

    batch_sizes: list[int] = field(default_factory=list)
    waits_ms: list[float] = field(default_factory=list)
    max_depth: int = 0  # most requests that waited at once
    submitted: int = 0  # requests accepted
    taken: int = 0  # requests handed out, joined ones included
    joined: int = 0
    overtaken: int = 0  # requests that a batch of another kind passed over
    cancelled: int = 0  # requests dropped because their sender cancelled them
    held_back: int = 0  # submissions that had to wait for room

    @classmethod
    def merged(cls, parts: Sequence["BatcherStats"]) -> "BatcherStats":
        """The statistics of several batchers (one a policy worker) as one; ``max_depth`` is the largest of theirs."""
        total = cls(max_depth=max((p.max_depth for p in parts), default=0))
        for part in parts:
            total.batch_sizes += part.batch_sizes
            total.waits_ms += part.waits_ms
            for name in ("submitted", "taken", "joined", "overtaken", "cancelled", "held_back"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
        return total

    def metrics(self, prefix: str) -> dict[str, float]:
        """``prefix/batch_size/…`` and ``prefix/wait_ms/…`` (mean, p50, p95, max; left out without data) and counts."""
        metrics = _spread(f"{prefix}/batch_size", self.batch_sizes) | _spread(f"{prefix}/wait_ms", self.waits_ms)
        for name in ("max_depth", "submitted", "taken", "joined", "overtaken", "cancelled", "held_back"):
            metrics[f"{prefix}/{name}"] = float(getattr(self, name))
        return metrics

    def histograms(self, prefix: str) -> dict[str, float]:
        """Both distributions over fixed edges, as scalars: ``prefix/batch_size/hist/3_to_5`` counts sizes 3 and 4.

        The edges never change, so steps and policy workers can be added up.
        """
        sizes = histogram(f"{prefix}/batch_size", self.batch_sizes, BATCH_SIZE_EDGES)
        return sizes | histogram(f"{prefix}/wait_ms", self.waits_ms, WAIT_MS_EDGES)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p95 = np.percentile(values, (50, 95))
    found = {"mean": np.mean(values), "p50": p50, "p95": p95, "max": np.max(values)}
    return {f"{name}/{statistic}": float(value) for statistic, value in found.items()}


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{KEY}.{name}: {value!r}, expected a whole number of requests, 1 or more")
    return value


class BatchRule:
    """Which requests wait, when a batch of them may fire, and who is in it: decisions alone, no threads, no clock.

    Not thread-safe. Times are seconds on whichever clock the caller keeps. A request is a ``Ticket`` or has its
    ``kind``, ``arrival``, ``order``, ``overtaken`` and ``claim``.

    Args, Raises: see ``Batcher``.
    """

    def __init__(self, max_batch_size: int, max_wait_ms: float, max_queue: int = 4096) -> None:
        self.max_batch_size, self.max_queue = _count("max_batch_size", max_batch_size), _count("max_queue", max_queue)
        if isinstance(max_wait_ms, bool) or not isinstance(max_wait_ms, int | float) or not 0 <= max_wait_ms < math.inf:
            raise ValueError(f"{KEY}.max_wait_ms: {max_wait_ms!r}, expected a finite number of milliseconds, 0 or more")
        if max_queue < max_batch_size:
            raise ValueError(
                f"{KEY}.max_queue: {max_queue}, expected at least max_batch_size ({max_batch_size}): no batch could "
                f"ever be full; set max_queue to {max_batch_size} or more"
            )
        self.max_wait_ms = float(max_wait_ms)
        self._lines: dict[Hashable, deque[Any]] = {}  # per kind, never empty; each in order of arrival
        self._depth = self._arrivals = 0
        self._start_stats()

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return self._depth

    def append(self, tickets: Sequence[Any], kind: Hashable, now: float) -> bool:
        """Queue ``tickets``, all of ``kind``, as arrivals of ``now``.

        Returns:
            Whether a batch may now fire earlier than was known before: it is a taker's cue to look again.
        """
        was_empty = not self._depth
        for order, ticket in enumerate(tickets, start=self._arrivals):
            ticket.arrival, ticket.order = now, order
        self._lines.setdefault(kind, deque()).extend(tickets)
        self._arrivals += len(tickets)
        self._depth += len(tickets)
        self._stats.submitted += len(tickets)
        self._stats.max_depth = max(self._stats.max_depth, self._depth)
        # The taker already sleeps until the oldest request is due; only these two events can be earlier than that.
        return was_empty or len(self._head_line()) >= self.max_batch_size

    def due_in(self, now: float) -> float:
        """Seconds until a batch may fire, 0 or less when it may now; infinite when nothing waits."""
        if not self._depth:
            return math.inf
        line = self._head_line()
        return 0.0 if len(line) >= self.max_batch_size else self.max_wait_ms / 1e3 - (now - line[0].arrival)

    def fire(self, now: float) -> list[Any]:
        """The batch that may fire at ``now``, empty when none may, or when all of it was cancelled."""
        batch = self._collect(self.max_batch_size, now) if self.due_in(now) <= 0 else []
        if batch:
            self._sizes.append(len(batch))
        return batch

    def join(self, limit: int, now: float, kind: Hashable = None) -> list[Any]:
        """See ``Batcher.take_now``."""
        if limit < 1 or not self._depth or (kind is not None and self._head_line()[0].kind != kind):
            return []
        batch = self._collect(limit, now)
        self._stats.joined += len(batch)
        return batch

    def drain_stats(self) -> BatcherStats:
        """The statistics since the last call, and start anew."""
        stats, sizes, waits = self._stats, self._sizes, self._waits
        self._start_stats()
        stats.batch_sizes, stats.waits_ms = list(sizes), list(waits)
        return stats

    def _start_stats(self) -> None:
        self._stats = BatcherStats(max_depth=self._depth)
        self._sizes: deque[int] = deque(maxlen=KEPT)
        self._waits: deque[float] = deque(maxlen=KEPT)

    def _head_line(self) -> deque[Any]:
        """The line of the oldest request."""
        return min(self._lines.values(), key=lambda line: line[0].order)

    def _collect(self, limit: int, now: float) -> list[Any]:
        line = self._head_line()
        kind = line[0].kind
        others = [other for other in self._lines.values() if other is not line]
        # Who has been overtaken stands first in its line, since a batch passes over all that came before its last
        # request. Nobody goes past such a request again.
        barrier = min((other[0].order for other in others if other[0].overtaken), default=math.inf)
        batch: list[Any] = []
        while line and len(batch) < limit and line[0].order < barrier:
            ticket = line.popleft()
            self._depth -= 1
            if ticket.claim():
                batch.append(ticket)
            else:
                self._stats.cancelled += 1
        if not line:
            del self._lines[kind]
        for other in others if batch else []:
            for ticket in other:
                if ticket.order > batch[-1].order:
                    break
                ticket.overtaken += 1
                self._stats.overtaken += 1
        self._stats.taken += len(batch)
        self._waits.extend((now - ticket.arrival) * 1e3 for ticket in batch)
        return batch


class Batcher(BatchRule):
    """Collects requests into batches of one kind.

    Args:
        max_batch_size: requests in a batch, at most.
        max_wait_ms: a batch that is not full fires when its oldest request has waited this long since its arrival.
            0 fires with whatever waits.
        max_queue: requests that wait, at most; submissions beyond that are held back.
        clock: seconds, monotonic; another than ``time.monotonic`` is for tests.

    Raises:
        ValueError: a value out of range, or a queue too small to fill a batch; the error names the key.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_wait_ms: float,
        max_queue: int = 4096,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_batch_size, max_wait_ms, max_queue)
        self._clock = clock
        self._lock = threading.Lock()
        self._taker = threading.Condition(self._lock)
        self._senders: deque[threading.Condition] = deque()  # held back, first come first
        self._interrupted = False
        self._error: BaseException | None = None

    def has_room(self, count: int) -> bool:
        """Whether ``submit`` of so many would not block now; only the submitting thread can rely on it."""
        return not self._senders and self._depth + count <= self.max_queue

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called: ``take`` no longer blocks, so the lane must end."""
        return self._error is not None

    # ------------------------------------------------------------ senders

    def submit(self, payloads: Sequence[Any], kind: Hashable, timeout: float | None = None) -> list[Ticket]:
        """Queue one request per payload, all of them or none, and return their tickets in the same order.

        Blocks while the queue has no room for all; held-back senders are let in in the order in which they came. On a
        closed batcher the tickets' futures have already failed with the error of ``close``.

        Raises:
            BatcherFull: there was no room for ``timeout`` seconds (None: wait for ever).
            ValueError: more payloads than the queue can ever hold.
        """
        if len(payloads) > self.max_queue:
            raise ValueError(
                f"{KEY}.max_queue: {self.max_queue}, expected at least the {len(payloads)} requests of one submission; "
                "raise it or submit fewer at once"
            )
        tickets = [Ticket(payload, kind, math.nan) for payload in payloads]
        with self._lock:
            self._wait_for_room(len(tickets), timeout)
            error = self._error
            if error is None and tickets and self.append(tickets, kind, self._clock()):
                self._taker.notify()
        if error is not None:
            _fail(tickets, error)
        return tickets

    def _wait_for_room(self, count: int, timeout: float | None) -> None:
        if self._error is not None or (not self._senders and self._depth + count <= self.max_queue):
            return
        deadline = math.inf if timeout is None else self._clock() + timeout
        turn = threading.Condition(self._lock)
        self._senders.append(turn)
        self._stats.held_back += 1
        try:
            while self._error is None and (self._senders[0] is not turn or self._depth + count > self.max_queue):
                remaining = deadline - self._clock()
                if remaining <= 0:
                    raise BatcherFull(
                        f"{KEY}.max_queue: {self.max_queue}, {self._depth} requests wait and {count} more found no "
                        f"room for {timeout} s; expected the policy worker to take some: see whether it still answers, "
                        "add policy workers, or raise max_queue"
                    )
                turn.wait(None if remaining == math.inf else remaining)
        finally:
            self._senders.remove(turn)
            self._let_in()

    def _let_in(self) -> None:
        if self._senders:
            self._senders[0].notify()

    # ------------------------------------------------------------ the taker

    def take(self, timeout: float | None = None) -> list[Ticket]:
        """Block until a batch may fire and return it: 1 to ``max_batch_size`` requests of one kind, oldest first.

        A batch may fire when ``max_batch_size`` requests of the oldest one's kind wait, or when the oldest has waited
        ``max_wait_ms`` since its arrival, whatever this thread did meanwhile. Empty after ``interrupt`` (which goes
        before a batch that may fire), after ``timeout`` seconds (None: wait for ever), and always once closed.
        """
        deadline = math.inf if timeout is None else self._clock() + timeout
        with self._lock:
            while self._error is None and not self._interrupted:
                now = self._clock()
                remaining = self.due_in(now)
                if remaining <= 0:
                    batch = self.fire(now)
                    self._let_in()
                    if batch:  # empty: all were cancelled
                        return batch
                    continue
                remaining = min(remaining, deadline - now)
                if remaining <= 0:
                    return []
                self._taker.wait(None if remaining == math.inf else remaining)
            self._interrupted = False
            return []

    def take_now(self, limit: int, kind: Hashable = None) -> list[Ticket]:
        """What waits now, oldest first: at most ``limit`` requests of the oldest one's kind; never blocks.

        For joining a running batch. With ``kind``, nothing unless the oldest request is of it: the running batch then
        ends before another kind has waited too long.
        """
        with self._lock:
            batch = self.join(limit, self._clock(), kind)
            self._let_in()
            return batch

    def interrupt(self) -> None:
        """Make one ``take``, the one that blocks or else the next, return empty: there is other work between batches.

        Interrupts that no ``take`` has seen yet count as one. Requests stay where they are.
        """
        with self._lock:
            self._interrupted = True
            self._taker.notify()

    def close(self, error: BaseException) -> None:
        """Fail every waiting and every later request with ``error`` and release everyone. A second close is ignored."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            waiting = [ticket for line in self._lines.values() for ticket in line]
            self._lines.clear()
            self._depth = 0
            self._taker.notify()
            for turn in self._senders:
                turn.notify()
        _fail(waiting, error)

    def drain_stats(self) -> BatcherStats:
        """The statistics since the last call, and start anew."""
        with self._lock:
            return super().drain_stats()


def _fail(tickets: Sequence[Ticket], error: BaseException) -> None:
    """Outside the lock: a future runs its callbacks here, and they may call the batcher."""
    for ticket in tickets:
        if ticket.claim():
            ticket.future.set_exception(error)


def worth_joining(waiting: int, room: int, running: int, share: float) -> bool:
    """Whether requests that wait join the running chains at a step boundary. Encoding their prefix holds those up, so
    they come in parties of at least ``share`` of them; where not all find room, in one as large as the running.
    """
    return min(waiting, room) >= (share if waiting <= room else 1.0) * running
