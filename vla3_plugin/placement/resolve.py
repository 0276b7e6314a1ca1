"""``vla3.placement`` of a run's config, resolved, and the keys of verl and of vla3 that follow from it.

A run without any of these keys is placed by verl's own: ``trainer.n_gpus_per_node``,
``actor_rollout_ref.rollout.n_gpus_per_node`` and ``vla3.env.workers``, each role on devices of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf, open_dict

from vla3_plugin.placement.pools import MODEL, SIMULATOR, budget_faults
from vla3_plugin.placement.spec import (
    KEY,
    Cluster,
    Device,
    Placement,
    Process,
    SpecError,
    devices_text,
    nearest,
    resolve,
)
from vla3_plugin.profile import joins_a_cluster

if TYPE_CHECKING:
    from vla3_plugin.config import PlacementConfig, VLA3Config

_MOST_GPUS, _MOST_NODES = 4096, 100_000
# Shares of a GPU that Ray, which counts ten-thousandths, adds up to exactly one.
SHARES = tuple(n for n in range(1, 10_001) if 10_000 % n == 0)


def place(config: Any, vla3: VLA3Config) -> tuple[Placement | None, list[str]]:
    """(the placement, faults); None where none is asked for, or where there are faults."""
    spec = vla3.placement
    if not _given(spec):
        alone = [name for name in ("node_groups", "node_gpus", "ratio_per_node") if getattr(spec, name)]
        return None, [f"{KEY}.{name} says nothing without component_placement, mode or ratio" for name in alone]
    try:
        placement = _resolve(spec, cluster_of(config, spec), vla3.env.workers)
    except SpecError as error:
        return None, error.faults
    faults = [*_shared_faults(config, placement), *_budget_faults(config, spec, placement)]
    faults += _host_faults(placement, vla3.env.isolation) if vla3.env.host == "policy_worker" else []
    return (None, faults) if faults else (placement, [])


def _host_faults(placement: Placement, isolation: str) -> list[str]:
    """Env workers that cannot live in the process of the policy worker that they ask, since it is elsewhere."""
    policies, faults = placement.components["rollout"], []
    for env, rank in zip(placement.components["env"], nearest(placement), strict=True):
        policy = policies[rank]
        seen = isolation == "none" and not env.devices  # a simulator in a process with a device uses that
        if env.node != policy.node or not set(env.devices) <= set(policy.devices) or (seen and policy.devices):
            faults.append(
                f"{KEY}.component_placement.env: env worker {env.rank} on {_where(env)}, but with vla3.env.host: "
                f"'policy_worker' it lives in the process of policy worker {rank} on {_where(policy)}; place env with "
                "rollout, such as {'env,rollout': 0-1}, or set vla3.env.host=own"
            )
    return faults[:3]


def _where(process: Process) -> str:
    return devices_text(process.places) if process.devices else f"node {process.node}"


def derive(config: Any, vla3: VLA3Config, placement: Placement) -> None:
    """Set what follows: ranks, policy workers, env workers, and the cluster that the numbers were read against."""
    vla3.placement.node_gpus = list(placement.cluster.gpus)
    vla3.env.workers = len(placement.components["env"])
    with open_dict(config):
        for node, name in ((config.trainer, "actor"), (config.actor_rollout_ref.rollout, "rollout")):
            each = Counter(p.node for p in placement.components[name])
            even = len(set(each.values())) == 1
            node.nnodes = len(each) if even else 1  # policy workers stand alone: only their number counts
            node.n_gpus_per_node = next(iter(each.values())) if even else sum(each.values())


def summary(placement: Placement) -> dict[str, str]:
    """For the preflight: where each component goes."""
    notes = {"note": "; ".join(placement.notes)} if placement.notes else {}
    return {"mode": f"{placement.mode}, {placement.cluster}", **placement.describe(), **notes}


def placement_of(config: Any) -> Placement | None:
    """The placement of a config that ``derive`` has been through, in any process of the run."""
    from vla3_plugin.config import PlacementConfig

    node = OmegaConf.select(config, KEY)
    if node is None or node.get("node_gpus") is None:
        return None
    spec = PlacementConfig(**OmegaConf.to_container(node, resolve=True))  # type: ignore[arg-type]
    cluster, workers = Cluster(tuple(spec.node_gpus or ())), int(config.vla3.env.workers)
    return _resolve(spec, cluster, workers) if _given(spec) else None


def share(placement: Placement) -> int:
    """Into how many equal parts a device is divided for Ray: enough for the one with the most processes."""
    most = max((len(placement.on(device)) for device in placement.devices()), default=1)
    if most > SHARES[-1]:
        raise SpecError([f"{KEY}: {most} processes on one device, and Ray divides a GPU into at most {SHARES[-1]}"])
    return next(n for n in SHARES if n >= most)


def bundle_cpus(placement: Placement, device: Device) -> int:
    """CPUs that Ray reserves beside a device: one a learner rank or policy worker, one for verl's questions there."""
    return 1 + sum(name != "env" for name, _ in placement.on(device))


