"""The batcher under any history of events: no request is lost, answered twice, or overtaken more than once."""

from batching import LONG, Clock, payloads, start
from hypothesis import given, settings
from hypothesis import strategies as st

from vla3_plugin.rollout.batcher import Batcher

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
