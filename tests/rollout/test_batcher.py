"""The batcher: when it fires, whom it lets join, and how it is interrupted, closed and filled up.

What depends on time runs on a clock that the test moves; threads are given generous bounds and asserted on order only.
"""

import time

import pytest
from batching import LONG, NEVER_MS, Clock, payloads, start, wait_until

from vla3_plugin.rollout.batcher import Batcher, BatcherFull

# ---------------------------------------------------------------- when it fires


def test_a_full_batch_fires_at_once():
    batcher = Batcher(3, NEVER_MS, clock=Clock())
    batcher.submit(["a", "b"], "train")
    assert batcher.take(timeout=0) == []
    batcher.submit(["c", "d"], "train")
    assert payloads(batcher.take(timeout=0)) == ["a", "b", "c"]
    assert batcher.depth == 1 and batcher.take(timeout=0) == []


def test_a_batch_that_is_not_full_fires_when_its_oldest_request_has_waited_long_enough():
    clock = Clock()
    batcher = Batcher(8, 10.0, clock=clock)
    batcher.submit(["a"], "train")
    clock.now += 0.009
    batcher.submit(["b"], "train")
    assert batcher.take(timeout=0) == []
    clock.now += 0.0011
    assert payloads(batcher.take(timeout=0)) == ["a", "b"], "the younger one does not put the batch off"


def test_the_clock_starts_at_arrival_and_not_at_take():
    """A request that waited while the lane was busy fires at once: else every busy spell would add max_wait_ms."""
    clock = Clock()
    batcher = Batcher(8, 10.0, clock=clock)
    batcher.submit(["a"], "train")
    clock.now += 0.5  # the lane runs another batch
    assert payloads(batcher.take(timeout=0)) == ["a"]
    clock.now += 10.0  # an idle spell
    batcher.submit(["b"], "train")
    assert batcher.take(timeout=0) == [], "and an idle spell does not count as waiting"


def test_a_full_batch_of_a_younger_kind_does_not_fire_before_the_oldest_request():
    clock = Clock()
    batcher = Batcher(2, 10.0, clock=clock)
    batcher.submit(["e"], "eval")
    batcher.submit(["a", "b", "c"], "train")
    assert batcher.take(timeout=0) == []
    clock.now += 0.0101
    assert payloads(batcher.take(timeout=0)) == ["e"]
    assert payloads(batcher.take(timeout=0)) == ["a", "b"]


def test_a_blocked_take_is_woken_by_the_request_that_fills_the_batch():
    batcher = Batcher(3, NEVER_MS)
    taken = start(batcher.take)
    for payload in "abc":
        batcher.submit([payload], "train")
    assert payloads(taken.result(LONG)) == ["a", "b", "c"]


def test_a_lone_request_is_never_fired_early_and_always_fired():
    batcher = Batcher(8, 20.0)
    for _ in range(5):
        taken = start(batcher.take)
        before = time.monotonic()
        batcher.submit(["a"], "train")
        assert payloads(taken.result(LONG)) == ["a"]
        assert time.monotonic() - before >= 0.020
    assert min(batcher.drain_stats().waits_ms) >= 20.0


def test_waiting_takes_no_polling():
    """Asleep between events: the clock is read a fixed number of times for an event, not per unit of time."""
    clock = Clock()
    batcher = Batcher(32, NEVER_MS, clock=clock)
    taken = start(batcher.take)
    for payload in range(31):
        batcher.submit([payload], "train")
    wait_until(lambda: len(batcher._taker._waiters) == 1)
    before = clock.calls
    time.sleep(0.2)
    assert clock.calls == before
    batcher.submit([31], "train")
    assert payloads(taken.result(LONG)) == list(range(32))
    assert clock.calls - before <= 3


def test_requests_that_cannot_fire_a_batch_do_not_wake_the_taker():
    batcher = Batcher(32, NEVER_MS)
    taken = start(batcher.take)
    batcher.submit([0], "train")
    wait_until(lambda: len(batcher._taker._waiters) == 1)
    asleep = batcher._taker._waiters[0]
    for payload in range(1, 31):
        batcher.submit([payload], "train")
        assert batcher._taker._waiters[0] is asleep
    batcher.submit([31], "train")
    assert len(taken.result(LONG)) == 32


