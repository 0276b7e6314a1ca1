"""Publication in the background: in order, one at a time, with a deadline and without losing an error."""

import threading
import time

import pytest

from vla3_plugin.learner.weights import WeightError
from vla3_plugin.telemetry.timeline import Timeline
from vla3_plugin.trainer.publisher import Publisher


class Learner:
    def __init__(self):
        self.snapshots, self.whole = [], 0

    def snapshot(self, version):
        self.snapshots.append(version)

    def publish_all(self):
        self.whole += 1


class WeightPlane:
    """Sends when ``gate`` is open."""

    def __init__(self):
        self.gate, self.sent, self.error = threading.Event(), [], None

    def update_weights(self, version):
        assert self.gate.wait(10)
        if self.error:
            raise self.error
        self.sent.append(version)
        return {"weights/bytes": 1.0}


def publisher(background, deadline_s=10.0):
    plane, learner, served = WeightPlane(), Learner(), []
    found = Publisher(plane, learner, served.append, served.append, background, False, Timeline("d"), deadline_s)
    return plane, learner, served, found


def test_training_goes_on_while_a_snapshot_is_sent_and_the_next_waits_for_it():
    plane, learner, served, found = publisher(background=True)
    assert found.publish(1) == {}, "returns before anything was sent"
    assert learner.snapshots == [1] and served == []
    plane.gate.set()
    metrics = found.publish(2)
    assert metrics["weights/bytes"] == 1.0, "of version 1, which was waited for"
    found.wait()
    assert plane.sent == served == learner.snapshots == [1, 2]


def test_in_line_publication_takes_no_snapshot_and_returns_when_it_is_served():
    plane, learner, served, found = publisher(background=False)
    plane.gate.set()
    assert "timing_s/publish" in found.publish(3)
    assert served == [3] and learner.snapshots == []


def test_a_publication_that_fails_is_reported_by_the_next_wait_and_serves_nothing():
    plane, _, served, found = publisher(background=True)
    plane.error = RuntimeError("checksum")
    plane.gate.set()
    found.publish(1)
    with pytest.raises(RuntimeError, match="checksum"):
        found.wait()
    assert [str(item) for item in served] == ["checksum"], "told at once to whoever waits for what depends on it"


def test_a_publication_that_never_ends_is_named_after_the_deadline():
    plane, _, _, found = publisher(background=True, deadline_s=0.05)
    found.publish(7)
    with pytest.raises(TimeoutError, match=r"version 7 was not served .* vla3\.deadline_s = 0\.05"):
        found.wait()


def eventually(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_version_that_a_dying_worker_did_not_take_is_sent_again_once_it_is_back():
    plane, learner, served, found = publisher(background=False)
    plane.gate.set()
    plane.error = ConnectionError("receiver closed the connection")

    def recovered(start, asked):
        assert asked > start, "a failure is looked into from its own time on"
        plane.error = None
        return True

    found.recovered_since = recovered
    found.publish(1)
    assert plane.sent == served == [1]
    assert learner.whole == 1, "it has lost what does not train as well"
    found.publish(2)
    assert learner.whole == 1


def test_a_publication_that_fails_although_no_worker_died_is_not_repeated():
    plane, _, _, found = publisher(background=False)
    plane.gate.set()
    plane.error = RuntimeError("checksum")
    with pytest.raises(RuntimeError, match="checksum"):
        found.publish(1)


def test_a_restarted_worker_gets_the_current_version_from_the_snapshot():
    plane, learner, served, found = publisher(background=True)
    plane.gate.set()
    found.publish(4)
    found.wait()
    found.learner_moves()
    found.republish()
    assert eventually(lambda: served == [4, 4])
    assert learner.snapshots == [4], "the copy is still there"
    assert learner.whole == 1, "it holds nothing yet"


def test_all_weights_are_sent_each_time_where_that_is_asked_for():
    plane, learner = WeightPlane(), Learner()
    plane.gate.set()
    found = Publisher(plane, learner, print, print, False, False, Timeline("d"), 10.0, trained_only=False)
    found.publish(1)
    found.publish(2)
    assert plane.sent == [1, 2] and learner.whole == 2


def test_without_a_snapshot_nothing_is_sent_in_the_middle_of_a_step():
    """The learner's weights are no version then; the next one comes at the end of the step."""
    plane, _, served, found = publisher(background=False)
    plane.gate.set()
    found.publish(4)
    found.republish()
    assert eventually(lambda: served == [4, 4])
    found.learner_moves()
    found.republish()
    time.sleep(0.2)
    assert served == [4, 4]
    found.publish(5)
    assert served == [4, 4, 5]


def test_a_version_that_a_replica_could_not_verify_is_sent_again_and_only_so_often():
    plane, _, served, found = publisher(background=False)
    plane.gate.set()
    left = [1]

    def once(version):
        if left[0]:
            left[0] -= 1
            raise WeightError("checksum 0x1, published 0x2")
        served.append(version)
        return {}

    plane.update_weights = once
    found.publish(1)
    assert served == [1, 1], "received once, and then reported as served"
    left[0] = 99
    with pytest.raises(WeightError, match="checksum"):
        found.publish(2)
