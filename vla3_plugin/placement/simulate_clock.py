"""A virtual clock and processes on it: generators that yield seconds to sleep or an ``Event`` to wait for.

Time jumps from event to event, so a minute of a run costs milliseconds. What happens at the same time happens in the
order in which it was scheduled: a simulation is a function of its inputs and its seed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Union

Process = Generator[Union[float, "Event"], None, Any]


class Event:
    """Something that happens once; whoever waits goes on at that time, and whoever asks later does not wait."""

    __slots__ = ("clock", "happened", "waiting")

    def __init__(self, clock: Clock) -> None:
        self.clock, self.happened = clock, False
        self.waiting: list[Process] = []

    def set(self) -> None:
        if not self.happened:
            self.happened = True
            for process in self.waiting:
                self.clock.call(0.0, self.clock.resume, process)
            self.waiting.clear()


class Clock:
    """``now`` in seconds, from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def call(self, delay: float, function: Callable[..., None], *args: Any) -> None:
        """Call ``function`` in ``delay`` seconds."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, function, args))

    def start(self, process: Process) -> None:
        self.call(0.0, self.resume, process)

    def resume(self, process: Process) -> None:
        wanted = next(process, None)
        if wanted is None:
            return
        if not isinstance(wanted, Event):
            self.call(wanted, self.resume, process)
        elif wanted.happened:
            self.call(0.0, self.resume, process)
        else:
            wanted.waiting.append(process)

    def run(self, until: Callable[[], bool]) -> None:
        """Until ``until`` holds.

        Raises:
            RuntimeError: nothing is left to happen before that: everything waits for something else.
        """
        while not until():
            if not self._events:
                raise RuntimeError(f"the simulation stands still at {self.now:.3f} s: every process waits for another")
            self.now, _, function, args = heapq.heappop(self._events)
            function(*args)


class Device:
    """What one user at a time can have, first come first served; ``busy`` is seconds of use by role."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.busy: dict[str, float] = {}
        self._taken = False
        self._line: deque[Event] = deque()

    def use(self, seconds: float, role: str) -> Process:
        if self._taken:
            turn = Event(self.clock)
            self._line.append(turn)
            yield turn
        self._taken = True
        yield seconds
        self.busy[role] = self.busy.get(role, 0.0) + seconds
        if self._line:
            self._line.popleft().set()  # stays taken, so that nobody gets in between
        else:
            self._taken = False
