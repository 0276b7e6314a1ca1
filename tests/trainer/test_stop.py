"""A run that is interrupted leaves its records, and no process."""

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
        try:
            if process.environ().get("VLA3_TEST_TAG") == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return condition()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_asynchronous_run_leaves_no_process(third_party, line, tmp_path, how):
    tag = f"{os.getpid()}-{how.name}"
    command = [
        sys.executable, "-m", "verl.trainer.main", "recipe=vla3_maniskill", f"vla3.run_dir={tmp_path / 'run'}", *line,
        *SAME, *ON, "trainer.total_training_steps=100000", "trainer.val_before_train=false",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(third_party), "VLA3_PROFILE": "cpu", "VLA3_TEST_TAG": tag}
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            metrics = tmp_path / "run" / "metrics.jsonl"
            assert wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3, 150)
            assert len(marked(tag)) > 5, "driver, Ray, workers and simulators carry the mark"
            run.send_signal(how)
            assert wait_for(lambda: run.poll() is not None, 30), "the command returns"
            assert wait_for(lambda: not marked(tag), 30), [p.cmdline()[:3] for p in marked(tag)]
        finally:
            for process in marked(tag):
                process.kill()
    assert run.returncode != 0
