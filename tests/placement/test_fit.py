"""A placement that cannot be satisfied is refused with its arithmetic instead of waiting for ever."""

import pytest
import ray
import torch
from omegaconf import OmegaConf

from vla3_plugin.placement.fit import PlacementError, check_cluster, demand, local_faults


def config(ranks=2, replicas=3, nodes=1):
    return OmegaConf.create(
        {
            "trainer": {"n_gpus_per_node": ranks, "nnodes": nodes},
            "actor_rollout_ref": {
                "rollout": {"n_gpus_per_node": replicas, "nnodes": nodes, "tensor_model_parallel_size": 1}
            },
            "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 2}}},
        }
    )


def test_demand_counts_what_verl_reserves():
    """Three CPUs a learner rank, two a replica, one a storage unit and one for the task runner."""
    needed = demand(config())
    assert (needed.gpus, needed.cpus) == (5, 3 * 2 + 2 * 3 + 2 + 1)
    assert demand(config(nodes=4)).gpus == 20


def cluster(monkeypatch, there, nodes=({"CPU": 15, "GPU": 5},)):
    monkeypatch.setattr(ray, "cluster_resources", lambda: there)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in nodes])


def test_each_node_that_has_a_cpu_gets_a_storage_unit_which_needs_one(monkeypatch):
    nodes = [{"CPU": 5, "GPU": 2}, {"CPU": 5, "GPU": 3}, {"CPU": 6}, {}]
    cluster(monkeypatch, {"GPU": 5, "CPU": 16}, nodes)
    check_cluster(config())
    cluster(monkeypatch, {"GPU": 5, "CPU": 15}, nodes)
    with pytest.raises(PlacementError, match=r"16 CPUs = .* \+ 3 storage units"):
        check_cluster(config())


@pytest.mark.parametrize("there", [{"GPU": 5, "CPU": 15}, {"GPU": 8, "CPU": 64, "memory": 1}])
def test_a_placement_that_fits_is_accepted(monkeypatch, there):
    cluster(monkeypatch, there)
    check_cluster(config())


@pytest.mark.parametrize("there", [{"GPU": 4, "CPU": 64}, {"GPU": 8, "CPU": 14}, {}])
def test_a_placement_that_does_not_fit_is_refused_with_the_numbers(monkeypatch, there):
    cluster(monkeypatch, there)
    with pytest.raises(PlacementError, match="5 GPUs = 2 learner [+] 3 policy workers; 15 CPUs") as caught:
        check_cluster(config())
    assert f"{there.get('GPU', 0)} GPUs and {there.get('CPU', 0)} CPUs" in str(caught.value)
    assert "trainer.n_gpus_per_node" in str(caught.value)


@pytest.mark.parametrize(("devices", "device", "address", "refused"), [
    (4, "cuda", None, True), (5, "cuda", None, False), (0, "cpu", None, False), (0, "cuda", "ray://head:10001", False),
])  # fmt: skip
def test_accelerators_that_this_machine_lacks_are_missed_before_ray_starts(
    monkeypatch, devices, device, address, refused
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    wanted = OmegaConf.merge(
        config(), {"trainer": {"device": device}, "ray_kwargs": {"ray_init": {"address": address}}}
    )
    faults = local_faults(wanted)
    assert bool(faults) == refused
    if refused:
        assert "trainer.n_gpus_per_node: the placement needs 5 GPUs = 2 learner + 3 policy" in faults[0]
        assert "this machine has 4" in faults[0]
