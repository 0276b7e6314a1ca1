"""The trainer and the learner on the virtual clock: ``trainer.trainer`` in its modes, over the real ``Admission``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from vla3_plugin.placement.simulate_clock import Clock, Device, Event, Process
from vla3_plugin.placement.simulate_envs import Draws, Manager
from vla3_plugin.placement.simulate_lane import Lane
from vla3_plugin.placement.simulate_model import Workload
from vla3_plugin.trainer.admission import Admission, Group

_AHEAD = 2  # micro-batches at the learner, as in trainer.streaming
_PARITY_ROWS = 32  # as in trainer.parity


class Learner:
    """All ranks; a piece of work takes each rank's device at once, and ends when the last one is done."""

    def __init__(self, clock: Clock, work: Workload, devices: Sequence[Device]) -> None:
        self.clock, self.work = clock, work
        self.devices = devices  # of shared devices; none of its own contends with anything
        self.busy = 0.0
        self._queue: deque[tuple[Event, float, Event]] = deque()
        self._wake = Event(clock)
        clock.start(self._gradient_lane())

    def compute(self, ms: float) -> Process:
        seconds = ms / 1e3
        self.busy += seconds
        if not self.devices:
            yield seconds
            return
        ends = []
        for device in self.devices:
            end = Event(self.clock)
            self.clock.start(_then(device.use(seconds, "learner"), end))
            ends.append(end)
        for end in ends:
            yield end

    def send(self, ms: float, fetch: bool = True) -> Event:
        """Queue a streamed micro-batch; its samples are fetched while earlier ones compute."""
        there, done = Event(self.clock), Event(self.clock)
        self.clock.call(self.work.host.fetch_ms / 1e3 if fetch else 0.0, there.set)
        self._queue.append((there, ms, done))
        self._wake.set()
        return done

    def _gradient_lane(self) -> Process:
        while True:
            if not self._queue:
                self._wake = Event(self.clock)
                yield self._wake
                continue
            there, ms, done = self._queue.popleft()
            yield there
            yield from self.compute(ms)
            done.set()

    def samples_ms(self, samples: int, passes: float = 1.0) -> float:
        """A rank's time for its part of ``samples``, in micro-batches; ``passes`` 1 is forward and backward."""
        mine, size = math.ceil(samples / self.work.layout.ranks), self.work.schedule.micro_batch
        whole, rest = divmod(mine, size)
        sizes = [size] * whole + ([rest] if rest else [])
        return sum(passes * self.work.policy.train_ms(s) + self.work.host.micro_ms for s in sizes)