def test_take_gives_up_after_its_timeout_and_keeps_the_request():
    batcher = Batcher(8, NEVER_MS)
    batcher.submit(["a"], "train")
    assert batcher.take(timeout=0.01) == []
    assert batcher.depth == 1


def test_no_wait_fires_with_whatever_is_there():
    batcher = Batcher(8, 0, clock=Clock())
    assert batcher.take(timeout=0) == []
    batcher.submit(["a", "b"], "train")
    assert payloads(batcher.take(timeout=0)) == ["a", "b"]


# ---------------------------------------------------------------- joining a running batch


def test_take_now_takes_what_waits_of_the_oldest_kind_without_waiting():
    batcher = Batcher(8, NEVER_MS, clock=Clock())
    assert batcher.take_now(4) == []
    batcher.submit(["a", "b", "c"], "train")
    assert batcher.take_now(0) == []
    assert payloads(batcher.take_now(2)) == ["a", "b"]
    batcher.submit(["e"], "eval")
    assert payloads(batcher.take_now(2)) == ["c"]
    assert batcher.depth == 1


def test_a_running_batch_is_not_joined_past_an_older_request_of_another_kind():
    """Else a stream of joining training requests would keep an evaluation waiting for ever."""
    batcher = Batcher(8, NEVER_MS, clock=Clock())
    batcher.submit(["e"], "eval")
    batcher.submit(["a"], "train")
    assert batcher.take_now(8, kind="train") == []
    assert payloads(batcher.take_now(8, kind="eval")) == ["e"]
    assert payloads(batcher.take_now(8, kind="train")) == ["a"]


# ---------------------------------------------------------------- interrupt


def test_an_interrupt_wakes_exactly_one_blocked_take_and_loses_no_request():
    batcher = Batcher(8, NEVER_MS)
    batcher.submit(["a"], "train")
    taken = start(batcher.take)
    wait_until(lambda: len(batcher._taker._waiters) == 1)
    batcher.interrupt()
    assert taken.result(LONG) == []
    again = start(batcher.take)
    wait_until(lambda: len(batcher._taker._waiters) == 1)
    assert not again.done() and batcher.depth == 1
    batcher.submit(range(7), "train")
    assert payloads(again.result(LONG)) == ["a", *range(7)]


def test_an_interrupt_that_comes_between_two_takes_is_seen_by_the_next_one():
    """It also goes before a batch that may fire, and several at once are one."""
    batcher = Batcher(2, NEVER_MS, clock=Clock())
    batcher.submit(["a", "b"], "train")
    batcher.interrupt()
    batcher.interrupt()
    assert batcher.take() == []
    assert payloads(batcher.take()) == ["a", "b"]


# ---------------------------------------------------------------- close


def test_close_fails_waiting_and_later_requests_with_the_given_error():
    batcher = Batcher(8, NEVER_MS)
    error = RuntimeError("the policy worker is gone")
    tickets = batcher.submit(["a", "b"], "train") + batcher.submit(["e"], "eval")
    batcher.close(error)
    batcher.close(RuntimeError("a second reason"))
    tickets += batcher.submit(["c"], "train")
    assert [t.future.exception(0) for t in tickets] == [error] * 4
    assert batcher.closed and batcher.depth == 0
    assert batcher.take() == [] and batcher.take() == [] and batcher.take_now(4) == []


def test_close_spares_what_was_taken_and_what_was_cancelled():
    batcher = Batcher(1, NEVER_MS)
    taken, cancelled, waiting = batcher.submit(["a", "b", "c"], "train")
    assert batcher.take() == [taken]
    assert cancelled.future.cancel()
    batcher.close(RuntimeError("closed"))
    taken.future.set_result("answer")
    assert taken.future.result() == "answer" and cancelled.future.cancelled()
    assert str(waiting.future.exception()) == "closed"


