"""Settings that every test shares."""

from __future__ import annotations

import torch
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
