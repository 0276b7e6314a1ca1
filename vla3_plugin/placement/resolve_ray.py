"""A resolved placement in Ray: one placement group a device, on its node; what runs on the device shares its bundle.

verl makes a resource pool a role, on devices that Ray chooses. Here the devices are chosen, and a pool is a list of
those that a role runs on, so that roles may share some.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from verl.single_controller.ray.base import (
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    sort_placement_group_by_node_ip,
)
from verl.utils.device import get_device_name
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutMode

from vla3_plugin.envs.rendering import ASSIGNED
from vla3_plugin.placement.fit import PlacementError, whereabouts
from vla3_plugin.placement.resolve import bundle_cpus, share
from vla3_plugin.placement.spec import Device, Placement
from vla3_plugin.rollout.policy_worker import PolicyReplica

_NODE_LABEL = "ray.io/node-id"
_TIMEOUT_S = 300.0  # for Ray to reserve what is free already


@dataclass(frozen=True)
class Grid:
    """``nodes``: Ray's id of each node of the placement. ``groups``: the placement group of each device in use."""

    placement: Placement
    nodes: tuple[str, ...]
    groups: dict[Device, PlacementGroup]
    accelerated: bool  # devices are real

    def pool(self, name: str, devices: Sequence[Device]) -> RayResourcePool:
        """verl's resource pool over ``devices``, one process on each, in verl's order of nodes."""
        pool = RayResourcePool(
            process_on_nodes=[1] * len(devices),
            use_gpu=True,
            name_prefix=name,
            max_colocate_count=share(self.placement),  # verl gives each worker one part of a GPU
        )
        pool.pgs = sort_placement_group_by_node_ip([self.groups[device] for device in devices])
        return pool

    def learner_pools(self, verls: ResourcePoolManager) -> ResourcePoolManager:
        """In place of verl's manager: the learner's pool on the placement's devices."""
        devices = [place for p in self.placement.components["actor"] for place in p.places]
        return _Pools(resource_pool_spec=verls.resource_pool_spec, mapping=verls.mapping, grid=self, devices=devices)

    def env_options(self, rank: int) -> dict[str, Any]:
        """Options of the Ray actor of an env worker: its device's bundle, or its node."""
        process = self.placement.components["env"][rank]
        drawing = "cuda" if process.devices and self.accelerated else "none"
        options: dict[str, Any] = {"runtime_env": {"env_vars": {ASSIGNED: drawing}}}
        if not process.devices:
            strategy: Any = NodeAffinitySchedulingStrategy(self.nodes[process.node], soft=False)
        else:
            strategy = PlacementGroupSchedulingStrategy(self.groups[process.places[0]], 0)
            options["num_gpus"] = 1 / share(self.placement)
        return {**options, "scheduling_strategy": strategy}

    def landed(self, run_dir: Path, **actors: Sequence[Any]) -> list[str]:
        """Where each process of ``actor``, ``rollout`` and ``env`` says it runs, into the run directory.

        Returns:
            A line for each whose node is not the one that was chosen for it.
        """
        names = [(name, rank) for name, group in actors.items() for rank in range(len(group))]
        found = ray.get([actor.__ray_call__.remote(whereabouts) for group in actors.values() for actor in group])
        record = [
            {"process": f"{name} {rank}", **where, "node": self.nodes.index(where["node_id"])}
            if where["node_id"] in self.nodes
            else {"process": f"{name} {rank}", **where, "node": None}
            for (name, rank), where in zip(names, found, strict=True)
        ]
        (run_dir / "placement.json").write_text(json.dumps(record, indent=1))
        wanted = {f"{n} {p.rank}": p.node for n, group in self.placement.components.items() for p in group}
        return [f"{r['process']} is on node {r['node']}, not {wanted[r['process']]}" for r in record
                if r["node"] != wanted[r["process"]] and not r["process"].startswith("actor")]  # fmt: skip


