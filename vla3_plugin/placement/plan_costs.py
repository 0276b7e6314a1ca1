"""Bytes and seconds on paper: what training state, weights and gradients take, per device and per step.

Formulas, not measurements; ``benchmarks/scaling.md`` shows them from 3 B to 1 T parameters. Ring collectives: of n
ranks each sends (n - 1)/n of the data for a reduce-scatter or an all-gather and twice that for an all-reduce
(Patarasuk and Yuan 2009). Sharded inside a node and replicated across (HSDP, ``fsdp_size`` = GPUs of a node): weights
are gathered and gradients scattered inside, and only a rank's shard of the gradients crosses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GB = 1e9
MASTER = GRADIENT = 4  # bytes a trainable parameter, float32, as verl's FSDP keeps them
ADAM = 8


@dataclass(frozen=True)
class Link:
    """GB/s, one direction, of a GPU; ``latency_us`` of a hop."""

    gb_s: float
    latency_us: float = 10.0

    def seconds(self, bytes_: float, hops: int = 1) -> float:
        return bytes_ / (self.gb_s * GB) + hops * self.latency_us * 1e-6 if self.gb_s else 0.0


@dataclass(frozen=True)
class Sharding:
    """``ranks`` of the learner; ``per_cell`` of them share the parameters, and cells are replicas of one another."""

    ranks: int
    per_cell: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.per_cell < 1 or self.ranks % self.per_cell:
            raise ValueError(f"{self.ranks} ranks in cells of {self.per_cell}: expected whole cells")

    @property
    def cells(self) -> int:
        return self.ranks // self.per_cell


def state_bytes(parameters: float, trainable: float, shards: int) -> float:
    """Training state of one rank: master weights of all, gradients and Adam's two moments of what is trained."""
    return (MASTER * parameters + (GRADIENT + ADAM) * trainable) / shards


def replica_bytes(parameters: float, wire: int = 2, receiving: bool = True) -> float:
    """A policy worker's weights, and the buffer that the next version arrives in while this one serves."""
    return wire * parameters * (2 if receiving else 1)


def gradient_bytes_across(trainable: float, sharding: Sharding, wire: int = 4) -> float:
    """What one rank sends over its own cell's border in a step: its shard, all-reduced over the cells."""
    m = sharding.cells
    return 2 * (m - 1) / m * wire * trainable / sharding.per_cell


def bytes_sent(
    parameters: float,
    trainable: float,
    sharding: Sharding,
    gathers: float = 1,
    reductions: float = 1,
    wire: int = 4,
    gathered: int = 2,
) -> tuple[float, float]:
    """What one rank sends in a step (inside its cell, over its border), with so many all-gathers of the parameters and
    reductions of the gradients, at ``gathered`` and ``wire`` bytes a parameter.

    FSDP2 gathers once in each forward and once in each backward, so twice a micro-batch, and reduces once an update.
    ``learner.collectives`` counts what is really sent.
    """
    n = sharding.per_cell
    inside = (n - 1) / n * (reductions * wire * trainable + gathers * gathered * parameters)
    return inside, reductions * gradient_bytes_across(trainable, sharding, wire)


def reduce_s(
    parameters: float, trainable: float, sharding: Sharding, within: Link, between: Link, wire: int = 4
) -> float:
    """An optimizer step's collectives, not overlapped with computing: gradients scattered inside the cell, shards
    all-reduced across cells, and the new weights gathered inside (bf16)."""
    n, m = sharding.per_cell, sharding.cells
    inside, across = bytes_sent(parameters, trainable, sharding, wire=wire)
    seconds = within.seconds(inside, 2 * (n - 1)) if n > 1 else 0.0
    return seconds + (between.seconds(across, 2 * (m - 1)) if m > 1 else 0.0)


def flat_reduce_s(parameters: float, trainable: float, ranks: int, per_node: int, within: Link, between: Link) -> float:
    """The same with all ranks in one sharding group: a ring over all of them goes at the slowest link's pace, and the
    GPUs of a node share its way out."""
    if ranks <= per_node:
        return reduce_s(parameters, trainable, Sharding(ranks, ranks), within, between)
    data = (ranks - 1) / ranks * (4 * trainable + 2 * parameters)
    return between.seconds(data, 2 * (ranks - 1))


def publish_s(
    parameters: float,
    nodes: int,
    replicas: int,
    within: Link,
    between: Link,
    gpus_per_node: int = 8,
    wire: int = 2,
    relay: bool = True,
) -> float:
    """A version to every replica. With ``relay`` one copy enters each node, down a pipelined chain over all of the
    node's links, and fans out inside; without, every replica receives its own from the learner's node.
    """  # fmt: skip
    data = wire * parameters
    if nodes <= 1:
        return within.seconds(data, 1)
    if not relay:
        return between.seconds(data * replicas / gpus_per_node, replicas)
    return between.seconds(data / gpus_per_node, nodes) + within.seconds(data, 1)


def weight_bytes_across(parameters: float, nodes: int, replicas: int, relay: bool = True, wire: int = 2) -> float:
    """Bytes of a publication that leave the learner's node: once a node with the relay, else once a replica."""
    outside = max(0, nodes - 1) if relay else max(0, replicas - math.ceil(replicas / max(1, nodes)))
    return wire * parameters * outside
