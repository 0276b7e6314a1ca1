"""Bytes that a rank of the learner sends to other ranks, by hop: ``traffic/learner/ranks_within_node`` and
``…/ranks_between_nodes``.

Counted call by call from the payload that a collective hands to its process group, not sniffed from the wire: what a
rank must send where n ranks form a ring, the least that each can send (Patarasuk and Yuan 2009). With ``own`` the bytes
of this rank's part and ``whole`` those of all parts, all-gather (n - 1) own, reduce-scatter (n - 1)/n whole, all-reduce
2 (n - 1)/n whole; broadcast (n - 1)/n whole, the mean over a chain whose last rank sends nothing on. Headers, retries
and what a backend does otherwise are not in it. ``placement.plan_costs.bytes_sent`` predicts the sums.

A group whose ranks live on several nodes counts as between nodes, all of it. With cells that is exact: the all-reduced
shards go between nodes, everything else stays on one.

Seen are all-gathers, reduce-scatters, all-reduces and broadcasts called from Python, at the methods of ``ProcessGroup``
(FSDP, the counts of the loss) and at the functional collectives that DTensors use (the gradient's norm, weights
gathered for a publication or a checkpoint). Not seen are other collectives, which nothing here calls, and what C++
starts by itself: DDP's reducer, collectives inside a compiled graph. The hooks of FSDP2 stay outside of those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from vla3_plugin.telemetry import traffic

WITHIN, BETWEEN = "ranks_within_node", "ranks_between_nodes"


def _gathered(n: int, own: int) -> int:
    return (n - 1) * own


def _scattered(n: int, whole: int) -> int:
    return (n - 1) * whole // n


def _all_reduced(n: int, whole: int) -> int:
    return 2 * (n - 1) * whole // n


# Methods of ProcessGroup: which argument is the payload, and what is sent of it. Names differ between torch's versions;
# none of these calls another.
_METHODS: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "allreduce": (0, _all_reduced),
    "allreduce_coalesced": (0, _all_reduced),
    "broadcast": (0, _scattered),
    "allgather": (1, _gathered),
    "allgather_coalesced": (1, _gathered),
    "_allgather_base": (1, _gathered),
    "all_gather_single": (1, _gathered),
    "allgather_into_tensor_coalesced": (1, _gathered),
    "all_gather_single_coalesced": (1, _gathered),
    "reduce_scatter": (1, _scattered),
    "_reduce_scatter_base": (1, _scattered),
    "reduce_scatter_single": (1, _scattered),
    "reduce_scatter_tensor_coalesced": (1, _scattered),
    "reduce_scatter_single_coalesced": (1, _scattered),
}
# Functional collectives: which argument is the group; the payload is the first. Of each line the first that this torch
# has: where it has both, the second calls the first.
_FUNCTIONS: list[tuple[tuple[str, ...], int, Callable[[int, int], int]]] = [
    (("all_reduce",), 2, _all_reduced),
    (("broadcast",), 2, _scattered),
    (("all_gather_single", "all_gather_tensor"), 2, _gathered),
    (("reduce_scatter_single", "reduce_scatter_tensor"), 3, _scattered),
]

_nodes: list[str] = []  # of each rank
_hops: dict[str, tuple[int, str]] = {}  # by name of the group: its size, and where it sends
_installed = False


def install(nodes: Sequence[str]) -> None:
    """Count from now on in this process. Once more with other ``nodes`` after the process group was built anew.

    Args:
        nodes: the node that each rank of the default process group lives on. Of none, nothing is counted.
    """
    global _installed
    _nodes[:] = nodes
    _hops.clear()
    if _installed:
        return
    _installed = True
    for name, (at, sent) in _METHODS.items():
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _method(getattr(dist.ProcessGroup, name), at, sent))
    for names, at, sent in _FUNCTIONS:
        name = next(name for name in names if hasattr(functional, name))
        setattr(functional, name, _function(getattr(functional, name), at, sent))


def hop(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    return WITHIN if len({nodes[rank] for rank in ranks}) == 1 else BETWEEN


def _method(original: Callable[..., Any], at: int, sent: Callable[[int, int], int]) -> Callable[..., Any]:
    @functools.wraps(original)
    def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        _count(group, args[at : at + 1], sent)
        return original(group, *args, **kwargs)

    return counted


def _function(original: Callable[..., Any], at: int, sent: Callable[[int, int], int]) -> Callable[..., Any]:
    @functools.wraps(original)
    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not functional._are_we_tracing():  # a trace runs this once, on tensors without data
            group = kwargs["group"] if "group" in kwargs else args[at - 1]
            if isinstance(group, tuple):
                mesh, dimension = group
                group = mesh.get_group(dimension)
            if isinstance(group, dist.ProcessGroup):
                _count(group, tensor, sent)
        return original(tensor, *args, **kwargs)

    return counted


def _count(group: dist.ProcessGroup, payload: Any, sent: Callable[[int, int], int]) -> None:
    if not _nodes:
        return
    name = group.group_name
    if name not in _hops:
        try:
            ranks = dist.get_process_group_ranks(group)
        except (KeyError, ValueError):  # somebody's own, not made of the default group's ranks
            ranks = [0]
        _hops[name] = len(ranks), hop(ranks, _nodes)
    n, where = _hops[name]
    if n > 1:
        traffic.add(where, sent(n, _size(payload)))


def _size(payload: Any) -> int:
    return payload.nbytes if isinstance(payload, torch.Tensor) else sum(map(_size, payload))