def _given(spec: PlacementConfig) -> bool:
    return bool(spec.component_placement) or spec.mode is not None or spec.ratio is not None


def _resolve(spec: PlacementConfig, cluster: Cluster, env_workers: int) -> Placement:
    return resolve(
        cluster,
        spec.component_placement,
        mode=spec.mode,
        ratio=spec.ratio,
        ratio_per_node=spec.ratio_per_node,
        node_groups=spec.node_groups,
        env_workers=env_workers,
    )


def chooses(spec: PlacementConfig) -> bool:
    """Whether the planner is to choose: ``auto``, and nothing that says where things go."""
    return spec.mode == "auto" and not (spec.component_placement or spec.ratio)


def cluster_of(config: Any, spec: PlacementConfig) -> Cluster:
    """The cluster as described, or this machine."""
    gpus = spec.node_gpus
    if gpus is not None:
        if not 0 < len(gpus) <= _MOST_NODES or not all(0 <= count <= _MOST_GPUS for count in gpus):
            raise SpecError([f"{KEY}.node_gpus: {gpus}, expected the GPUs of each node, such as [8, 8, 0]"])
        return Cluster(tuple(gpus))
    if joins_a_cluster(config.ray_kwargs.ray_init.get("address")):
        raise SpecError([f"{KEY}.node_gpus: null, expected the GPUs of each node of the cluster, such as [8, 8, 0]"])
    if config.trainer.device != "cpu":
        import torch

        return Cluster((torch.cuda.device_count(),))
    # On a machine without accelerators they are logical, and there are as many as the placement names, or for the
    # planner as the config has learner ranks and policy workers.
    if chooses(spec):
        both = (config.trainer, config.actor_rollout_ref.rollout)
        return Cluster((sum(int(part.n_gpus_per_node) * int(part.nnodes) for part in both),))
    named = [int(n) for text in _texts(spec.component_placement) for n in re.findall(r"\d{1,4}", text)]
    parts = sum(int(n) for n in re.findall(r"\d{1,3}", str(spec.ratio).partition("=")[2]))
    return Cluster((max([1, *(n + 1 for n in named), parts]),))


def _texts(component_placement: dict[str, Any]) -> list[str]:
    """The resources that it names, without the processes on them."""
    values = [v.get("placement") if isinstance(v, dict) else v for v in component_placement.values()]
    return [segment.split(":")[0] for value in values for segment in str(value).split(",")]


def _budget_faults(config: Any, spec: PlacementConfig, placement: Placement) -> list[str]:
    """Where this machine's GPUs are what counts: budgets that they cannot hold."""
    if config.trainer.device == "cpu" or len(placement.cluster.gpus) > 1:
        return []
    import torch

    hosts = set(placement.devices("env"))
    models = {
        devices_text([device]): count
        for device in placement.devices("actor", "rollout")
        if device in hosts and (count := sum(name != "env" for name, _ in placement.on(device)))
    }
    capacity = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    budgets = {MODEL: spec.model_memory_gb, SIMULATOR: spec.simulator_memory_gb}
    return budget_faults(models, budgets, capacity) if capacity else []


def _shared_faults(config: Any, placement: Placement) -> list[str]:
    """What cannot live together on a device."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    shared = [d for d in placement.devices() if sum(name != "env" for name, _ in placement.on(d)) > 1]
    if engine.backend == "nccl" and shared:
        return [
            "actor_rollout_ref.rollout.checkpoint_engine.backend: 'nccl' refuses two ranks on one GPU, and "
            f"{devices_text(shared)} has several of learner and policy workers; use vla3_gloo (through host memory), "
            f"or {KEY}.mode=disaggregated"
        ]
    return []
