"""The batcher: when it fires, in which order, and that no request is lost, answered twice or left behind.

What depends on time runs on a clock that the test moves; threads are given generous bounds and asserted on order only.
"""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla3_plugin.rollout import batcher as module
from vla3_plugin.rollout.batcher import Batcher, BatcherFull, BatcherStats

LONG = 10.0  # seconds; never reached unless something hangs
NEVER_MS = 1e9


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self.now


def payloads(tickets):
    return [ticket.payload for ticket in tickets]


def wait_until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.001)


def start(function, *args):
    """The future of ``function(*args)`` in a thread of its own, which a failing test does not wait for."""
    future = Future()

    def body():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return future


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


# ---------------------------------------------------------------- order: any history of events

KINDS = ("train", "eval", "probe")


def events(kinds):
    return st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.sampled_from(kinds), st.integers(1, 4)),
            st.tuples(st.just("pass"), st.floats(0, 0.02)),
            st.tuples(st.just("take")),
            st.tuples(st.just("take_now"), st.integers(0, 6)),
            st.tuples(st.just("cancel"), st.integers(0, 50)),
        ),
        max_size=60,
    )


class History:
    """Runs events against a batcher and keeps its own book: who waits, and which batch took whom."""

    def __init__(self, limit):
        self.limit, self.clock = limit, Clock()
        self.batcher = Batcher(limit, 10.0, max_queue=1000, clock=self.clock)
        self.tickets = []  # payload i is the i-th arrival
        self.arrivals = []
        self.waiting = []
        self.cancelled = set()
        self.batches = []  # (batch, who waited before it)

    def submit(self, kind, count):
        start = len(self.tickets)
        self.tickets += self.batcher.submit(range(start, start + count), kind)
        self.arrivals += [self.clock.now] * count
        self.waiting += range(start, start + count)

    def cancel(self, index):
        if index in self.waiting and self.tickets[index].future.cancel():
            self.cancelled.add(index)

    def take(self):
        may_fire = False
        if self.waiting:
            head = self.waiting[0]
            same = [i for i in self.waiting if self.tickets[i].kind == self.tickets[head].kind]
            may_fire = len(same) >= self.limit or self.clock.now - self.arrivals[head] >= 0.010
        batch = self.book(self.batcher.take(timeout=0), self.limit)
        if not self.cancelled:  # a cancelled request takes its place until its turn
            assert bool(batch) == may_fire

    def take_now(self, limit):
        batch = self.book(self.batcher.take_now(limit), limit)
        if not self.cancelled:
            assert bool(batch) == bool(self.waiting_before and limit)

    def book(self, tickets, limit):
        batch = payloads(tickets)
        self.waiting_before = list(self.waiting)
        assert len(batch) <= limit
        assert len({ticket.kind for ticket in tickets}) <= 1
        assert set(batch) <= set(self.waiting), "only who waits, so nobody twice"
        assert not set(batch) & self.cancelled
        self.batches.append((batch, self.waiting_before))
        alive = self.batcher._lines.values()
        gone = set(self.waiting) - {ticket.payload for line in alive for ticket in line}
        assert gone <= set(batch) | self.cancelled, "nobody lost"
        self.waiting = [i for i in self.waiting if i not in gone]
        assert self.batcher.depth == len(self.waiting)
        return batch

    def run(self, script):
        for name, *args in script:
            if name == "pass":
                self.clock.now += args[0]
            else:
                getattr(self, name)(*args)
        while self.waiting:
            self.clock.now += 1.0
            self.take()

    def overtakings(self):
        """For each request, the batches that left with a later arrival while it waited."""
        count = dict.fromkeys(range(len(self.tickets)), 0)
        for batch, waited in self.batches:
            for i in waited:
                if i not in batch and i not in self.cancelled and batch and max(batch) > i:
                    count[i] += 1
        return count


@settings(max_examples=150)
@given(st.integers(1, 5), events(KINDS[:2]))
def test_no_request_of_two_kinds_is_overtaken_twice_lost_or_answered_twice(limit, script):
    history = History(limit)
    history.run(script)
    assert max(history.overtakings().values(), default=0) <= 1
    taken = [i for batch, _ in history.batches for i in batch]
    assert sorted(taken) == sorted(set(range(len(history.tickets))) - history.cancelled)


@settings(max_examples=150)
@given(st.integers(1, 5), events(KINDS))
def test_the_same_holds_for_three_kinds_and_the_tickets_count_it(limit, script):
    """Three kinds need more than 'the oldest one chooses the kind': two batches could pass over the third."""
    history = History(limit)
    history.run(script)
    overtakings = history.overtakings()
    assert max(overtakings.values(), default=0) <= 1
    for i, ticket in enumerate(history.tickets):
        assert i in history.cancelled or ticket.overtaken == overtakings[i]


@given(st.integers(1, 5), events(KINDS))
def test_requests_of_one_kind_leave_in_the_order_of_their_arrival(limit, script):
    history = History(limit)
    history.run(script)
    for kind in KINDS:
        left = [i for batch, _ in history.batches for i in batch if history.tickets[i].kind == kind]
        assert left == sorted(left)


@given(st.integers(1, 5), events(KINDS))
def test_the_statistics_add_up(limit, script):
    history = History(limit)
    history.run(script)
    stats = history.batcher.drain_stats()
    assert stats.submitted == len(history.tickets)
    assert stats.taken == len(stats.waits_ms) == sum(len(batch) for batch, _ in history.batches)
    assert stats.taken == sum(stats.batch_sizes) + stats.joined
    assert stats.cancelled == len(history.cancelled) == stats.submitted - stats.taken
    assert stats.max_depth == max((len(w) for _, w in history.batches), default=0)


