"""Killing Ray actors so that Ray starts them anew, those included whose process hangs in the constructor."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import ray

from vla3_plugin.supervise import TAG


def replace(actor: Any) -> None:
    """Kill the process of ``actor``. Does not wait. Has no effect while the actor is being constructed."""
    ray.kill(actor, no_restart=False)


def end_starting(kind: str, older_than_s: float) -> None:
    """End every process of this run that may hang in the constructor of the class named ``kind``. Does not wait.

    Ray's own kill is a request to the process, or to whoever knows that it is up; in a constructor it reaches nobody.
    Nor does anybody know which process is which actor's. So all that may be, and started ``older_than_s`` ago, are
    ended, on all nodes. One that was starting healthily starts again.
    """
    for node in ray.nodes():
        if node["Alive"]:
            here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            _end_starting.options(scheduling_strategy=here).remote(kind, older_than_s, os.environ.get(TAG))


@ray.remote(num_cpus=0, max_retries=0)
def _end_starting(kind: str, older_than_s: float, tag: str | None) -> int:
    """The part of this node; how many were ended.

    An actor with coroutines has no title before it is constructed and looks like a worker that waits for work. Ending
    such a worker costs nothing, but only our job's may be ended, and on a cluster that others use not all say whose
    they are: those are left alone.
    """
    import psutil

    ended, job, raylet = 0, ray.get_runtime_context().get_job_id(), os.getppid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.ppid() != raylet:
                continue
            title, known = [*process.cmdline(), "", ""], process.environ()
            ours = known.get("RAY_JOB_ID") == job or (tag is not None and known.get(TAG) == tag)
            constructing = title[0].startswith(f"ray::{kind}.__init__")
            untitled = title[0] == "ray::IDLE" or title[1].endswith("default_worker.py")
            if ours and (constructing or untitled) and time.time() - process.create_time() > older_than_s:
                process.kill()
                ended += 1
    return ended
