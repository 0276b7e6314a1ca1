"""An actor whose process hangs, wherever it is in its life, on a Ray of its own."""

import os
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

CODE = """
import os, pathlib, signal, sys, time
os.environ["VLA3_RUN_TAG"] = tag = sys.argv[1]
import psutil, ray
from vla3_plugin.rollout.replacing import end_starting, replace

ray.init(num_cpus=1, include_dashboard=False, address="local", log_to_driver=False)
lives = pathlib.Path(sys.argv[2])

@ray.remote(num_cpus=0, max_restarts=-1)
class Hanging:
    COROUTINE
    def __init__(self):
        with lives.open("a") as file:
            file.write(f"{os.getpid()}\\n")
        if len(lives.read_text().split()) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)

    def pid(self):
        return os.getpid()

def until(condition):
    end = time.monotonic() + 40
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    assert condition()

actor = Hanging.remote()
first = ray.get(actor.pid.remote())
os.kill(first, signal.SIGSTOP)
replace(actor)
until(lambda: len(lives.read_text().split()) == 2)
second = int(lives.read_text().split()[1])
until(lambda: psutil.Process(second).status() == psutil.STATUS_STOPPED)
replace(actor)
end_starting(KIND, 0.0)
until(lambda: len(lives.read_text().split()) == 3)
until(lambda: not psutil.pid_exists(second) or psutil.Process(second).status() == psutil.STATUS_ZOMBIE)
third = None
end = time.monotonic() + 40
while third is None and time.monotonic() < end:
    try:
        third = ray.get(actor.pid.remote(), timeout=5)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        time.sleep(0.2)
print("third", third == int(lives.read_text().split()[2]))
"""


@pytest.mark.parametrize("coroutine", ["", "async def wait(self): pass"], ids=["plain", "coroutines"])
def test_an_actor_that_was_stopped_is_replaced_even_while_it_was_being_restarted(tmp_path, coroutine):
    """Ray's kill has no effect on a process that is in its constructor: a run waited for it until its deadline."""
    code = CODE.replace("COROUTINE", coroutine).replace("KIND", '"Hanging"')
    command = [sys.executable, "-c", code, f"{os.getpid()}-{tmp_path.name}", str(tmp_path / "lives")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    started = [int(pid) for pid in (tmp_path / "lives").read_text().split()]
    left, deadline = started, time.monotonic() + 10
    while left and time.monotonic() < deadline:
        left = [p for p in started if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.1)
    assert not left, done.stderr[-2000:]
    assert "third True" in done.stdout, done.stderr[-3000:]
