"""The device a simulator draws on: one test for each way in which CUDA's, EGL's and Vulkan's numbers are confused."""

import json
import os

import pytest
import ray
from omegaconf import OmegaConf

from vla3_plugin.config import VLA3Config
from vla3_plugin.envs import registry
from vla3_plugin.envs.rendering import ASSIGNED, EglDevice, RenderingError, child_environment, egl_devices
from vla3_plugin.placement.fit import PlacementError, demand
from vla3_plugin.placement.resolve import bundle_cpus, derive, place, placement_of, share, summary
from vla3_plugin.placement.spec import Cluster, resolve
from vla3_plugin.telemetry import clock

SOFTWARE, HIDDEN, OWN = EglDevice(None, True), EglDevice(None, False), EglDevice(0, False)


def placed(visible, **more):
    return {ASSIGNED: "cuda", "CUDA_VISIBLE_DEVICES": visible, **more}


def test_nothing_is_said_where_nobody_chose():
    assert child_environment({"CUDA_VISIBLE_DEVICES": "3"}, True, [OWN]) == {}


def test_egl_counts_in_an_order_of_its_own():
    """CUDA's device 3 may be EGL's 1 (MuJoCo's issue 3245), and in a container EGL may list one device alone, so that
    CUDA's number is beyond its list (starVLA's 390)."""
    found = child_environment(placed("3"), True, [HIDDEN, OWN, HIDDEN, HIDDEN])
    assert found == {"CUDA_VISIBLE_DEVICES": "3", "MUJOCO_EGL_DEVICE_ID": "1", "EGL_DEVICE_ID": "1"}
    assert child_environment(placed("7"), True, [OWN])["MUJOCO_EGL_DEVICE_ID"] == "0"


def test_a_variable_that_all_workers_inherit_does_not_put_them_all_on_one_gpu():
    """MuJoCo draws on EGL's first device unless told (OpenTau's 402); one value for a whole cluster does the same."""
    two = [child_environment(placed(str(i), MUJOCO_EGL_DEVICE_ID="0"), True, devices)["MUJOCO_EGL_DEVICE_ID"]
           for i, devices in enumerate(([OWN, HIDDEN], [HIDDEN, OWN]))]  # fmt: skip
    assert two == ["0", "1"]


@pytest.mark.parametrize("name", ["GPU-7d2f9a3e-1b5c-4e8f-9a0b-1c2d3e4f5a6b", "MIG-1", "12"])
def test_a_device_may_be_named_by_its_identity(name):
    """robosuite wants digits, and digits that CUDA_VISIBLE_DEVICES lists; EGL's index comes from EGL instead."""
    assert child_environment(placed(name), True, [SOFTWARE, OWN])["MUJOCO_EGL_DEVICE_ID"] == "1"


def test_mujoco_lists_ten_egl_devices():
    devices = [HIDDEN] * 10 + [OWN]
    with pytest.raises(
        RenderingError, match="CUDA device 10, but it is EGL's device 10, and MuJoCo knows the first 10"
    ):
        child_environment(placed("10"), True, devices)
    assert child_environment(placed("10"), False, devices)["MUJOCO_EGL_DEVICE_ID"] == "10"  # not MuJoCo: it may


def test_a_device_that_egl_does_not_have_is_refused_for_mujoco_alone():
    """A slice of a GPU, or a driver without graphics: MuJoCo would draw on somebody else's device."""
    with pytest.raises(RenderingError, match="no EGL device draws on it; place env on another"):
        child_environment(placed("MIG-1"), True, [HIDDEN, SOFTWARE])
    assert child_environment(placed("MIG-1"), False, [HIDDEN, SOFTWARE]) == {"CUDA_VISIBLE_DEVICES": "MIG-1"}
    assert child_environment(placed("0"), True, []) == {"CUDA_VISIBLE_DEVICES": "0"}  # no EGL: OSMesa draws


@pytest.mark.parametrize("visible", ["", "0,1", " , "])
def test_a_vulkan_simulator_sees_exactly_one_cuda_device(visible):
    """SAPIEN asks Vulkan for a CUDA device by its number among the visible ones: only with one is cuda:0 the chosen
    one (SAPIEN's 101), and Ray hides all of them from an actor that asks for no GPU."""
    with pytest.raises(RenderingError, match="expected one device"):
        child_environment(placed(visible), False, [])
    assert child_environment(placed(" 5 "), False, []) == {"CUDA_VISIBLE_DEVICES": "5"}


