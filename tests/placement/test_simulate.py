"""The simulated run: what small cases give by hand, the real batcher's decisions, and what no schedule can exceed."""

import itertools
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vla3_plugin.envs.latency_draw import Duration
from vla3_plugin.placement.closed_forms import bounds
from vla3_plugin.placement.simulate import simulate
from vla3_plugin.placement.simulate_clock import Clock, Device, Event
from vla3_plugin.placement.simulate_lane import BatchedLane, Call, make_lane
from vla3_plugin.placement.simulate_model import EnvTimes, HostCosts, Layout, Schedule, Workload
from vla3_plugin.policies.latency import LatencySettings
from vla3_plugin.rollout.batcher import Batcher


def workload(env=100.0, chunks=4, prefix=(10.0, 0.0), step=(5.0, 0.0), denoising_steps=2, train=1.0, **more):
    """Two simulators that take ``env`` ms; inference 20 ms; training 1 ms a sample; two episodes a step."""
    return Workload(
        env=EnvTimes(Duration(env, **more.pop("draw", {})), low=chunks, high=chunks),
        policy=LatencySettings(
            prefix_ms_base=prefix[0], prefix_ms_per_sample=prefix[1], step_ms_base=step[0], step_ms_per_sample=step[1],
            denoising_steps=denoising_steps, train_ms_per_sample=train,
        ),
        layout=more.pop("layout", Layout(shards=2)),
        schedule=Schedule(**{"train_batch_size": 2, "micro_batch": 4, "bootstrap": False, **more.pop("schedule", {})}),
        host=HostCosts(**more.pop("host", {})),
    )  # fmt: skip


# ---------------------------------------------------------------- by hand


def test_one_clock_is_the_sum_of_its_parts():
    """Per step: 4 x (20 inference + 100 simulator), then 8 samples x 1 ms."""
    found = simulate(workload(), steps=3, warmup=1)
    assert found.step_s == pytest.approx(0.488)
    assert found.samples_per_s == pytest.approx(8 / 0.488)
    assert found.busy == pytest.approx({"env": 0.4 / 0.488, "rollout": 0.08 / 0.488, "learner": 0.008 / 0.488})
    assert found.batch == 2 and found.staleness == {0: 6}


def test_a_value_of_the_last_observation_is_one_more_inference():
    assert simulate(workload(schedule={"bootstrap": True}), steps=2).step_s == pytest.approx(0.508)


def test_host_costs_are_paid_where_they_arise():
    costs = {"assign_ms": 1, "request_ms": 2, "batch_ms": 3, "deliver_ms": 4, "report_ms": 5, "prepare_ms": 6,
             "update_ms": 7, "micro_ms": 8, "reduce_ms": 9, "publish_ms": 10, "step_ms": 11}  # fmt: skip
    # 4 calls of 2 + 3; two episodes delivered one after the other; 8 samples are two micro-batches
    more = 1 + 4 * (2 + 3) + 2 * 4 + 5 + 6 + 7 + 2 * 8 + 9 + 10 + 11
    assert simulate(workload(host=costs), steps=2).step_s == pytest.approx(0.488 + more / 1e3)


def test_resets_of_one_process_are_done_one_by_one_and_of_two_at_the_same_time():
    two = workload(layout=Layout(shards=1, slots=2))
    two = Workload(
        EnvTimes(Duration(100.0), reset_ms=Duration(30.0), low=4, high=4), two.policy, two.layout, two.schedule
    )
    assert simulate(two, steps=2).step_s == pytest.approx(0.488 + 0.060)
    apart = Workload(two.env, two.policy, Layout(shards=2), two.schedule)
    assert simulate(apart, steps=2).step_s == pytest.approx(0.488 + 0.030)


def test_two_ranks_share_the_samples_and_epochs_repeat_them():
    assert simulate(workload(layout=Layout(shards=2, ranks=2)), steps=2).step_s == pytest.approx(0.484)
    assert simulate(workload(schedule={"epochs": 3}), steps=2).step_s == pytest.approx(0.504)


def test_two_stages_overlap_one_ones_simulator_with_the_others_inference():
    """Each of two stages has one environment: rounds of 120 ms, the second 20 ms behind the first."""
    found = simulate(workload(schedule={"pipeline_stage_num": 2}), steps=2)
    assert found.step_s == pytest.approx(0.480 + 0.020 + 0.008)


