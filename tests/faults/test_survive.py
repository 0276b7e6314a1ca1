"""Faults in a run that is under way: each is survived, counted, and costs no episode of the plan.

One run serves all of them, one after the other: what must hold after a fault is that the run goes on; what must hold in
the end is the account of every group. In the table of docs/reliability.md each fault has its line.
"""

import json
import math
import os
import signal
import time

import psutil
import pytest
from whole_runs import MODES, Living, mode_overrides, wait_for

from vla3_plugin.telemetry.ledger import read_ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# one bad episode a kind; the ids are early in the plan, so every run meets them
BAD = {"9": "exit", "26": "raise", "43": "bad_state", "62": "bad_reward", "81": "hang"}
SIMULATOR, POLICY, ENV = "vla3_plugin.envs.child", "ray::PolicyWorker", "ray::EnvWorker"
LEARNER, TRAINER = "ray::WorkerDict", "ray::TaskRunner"
HEARTBEAT_S = 8.0
FAULTS = [
    (SIMULATOR, signal.SIGKILL, ["env_replaced"]),
    (SIMULATOR, signal.SIGSTOP, ["env_replaced"]),
    (POLICY, signal.SIGKILL, ["policy_worker_lost", "policy_worker_restarted"]),
    (POLICY, signal.SIGSTOP, ["policy_worker_lost", "policy_worker_restarted"]),
    (ENV, signal.SIGKILL, ["env_worker_lost", "env_worker_restarted"]),
    (ENV, signal.SIGSTOP, ["env_worker_lost", "env_worker_restarted"]),
]


