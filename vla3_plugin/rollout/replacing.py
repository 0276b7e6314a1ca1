"""Killing a Ray actor so that Ray starts it anew, one whose process hangs in its constructor included."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray

from vla3_plugin.supervise import TAG


def replace(actor: Any, kind: str, starting: bool) -> None:
    """Kill the process of ``actor``, an instance of the class named ``kind``. Does not wait.

    ``starting``: it was being restarted, and has not answered since. Ray's own kill is a request to the process, or to
    whoever knows that it is up; while a constructor runs it has no effect. So every process of that class that may
    be in its constructor is ended, on all nodes: another one that is starting healthily starts again.
    """
    ray.kill(actor, no_restart=False)
    if not starting:
        return
    for node in ray.nodes():
        if node["Alive"]:
            here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            _end_starting.options(scheduling_strategy=here).remote(kind, os.environ.get(TAG))


@ray.remote(num_cpus=0, max_retries=0)
def _end_starting(kind: str, tag: str | None) -> int:
    """End this node's processes that may be constructing a ``kind``; how many.

    An actor with coroutines has no title before it is constructed and looks like a worker that waits for work. Ending
    such a worker costs nothing, but only this run's may be ended; a raylet that we did not start gives its workers no
    tag.
    """
    import psutil

    ended = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            title, ours = [*process.cmdline(), "", ""], process.environ().get(TAG)
            constructing = title[0].startswith(f"ray::{kind}.__init__") and ours in (tag, None)
            untitled = title[0].startswith("ray::IDLE") or title[1].endswith("default_worker.py")
            if constructing or (untitled and ours == tag is not None):
                process.kill()
                ended += 1
    return ended