def test_with_decoupled_training_rollout_never_waits_for_the_learner():
    """Rollout 4 x 120 ms, learner 8 x 10 ms: a step takes the longer of the two, and samples are one version old."""
    asynchronous = {"interaction": True, "training": True, "max_staleness": 1, "recompute": False}
    found = simulate(workload(train=10.0, schedule=asynchronous), steps=5)
    assert found.step_s == pytest.approx(0.480)
    assert found.busy["env"] + found.waits["policy"] == pytest.approx(1.0)
    assert found.dropped == 0


@pytest.mark.parametrize(("just_in_time", "ages"), [(False, {2: 10}), (True, {1: 5, 2: 5})])
def test_a_learner_that_binds_never_waits_when_rollout_may_run_ahead(just_in_time, ages):
    asynchronous = {
        "interaction": True, "training": True, "max_staleness": 2, "recompute": False, "just_in_time": just_in_time
    }  # fmt: skip
    found = simulate(workload(train=200.0, schedule=asynchronous), steps=5, warmup=20)  # the lead has settled
    assert found.step_s == pytest.approx(1.6)
    assert found.busy["learner"] == pytest.approx(1.0)
    assert found.staleness == ages, "it takes what has waited longest; just in time, one of two is in reserve"


def test_streaming_trains_on_the_first_episode_while_the_second_is_played():
    """Episodes of one simulator, one after the other: 480 ms each. Streamed, only the last one's training is left."""
    alone = workload(train=50.0, layout=Layout(shards=1), schedule={"interaction": True})
    assert simulate(alone, steps=2).step_s == pytest.approx(0.960 + 0.400)
    streamed = alone.but(streaming=True)
    # the first micro-batch (4 samples, 200 ms) is sent when a fifth sample is there: at the end
    assert simulate(streamed, steps=2).step_s == pytest.approx(0.960 + 0.400)
    finer = streamed.but(micro_batch=2)
    # of the first episode's two micro-batches one may go at 480 ms; three are left at 960
    assert simulate(finer, steps=2).step_s == pytest.approx(0.960 + 0.300)


def test_a_collocated_device_does_one_thing_at_a_time():
    asynchronous = {"interaction": True, "training": True, "max_staleness": 2, "recompute": False}
    apart = workload(env=0.0, chunks=8, train=20.0, schedule=asynchronous)
    shared = apart.but(shared=True)
    found = simulate(shared, steps=6)
    assert found.busy["rollout"] + found.busy["learner"] <= 1 + 1e-9
    assert found.samples_per_s < simulate(apart, steps=6).samples_per_s


def test_a_simulator_on_the_replicas_device_waits_for_it():
    work = workload(schedule={"interaction": True, "max_batch_size": 1})
    on_cpu, on_gpu = simulate(work, steps=2), simulate(work.but(simulator_on_replica=True), steps=2)
    assert on_gpu.step_s == pytest.approx(2 * 4 * 0.120 + 0.008), "all work of both environments, one after the other"
    assert on_cpu.step_s < on_gpu.step_s


