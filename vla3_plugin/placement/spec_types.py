"""What a placement is made of: a cluster, processes on its devices, and the error that refuses one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KEY = "vla3.placement"
COMPONENTS = ("actor", "rollout", "env")  # learner ranks, policy workers, env workers
MODES = ("collocated", "disaggregated", "hybrid", "auto")
# Components that RLinf's configs place and that have no process of their own here: read, checked, and not placed.
ELSEWHERE = {
    "reward": "the simulator gives the reward",
    "reward_server": "the simulator gives the reward",
    "inference": "the learner computes log-probabilities",
    "actor_inference": "the learner computes log-probabilities",
    "critic": "the value head is part of the policy",
    "critic_inference": "the value head is part of the policy",
    "rollout_judge": "the simulator judges",
    "agent": "the env worker is the agent",
}
Device = tuple[int, int]  # node, accelerator of that node


class SpecError(ValueError):
    """A placement that is malformed or impossible; ``faults`` has a line for each reason: key, value, arithmetic."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


@dataclass(frozen=True)
class Cluster:
    """``gpus``: accelerators of each node, by node rank; 0 is a node of CPUs alone."""

    gpus: tuple[int, ...]

    @property
    def devices(self) -> list[Device]:
        return [(node, device) for node, count in enumerate(self.gpus) for device in range(count)]

    def __str__(self) -> str:
        nodes = f"{len(self.gpus)} node{'s' * (len(self.gpus) != 1)}"
        return f"{nodes} with {' + '.join(map(str, self.gpus))} GPU{'s' * (sum(self.gpus) != 1)}"


@dataclass(frozen=True)
class Process:
    """``rank`` within its component; ``devices`` of its node, none for a process that needs no accelerator."""

    rank: int
    node: int
    devices: tuple[int, ...]

    @property
    def places(self) -> list[Device]:
        return [(self.node, device) for device in self.devices]


@dataclass(frozen=True)
class Placement:
    cluster: Cluster
    mode: str  # collocated | disaggregated | hybrid
    components: Mapping[str, tuple[Process, ...]]  # of COMPONENTS, processes in the order of their ranks
    notes: tuple[str, ...] = ()

    def devices(self, *names: str) -> list[Device]:
        """Those that the named components (all where none is named) use, each once, in order."""
        chosen = names or tuple(self.components)
        return sorted({place for name in chosen for p in self.components.get(name, ()) for place in p.places})

    def cluster_devices(self) -> list[Device]:
        """Those in use, and those before one in use on its node, which are held while it is reserved."""
        last = dict(self.devices())
        return [(node, device) for node in sorted(last) for device in range(last[node] + 1)]

    def on(self, device: Device) -> list[tuple[str, int]]:
        """(component, rank) of every process on a device."""
        return [(name, p.rank) for name, group in self.components.items() for p in group if device in p.places]

    def describe(self) -> dict[str, str]:
        """A line for each component, for people."""
        return {name: describe(group) for name, group in self.components.items()}


def near(name: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def span(numbers: Iterable[int]) -> str:
    """``0-3,5``"""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


def devices_text(places: Iterable[Device]) -> str:
    by_node: dict[int, list[int]] = {}
    for node, device in places:
        by_node.setdefault(node, []).append(device)
    return "; ".join(f"node {node} GPU {span(own)}" for node, own in sorted(by_node.items()))


def describe(group: tuple[Process, ...]) -> str:
    places = devices_text(place for p in group for place in p.places)
    bare = span(p.node for p in group if not p.devices)
    where = "; ".join(filter(None, [places, f"node {bare} without a GPU" if bare else ""]))
    return f"{len(group)} process{'es' * (len(group) != 1)} on {where}"