def test_close_releases_a_blocked_take_and_held_back_senders():
    full, empty = Batcher(2, NEVER_MS, max_queue=2), Batcher(2, NEVER_MS)
    full.submit(["a"], "train")
    senders = [start(full.submit, ["b", "c"], "train") for _ in range(3)]
    taken = start(empty.take)
    wait_until(lambda: len(full._senders) == 3 and len(empty._taker._waiters) == 1)
    error = RuntimeError("closed")
    full.close(error)
    empty.close(error)
    assert taken.result(LONG) == []
    assert [t.future.exception(0) for s in senders for t in s.result(LONG)] == [error] * 6


def test_a_callback_of_a_failed_request_may_call_the_batcher():
    batcher = Batcher(8, NEVER_MS)
    retried = []
    (ticket,) = batcher.submit(["a"], "train")
    ticket.future.add_done_callback(lambda _: retried.extend(batcher.submit(["a"], "train")))
    start(batcher.close, RuntimeError("closed")).result(LONG)
    assert str(retried[0].future.exception(0)) == "closed"


# ---------------------------------------------------------------- back-pressure


def test_a_full_queue_holds_back_and_then_raises_naming_the_key():
    batcher = Batcher(2, NEVER_MS, max_queue=4)
    batcher.submit([1, 2, 3], "train")
    before = time.monotonic()
    with pytest.raises(BatcherFull, match=r"vla3\.stages\.interaction\.max_queue: 4, 3 requests wait and 2 more"):
        batcher.submit([4, 5], "train", timeout=0.05)
    assert time.monotonic() - before >= 0.05
    assert batcher.depth == 3 and batcher.drain_stats().submitted == 3, "all or none"
    assert len(batcher.submit([4], "train", timeout=0)) == 1
    with pytest.raises(BatcherFull):
        batcher.submit([5], "train", timeout=0)


def test_held_back_senders_are_let_in_in_the_order_in_which_they_came():
    """A small submission does not slip past a large one: else a large shard could wait for ever."""
    batcher = Batcher(1, NEVER_MS, max_queue=4)
    batcher.submit(range(4), "train")
    senders = []
    for payload in (["large"] * 3, ["small"], ["last"]):
        senders.append(start(batcher.submit, payload, "train", LONG))
        wait_until(lambda: len(batcher._senders) == len(senders))
    for payload in (0, 1):
        assert payloads(batcher.take()) == [payload]
    with pytest.raises(BatcherFull):
        batcher.submit(["there is room for me, but not for the large one before me"], "train", timeout=0)
    assert len(batcher._senders) == 3
    rest = [batcher.take()[0].payload for _ in range(7)]
    assert rest == [2, 3, "large", "large", "large", "small", "last"]
    assert all(s.result(LONG) for s in senders)
    assert batcher.drain_stats().held_back == 4


def test_a_sender_that_gives_up_lets_the_next_one_in():
    batcher = Batcher(1, NEVER_MS, max_queue=4)
    batcher.submit([1, 2, 3], "train")
    large = start(batcher.submit, ["x"] * 4, "train", 0.3)
    wait_until(lambda: batcher._senders)
    small = start(batcher.submit, ["y"], "train")
    with pytest.raises(BatcherFull):
        large.result(LONG)
    assert len(small.result(LONG)) == 1


def test_a_submission_that_can_never_fit_is_refused_at_once():
    with pytest.raises(ValueError, match=r"vla3\.stages\.interaction\.max_queue: 4, expected at least the 5"):
        Batcher(2, 1.0, max_queue=4).submit(range(5), "train")


@pytest.mark.parametrize(
    "arguments, key",
    [
        ((0, 1.0), "max_batch_size: 0"),
        ((2.5, 1.0), "max_batch_size: 2.5"),
        ((True, 1.0), "max_batch_size: True"),
        ((4, -1.0), "max_wait_ms: -1.0"),
        ((4, float("inf")), "max_wait_ms: inf"),
        ((4, float("nan")), "max_wait_ms: nan"),
        ((4, None), "max_wait_ms: None"),
        ((4, 1.0, 0), "max_queue: 0"),
        ((4, 1.0, 3), r"max_queue: 3, expected at least max_batch_size \(4\)"),
    ],
)
def test_a_bad_setting_is_refused_by_name(arguments, key):
    with pytest.raises(ValueError, match=rf"vla3\.stages\.interaction\.{key}"):
        Batcher(*arguments)
