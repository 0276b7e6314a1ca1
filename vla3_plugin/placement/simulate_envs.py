"""Env workers on the virtual clock: the loop of ``rollout.interaction``, and who gets which episode when.

An episode's times belong to it, drawn by ``Draws``. What is not here: simulators that fail, and evaluation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from vla3_plugin.placement.simulate_clock import Clock, Event, Process
from vla3_plugin.placement.simulate_lane import Call, Lane
from vla3_plugin.placement.simulate_model import Workload

Done = Callable[[dict[str, Any]], None]


class Draws(Protocol):
    """Durations in ms. ``episode`` is the plan's index."""

    def length(self, episode: int) -> int:
        """Chunk steps until it ends."""
        ...

    def cut(self, episode: int, length: int) -> bool:
        """Whether it is truncated there rather than ended by itself."""
        ...

    def chunk_ms(self, episode: int, chunk: int) -> float: ...

    def reset_ms(self, episode: int) -> float: ...


class RandomDraws:
    """Independent draws in the order in which they are asked for."""

    def __init__(self, work: Workload) -> None:
        self.env = work.env
        self._rng = np.random.default_rng(work.seed)
        self._numbers: list[float] = []
        self._itself: dict[int, bool] = {}

    def _uniform(self) -> float:
        if not self._numbers:
            self._numbers = self._rng.random(4096).tolist()
        return self._numbers.pop()

    def length(self, episode: int) -> int:
        itself = self.env.low < self.env.high and self._uniform() < self.env.success
        self._itself[episode] = itself
        return self.env.low + int(self._uniform() * (self.env.high - self.env.low + 1)) if itself else self.env.high

    def cut(self, episode: int, length: int) -> bool:
        return not self._itself.pop(episode)

    def chunk_ms(self, episode: int, chunk: int) -> float:
        return self.env.chunk_ms.quantile(self._uniform())

    def reset_ms(self, episode: int) -> float:
        return self.env.reset_ms.quantile(self._uniform())


class _Run:
    __slots__ = ("episode", "length", "chunks", "version")

    def __init__(self, episode: int, length: int) -> None:
        self.episode, self.length, self.chunks = episode, length, 0
        self.version = 1 << 62

    def saw(self, version: int) -> None:
        self.version = min(self.version, version)


