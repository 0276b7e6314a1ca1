"""What ends a run: the learner's death, the driver's, an interrupt. It restarts where it may and leaves nothing."""

import json
import os
import signal

import psutil
import pytest
from whole_runs import MODES, marked, mode_overrides, wait_for

from vla3_plugin.telemetry.ledger import read_ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def steps(directory):
    file = directory / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.is_file() else []


def driver_of(process):
    """The process that talks to Ray: the supervisor's child."""
    return psutil.Process(process.pid).children()[0]


@pytest.fixture(scope="module", params=MODES)
def living(request, start_run, line, tmp_path_factory):
    directory = tmp_path_factory.mktemp(f"restart-{request.param}") / "run"
    process, tag, log = start_run(
        directory, *line, *mode_overrides(request.param), "trainer.total_training_steps=100000",
        "trainer.val_before_train=false", "trainer.save_freq=5", "vla3.max_restarts=10", "vla3.deadline_s=45",
        "vla3.heartbeat_s=15", "+vla3.env.options.delay_s=0.05",
    )  # fmt: skip
    assert wait_for(lambda: len(steps(directory)) >= 8, 200), log.read_text()[-3000:]
    yield directory, process, tag, log
    for left in marked(tag):
        left.kill()


# a learner rank that hangs is waited for until the deadline, which leaves room for a checkpoint: minutes, not seconds
@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("ray::WorkerDict", signal.SIGKILL),
        ("ray::TaskRunner", signal.SIGSTOP),
        # a driver that is replaced is in every test run too: tests/test_supervise.py
        pytest.param("driver", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("ray::TaskRunner", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("ray::WorkerDict", signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param("driver", signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_the_run_goes_on_from_its_newest_checkpoint_when_a_process_it_cannot_replace_dies_or_hangs(living, victim, how):
    directory, process, tag, log = living
    lives = log.read_text().count("of vla3.max_restarts")
    if victim == "driver":
        driver_of(process).send_signal(how)
    else:
        next(p for p in marked(tag) if victim in " ".join(p.cmdline())).send_signal(how)
    assert wait_for(lambda: log.read_text().count("of vla3.max_restarts") > lives, 120), log.read_text()[-3000:]
    before = len(steps(directory))
    assert wait_for(lambda: len(steps(directory)) >= before + 4 or process.poll() is not None, 240), log.read_text()[
        -3000:
    ]
    assert process.poll() is None, log.read_text()[-3000:]
    after = steps(directory)
    assert after[before] <= after[before - 1] + 1, "no step is skipped"
    assert after[before] % 5 == 1, "it went on after a checkpoint"


def test_an_interrupt_ends_it_with_a_checkpoint_and_the_account_of_all_its_lives_is_whole(living):
    directory, process, tag, log = living
    process.send_signal(signal.SIGINT)
    assert wait_for(lambda: process.poll() is not None, 45), log.read_text()[-3000:]
    assert process.returncode == 128 + signal.SIGINT
    assert wait_for(lambda: not marked(tag), 10), [p.cmdline()[:3] for p in marked(tag)]
    last = steps(directory)[-1]
    state = json.loads((directory / "checkpoints" / f"global_step_{last}" / "trainer.json").read_text())
    account, admission = read_ledger(directory, last_step=last), state["admission"]
    assert sorted(account.trained) == list(range(1, last + 1)) and account.twice == []
    assert account.groups | {*admission["replay"], *admission["dropped_groups"]} == set(range(admission["next_group"]))


@pytest.mark.parametrize(
    "how",
    [
        "learner killed",
        pytest.param("terminated twice", marks=pytest.mark.long),
        pytest.param("driver killed", marks=pytest.mark.long),
    ],
)
def test_without_restarts_it_ends_soon_with_a_cause_and_leaves_no_process(start_run, line, tmp_path, how):
    directory = tmp_path / "run"
    process, tag, log = start_run(
        directory,
        *line,
        *mode_overrides("ppo-asynchronous"),
        "trainer.total_training_steps=100000",
        "trainer.val_before_train=false",
    )
    try:
        assert wait_for(lambda: len(steps(directory)) >= 3, 200), log.read_text()[-3000:]
        if how == "terminated twice":
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGTERM)
        elif how == "driver killed":
            driver_of(process).kill()
        else:
            next(p for p in marked(tag) if "ray::WorkerDict" in " ".join(p.cmdline())).kill()
        assert wait_for(lambda: process.poll() is not None, 60), log.read_text()[-3000:]
        assert process.returncode not in (0, None)
        assert wait_for(lambda: not marked(tag), 30), [p.cmdline()[:3] for p in marked(tag)]
        if how == "learner killed":
            assert "WorkerDict" in log.read_text()[-20000:] and "died" in log.read_text()[-20000:]
    finally:
        for left in marked(tag):
            left.kill()