reserved: Grid | None = None  # of this process, which is the one that makes every worker


def reserve(placement: Placement, accelerated: bool) -> Grid:
    """Reserve every device of the placement in the connected cluster.

    Devices before one that is used, and not used themselves, are held until all are reserved: Ray takes a node's GPUs
    in order, so that device 3 of the placement is the node's GPU 3 where nobody else uses the node.

    Raises:
        PlacementError: the cluster's nodes are not those of the placement, or do not have free what it needs.
    """
    global reserved
    there = [node for node in ray.nodes() if node["Alive"]]
    nodes = match_nodes(placement.cluster.gpus, [int(node["Resources"].get("GPU", 0)) for node in _ordered(there)])
    ids = tuple(_ordered(there)[i]["NodeID"] for i in nodes)
    used = placement.devices()
    last = {node: max(d for n, d in used if n == node) for node in {n for n, _ in used}}
    groups = {
        (node, device): placement_group(
            [{"GPU": 1, "CPU": bundle_cpus(placement, (node, device)) if (node, device) in used else 0.001}],
            name=f"vla3-{ray.get_runtime_context().get_job_id()}-{node}.{device}",
            bundle_label_selector=[{_NODE_LABEL: ids[node]}],
        )
        for node in sorted(last)
        for device in range(last[node] + 1)
    }
    late = [place for place in used if not groups[place].wait(_TIMEOUT_S)]
    for place in groups.keys() - set(used):
        remove_placement_group(groups.pop(place))
    if late:
        raise PlacementError(
            f"the placement was not given node {late[0][0]} GPU {late[0][1]} within {_TIMEOUT_S:g} s; free in the "
            f"cluster: {ray.available_resources()}"
        )
    reserved = Grid(placement, ids, groups, accelerated)
    return reserved


def match_nodes(wanted: Sequence[int], there: Sequence[int]) -> list[int]:
    """For each node of a placement the cluster's node that stands for it: itself where it is large enough, else the
    smallest that is left and is.

    Raises:
        PlacementError: with both sides.
    """
    free, chosen = set(range(len(there))), {}
    for rank in sorted(range(len(wanted)), key=lambda rank: -wanted[rank]):
        fits = [node for node in free if there[node] >= wanted[rank]]
        if not fits:
            raise PlacementError(
                f"vla3.placement.node_gpus: {list(wanted)} GPUs a node, but the cluster has {len(there)} nodes with "
                f"{list(there)}: none is left for node {rank}"
            )
        chosen[rank] = rank if rank in fits else min(fits, key=lambda node: (there[node], node))
        free.remove(chosen[rank])
    return [chosen[rank] for rank in range(len(wanted))]


def _ordered(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The head first, then by address: the order that node ranks follow."""
    head = "node:__internal_head__"
    return sorted(nodes, key=lambda n: (head not in n["Resources"], n["NodeManagerAddress"], n["NodeID"]))


@dataclass
class _Pools(ResourcePoolManager):
    grid: Grid | None = None
    devices: Sequence[Device] = ()

    def create_resource_pool(self) -> None:
        assert self.grid is not None
        for name in self.resource_pool_spec:
            self.resource_pool_dict[name] = self.grid.pool(name, self.devices)


class PlacedReplica(PolicyReplica):
    """A policy worker on the device that the placement has for its rank."""

    async def init_standalone(self) -> None:
        assert reserved is not None
        self.rollout_mode = RolloutMode.STANDALONE
        process = reserved.placement.components["rollout"][self.replica_rank]
        self.resource_pool = reserved.pool(f"rollout_pool_{self.replica_rank}", process.places)
        self.workers = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"rollout_standalone_{self.replica_rank}",
            use_gpu=True,
            device_name=get_device_name(),
        ).workers
        await self.launch_servers()


class PlacedServers(LLMServerManager):
    """verl's server manager with the policy workers where the placement has them."""

    rollout_replica_class = PlacedReplica
