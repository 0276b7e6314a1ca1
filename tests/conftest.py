"""Settings that every test shares."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

# The same examples in every run and on every machine: a failure is a change in the code, never in the draw.
settings.register_profile(
    "vla3",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("vla3")

pytest_plugins = ["whole_runs"]

torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)  # after what ``-m`` leaves out
def pytest_collection_modifyitems(config, items):
    """Between several processes, files that may take longest go first: one begun last would leave the others idle."""
    if hasattr(config, "workerinput"):
        allowed: dict = {}
        for item in items:
            mark = item.get_closest_marker("timeout")
            allowed[item.path] = allowed.get(item.path, 0) + (mark.args[0] if mark else 0)
        items.sort(key=lambda item: -allowed[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Fresh weights and inputs are the same whatever ran before: a test that fails once fails again."""
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    pytest_runtest_setup(item)


@pytest.fixture(scope="module")
def mesh():
    """A device mesh of this process alone. Fails, and does not skip, where an earlier test kept the process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