def test_a_simulator_without_a_device_leaves_the_gpus_alone():
    """On a machine with GPUs EGL's first device is one of them; Mesa's is the one to draw with."""
    found = child_environment({ASSIGNED: "none", "CUDA_VISIBLE_DEVICES": "0,1"}, True, [HIDDEN, HIDDEN, SOFTWARE])
    assert (found["CUDA_VISIBLE_DEVICES"], found["MUJOCO_EGL_DEVICE_ID"]) == ("", "2")
    assert child_environment({ASSIGNED: "none"}, True, [SOFTWARE]) == {"CUDA_VISIBLE_DEVICES": ""}


def test_logical_devices_are_not_taken_for_egls():
    """On a CPU Ray's GPUs are numbers; without this a simulator on the second would ask EGL for its second device."""
    assert child_environment({ASSIGNED: "none", "CUDA_VISIBLE_DEVICES": "2"}, True, [SOFTWARE]) == {
        "CUDA_VISIBLE_DEVICES": ""
    }


def test_egl_is_asked_and_answers():
    devices = egl_devices()
    if not devices:
        pytest.skip("there is no EGL here")
    assert sum(device.software for device in devices) <= 1
    known = [device.cuda for device in devices if device.cuda is not None]
    assert len(set(known)) == len(known)


REPORTER = """
import json, os
from vla3_plugin.envs.latency import LatencyEnv
def make(path, **options):
    names = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID")
    open(path, "w").write(json.dumps({name: os.environ.get(name) for name in names}))
    return LatencyEnv(**options)
"""


def test_the_simulators_process_is_told(tmp_path, monkeypatch):
    (tmp_path / "reporter.py").write_text(REPORTER)
    monkeypatch.setenv(ASSIGNED, "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr("vla3_plugin.envs.rendering.egl_devices", lambda: (HIDDEN, OWN))
    out = tmp_path / "out.json"
    with registry.make_env("reporter:make", {"path": str(out)}, paths=[str(tmp_path)], name="reporter"):
        assert json.loads(out.read_text()) == {"CUDA_VISIBLE_DEVICES": "3", "MUJOCO_EGL_DEVICE_ID": "1"}


# ---------------------------------------------------------------- from the config to Ray


def config(device="cpu", backend="vla3_gloo", **placement):
    vla3 = VLA3Config()
    for key, value in placement.items():
        setattr(vla3.placement, key, value)
    run = OmegaConf.create({
        "trainer": {"device": device, "n_gpus_per_node": 1, "nnodes": 1},
        "actor_rollout_ref": {"rollout": {"n_gpus_per_node": 1, "nnodes": 1, "tensor_model_parallel_size": 1,
                                          "checkpoint_engine": {"backend": backend}}},
        "ray_kwargs": {"ray_init": {}},
        "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}},
    })  # fmt: skip
    return run, vla3


def derived(**placement):
    run, vla3 = config(**placement)
    found, faults = place(run, vla3)
    assert not faults
    derive(run, vla3, found)
    run.vla3 = OmegaConf.structured(vla3)
    return run, vla3, found


def test_without_placement_keys_nothing_changes():
    run, vla3 = config()
    assert place(run, vla3) == (None, [])
    run.vla3 = OmegaConf.structured(vla3)
    assert placement_of(run) is None
    assert demand(run).gpus == 2


def test_ranks_policy_workers_env_workers_and_the_cluster_follow_from_the_placement(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run, vla3, found = derived(component_placement={"actor": 0, "env,rollout": "1-2"})
    rollout = run.actor_rollout_ref.rollout
    assert (run.trainer.n_gpus_per_node, run.trainer.nnodes, vla3.env.workers) == (1, 1, 2)
    assert (rollout.n_gpus_per_node, rollout.nnodes, vla3.placement.node_gpus) == (2, 1, [3])
    assert placement_of(run) == found  # any process of the run comes to the same
    assert demand(run).gpus == 3
    assert summary(found)["env"] == "2 processes on node 0 GPU 1-2"


def test_roles_that_share_a_device_are_counted_once(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run, vla3, found = derived(component_placement={"actor,rollout": 0, "env": "0:0-3"})
    assert (demand(run).gpus, vla3.env.workers, share(found)) == (1, 4, 8)  # six processes, in parts Ray can add up
    assert bundle_cpus(found, (0, 0)) == 3


def test_env_workers_that_are_asked_for_are_spread_over_the_devices_that_a_ratio_gives():
    run, vla3 = config(ratio="rollout:actor = 3:1", node_gpus=[4])
    vla3.env.workers = 7
    found, _ = place(run, vla3)
    derive(run, vla3, found)
    run.vla3 = OmegaConf.structured(vla3)
    assert vla3.env.workers == 9  # three on each of three
    assert placement_of(run) == found


def test_a_rollout_that_is_uneven_over_nodes_counts_its_workers():
    run, *_ = derived(component_placement={"actor": "2-3", "env,rollout": "0-1,4"}, node_gpus=[4, 2])
    assert (run.actor_rollout_ref.rollout.n_gpus_per_node, run.actor_rollout_ref.rollout.nnodes) == (3, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "collocated", "node_gpus": []}, "expected the GPUs of each node"),
        ({"mode": "collocated", "node_gpus": [-1]}, "expected the GPUs of each node"),
        ({"node_gpus": [8]}, "node_gpus says nothing without component_placement"),
        ({"mode": "collocated", "node_gpus": [2], "device": "cuda", "backend": "nccl"}, "'nccl' refuses two ranks on"),
        ({"ratio": "rollout:actor = 3:1", "node_gpus": [6]}, "4 parts do not divide 6 devices"),
    ],
)
def test_a_placement_that_cannot_run_is_a_fault(options, reason):
    run, vla3 = config(**options)
    found, faults = place(run, vla3)
    assert found is None and len(faults) == 1 and reason in faults[0]


