"""Policy workers that die at awkward moments: what the supervisor tells a publication, and what it does itself."""

import threading
import time
from types import SimpleNamespace

import pytest
import ray

from vla3_plugin.trainer import supervisor
from vla3_plugin.trainer.supervisor import Supervisor

GONE = ray.exceptions.ActorUnavailableError("gone", None)
NEVER = object()  # no answer


class Worker:
    """A handle whose answers the test sets."""

    def __init__(self):
        self.answer, self.configured, self.kills, self.failing = 0, 0, 0, 0
        self.weights_version = SimpleNamespace(remote=lambda: lambda: self.answer)
        self.configure = SimpleNamespace(remote=lambda stage: self._configure)

    def _configure(self):
        if self.failing:
            self.failing -= 1
            return GONE
        self.configured += 1


class Learner:
    """A worker group of two ranks; ``answers``: how long each has been busy."""

    def __init__(self, *answers):
        self.answers = list(answers) or [0.0, 0.0]
        self.workers = [SimpleNamespace(kills=0), SimpleNamespace(kills=0)]

    def busy_s(self):
        return [lambda rank=rank: self.answers[rank] for rank in range(2)]


class Publisher:
    def __init__(self):
        self.again = threading.Event()

    def republish(self):
        self.again.set()


def get(call, timeout=None):
    if isinstance(call, list):
        return [get(one) for one in call]
    answer = call()
    if isinstance(answer, BaseException):
        raise answer
    return answer


@pytest.fixture
def watch(monkeypatch):
    started, sweeps = [], []
    fake = SimpleNamespace(
        get=get,
        wait=lambda calls, timeout, num_returns=1: (
            [call for call in calls if call() is not NEVER],
            [call for call in calls if call() is NEVER],
        ),
        kill=lambda handle, no_restart=True: setattr(handle, "kills", handle.kills + 1),
        exceptions=ray.exceptions,
    )
    monkeypatch.setattr(supervisor, "ray", fake)
    monkeypatch.setattr(supervisor, "replace", fake.kill)
    monkeypatch.setattr(supervisor, "end_starting", lambda kind, older: sweeps.append((kind, older)))
    monkeypatch.setattr(supervisor, "_PERIOD_S", 0.02)

    def start(worker, deadline_s=10.0, start_s=10.0, learner=None):
        found = SimpleNamespace(publisher=Publisher(), events=[], failures=[], sweeps=sweeps)
        found.it = Supervisor(
            [worker], learner or Learner(), found.publisher, {}, heartbeat_s=0.3, start_s=start_s,
            deadline_s=deadline_s, max_restarts=3, failed=found.failures.append,
            on_event=lambda event: found.events.append(event["kind"]),
        )  # fmt: skip
        started.append(found.it)
        return found

    yield start
    for found in started:
        found.close()


def eventually(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_worker_that_dies_late_in_a_publication_is_why_it_failed(watch):
    """It answered after the publication began, and its death is not known yet when the publication has failed."""
    worker = Worker()
    found = watch(worker)
    start = time.monotonic()
    assert eventually(lambda: found.it.workers[0].answered > start)
    worker.answer = GONE
    threading.Timer(0.3, setattr, [worker, "answer", -1]).start()
    assert found.it.recovered_since(start, time.monotonic())
    assert not found.failures


def test_a_publication_that_began_while_a_worker_was_away_is_sent_again_when_it_is_back(watch):
    worker = Worker()
    found = watch(worker)
    worker.answer = GONE
    assert eventually(lambda: found.it.workers[0].away)
    start = time.monotonic()
    threading.Timer(0.3, setattr, [worker, "answer", -1]).start()
    assert found.it.recovered_since(start, time.monotonic())


def test_a_failure_with_all_workers_well_is_nobodys_death(watch):
    found = watch(Worker())
    start = time.monotonic()
    assert not found.it.recovered_since(start, start)


def test_a_worker_that_was_replaced_before_anybody_looked_is_configured_and_gets_its_weights(watch):
    worker = Worker()
    worker.answer = -1
    found = watch(worker)
    assert eventually(found.publisher.again.is_set)
    assert worker.configured == 1 and found.events == ["policy_worker_lost", "policy_worker_restarted"]


def test_a_worker_that_dies_again_while_it_is_configured_is_waited_for_once_more(watch):
    worker = Worker()
    worker.answer, worker.failing = -1, 2
    found = watch(worker)
    assert eventually(found.publisher.again.is_set)
    assert worker.configured == 1 and not found.failures


def test_a_new_process_that_never_answers_ends_the_run_at_the_deadline(watch):
    worker = Worker()
    worker.answer = NEVER
    found = watch(worker, deadline_s=0.5)
    assert eventually(lambda: found.failures)
    assert "did not come back within vla3.deadline_s = 0.5 s" in str(found.failures[0])
    assert worker.kills == 1, "once for the missing sign of life"


@pytest.mark.parametrize("gone", [False, True], ids=["does not answer", "is said to be restarting, again and again"])
def test_a_new_process_that_hangs_in_its_constructor_is_ended_after_the_time_that_a_start_may_take(watch, gone):
    worker = Worker()
    worker.answer = ray.exceptions.RayActorError() if gone else NEVER
    found = watch(worker, start_s=0.5)
    assert eventually(lambda: found.sweeps)
    assert found.sweeps[0] == ("PolicyWorker", 0.25) and worker.kills >= 1 and not found.failures
    worker.answer = -1
    assert eventually(lambda: worker.configured == 1)
    assert found.events == ["policy_worker_lost", "policy_worker_restarted"]


@pytest.mark.parametrize("answer", [NEVER, 99.0], ids=["a rank that does not answer", "a collective that hangs"])
def test_a_learner_rank_that_hangs_is_killed_so_that_nobody_waits_for_it_for_ever(watch, answer):
    learner = Learner(0.0, answer)
    found = watch(Worker(), deadline_s=0.3, learner=learner)
    assert eventually(lambda: found.failures)
    assert "learner ranks [1] did not finish what they were at within vla3.deadline_s = 0.3 s" in str(found.failures[0])
    assert [worker.kills for worker in learner.workers] == [0, 1]
