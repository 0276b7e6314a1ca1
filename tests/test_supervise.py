"""The process that a shell talks to, without Ray: a child that stops when it is asked, or does not, or fails."""

import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from vla3_plugin.pulse import Pulse, PulseListener

# What stands for a run: it notes that it has begun, stops when the file is there, and saves.
RUN = """
import os, subprocess, sys, time, pathlib
from omegaconf import OmegaConf
from vla3_plugin import supervise
how, root = sys.argv[1], pathlib.Path(sys.argv[2])
supervise._LEFT_S, supervise._LOCK_S = 2.0, 0.5
trainer = {"default_local_dir": str(root / "checkpoints"), "resume_mode": "disable"}
config = OmegaConf.create({"vla3": {"run_dir": str(root), "max_restarts": 2, "heartbeat_s": 5.0}, "trainer": trainer})
supervise.supervise(config)
with (root / "begun").open("a") as file:
    file.write(config.trainer.resume_mode + "\\n")
if how == "starts":
    time.sleep(60)
(root / supervise.LISTENS_FILE).touch()
if how == "fails":
    (root / "checkpoints" / "global_step_1").mkdir(parents=True, exist_ok=True)
    os.utime(root / "checkpoints" / "global_step_1", (0, 0))  # the clock has jumped
    sys.exit(1)
if how == "refuses":
    sys.exit(2)
if how == "hangs" and config.trainer.resume_mode == "disable":
    (root / "checkpoints" / "global_step_1").mkdir(parents=True, exist_ok=True)
    time.sleep(3)  # heard of first
    os.kill(os.getpid(), 19)
if how == "trainer hangs":  # another process, as the one is that Ray starts
    code = "import os, pathlib, sys, time; from vla3_plugin.pulse import Pulse; "
    code += "Pulse(pathlib.Path(sys.argv[1]), 'trainer'); time.sleep(3); os.kill(os.getpid(), 19)"
    subprocess.run([sys.executable, "-c", code, str(root)])
if how == "leaves":  # a process of another session, as Ray's are
    nowhere = subprocess.DEVNULL
    subprocess.Popen(["sleep", "60"], start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere)
while not (root / "stop").exists():
    time.sleep(0.05)
(root / "saved").touch()
"""


