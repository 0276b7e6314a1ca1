"""Bytes by plane and hop: what crossed which boundary between processes, counted where it arrives or is handed over.

The data plane carries observations, actions and samples, the weight plane parameters, the learner's plane what its
ranks tell one another: parameters that are gathered, gradients that are reduced. Each process counts for itself;
``drain`` hands the counts out as one span of the lane ``traffic``, the way its other spans go, and the trainer sums
them up once a step: ``traffic/data/env_to_policy`` and so on, in bytes.

Hops of the data plane: ``simulator_to_env`` (shared memory), ``env_to_policy`` and ``policy_to_env`` (requests and
answers), ``env_to_store`` (finished trajectories), ``store_to_learner`` (each pass over samples that fetches them) and
``learner_to_store`` (copies that fill up a batch), ``store_to_driver`` and ``driver_to_store`` (what advantages are
computed from, and they: no image is among it), ``store_to_checkpoint`` (samples of groups in flight);
``store_between_nodes`` is what of all that went to or came from a storage unit on another node.
Of the weight plane: ``learner_to_policy``, what all policy workers received together, and ``between_nodes``, what of it
left a node (counted where our own backend sends; nccl does not say).
Of the learner's plane: ``ranks_within_node`` and ``ranks_between_nodes``, by the process group that a collective is of;
how they are derived says ``learner.collectives``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from vla3_plugin.telemetry import clock
from vla3_plugin.telemetry.timeline import TRAFFIC_LANE, Span

DATA, WEIGHTS, LEARNER = "data", "weights", "learner"
HOPS = {
    DATA: (
        "simulator_to_env",
        "env_to_policy",
        "policy_to_env",
        "env_to_store",
        "store_to_learner",
        "learner_to_store",
        "store_to_driver",
        "driver_to_store",
        "store_to_checkpoint",
        "store_between_nodes",
    ),
    WEIGHTS: ("learner_to_policy", "between_nodes"),
    LEARNER: ("ranks_within_node", "ranks_between_nodes"),
}
_PLANE = {hop: plane for plane, hops in HOPS.items() for hop in hops}
_lock = threading.Lock()
_counted: Counter[str] = Counter()


def count(hop: str, arrays: Mapping[str, Any] | Iterable[Any]) -> None:
    """Add the size of ``arrays`` (numpy arrays or torch tensors, by name or not) to ``hop`` of this process."""
    values = arrays.values() if isinstance(arrays, Mapping) else arrays
    add(hop, sum(int(value.nbytes) for value in values if hasattr(value, "nbytes")))


def add(hop: str, size: int) -> None:
    """Add ``size`` bytes to ``hop`` of this process."""
    with _lock:
        _counted[hop] += size


def drain(role: str) -> list[Span]:
    """What this process counted since the last call, as a span of no length; nothing of nothing."""
    with _lock:
        found = dict(_counted)
        _counted.clear()
    now = clock.now()
    return [Span(role, TRAFFIC_LANE, "bytes", now, now, found)] if found else []


def traffic_metrics(spans: Iterable[Span]) -> dict[str, float]:
    """Bytes of every hop, over all processes that ``spans`` came from; a hop that nothing crossed is 0."""
    total: Counter[str] = Counter()
    for span in spans:
        if span.lane == TRAFFIC_LANE:
            total.update(span.args or {})
    return {f"traffic/{plane}/{hop}": float(total[hop]) for hop, plane in _PLANE.items()}
