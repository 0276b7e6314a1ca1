"""Whether the run's roles fit the Ray cluster. A placement group that does not fit would wait for ever."""

from dataclasses import dataclass, replace
from typing import Any

from vla3_plugin.profile import joins_a_cluster

COLOCATED = 3  # CPUs verl reserves for each training worker's bundle (ResourcePoolManager.max_colocate_count)
REPLICA = 2  # and for each standalone replica's


class PlacementError(RuntimeError):
    """The cluster is too small; the message holds the arithmetic."""


@dataclass(frozen=True)
class Demand:
    """What verl asks Ray for. On a CPU the GPUs are logical and CPUs may exceed the cores.

    ``devices`` and ``bundle_cpus``: of a placement that says where each process runs; roles may share its devices.
    """

    learner_ranks: int
    replicas: int
    storage_units: int
    devices: int | None = None
    bundle_cpus: int = 0

    @property
    def gpus(self) -> int:
        return self.learner_ranks + self.replicas if self.devices is None else self.devices

    @property
    def cpus(self) -> int:
        if self.devices is not None:
            return self.bundle_cpus + self.storage_units + 1
        return COLOCATED * self.learner_ranks + REPLICA * self.replicas + self.storage_units + 1

    def arithmetic(self) -> str:
        if self.devices is not None:
            return (
                f"{self.devices} GPUs (vla3.placement); {self.cpus} CPUs = {self.bundle_cpus} beside them + "
                f"{self.storage_units} storage units + 1 task runner"
            )
        return (
            f"{self.gpus} GPUs = {self.learner_ranks} learner + {self.replicas} policy workers; {self.cpus} CPUs = "
            f"{COLOCATED} x {self.learner_ranks} + {REPLICA} x {self.replicas} + {self.storage_units} storage units + "
            "1 task runner"
        )


def demand(config: Any) -> Demand:
    from vla3_plugin.placement.resolve import bundle_cpus, placement_of

    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    placement = placement_of(config)
    devices = placement.cluster_devices() if placement else []
    return Demand(
        learner_ranks=trainer.n_gpus_per_node * trainer.nnodes,
        replicas=rollout.n_gpus_per_node * rollout.nnodes // rollout.tensor_model_parallel_size,
        storage_units=config.transfer_queue.backend.SimpleStorage.num_data_storage_units,
        devices=len(devices) if placement else None,
        bundle_cpus=sum(bundle_cpus(placement, device) for device in devices) if placement else 0,
    )


def storage_units(configured: int) -> int:
    """How many the connected cluster gets: one at least on each node that has a CPU for it, see rollout.store_nodes."""
    import ray

    nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in ray.nodes())
    return max(configured, nodes)


def check_cluster(config: Any) -> None:
    """Refuse a placement that the connected cluster cannot hold.

    Raises:
        PlacementError: with what is needed, what is there, and what to change.
    """
    import ray

    needed, there = demand(config), ray.cluster_resources()
    needed = replace(needed, storage_units=storage_units(needed.storage_units))
    if there.get("GPU", 0) < needed.gpus or there.get("CPU", 0) < needed.cpus:
        raise PlacementError(
            f"the placement does not fit the Ray cluster: it needs {needed.arithmetic()}; the cluster has "
            f"{there.get('GPU', 0):g} GPUs and {there.get('CPU', 0):g} CPUs. Lower trainer.n_gpus_per_node or "
            "actor_rollout_ref.rollout.n_gpus_per_node, or start the cluster with more (on a machine without GPUs: "
            f"ray start --num-gpus={needed.gpus} --num-cpus={needed.cpus}, these are logical)"
        )


def local_faults(config: Any) -> list[str]:
    """What a cluster of this one machine could not hold, before it is started: real accelerators cannot be invented."""
    if joins_a_cluster(config.ray_kwargs.ray_init.get("address")) or config.trainer.device != "cuda":
        return []
    import torch

    needed, there = demand(config), torch.cuda.device_count()
    if needed.gpus <= there:
        return []
    return [
        f"trainer.n_gpus_per_node: the placement needs {needed.gpus} GPUs = {needed.learner_ranks} learner + "
        f"{needed.replicas} policy workers, this machine has {there}; lower it or "
        "actor_rollout_ref.rollout.n_gpus_per_node, join a cluster (ray_kwargs.ray_init.address), or set "
        "vla3.profile=cpu"
    ]


def whereabouts(_actor: Any) -> dict[str, Any]:
    """Node and devices of the process that this runs in; here, because env workers need not import verl for it."""
    import ray

    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    return {"node_id": context.get_node_id(), "address": ray.util.get_node_ip_address(), "gpus": gpus}
