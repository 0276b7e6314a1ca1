"""Settings that every test shares."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def mesh():
    """A device mesh of this process alone. Fails, and does not skip, where an earlier test kept the process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
