"""The modes of the benchmark are the modes that they are called."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import verl  # noqa: F401  loads the plugin
from omegaconf import OmegaConf

from vla3_plugin.cli_placement import compose_recipe
from vla3_plugin.config import parse

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    import async_throughput
finally:  # its modules have names that tests have too
    sys.path.remove(BENCHMARKS)

STAGES = {
    "sync": (False, False, False),
    "pipeline": (False, False, False),
    "interaction": (True, False, False),
    "interaction+streaming": (True, True, False),
    "all": (True, True, True),
    "all+step_join": (True, True, True),
    "all+hosted": (True, True, True),
}


@pytest.mark.parametrize("real", [None, "maniskill", "libero"])
@pytest.mark.parametrize("mode", STAGES)
def test_a_mode_has_the_stages_that_it_names(real, mode):
    """On a real simulator all of them used to start from the asynchronous recipe, the synchronous one too."""
    args = Namespace(real=real, preset="slow-learner", override=[])
    recipe, *rest = async_throughput.recipe(args)
    config = compose_recipe(recipe.removeprefix("recipe="), [*rest, *async_throughput.overrides(mode, args)])
    vla3 = parse(OmegaConf.select(config, "vla3"))
    stages = vla3.stages
    assert (stages.interaction.enabled, stages.streaming.enabled, stages.training.enabled) == STAGES[mode]
    assert (stages.interaction.batching == "step_join") == mode.endswith("step_join")
    assert (vla3.env.host == "policy_worker") == mode.endswith("hosted")


def test_a_rate_is_of_the_steps_between_warm_up_and_the_end_of_supply():
    """The last steps, in which half of the simulators stood idle, used to count."""
    times = [10, 20, 22, 24, 30, 50]
    rows = [{"time": float(t), "rollout/chunk_steps": 8.0} for t in times]
    found = async_throughput.figures(rows, warmup=2, cooldown=2)
    assert (found["samples_per_s"], found["step_s"], found["steps"]) == (4.0, 2.0, 2)


def test_how_busy_the_cores_were_is_told_for_the_measured_steps_alone(monkeypatch):
    cores = async_throughput.Cores()
    cores.close()
    assert 0 <= cores.seen[0][1]
    monkeypatch.setattr(async_throughput.os, "cpu_count", lambda: 2)
    cores.seen = [(10.0, 100.0), (20.0, 120.0), (30.0, 125.0)]
    assert cores.busy(10.0, 20.0) == 1.0
    assert cores.busy(20.0, 30.0) == 0.25
    assert cores.busy(15.0, 25.0) == 0.625