@pytest.fixture(scope="module", params=MODES)
def living(request, start_run, line, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    overrides = [
        *line, *mode_overrides(request.param), "trainer.total_training_steps=100000",
        "trainer.val_before_train=false", "trainer.save_freq=50", "vla3.stages.training.max_staleness=2",
        "vla3.env.workers=2", "vla3.env.shards_per_worker=1", "vla3.env.envs_per_shard=4",
        "actor_rollout_ref.rollout.n_gpus_per_node=2", "vla3.env.timeout_s=3", f"vla3.heartbeat_s={HEARTBEAT_S}",
        "vla3.worker_start_s=90", "vla3.max_worker_restarts=50", f"+vla3.env.options.bad={BAD}".replace("'", ""),
        "+vla3.env.options.delay_s=0.05", "vla3.env.nice=2",
    ]  # fmt: skip
    run = Living(start_run, directory, *overrides)
    run.goes_on(3, 200)
    # what the bad episodes cause must not be taken for what a test causes
    wait_for(lambda: run.given_up() == {int(k) for k in BAD}, 120)
    yield run
    for process in run.marked():
        process.kill()


def test_an_episode_that_takes_its_simulator_down_each_time_is_given_up_and_the_run_goes_on(living):
    assert living.given_up() == {int(k) for k in BAD}, (living.faults, living.tail())
    why = {f["episodes"][0]: f["why"] for f in living.faults if f["kind"] == "episode_quarantined"}
    assert "exited with status 139" in why[9] and "exploded" in why[26] and "no answer within 3 s" in why[81]
    assert "not finite" in why[43] and "not finite" in why[62]


def test_env_workers_and_simulators_stand_back_as_far_as_they_are_told_and_nobody_else_does(living):
    mine = os.nice(0)
    for pattern, further in ((SIMULATOR, 2), (ENV, 2), (POLICY, 0), (LEARNER, 0)):
        assert {p.nice() for p in living.processes(pattern)} == {mine + further}, pattern


def test_no_process_is_started_that_nobody_asks(living):
    """verl's server managers used to bring two load balancers: nine CPU seconds at every start, a gigabyte."""
    titles = {title.split()[0].partition(".")[0] for p in living.processes("^ray::") if (title := p.cmdline()[0])}
    ours = {POLICY, ENV, LEARNER, f"{TRAINER}V1", "ray::TransferQueueController", "ray::SimpleStorageUnit"}
    assert ours <= titles <= ours | {"ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent"}, titles


@pytest.mark.parametrize("moment", ["after a step", pytest.param("within a step", marks=pytest.mark.long)])
@pytest.mark.parametrize(("victim", "how", "kinds"), FAULTS)
def test_a_process_that_dies_or_hangs_is_replaced_and_the_run_goes_on(living, victim, how, kinds, moment):
    before = len(living.faults)
    living.until(moment)
    target = living.processes(victim)[-1]
    target.send_signal(how)
    living.goes_on(4, 120)

    def seen():
        return [f["kind"] for f in living.faults[before:]]

    assert wait_for(lambda: all(kind in seen() for kind in kinds), 90), (seen(), living.tail())
    assert wait_for(lambda: not target.is_running() or target.status() == psutil.STATUS_ZOMBIE, 30)


@pytest.mark.long  # it waits for worker_start_s, which has to be long enough for a start beside other work
@pytest.mark.parametrize(("victim", "kind"), [(ENV, "env_worker_restarted"), (POLICY, "policy_worker_restarted")])
def test_a_worker_that_hangs_while_it_is_being_restarted_is_replaced_too(living, victim, kind):
    before = len(living.faults)
    # an actor with coroutines has no title before it is constructed
    titles = r"ray::IDLE" if victim == POLICY else rf"{victim}\.__init__"
    known = {p.pid for p in living.processes(titles)}

    def new():
        return [p for p in living.processes(titles) if p.pid not in known]

    living.processes(victim)[-1].kill()
    assert wait_for(new, 60), living.tail()
    target = new()[0]
    target.send_signal(signal.SIGSTOP)

    def replaced():
        return kind in [fault["kind"] for fault in living.faults[before:]]

    assert wait_for(replaced, 300), (living.faults[before:], living.tail())
    assert wait_for(lambda: not target.is_running() or target.status() == psutil.STATUS_ZOMBIE, 30)
    living.goes_on(4, 120)


@pytest.mark.parametrize("victim", [POLICY, ENV, LEARNER, TRAINER])
def test_messages_that_are_late_by_less_than_the_heartbeat_are_waited_for(living, victim):
    """A replica that is slow to take its weights, a learner that stalls: late is not lost."""
    before, target = len(living.faults), living.processes(victim)[-1]
    living.until("after a step")
    target.send_signal(signal.SIGSTOP)
    time.sleep(HEARTBEAT_S / 2.5)
    target.send_signal(signal.SIGCONT)
    living.goes_on(4, 120)
    assert living.faults[before:] == [] and target.is_running()


@pytest.mark.parametrize("seconds", [5000, -5000])
def test_a_wall_clock_that_is_set_forward_or_back_is_no_fault(living, seconds):
    clock, before = living.directory.parent / "clock", len(living.faults)
    clock.write_text(str(seconds))
    living.goes_on(6, 120)
    assert living.faults[before:] == []
    # the others ask for the wall clock only when they have something to log
    seen = clock.with_name(f"clock.{living.processes(TRAINER)[-1].pid}")
    assert wait_for(lambda: seen.exists() and seen.read_text() == str(float(seconds)), 30), living.tail()
    row = json.loads(living.rows()[-1])
    shares = {name: value for name, value in row.items() if name.startswith("lanes/") and "spans" not in name}
    assert shares and all(-1e-6 <= value <= 1 + 1e-6 for value in shares.values()), shares


def test_gradients_that_are_not_finite_are_skipped_and_counted_and_the_run_goes_on(living):
    before, cause = len(living.faults), living.directory.parent / "bad_gradient"
    written = cause.parent / "written"
    written.write_text("2")
    written.replace(cause)
    assert wait_for(lambda: living.faults[before:] or living.process.poll() is not None, 60), living.tail()
    assert {f["kind"] for f in living.faults[before:]} == {"update_skipped"}
    living.goes_on(4, 120)
    norms = [norm for row in living.rows() if (norm := json.loads(row).get("actor/grad_norm")) is not None]
    assert math.isfinite(norms[-1])  # a step whose groups are all equal has none


def test_it_stops_when_asked_with_a_checkpoint_and_every_group_is_accounted_for(living):
    """After all that: nothing twice, nothing lost, nothing older than the bound, no process left."""
    living.process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: living.process.poll() is not None, 45), living.tail()
    assert living.process.returncode == 128 + signal.SIGTERM
    assert wait_for(lambda: not living.marked(), 10), [p.cmdline()[:3] for p in living.marked()]
    assert "stopped as asked" in living.log.read_text()
    newest = max((living.directory / "checkpoints").glob("global_step_*"), key=lambda p: int(p.name.split("_")[-1]))
    step = int(newest.name.split("_")[-1])
    account = read_ledger(living.directory, last_step=step)
    assert sorted(account.trained) == list(range(1, step + 1))
    assert account.twice == []
    admission = json.loads((newest / "trainer.json").read_text())["admission"]
    known = account.groups | {*admission["replay"], *admission["dropped_groups"]}
    assert known == set(range(admission["next_group"])), "none skipped"
    rows = [json.loads(text) for text in (living.directory / "metrics.jsonl").read_text().splitlines()]
    assert max(row["staleness/max"] for row in rows) <= 2
    assert not [path for path in os.listdir("/dev/shm") if "vla3" in path]