def test_a_request_that_was_overtaken_once_stops_the_next_batch():
    batcher = Batcher(2, 0, clock=Clock())
    for payload, kind in (("t1", "train"), ("e1", "eval"), ("p1", "probe"), ("t2", "train"), ("e2", "eval")):
        batcher.submit([payload], kind)
    assert payloads(batcher.take()) == ["t1", "t2"], "passes over e1 and p1"
    assert payloads(batcher.take()) == ["e1"], "and e2 may not pass over p1"
    assert payloads(batcher.take()) == ["p1"]
    assert payloads(batcher.take()) == ["e2"]


@settings(max_examples=8)
@given(st.integers(1, 9), st.integers(1, 24), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_under_many_threads_every_request_is_answered_once_with_its_own_answer(limit, room, shards):
    batcher = Batcher(limit, 0.2, max_queue=max(limit, room, *shards))
    answered = []

    def lane():
        while not batcher.closed:
            batch = batcher.take()
            assert len(batch) <= limit and len({t.kind for t in batch}) <= 1
            for ticket in batch + batcher.take_now(1):
                answered.append(ticket.payload)
                ticket.future.set_result(("answer", ticket.payload))

    def shard(index, envs):
        for step in range(15):
            kind = "eval" if (index + step) % 3 == 0 else "train"
            mine = [(index, step, env) for env in range(envs)]
            tickets = batcher.submit(mine, kind, timeout=LONG)
            assert [t.future.result(LONG) for t in tickets] == [("answer", payload) for payload in mine]
        return 15 * envs

    taker = start(lane)
    running = [start(shard, index, envs) for index, envs in enumerate(shards)]
    try:
        total = sum(future.result(3 * LONG) for future in running)
    finally:
        batcher.close(RuntimeError("over"))
    taker.result(LONG)
    assert len(answered) == len(set(answered)) == total == sum(shards) * 15


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


# ---------------------------------------------------------------- statistics


def test_statistics_say_sizes_waits_and_depth_since_the_last_drain():
    clock = Clock()
    batcher = Batcher(3, 10.0, clock=clock)
    batcher.submit("abcd", "train")
    clock.now += 0.002
    assert len(batcher.take()) == 3
    stats = batcher.drain_stats()
    assert (stats.batch_sizes, stats.submitted, stats.taken, stats.max_depth) == ([3], 4, 3, 4)
    assert stats.waits_ms == pytest.approx([2.0] * 3)
    assert len(batcher.take_now(3)) == 1
    stats = batcher.drain_stats()
    assert (stats.batch_sizes, stats.submitted, stats.taken, stats.joined, stats.max_depth) == ([], 0, 1, 1, 1)


def test_metrics_are_plain_numbers_under_the_prefix():
    metrics = BatcherStats([1, 3, 8], [0.5, 1.0, 30.0], max_depth=9, submitted=12, taken=12).metrics("batcher")
    assert metrics["batcher/batch_size/mean"] == 4.0 and metrics["batcher/batch_size/p50"] == 3.0
    assert metrics["batcher/wait_ms/max"] == 30.0 and metrics["batcher/wait_ms/p95"] == pytest.approx(27.1)
    assert metrics["batcher/max_depth"] == 9.0 and metrics["batcher/taken"] == 12.0
    assert all(type(value) is float for value in metrics.values())
    assert not any("wait_ms" in name for name in BatcherStats().metrics("b")), "nothing waited: no made-up zero"


def test_histograms_have_fixed_edges_and_lose_no_value():
    stats = BatcherStats([1, 3, 4, 4, 32, 1000], [0.0, 0.7, 3.0, 5000.0])
    histograms = stats.histograms("batcher")
    assert histograms["batcher/batch_size/hist/3_to_5"] == 3.0
    assert histograms["batcher/wait_ms/hist/from_1000"] == 1.0
    assert sum(v for k, v in histograms.items() if "batch_size" in k) == 6
    assert sum(v for k, v in histograms.items() if "wait_ms" in k) == 4
    assert histograms.keys() == BatcherStats().histograms("batcher").keys()


def test_statistics_of_several_policy_workers_add_up():
    parts = [BatcherStats([2], [1.0, 2.0], 5, 2, 2, overtaken=1), BatcherStats([1], [3.0], 7, 1, 1, held_back=4)]
    merged = BatcherStats.merged(parts)
    assert merged == BatcherStats([2, 1], [1.0, 2.0, 3.0], 7, 3, 3, overtaken=1, held_back=4)
    assert parts[0].batch_sizes == [2] and BatcherStats.merged([]) == BatcherStats()


def test_statistics_that_nobody_drains_do_not_grow(monkeypatch):
    monkeypatch.setattr(module, "KEPT", 10)
    batcher = Batcher(1, 0)
    for i in range(50):
        batcher.submit([i], "train")
        batcher.take()
    stats = batcher.drain_stats()
    assert len(stats.batch_sizes) == len(stats.waits_ms) == 10 and stats.taken == stats.submitted == 50


@pytest.mark.slow
def test_the_benchmark_runs_and_reports_what_it_promises():
    script = Path(__file__).parents[2] / "benchmarks" / "batcher.py"
    command = [sys.executable, str(script), "--json", "--seconds", "0.2", "--trials", "1", "--idle", "40"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert all(min(row["per_second"]) > 0 for row in result["throughput"])
    assert len(result["delay"]) == 2, "one sender, and many"
    assert all(min(row["requests"]) > 0 for found in result["delay"].values() for row in found["below"])
    assert result["idle"]["requests"] == 40 and result["idle"]["early"] == 0
