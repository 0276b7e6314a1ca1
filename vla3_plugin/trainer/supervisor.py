"""Watches the policy workers: one that dies or hangs is restarted in place and gets the current version again. A
learner rank that hangs is killed, which ends the run.

Ray keeps a restarted actor's handle and place, so nobody else has to know. Until its weights have arrived it refuses
requests, and env workers ask another one, or wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from vla3_plugin.rollout.policy_worker import PolicyWorker
from vla3_plugin.rollout.replacing import end_starting, replace
from vla3_plugin.rollout.supervision import Event
from vla3_plugin.trainer.publisher import Publisher

_PERIOD_S = 1.0  # between two looks at a worker


@dataclass
class _Watched:
    handle: Any
    call: Any = None  # the question that is under way
    asked: float = 0.0
    answered: float = field(default_factory=time.monotonic)  # when the last answered question was asked
    version: int = 0  # its last answer; the first publication came before this class
    lost: int = 0  # how often
    away: bool = False
    started: float = 0.0  # while it is away: since when its newest process has had time


class Supervisor:
    """``configure``: what a fresh policy worker is told (``PolicyWorker.configure``). ``failed`` hears of what ends the
    run: a worker that was lost more than ``max_restarts`` times, or does not come back within ``deadline_s``.
    """

    def __init__(
        self,
        workers: list[Any],
        learner: Any,
        publisher: Publisher,
        configure: dict[str, Any],
        *,
        heartbeat_s: float,
        start_s: float,
        deadline_s: float,
        max_restarts: int,
        on_event: Callable[[Event], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.workers = [_Watched(handle) for handle in workers]
        self.learner, self._calls, self._asked = learner, None, 0.0  # type: Any, list[Any] | None, float
        self.publisher, self.configure = publisher, configure
        self.heartbeat_s, self.start_s = heartbeat_s, start_s
        self.deadline_s, self.max_restarts = deadline_s, max_restarts
        self.on_event, self.failed = on_event, failed
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        publisher.recovered_since = self.recovered_since
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=10)

    def recovered_since(self, start: float, asked: float) -> bool:
        """Waits until every worker has answered a question asked after ``asked``. True: one was away after ``start``.

        What a publication asks when it failed or takes long: was it a worker's death, and are they back? A failure is
        known before the death that caused it: only questions asked after it tell. (Both are monotonic times.)
        """
        deadline = time.monotonic() + self.deadline_s
        with self._changed:
            while not self._closed.is_set() and time.monotonic() < deadline:
                if all(not w.away and w.answered > asked for w in self.workers):
                    return self._away_until > start
                self._changed.wait(timeout=_PERIOD_S)
        return False

    _away_until = 0.0  # when a worker was last found lost, or came back

    def _watch(self) -> None:
        try:
            while not self._closed.wait(_PERIOD_S):
                for rank, worker in enumerate(self.workers):
                    self._look(rank, worker)
                self._hurry_starting()
                self._look_at_learner()
                if any(not w.away and w.lost and w.version < 0 for w in self.workers):
                    self.publisher.republish()
        except BaseException as error:
            if not self._closed.is_set():
                self.failed(error)

    def _look(self, rank: int, worker: _Watched) -> None:
        now = time.monotonic()
        if worker.call is None:
            worker.call, worker.asked = worker.handle.weights_version.remote(), now
            return
        done, _ = ray.wait([worker.call], timeout=0)
        if not done:
            if worker.away and now - worker.answered > self.deadline_s:
                raise TimeoutError(
                    f"policy worker {rank} did not come back within vla3.deadline_s = {self.deadline_s} s: its "
                    "new process does not answer"
                )
            if not worker.away and now - worker.asked > self.heartbeat_s:
                self._lose(rank, worker, f"it gave no sign of life for vla3.heartbeat_s = {self.heartbeat_s:g} s")
                replace(worker.handle)
                worker.call = None
            return
        call, worker.call = worker.call, None
        try:
            version = ray.get(call)
        except ray.exceptions.RayActorError as error:
            self._lose(rank, worker, str(error).strip())
            if isinstance(error, ray.exceptions.ActorDiedError):
                raise RuntimeError(f"policy worker {rank} died and was not restarted: {error}") from error
            if now - worker.answered > self.deadline_s:
                raise TimeoutError(
                    f"policy worker {rank} did not come back within vla3.deadline_s = {self.deadline_s} s: {error}"
                ) from error
            return
        if version < 0 <= worker.version and not worker.away:
            self._lose(rank, worker, "its process was replaced between two looks")
        if worker.away:
            try:
                ray.get(worker.handle.configure.remote(self.configure), timeout=self.heartbeat_s)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                return  # gone once more: it is still away, and asked again
            self.on_event({"kind": "policy_worker_restarted", "where": f"policy{rank}", "why": "", "episodes": []})
        with self._changed:
            if worker.away:
                self._away_until = time.monotonic()
            worker.away, worker.answered, worker.version = False, worker.asked, version
            self._changed.notify_all()

    def _hurry_starting(self) -> None:
        """A new process can hang too, before it can answer anything."""
        away = [worker for worker in self.workers if worker.away]
        late = [worker for worker in away if time.monotonic() - worker.started > self.start_s]
        if late:
            for worker in late:
                replace(worker.handle)
                worker.call = None
            end_starting(PolicyWorker.__name__, self.start_s / 2)
            for worker in away:  # others may have been ended with them
                worker.started = time.monotonic()

    def _look_at_learner(self) -> None:
        """A rank that hangs, in a call of verl's or in a collective, is killed: who waits for it hears of its death.

        Raises:
            TimeoutError: one was.
        """
        now = time.monotonic()
        if self._calls is None:
            self._calls, self._asked = self.learner.busy_s(), now
            return
        done, late = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        if late:
            hung = [rank for rank, call in enumerate(self._calls) if call in set(late)]
            hung = hung if now - self._asked > self.deadline_s else []
        else:
            calls, self._calls = self._calls, None
            try:
                hung = [rank for rank, busy in enumerate(ray.get(calls)) if busy > self.deadline_s]
            except ray.exceptions.RayActorError:
                return  # dead: whoever waits for it is told
        if hung:
            for rank in hung:
                ray.kill(self.learner.workers[rank])
            raise TimeoutError(
                f"learner ranks {hung} did not finish what they were at within vla3.deadline_s = {self.deadline_s} s "
                "and were killed"
            )

    def _lose(self, rank: int, worker: _Watched, why: str) -> None:
        if worker.away:
            return
        with self._changed:
            worker.away, worker.lost, self._away_until = True, worker.lost + 1, time.monotonic()
            worker.started = self._away_until
            self._changed.notify_all()
        self.on_event({"kind": "policy_worker_lost", "where": f"policy{rank}", "why": why, "episodes": []})
        if worker.lost > self.max_restarts:
            raise RuntimeError(
                f"policy worker {rank} was lost {worker.lost} times (vla3.max_worker_restarts = {self.max_restarts}); "
                f"the last time: {why}"
            )
