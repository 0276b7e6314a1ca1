"""A run that is interrupted, or loses a process, ends soon, says why and leaves no process."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ON = [f"vla3.stages.{stage}.enabled=true" for stage in ("interaction", "streaming", "training")]
SAME = ["vla3.algorithm.advantage_statistics=previous", "vla3.algorithm.mini_batches=episodes"]


def marked(tag):
    """Living processes whose environment carries ``tag``: everything the run started, however it is parented now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("VLA3_TEST_TAG") == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return condition()


@pytest.fixture
def running(third_party, line, tmp_path):
    """(process, tag, log) of an asynchronous run without an end, some steps after its start."""
    tag = f"{os.getpid()}-{tmp_path.name}"
    command = [
        sys.executable, "-m", "verl.trainer.main", "recipe=vla3_maniskill", f"vla3.run_dir={tmp_path / 'run'}", *line,
        *SAME, *ON, "trainer.total_training_steps=100000", "trainer.val_before_train=false",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(third_party), "VLA3_PROFILE": "cpu", "VLA3_TEST_TAG": tag}
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
            # where these tests run as a shell's background job, an ignored interrupt would be inherited
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        started = wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3, 150)
        assert started, log.read_text()[-3000:]
        yield run, tag, log
    finally:
        for process in marked(tag):
            process.kill()


def ends_without_a_trace(run, tag):
    assert wait_for(lambda: run.poll() is not None, 60), "the command returns"
    assert wait_for(lambda: not marked(tag), 30), [p.cmdline()[:3] for p in marked(tag)]
    assert run.returncode != 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_asynchronous_run_leaves_no_process(running, how):
    run, tag, _ = running
    assert len(marked(tag)) > 5, "driver, Ray, workers and simulators carry the mark"
    run.send_signal(how)
    ends_without_a_trace(run, tag)


@pytest.mark.parametrize(
    ("victim", "cause"),
    [("vla3_plugin.envs.child", "killed by SIGKILL"), ("PolicyWorker", "ActorDied|actor died"), ("EnvWorker", "died")],
)
def test_a_killed_process_ends_the_run_with_its_cause(running, victim, cause):
    import re

    run, tag, log = running
    victims = [p for p in marked(tag) if victim in " ".join(p.cmdline())]
    assert victims, [p.cmdline() for p in marked(tag)]
    victims[0].kill()
    ends_without_a_trace(run, tag)
    assert re.search(cause, log.read_text()), log.read_text()[-3000:]