class EnvWorker:
    """A worker's loops over its shards; ``source`` are the episodes that it was given and has not begun."""

    def __init__(
        self, clock: Clock, work: Workload, draws: Draws, lane: Lane, delivered: Callable[[EnvWorker, _Run], None]
    ) -> None:
        self.clock, self.work, self.draws, self.lane, self.delivered = clock, work, draws, lane, delivered
        self.source: deque[int] = deque()
        self.arrived = Event(clock)
        self.out = 0  # episodes it was given and has not reported
        self.chunk_steps = 0
        self.seconds = dict.fromkeys(("chunk_step", "reset", "wait:batch", "wait:data", "deliver"), 0.0)
        shards = work.layout.shards
        loops = shards if work.schedule.interaction else work.schedule.pipeline_stage_num
        self.loops = [list(range(i, shards, loops)) for i in range(loops)]
        for part in self.loops:
            clock.start(self._play(part))

    def put(self, episodes: Sequence[int]) -> None:
        self.source.extend(episodes)
        self.arrived.set()

    def _spend(self, what: str, since: float) -> None:
        self.seconds[what] += self.clock.now - since

    def _play(self, shards: list[int]) -> Process:
        clock, host = self.clock, self.work.host
        slots = [(e, s) for s in range(self.work.layout.slots) for e in shards]  # as Interaction orders them
        running: dict[tuple[int, int], _Run] = {}
        ended: list[_Run] = []
        while True:
            since = clock.now
            while not self.source and not running and not ended:
                self.arrived = self.arrived if not self.arrived.happened else Event(clock)
                yield self.arrived
            self._spend("wait:data", since)
            yield from self._start(slots, running)

            since, call = clock.now, Call(clock, len(running) + len(ended))
            way = (host.request_ms + host.request_ms_per_row * call.rows) / 2e3
            if way:
                yield way
            self.lane.submit(call)
            yield call.answered
            if way:
                yield way
            self._spend("wait:batch", since)
            for run in running.values():
                run.saw(call.version)
            yield from self._deliver(ended)
            ended = []
            if not running:
                continue

            since = clock.now
            seconds = max(self._shard_ms(shard, running) for shard in shards) / 1e3
            if self.work.layout.simulator_on_replica:
                yield from self.lane.device.use(seconds, "env")
            else:
                yield seconds
            self._spend("chunk_step", since)
            self.chunk_steps += len(running)
            finished: list[_Run] = []
            for slot, run in list(running.items()):
                run.chunks += 1
                if run.chunks < run.length:
                    continue
                del running[slot]
                cut = self.draws.cut(run.episode, run.length)
                (ended if self.work.schedule.bootstrap and cut else finished).append(run)
            yield from self._deliver(finished)

    def _start(self, slots: list[tuple[int, int]], running: dict[tuple[int, int], _Run]) -> Process:
        resets: dict[int, float] = {}
        for slot in slots:
            if slot in running or not self.source:
                continue
            episode = self.source.popleft()
            running[slot] = _Run(episode, self.draws.length(episode))
            resets[slot[0]] = resets.get(slot[0], 0.0) + self.draws.reset_ms(episode)  # one by one in a process
        if any(resets.values()):
            since = self.clock.now
            yield max(resets.values()) / 1e3
            self._spend("reset", since)

    def _shard_ms(self, shard: int, running: dict[tuple[int, int], _Run]) -> float:
        """ms of the shard's chunk step; 0 where none of its environments runs."""
        rows = [run for (e, _), run in running.items() if e == shard]
        if not rows:
            return 0.0
        env = self.work.env
        if env.per == "shard":
            first = min(rows, key=lambda run: run.episode)
            return self.draws.chunk_ms(first.episode, first.chunks) + env.per_env_ms * len(rows)
        return max(self.draws.chunk_ms(run.episode, run.chunks) for run in rows)

    def _deliver(self, runs: list[_Run]) -> Process:
        for run in runs:
            if self.work.host.deliver_ms:
                since = self.clock.now
                yield self.work.host.deliver_ms / 1e3
                self._spend("deliver", since)
            self.clock.call(self.work.host.report_ms / 1e3, self.delivered, self, run)


class Manager:
    """``rollout.manager``: hands episodes out as workers have room, or, in lock step, each worker its share at once."""

    def __init__(self, clock: Clock, work: Workload, draws: Draws, lanes: Sequence[Lane], done: Done) -> None:
        self.clock, self.work, self.done = clock, work, done
        self.workers = [
            EnvWorker(clock, work, draws, lanes[i % len(lanes)], self._delivered) for i in range(work.layout.workers)
        ]
        slots = work.layout.shards * work.layout.slots
        self._room = slots + max(1, slots // 4)
        self._backlog: deque[int] = deque()

    def submit(self, episodes: Sequence[int]) -> None:
        if not self.work.schedule.interaction:
            count = len(self.workers)
            for i, worker in enumerate(self.workers):
                self._assign(worker, list(episodes[i::count]))
            return
        self._backlog.extend(episodes)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._backlog:
            worker = min(self.workers, key=lambda w: w.out)
            if worker.out >= self._room:
                return
            self._assign(worker, [self._backlog.popleft()])

    def _assign(self, worker: EnvWorker, episodes: list[int]) -> None:
        if episodes:
            worker.out += len(episodes)
            self.clock.call(self.work.host.assign_ms / 1e3, worker.put, episodes)

    def _delivered(self, worker: EnvWorker, run: _Run) -> None:
        worker.out -= 1
        group = run.episode // self.work.schedule.group_size
        episode = {"group_id": group, "episode_id": run.episode}
        self.done({"episode": episode, "version": run.version, "keys": range(run.length)})
        self._hand_out()
