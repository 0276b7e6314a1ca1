"""The clock that spans of different processes are compared by."""

import os
import subprocess
import sys
import time

import pytest

from vla3_plugin.telemetry import clock

CODE = "from vla3_plugin.telemetry import clock; print(clock.now())"
SET_BACK = "import time; real = time.time; time.time = lambda: real() - 5000; "


def child(code, **variables):
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def test_a_process_that_starts_after_the_clock_was_set_back_still_agrees_with_the_others():
    before = clock.now()
    assert before < child(SET_BACK + CODE) < clock.now()


def test_a_process_of_another_machine_counts_from_its_own_clock():
    assert abs(child(CODE, VLA3_CLOCK="12345.0@another") - time.time()) < 5
    assert abs(child(CODE, VLA3_CLOCK="nonsense") - time.time()) < 5


def test_the_clock_is_the_wall_clock_as_long_as_nobody_sets_it():
    assert abs(clock.now() - time.time()) < 5


def test_workers_of_a_cluster_that_is_joined_are_given_the_clock(monkeypatch):
    """They are Ray's children, not this process's, and counted from the clock as it stood when each started."""
    from omegaconf import OmegaConf

    from vla3_plugin.launch import prepare_cluster

    config = OmegaConf.create({"ray_kwargs": {"ray_init": {"address": "10.0.0.1:6379", "num_cpus": None}}})
    OmegaConf.set_struct(config, True)
    monkeypatch.setenv("TENSORBOARD_DIR", "/runs/one/tensorboard")
    prepare_cluster(config)
    given = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert given["TENSORBOARD_DIR"] == "/runs/one/tensorboard", "or it would be written where the worker runs"
    assert child(SET_BACK + CODE, **given) == pytest.approx(clock.now(), abs=60), "set back by 5000 s"