def _hear_signals():
    """These tests may run under nohup or as a shell's background job, whose ignored signals would be inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def start(tmp_path):
    begun = []

    def run(how, **options):
        command = [sys.executable, "-c", RUN, how, str(tmp_path)]
        begun.append(
            subprocess.Popen(
                command,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                text=True,
                preexec_fn=_hear_signals,
                **options,
            )
        )
        return begun[-1]

    yield run
    for process in begun:
        process.kill()
        process.wait()


def lives(tmp_path):
    file = tmp_path / "begun"
    return file.read_text().split() if file.exists() else []


def eventually(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_orderly_end_does_not_need_anybody_to_read_what_is_said(start, tmp_path, number):
    """``… 2>&1 | tee log``: an interrupt ends tee as well, and the supervisor writes into a closed pipe."""
    process = start("stops", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert eventually(lambda: lives(tmp_path))
    process.stdout.close()
    process.send_signal(number)
    assert process.wait(10) == 128 + number
    assert (tmp_path / "saved").exists() and not (tmp_path / "stop").exists()


def test_interrupts_while_leftovers_are_ended_leave_none(start, tmp_path):
    process = start("leaves", stderr=subprocess.PIPE)
    assert eventually(lambda: lives(tmp_path))
    process.send_signal(signal.SIGINT)
    assert eventually(lambda: (tmp_path / "saved").exists())
    for _ in range(3):
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
    assert process.wait(10) == 128 + signal.SIGINT
    assert "ended 1 processes" in process.stderr.read()


def test_a_run_that_is_still_starting_has_nothing_to_save_and_ends_at_once(start, tmp_path):
    process = start("starts")
    while not lives(tmp_path):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert not (tmp_path / "saved").exists()


def test_a_run_that_fails_each_time_is_restarted_so_often_and_from_what_it_saved(start, tmp_path):
    process = start("fails", stderr=subprocess.PIPE)
    assert process.wait(20) == 1
    assert lives(tmp_path) == ["disable", "auto", "auto"], "whatever the clock says"
    assert "restart 2 of vla3.max_restarts = 2" in process.stderr.read()


def test_checkpoints_of_an_older_run_are_not_resumed_from(start, tmp_path):
    (tmp_path / "checkpoints" / "global_step_1").mkdir(parents=True)
    os.utime(tmp_path / "checkpoints" / "global_step_1", (0, 0))
    assert start("fails", stderr=subprocess.DEVNULL).wait(20) == 1
    assert lives(tmp_path) == ["disable"] * 3


def test_a_run_that_cannot_start_is_not_restarted(start, tmp_path):
    assert start("refuses").wait(20) == 2
    assert lives(tmp_path) == ["disable"]


def test_a_second_run_in_the_same_directory_is_refused_and_does_not_disturb_the_first(start, tmp_path):
    first = start("stops", stderr=subprocess.DEVNULL)
    assert eventually(lambda: lives(tmp_path))
    second = start("stops", stderr=subprocess.PIPE)
    assert second.wait(20) == 2 and "another run is under way" in second.stderr.read()
    first.send_signal(signal.SIGTERM)
    assert first.wait(10) == 128 + signal.SIGTERM and lives(tmp_path) == ["disable"]


def test_a_driver_that_hangs_is_killed_and_the_run_starts_again(start, tmp_path):
    process = start("hangs", stderr=subprocess.PIPE)
    assert eventually(lambda: lives(tmp_path) == ["disable", "auto"], 40)
    time.sleep(7)  # longer than the heartbeat: the second life is not taken for silent
    assert lives(tmp_path) == ["disable", "auto"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    assert "the driver gave no sign of life for vla3.heartbeat_s = 5 s" in process.stderr.read()


def test_a_trainer_that_hangs_ends_the_run_although_the_driver_waits_for_it_in_good_health(start, tmp_path):
    process = start("trainer hangs", stderr=subprocess.PIPE)
    assert eventually(lambda: process.poll() is not None, 80)
    assert process.returncode == 128 + signal.SIGKILL and len(lives(tmp_path)) == 3
    assert "the trainer gave no sign of life" in process.stderr.read()


def beats(tmp_path, name, count):
    (tmp_path / ".pulse").mkdir(exist_ok=True)
    (tmp_path / ".pulse" / name).touch()
    os.utime(tmp_path / ".pulse" / name, (count, count))


def test_silence_is_counted_in_looks_so_a_listener_that_slept_itself_accuses_nobody(tmp_path):
    listener = PulseListener(tmp_path, 5.0)
    beats(tmp_path, "trainer", 1)
    assert listener.look() is None
    beats(tmp_path, "trainer", 3)
    assert listener.look() is None
    time.sleep(6)  # nobody looks
    assert [listener.look() for _ in range(4)] == [None] * 4
    assert listener.look() == "trainer"
    (tmp_path / ".pulse" / "trainer").unlink()
    assert listener.look() is None, "one that has ended is not hung"


def test_who_was_never_heard_of_is_not_missed(tmp_path):
    """A file system that does not keep times, a process that has just begun."""
    listener = PulseListener(tmp_path, 5.0)
    beats(tmp_path, "trainer", 1)
    assert [listener.look() for _ in range(20)] == [None] * 20


def test_nobody_is_missed_while_the_listener_itself_cannot_leave_a_mark(tmp_path, monkeypatch):
    listener = PulseListener(tmp_path, 5.0)
    for count in (1, 3):
        beats(tmp_path, "trainer", count)
        listener.look()
    with monkeypatch.context() as context:
        context.setattr(os, "utime", Mock(side_effect=OSError("read-only file system")))
        assert [listener.look() for _ in range(20)] == [None] * 20
    assert [listener.look() for _ in range(20)] == [None] * 20, "it has to be heard of again first"


def test_a_pulse_needs_no_room_on_the_disk(tmp_path):
    """A file system without a free block: the sign is the file's time."""
    pulse = Pulse(tmp_path, "trainer")
    path = tmp_path / ".pulse" / "trainer"
    first = path.stat().st_mtime_ns
    assert eventually(lambda: path.stat().st_mtime_ns != first)
    assert path.stat().st_size == 0
    pulse.close()
