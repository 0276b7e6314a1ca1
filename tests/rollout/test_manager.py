"""Env workers that are lost while they have nothing to do: in synchronous training that is during every update."""

import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray

from vla3_plugin.contract import Episode
from vla3_plugin.rollout import manager
from vla3_plugin.rollout.episodes import Assignment

GONE = ray.exceptions.ActorUnavailableError("gone", None)


class Ref:
    def __init__(self, future=None):
        self._future = future or Future()
        if future is None:
            self._future.set_result(None)

    def future(self):
        return self._future


class Worker:
    def __init__(self):
        self.connected, self.assigned, self.listening = 0, [], Future()
        self.connect = SimpleNamespace(remote=self._connect)
        self.spec = SimpleNamespace(remote=Ref)
        self.assign = SimpleNamespace(remote=self._assign)
        self.finished = SimpleNamespace(remote=self._finished)
        self.drain_timeline = SimpleNamespace(remote=Ref)
        self.close = SimpleNamespace(remote=Ref)
        self.kills = 0

    def _connect(self, policy_workers):
        self.connected += 1
        return Ref()

    def _assign(self, assignments):
        self.assigned += [a["episode"]["episode_id"] for a in assignments]
        return Ref()

    def _finished(self, timeout_s):
        self.listening = Future()
        return Ref(self.listening)


def eventually(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def hands(monkeypatch):
    def get(call, timeout=None):
        if timeout is not None:
            raise ray.exceptions.GetTimeoutError  # a hung worker
        return [{}]

    fake = SimpleNamespace(
        wait=lambda refs, num_returns, timeout: (refs, []),
        get=get,
        exceptions=ray.exceptions,
    )
    monkeypatch.setattr(manager, "ray", fake)
    monkeypatch.setattr(manager, "replace", lambda handle: setattr(handle, "kills", handle.kills + 1))
    monkeypatch.setattr(manager, "_POLL_S", 0.1)
    monkeypatch.setattr(manager.EnvSpec, "from_json", lambda data: data)
    monkeypatch.setattr(manager.store, "clear_episodes", lambda episodes: None)
    worker = Worker()
    found = manager.InteractionManager([worker], [object()], 1, 30.0, False, heartbeat_s=0.5, start_s=30.0)
    yield worker, found
    found.close()


def test_a_worker_that_dies_while_idle_is_connected_again_before_it_gets_episodes(hands):
    worker, found = hands
    events = []
    found.on_event = lambda event: events.append(event["kind"])
    first = worker.listening
    assert eventually(lambda: worker.listening is not first or not worker.listening.done())
    assert eventually(lambda: found._listening[0] is not None)
    worker.listening.set_exception(GONE)
    assert eventually(lambda: "env_worker_restarted" in events)
    assert worker.connected == 2
    found.submit([Assignment(Episode(0, 0, 0, 0, 0))], lambda summary: None)
    assert eventually(lambda: worker.assigned == [0])


def test_a_worker_that_hangs_while_idle_is_killed_and_holds_nobody_up(hands):
    worker, found = hands
    assert found.drain_timeline() == []
    assert eventually(lambda: worker.kills > 0)


def test_one_that_hangs_while_it_restarts_is_ended_once_and_who_restarts_beside_it_gets_its_time_anew(
    hands, monkeypatch
):
    """Who ends processes that are in a constructor cannot tell whose they are."""
    sweeps = []
    monkeypatch.setattr(manager, "end_starting", lambda kind, older: sweeps.append((kind, older)))
    _, found = hands
    found.close()  # from here on this test is its dispatching thread
    found.workers = [Worker(), Worker()]
    found._listening, found._out = [None, None], [{}, {}]
    now = time.monotonic()
    found._reviving = {0: now - 40, 1: now - 20}
    found._started = dict(found._reviving)
    found._check_heartbeats()
    assert [worker.kills for worker in found.workers] == [1, 0] and sweeps == [("EnvWorker", 15.0)]
    assert all(at >= now for at in found._started.values())
    found._check_heartbeats()
    assert len(sweeps) == 1
