"""Samples stay on the node that makes them: verl's TransferQueue with a storage unit a node, each row in one near by.

TransferQueue spreads rows over its storage units by their number, whatever node they come from. On a cluster of several
nodes a row goes instead to a unit on the node of the process that stores it first, and what is added to it later goes
to the same one. Where each field of a row lies is kept by the controller, as it is for every storage backend that says
so. With ``by_node`` a learner's ranks then read rows of their own node. What crosses all the same is counted.

Imported after ``transfer_queue`` in every process (``plugin``); on one node nothing changes.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import ray
import torch
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.bootstrap import StorageBootstrapProvider
from transfer_queue.storage.managers import AsyncSimpleStorageManager, StorageManagerFactory
from transfer_queue.storage.managers.simple_storage_manager import RoutingGroup
from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

from vla3_plugin.placement.fit import PlacementError, storage_units, whereabouts
from vla3_plugin.telemetry import traffic

BACKEND = "SimpleStorage"
_NODES = "nodes"  # in the backend's config: each storage unit's node
_routes: ContextVar[dict[int, str] | None] = ContextVar("vla3_store_routes", default=None)
_EVERYWHERE: dict[int, str] = {}


def node() -> str:
    """Ray's id of this process's node."""
    return ray.get_runtime_context().get_node_id()


def by_node(keys: Sequence[str], homes: Mapping[str, str], ranks: Sequence[str]) -> list[str]:
    """``keys`` in such an order that equal parts of it, one a rank, hold what lies on the rank's node as far as numbers
    allow. ``homes``: the node of each key, where it is known. ``ranks``: the node of each rank.

    Everything stays in its order where all ranks are on one node, and within each rank what is at home there does.
    """
    if len(set(ranks)) < 2:
        return list(keys)
    room = len(keys) // len(ranks)
    waiting: dict[str | None, list[str]] = defaultdict(list)
    for key in keys:
        waiting[homes.get(key)].append(key)
    parts: list[list[str]] = []
    for there in ranks:  # a node's rows to its ranks in turn
        parts.append(waiting[there][:room])
        del waiting[there][:room]
    left = [key for rows in waiting.values() for key in rows]
    for part in parts:
        missing = room - len(part)
        part += left[:missing]
        del left[:missing]
    return [key for part in parts for key in part] + left


class NodeStorageManager(AsyncSimpleStorageManager):
    """A process's side of the storage units of several nodes."""

    def __init__(self, controller_info: Any, config: DictConfig, zmq_context: Any = None) -> None:
        super().__init__(controller_info, config, zmq_context=zmq_context)
        self.nodes: dict[str, str] = dict(config.get(_NODES) or {})
        self.several = len(set(self.nodes.values())) > 1
        self.here = node() if self.several else ""
        units = list(self.storage_unit_infos)
        self.near = [unit for unit in units if self.nodes.get(unit) == self.here] or units

    # How to talk to a unit only TransferQueue's own methods know. They ask ``_group_by_hash`` which one each row is in,
    # with nothing but its number, so the answers wait in a context variable; they tell the controller what is stored by
    # ``notify_data_update``.

    def _group_by_hash(self, global_indexes: list[int]) -> dict[str, RoutingGroup]:
        routes = _routes.get()
        if routes is None:
            return super()._group_by_hash(global_indexes)
        if routes is _EVERYWHERE:
            return {unit: RoutingGroup(global_indexes, []) for unit in self.storage_unit_infos}
        found: dict[str, RoutingGroup] = {}
        for position, index in enumerate(global_indexes):
            group = found.setdefault(routes[index], RoutingGroup([], []))
            group.global_indexes.append(index)
            group.batch_positions.append(position)
        return found

    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: Any = None) -> None:
        if not self.several:
            return await super().put_data(data, metadata, data_parser=data_parser)
        routes = {}
        for index, fields in zip(metadata.global_indexes, metadata._custom_backend_meta, strict=True):
            routes[index] = next(iter(fields.values()), None) or self.near[index % len(self.near)]
        with _routed(routes):
            await super().put_data(data, metadata, data_parser=data_parser)

    async def notify_data_update(
        self,
        partition_id: str,
        global_indexes: list[int],
        field_schema: dict[str, dict[str, Any]],
        custom_backend_meta: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        routes = _routes.get()
        if routes is not None:
            custom_backend_meta = {index: dict.fromkeys(field_schema, routes[index]) for index in global_indexes}
        await super().notify_data_update(partition_id, global_indexes, field_schema, custom_backend_meta)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        if not self.several or metadata.size == 0:
            return await super().get_data(metadata)
        # fields of a row are apart only where it was completed together with rows that were new
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name in metadata.field_names:
            alike[tuple(fields[name] for fields in metadata._custom_backend_meta)].append(name)
        found: dict[str, Any] = {}
        for units, names in alike.items():
            with _routed(dict(zip(metadata.global_indexes, units, strict=True))):
                found.update((await super().get_data(metadata.select_fields(names))).items())
        return TensorDict(found, batch_size=metadata.size)

    async def clear_data(self, metadata: BatchMeta) -> None:
        # numbers of rows are few bytes, and a unit forgets what it has of them
        with _routed(_EVERYWHERE if self.several else None):
            await super().clear_data(metadata)

    async def _put_to_single_storage_unit(
        self, global_indexes: list[int], storage_data: dict[str, Any], target_storage_unit: str, data_parser: Any = None
    ) -> None:
        self._count(target_storage_unit, storage_data)
        await super()._put_to_single_storage_unit(
            global_indexes, storage_data, target_storage_unit=target_storage_unit, data_parser=data_parser
        )

    async def _get_from_single_storage_unit(
        self, global_indexes: list[int], fields: list[str], target_storage_unit: str
    ) -> tuple[list[str], dict[str, Any]]:
        answer = await super()._get_from_single_storage_unit(
            global_indexes, fields, target_storage_unit=target_storage_unit
        )
        self._count(target_storage_unit, answer[1])
        return answer

    def _count(self, unit: str, data: Mapping[str, Any]) -> None:
        if self.several and self.nodes.get(unit) != self.here:
            traffic.add("store_between_nodes", sum(_size(value) for value in data.values()))


@contextmanager
def _routed(routes: dict[int, str] | None) -> Iterator[None]:
    token = _routes.set(routes)
    try:
        yield
    finally:
        _routes.reset(token)


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.values().nbytes if value.is_nested and value.layout == torch.jagged else value.nbytes
    return sum(_size(item) for item in value) if isinstance(value, (list, tuple)) else 0


def initialize(conf: DictConfig) -> dict[str, Any]:
    """TransferQueue's own start of the storage units, one at least on each node that has a CPU for it; then where each
    has come to be goes into the config, which every process gets. Any one may have to hold everything: nodes need not
    make as many samples."""
    storage = conf.backend[BACKEND]
    if sum(node["Alive"] for node in ray.nodes()) < 2:
        return _initialize(conf)
    given = {name: storage.get(name) for name in ("total_storage_size", "required_node_resource")}
    with open_dict(storage):
        storage.num_data_storage_units = storage_units(storage.num_data_storage_units)
        if given["total_storage_size"] is not None:
            storage.total_storage_size = given["total_storage_size"] * storage.num_data_storage_units
        storage.required_node_resource = given["required_node_resource"] or "CPU"  # it goes round nodes that have it
        await_room(storage.num_data_storage_units, storage.required_node_resource)
        handles = _initialize(conf)
        where = ray.get([handle.__ray_call__.remote(whereabouts) for handle in handles.values()])
        units = [storage.zmq_info[name].id for name in handles]
        storage[_NODES] = {unit: found["node_id"] for unit, found in zip(units, where, strict=True)}
        storage.update(given)
    return handles


def await_room(units: int, resource: str, seconds: float = 60.0) -> None:
    """Until each node has a CPU free for each of its storage units: they are tied to it, and one whose CPUs others hold
    would be waited for without end. A run that has just ended may still hold some.

    Raises:
        PlacementError: after ``seconds``, with the nodes and what to do.
    """
    placed = get_node_round_robin_scheduling_strategies(units, required_node_resource=resource)
    wanted, end = Counter(strategy.node_id for strategy in placed), time.monotonic() + seconds
    while full := _without_room(wanted):
        if time.monotonic() > end:
            raise PlacementError(
                f"no room for TransferQueue's storage units on {'; '.join(full)}. Stop what else runs there; or have "
                "them on some nodes only: start those with a resource of their own (ray start --resources="
                "'{\"store\": 1}') and set +transfer_queue.backend.SimpleStorage.required_node_resource=store"
            )
        time.sleep(1.0)


def _without_room(wanted: Mapping[str, int]) -> list[str]:
    """The nodes with fewer free CPUs than ``wanted``."""
    free = ray._private.state.available_resources_per_node()  # as verl asks; Ray has no public one
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    return [
        f"{nodes[node]['NodeManagerAddress']}: {count} wanted, {free.get(node, {}).get('CPU', 0):g} of "
        f"{nodes[node]['Resources'].get('CPU', 0):g} CPUs free"
        for node, count in wanted.items()
        if free.get(node, {}).get("CPU", 0) < count
    ]


_initialize: Any = StorageBootstrapProvider.get_provider(BACKEND)
StorageManagerFactory.register(BACKEND)(NodeStorageManager)
StorageBootstrapProvider.register_provider(BACKEND)(initialize)