def test_what_stands_still_is_said():
    clock = Clock()
    with pytest.raises(RuntimeError, match="stands still"):
        clock.run(lambda: False)
    with pytest.raises(ValueError, match="takes any time"):
        simulate(workload(env=0.0, prefix=(0.0, 0.0), step=(0.0, 0.0), train=0.0))
    with pytest.raises(ValueError, match="at least 1"):
        simulate(workload(), steps=0)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: Layout(shards=0), "layout.shards: 0"),
        (lambda: Layout(replicas=2, ranks=1, shared=True), "2 replicas on 1 ranks"),
        (lambda: Schedule(train_batch_size=10, group_size=4), "multiple of group_size"),
        (lambda: Schedule(batching="eager"), "run_to_completion or step_join"),
        (lambda: HostCosts(batch_ms=-1.0), "host.batch_ms: -1.0"),
        (lambda: workload().but(speed=3), "'speed' is no field"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(make, said):
    with pytest.raises(ValueError, match=said):
        make()


# ---------------------------------------------------------------- the clock


def test_events_of_one_time_happen_in_the_order_they_were_made():
    clock, seen = Clock(), []
    for i in range(5):
        clock.call(1.0, seen.append, i)
    clock.run(lambda: len(seen) == 5)
    assert seen == list(range(5)) and clock.now == 1.0


def test_a_device_serves_first_come_first_served_and_never_two():
    clock, log = Clock(), []
    device = Device(clock)

    def user(name, at, seconds):
        yield at
        yield from device.use(seconds, name)
        log.append((name, clock.now))

    for name, at, seconds in (("a", 0.0, 2.0), ("b", 1.0, 1.0), ("c", 0.5, 1.0)):
        clock.start(user(name, at, seconds))
    clock.run(lambda: len(log) == 3)
    assert log == [("a", 2.0), ("c", 3.0), ("b", 4.0)] and sum(device.busy.values()) == 4.0


def test_an_event_lets_late_comers_through():
    clock, log = Clock(), []
    event = Event(clock)
    event.set()

    def late():
        yield event
        log.append(clock.now)

    clock.start(late())
    clock.run(lambda: bool(log))
    assert log == [0.0]


# ---------------------------------------------------------------- the same decisions as the real ones


@pytest.mark.parametrize("limit, wait_ms", [(1, 0.0), (3, 0.0), (4, 30.0), (16, 40.0)])
def test_the_lane_on_the_virtual_clock_makes_the_batches_of_the_threaded_batcher(limit, wait_ms):
    """Recorded arrivals, far enough apart that a thread can keep up with them; a batch takes 25 ms."""
    arrivals = [0.0, 0.01, 0.012, 0.05, 0.12, 0.121, 0.122, 0.123, 0.2, 0.21, 0.33, 0.36, 0.39]
    batch_ms = 25.0
    work = workload(prefix=(batch_ms, 0.0), step=(0.0, 0.0),
                    schedule={"interaction": True, "max_batch_size": limit, "max_wait_ms": wait_ms})  # fmt: skip
    clock = Clock()
    lane = BatchedLane(clock, work, Device(clock))
    calls = [Call(clock, 1) for _ in arrivals]
    for at, call in zip(arrivals, calls, strict=True):
        clock.call(at, lane.submit, call)
    clock.run(lambda: all(call.answered.happened for call in calls))
    virtual = lane.rule.drain_stats().batch_sizes

    batcher, sizes = Batcher(limit, wait_ms), []

    def serve():
        while sum(sizes) < len(arrivals):
            batch = batcher.take()
            sizes.append(len(batch))
            time.sleep(batch_ms / 1e3)

    for _ in range(3):  # a machine that is busy elsewhere may be late once
        sizes.clear()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        start = time.monotonic()
        for at in arrivals:
            time.sleep(max(0.0, start + at - time.monotonic()))
            batcher.submit(["x"], "train")
        thread.join(10)
        if sizes == virtual:
            break
    assert sizes == virtual


def test_step_join_lets_a_late_request_in_between_two_steps():
    """A batch of one runs 10 + 4 x 10 ms; who comes 15 ms later is done after one more prefix and four steps."""
    work = workload(prefix=(10.0, 0.0), step=(10.0, 0.0), denoising_steps=4,
                    schedule={"interaction": True, "max_batch_size": 8})  # fmt: skip
    ends = {}
    for batching in ("run_to_completion", "step_join"):
        clock = Clock()
        lane = make_lane(clock, work.but(batching=batching), Device(clock))
        first, second = Call(clock, 1), Call(clock, 1)
        clock.call(0.0, lane.submit, first)
        clock.call(0.015, lane.submit, second)
        clock.run(lambda: second.answered.happened)  # noqa: B023
        ends[batching] = clock.now
    assert ends["run_to_completion"] == pytest.approx(0.050 + 0.050)
    assert ends["step_join"] == pytest.approx(0.020 + 0.010 + 4 * 0.010)


def test_weights_enter_between_two_batches_and_every_answer_says_its_version():
    work = workload(schedule={"interaction": True, "max_batch_size": 4})
    clock = Clock()
    lane = BatchedLane(clock, work, Device(clock))
    early, late = Call(clock, 1), Call(clock, 1)
    lane.submit(early)
    swapped = []
    clock.call(0.005, lambda: swapped.append(lane.swap(7)))
    clock.call(0.006, lane.submit, late)
    clock.run(lambda: late.answered.happened)
    assert (early.version, late.version) == (0, 7) and swapped[0].happened


# ---------------------------------------------------------------- what holds for every workload

MODES = [
    {},
    {"pipeline_stage_num": 2},
    {"interaction": True},
    {"interaction": True, "streaming": True},
    {"interaction": True, "streaming": True, "training": True, "max_staleness": 2},
    {"interaction": True, "streaming": True, "training": True, "batching": "step_join"},
    {"training": True, "max_staleness": 1},
]


@st.composite
def workloads(draw):
    shards = draw(st.integers(2, 6))
    return workload(
        env=draw(st.floats(5, 200)), chunks=draw(st.integers(1, 5)),
        prefix=(draw(st.floats(1, 30)), draw(st.floats(0, 3))), step=(draw(st.floats(0, 5)), draw(st.floats(0, 1))),
        train=draw(st.floats(0, 20)), draw={"sigma": draw(st.sampled_from([0.0, 0.4]))},
        layout=Layout(workers=draw(st.integers(1, 2)), shards=shards, slots=draw(st.integers(1, 2))),
        schedule={**draw(st.sampled_from(MODES)), "train_batch_size": draw(st.integers(1, 3)) * 4,
                  "max_batch_size": draw(st.integers(1, 12)), "max_wait_ms": draw(st.sampled_from([0.0, 5.0])),
                  "group_size": draw(st.sampled_from([1, 2])), "bootstrap": draw(st.booleans()),
                  "mini_batches": draw(st.sampled_from([1, 2]))},
    )  # fmt: skip


@settings(max_examples=40)
@given(workloads())
def test_no_schedule_is_faster_than_its_busiest_resource_and_no_work_is_lost(work):
    steps = 5
    found = simulate(work, steps=steps, warmup=2)
    size, chunks = work.schedule.train_batch_size, work.env.high
    assert found.samples_per_s * found.step_s == pytest.approx(size * chunks), "each step trains on its episodes, once"
    assert sum(found.staleness.values()) == steps * size // work.schedule.group_size
    assert max(found.staleness) <= work.schedule.staleness and found.dropped == 0
    assert all(0 <= share <= 1 + 1e-9 for share in (*found.busy.values(), *found.waits.values()))
    # what was begun in the warm-up may end in the measured part: a learner's step is exact, rollout may be a bit ahead
    assert found.samples_per_s <= bounds(work)["learner"] * (1 + 1e-6) or work.policy.train_ms(1) == 0
    ahead = 1 + (work.schedule.staleness + 1) / steps
    drawn = 1.25 if work.env.chunk_ms.sigma else 1.0  # few draws: their mean is not the distribution's
    assert found.samples_per_s <= min(bounds(work).values()) * ahead * drawn


@settings(max_examples=25)
@given(workloads(), st.sampled_from(["train", "inference", "env"]))
def test_a_resource_twice_as_fast_never_makes_the_run_slower(work, what):
    """Up to what a first-come-first-served batcher can lose by being early: the anomaly of greedy schedules."""
    assume(work.env.chunk_ms.sigma == 0.0)
    half = {
        "train": {"train_ms_per_sample": 0.5},
        "inference": dict.fromkeys(
            ("prefix_ms_base", "prefix_ms_per_sample", "step_ms_base", "step_ms_per_sample"), 0.5
        ),
        "env": {},
    }[what]
    policy = replace(work.policy, **{name: getattr(work.policy, name) * share for name, share in half.items()})
    chunk = Duration(work.env.chunk_ms.median_ms * (0.5 if what == "env" else 1.0))
    faster = replace(work, policy=policy, env=replace(work.env, chunk_ms=chunk))
    before, after = simulate(work, steps=6), simulate(faster, steps=6)
    assert after.samples_per_s >= 0.8 * before.samples_per_s
    if not (work.schedule.interaction or work.schedule.training or work.schedule.pipeline_stage_num > 1):
        assert after.samples_per_s >= before.samples_per_s - 1e-9, "one clock has nothing to reorder"


def test_a_simulation_is_a_function_of_its_seed():
    work = workload(draw={"sigma": 0.5}, schedule=MODES[4])
    assert simulate(work, steps=4) == simulate(work, steps=4)
    assert simulate(work, steps=4) != simulate(replace(work, seed=1), steps=4)


def test_every_mode_trains_on_the_same_amount():
    found = [simulate(workload(schedule=mode), steps=4) for mode in MODES]
    for one, other in itertools.pairwise(found):
        assert one.samples_per_s * one.step_s == pytest.approx(other.samples_per_s * other.step_s)
