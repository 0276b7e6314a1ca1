"""The placement of a config: what contradicts the rest of it is refused with the places."""

import re

import pytest
import verl  # noqa: F401  loads the plugin
from omegaconf import OmegaConf

from vla3_plugin.cli_placement import compose_recipe
from vla3_plugin.config import parse
from vla3_plugin.placement import resolve

PLACES = "+vla3.placement.component_placement"


def place(*overrides):
    config = compose_recipe("vla3_maniskill", ["vla3.env.host=policy_worker", *overrides])
    return resolve.place(config, parse(OmegaConf.select(config, "vla3")))


@pytest.mark.parametrize(
    ("places", "where"),
    [
        ([f"{PLACES}.env=2", f"{PLACES}.rollout=1"], "env worker 0 on node 0 GPU 2.*policy worker 0 on node 0 GPU 1"),
        (
            ["vla3.placement.node_gpus=[2,0]", f"{PLACES}.rollout=1",
             f"{PLACES}.env={{node_group: node, placement: 1}}"],
            "env worker 0 on node 1, .*policy worker 0 on node 0 GPU 1",
        ),
    ],
)  # fmt: skip
def test_an_env_worker_cannot_live_in_a_process_that_is_elsewhere(places, where):
    placement, faults = place(f"{PLACES}.actor=0", *places)
    assert placement is None and len(faults) == 1
    assert re.search(where, faults[0]), faults
    assert "component_placement.env" in faults[0] and "set vla3.env.host=own" in faults[0]


def test_a_simulator_in_a_process_with_a_device_cannot_be_placed_without_one():
    """It would find the policy's."""
    places = ["vla3.placement.node_gpus=[2]", f"{PLACES}.actor=0", f"{PLACES}.rollout=1"]
    env = f"{PLACES}.env={{node_group: node, placement: 0}}"
    placement, faults = place(*places, env, "vla3.env.isolation=none", "vla3.env.shards_per_worker=1")
    assert placement is None and "env worker 0 on node 0, " in faults[0]
    assert place(*places, env)[1] == []


@pytest.mark.parametrize(
    "places",
    [
        [f"{PLACES}.env=1-2", f"{PLACES}.rollout=1-2"],
        ["vla3.placement.node_gpus=[3]", f"{PLACES}.rollout=1-2",
         f"{PLACES}.env={{node_group: node, placement: '0:0-1'}}"],
    ],
)  # fmt: skip
def test_on_the_same_device_or_without_one_on_the_same_node_it_can(places):
    placement, faults = place(f"{PLACES}.actor=0", *places)
    assert faults == [] and len(placement.components["env"]) == 2