def test_a_cluster_that_is_joined_has_to_be_described(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    _, faults = place(*config(mode="collocated"))
    assert "node_gpus: null, expected the GPUs of each node of the cluster" in faults[0]


def test_nodes_of_a_placement_find_nodes_of_the_cluster():
    from vla3_plugin.placement.resolve_ray import match_nodes

    assert match_nodes([8, 8, 0], [8, 8, 0]) == [0, 1, 2]
    assert match_nodes([8, 0], [0, 8]) == [1, 0]
    assert match_nodes([2, 4], [8, 4]) == [0, 1]
    with pytest.raises(PlacementError, match=r"\[8, 8\] GPUs a node, but the cluster has 2 nodes with \[8, 4\]"):
        match_nodes([8, 8], [8, 4])


@pytest.mark.slow
def test_processes_land_on_the_devices_and_nodes_that_were_chosen(tmp_path):
    """Two Ray nodes with logical GPUs; env workers on one's devices and, without any, on the other."""
    from ray.cluster_utils import Cluster as RayCluster

    from vla3_plugin.placement import resolve_ray

    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 2})
    cluster.add_node(num_cpus=4, num_gpus=2)
    try:
        anchor = "1.0@" + os.environ[clock.ANCHOR].partition("@")[2]  # as launch.prepare_cluster hands on the run's
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {clock.ANCHOR: anchor}})
        env = {"node_group": "b,cpus", "placement": "0-1,2:2-3"}
        groups = [{"label": "b", "node_ranks": 1}, {"label": "cpus", "node_ranks": 0, "ignore_hardware": True}]
        wanted = resolve(Cluster((2, 2)), {"actor": 1, "rollout": "2-3", "env": env}, node_groups=groups)
        grid = resolve_ray.reserve(wanted, accelerated=False)

        class Worker:
            def environment(self):
                return {name: os.environ.get(name) for name in (ASSIGNED, clock.ANCHOR)}

        actors = [ray.remote(num_cpus=0)(Worker).options(**grid.env_options(rank)).remote() for rank in range(4)]
        assert grid.landed(tmp_path, env=actors) == []
        record = json.loads((tmp_path / "placement.json").read_text())
        assert [(r["node"], r["gpus"]) for r in record] == [(1, ["0"]), (1, ["1"]), (0, []), (0, [])]
        told = ray.get([actor.environment.remote() for actor in actors])
        assert told == [{ASSIGNED: "none", clock.ANCHOR: anchor}] * 4
        assert ray.available_resources()["GPU"] == 1  # node 0's first was held, and given back
    finally:
        ray.shutdown()
        cluster.shutdown()
        resolve_ray.reserved = None