class Trainer:
    """``steps``: when each step ended, its samples and the age of each group's oldest, from ``run``."""

    def __init__(
        self, clock: Clock, work: Workload, draws: Draws, lanes: Sequence[Lane], learner: Learner, steps: int
    ) -> None:
        self.clock, self.work, self.lanes, self.learner, self.total = clock, work, lanes, learner, steps
        s = work.schedule
        self.admission = Admission(
            group_size=s.group_size,
            groups_per_step=s.groups_per_step,
            max_staleness=s.staleness,
            just_in_time=s.just_in_time,
        )
        self.manager = Manager(clock, work, draws, lanes, self._finished)
        self.steps: list[tuple[float, int, list[int]]] = []
        self.waited = 0.0  # the driver, for groups
        self._open, self._served, self._version = False, -1, 0
        self._changed = Event(clock)
        self._publication: Event | None = None
        clock.start(self._run())

    # ---- trainer.feeder

    def _published(self, version: int) -> None:
        self._served = version
        self._admit()

    def _admit(self) -> None:
        if self._open or self.work.schedule.training:
            size = self.work.schedule.group_size
            groups = self.admission.admit(self._served)
            self.manager.submit([g * size + i for g in groups for i in range(size)])

    def _finished(self, summary: dict[str, Any]) -> None:
        self.admission.finished(summary)
        self._changed.set()

    def _groups(self, limit: int, samples: float = math.inf) -> Any:
        since = self.clock.now
        while True:
            chosen, stale = self.admission.take(limit, samples)
            self.admission.waits(self.clock.now - since, took=bool(chosen))
            self._admit()
            if chosen:
                self._open = len(self.admission.taken) < self.admission.groups_per_step
                self.waited += self.clock.now - since
                return chosen
            self._changed = Event(self.clock)
            yield self._changed

    def _samples(self, groups: Sequence[Group]) -> int:
        return sum(group.samples for group in groups)

    # ---- trainer.trainer

    def _run(self) -> Process:
        self.admission.begin_step(0)
        self._published(0)
        for version in range(self.total):
            self._version, self._open, self._checked = version, True, False
            self.admission.begin_step(version, self.clock.now)
            self._admit()
            groups: list[Group] = []
            if self.work.schedule.streaming:
                samples = yield from self._stream(groups)
            else:
                samples = yield from self._collect_and_update(groups)
            self.admission.trained(self.clock.now)
            yield from self._publish(version + 1)
            yield self.work.host.step_ms / 1e3
            self.steps.append((self.clock.now, samples, [version - g.version for g in groups]))

    def _prepare(self, groups: Sequence[Group], samples: int) -> Process:
        """Parity once a step, where there is a sample of the learner's own version; advantages."""
        host = self.work.host
        fresh = sum(t["version"] == self._version for g in groups for t in g.trajectories)
        if fresh and not self._checked and host.parity_ms:
            self._checked = True
            rows = min(_PARITY_ROWS, samples)
            yield host.parity_ms / 1e3
            yield self.learner.send(self.learner.samples_ms(rows, self.work.policy.forward_share), fetch=False)
        yield (host.prepare_ms + host.prepare_ms_per_sample * samples) / 1e3

    def _collect_and_update(self, groups: list[Group]) -> Any:
        schedule, host = self.work.schedule, self.work.host
        while len(groups) < schedule.groups_per_step:
            groups += yield from self._groups(schedule.groups_per_step)
        samples = self._samples(groups)
        yield from self._prepare(groups, samples)
        yield host.switch_ms / 1e3
        yield (host.update_ms + host.update_ms_per_sample * samples) / 1e3
        if schedule.training and schedule.recompute and any(g.version < self._version for g in groups):
            yield from self.learner.compute(self.learner.samples_ms(samples, self.work.policy.forward_share))
        yield from self._epochs(samples, schedule.epochs)
        yield host.switch_ms / 1e3
        return samples

    def _epochs(self, samples: int, epochs: int) -> Process:
        parts, host = self.work.schedule.mini_batches, self.work.host
        for _ in range(epochs):
            for part in range(parts):
                share = samples * (part + 1) // parts - samples * part // parts
                yield from self.learner.compute(self.learner.samples_ms(share) + host.reduce_ms)

    def _stream(self, groups: list[Group]) -> Any:
        schedule, host = self.work.schedule, self.work.host
        size = schedule.micro_batch * self.work.layout.ranks
        samples = 0
        for part in range(1, schedule.mini_batches + 1):
            limit, pending = schedule.groups_per_step * part // schedule.mini_batches, 0
            sent: deque[Event] = deque()
            while len(self.admission.taken) < limit:
                piece = yield from self._groups(limit, size + 1 - pending)
                while schedule.whole_mini_batches and len(self.admission.taken) < limit:
                    piece += yield from self._groups(limit)
                count = self._samples(piece)
                groups += piece
                samples += count
                yield from self._prepare(piece, count)
                pending += count
                while pending > size:  # the last one is held back: the learner must know that it is
                    while len(sent) >= _AHEAD:
                        yield sent.popleft()
                    sent.append(self.learner.send(self.learner.samples_ms(size)))
                    pending -= size
            while len(sent) >= _AHEAD:
                yield sent.popleft()
            sent.append(self.learner.send(self.learner.samples_ms(pending) + host.reduce_ms))
            while sent:
                yield sent.popleft()
        if schedule.epochs > 1:
            yield (host.update_ms + host.update_ms_per_sample * samples) / 1e3
            yield from self._epochs(samples, schedule.epochs - 1)
        return samples

    # ---- trainer.publisher

    def _publish(self, version: int) -> Process:
        schedule = self.work.schedule
        if self._publication is not None:
            yield self._publication
        if schedule.streaming or schedule.training:
            yield from self.learner.compute(self.work.host.snapshot_ms)
        self._publication = Event(self.clock)
        self.clock.start(_then(self._send(version), self._publication))
        if not schedule.training:
            yield self._publication

    def _send(self, version: int) -> Process:
        yield self.work.host.publish_ms / 1e3
        yield from [lane.swap(version) for lane in self.lanes]
        self._published(version)


def _then(process: Process, end: Event) -> Process:
    yield from process
    end.set()
