"""RLinf's placement syntax: ``resources[:processes]`` lists, over the accelerators or the nodes of a group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla3_plugin.placement.spec_types import COMPONENTS, ELSEWHERE, KEY, Cluster, Process, SpecError, near

_RESERVED = ("cluster", "node")
_GROUP_KEYS = ("label", "node_ranks", "hardware", "env_configs", "ignore_hardware")


@dataclass(frozen=True)
class Group:
    """What a placement's numbers stand for: the ``kind`` of resource, and (node, devices) of each."""

    label: str
    kind: str
    resources: tuple[tuple[int, tuple[int, ...]], ...]


def read_names(where: str, key: Any, placed: Mapping[str, Any]) -> list[str]:
    known = (*COMPONENTS, *ELSEWHERE)
    names = [name.strip() for name in str(key).split(",")]
    faults = []
    for name in names:
        if name not in known:
            hint = near(name, known) or f"; known: {', '.join(known)}"
            faults.append(f"{where}: {name!r} is not a component{hint}")
        elif name in placed or names.count(name) > 1:
            faults.append(f"{where}: {name} is placed twice; name it once")
    if faults:
        raise SpecError(sorted(set(faults)))
    return names


def read_processes(where: str, value: Any, groups: Mapping[str, Group]) -> tuple[Process, ...]:
    text, labels = value, ["cluster"]
    if isinstance(value, Mapping):
        if unknown := [k for k in value if k not in ("node_group", "placement")]:
            raise SpecError([f"{where}.{unknown[0]}: unknown key, expected node_group and placement"])
        if "placement" not in value:
            raise SpecError([f"{where}: {dict(value)}, expected the key placement, such as placement: 0-3"])
        text, given = value["placement"], value.get("node_group", "cluster")
        labels = [s.strip() for s in given.split(",")] if isinstance(given, str) else list(map(str, _listed(given)))
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise SpecError([f"{where}: {text!r}, expected ranks such as 0-3, 0-1:0-7 or all"])
    for label in labels:
        if label not in groups:
            hint = near(label, groups) or f"; known: {', '.join(groups)}"
            raise SpecError([f"{where}.node_group: {label!r} is not a node group{hint}"])
    chosen = [groups[label] for label in labels]
    resources = tuple(resource for group in chosen for resource in group.resources)
    shared = [resource for resource in resources if resource[1]]  # nodes may come several times: robots share them
    if len(set(shared)) < len(shared) or len(set(labels)) < len(labels):
        raise SpecError([f"{where}.node_group: {', '.join(labels)} have resources in common; name each once"])
    kinds = sorted({group.kind for group in chosen})
    return _assign(where, text, resources, " or ".join(kinds))


def _assign(
    where: str, text: int | str, resources: Sequence[tuple[int, tuple[int, ...]]], kind: str
) -> tuple[Process, ...]:
    """Processes of one ``resources[:processes]`` list over ``resources``, which are (node, devices) by rank."""
    found: list[Process] = []
    taken: list[int] = []
    segments = [segment.strip() for segment in str(text).split(",")]
    if not all(segments):
        raise SpecError([f"{where}: {text!r} has an empty part, expected ranks such as 0-3 or 0-1:0-7"])
    for segment in segments:
        parts = [part.strip() for part in segment.split(":")]
        if len(parts) > 2:
            raise SpecError([f"{where}: {segment!r} has {len(parts) - 1} colons, expected resources:processes"])
        ranks = list(range(len(resources))) if parts[0].lower() == "all" else _ranks(where, parts[0])
        if not ranks:
            raise SpecError([f"{where}: {segment!r}, but there is no {kind} to place it on"])
        if ranks[-1] >= len(resources):
            sexagesimal = " (YAML reads an unquoted 1:0 as 60; quote it)" if isinstance(text, int) and text > 59 else ""
            have = f"0 to {len(resources) - 1}" if resources else "there is none"
            raise SpecError([f"{where}: {kind} {ranks[-1]} of {text!r} does not exist: {have}{sexagesimal}"])
        if taken and ranks[0] <= taken[-1]:
            why = "named twice" if set(ranks) & set(taken) else "out of order"
            raise SpecError([f"{where}: {text!r}: {kind} {ranks[0]} is {why}; name each once, in ascending order"])
        taken += ranks
        if len(parts) == 2 and parts[1].lower() == "all":
            raise SpecError([f"{where}: {segment!r}: processes cannot be 'all', expected a range such as 0-7"])
        numbers = _ranks(where, parts[1]) if len(parts) == 2 else list(range(len(found), len(found) + len(ranks)))
        if numbers[0] != len(found):
            why = f"after {len(found) - 1} comes {len(found)}" if found else "they start at 0"
            raise SpecError([f"{where}: {text!r}: process {numbers[0]} leaves a gap or comes twice: {why}"])
        if len(numbers) % len(ranks) and len(ranks) % len(numbers):
            raise SpecError(
                [
                    f"{where}: {segment!r}: {len(numbers)} processes on {len(ranks)} {kind}s: neither number divides "
                    f"the other ({len(numbers)} / {len(ranks)} = {len(numbers) / len(ranks):.3g})"
                ]
            )
        found += _spread(where, segment, numbers, [resources[rank] for rank in ranks])
    return tuple(found)


def _spread(
    where: str, segment: str, numbers: list[int], resources: list[tuple[int, tuple[int, ...]]]
) -> list[Process]:
    if len(numbers) >= len(resources):
        each = len(numbers) // len(resources)
        return [Process(number, *resources[i // each]) for i, number in enumerate(numbers)]
    each, found = len(resources) // len(numbers), []
    for i, number in enumerate(numbers):
        own = resources[i * each : (i + 1) * each]
        nodes = sorted({node for node, _ in own})
        if len(nodes) > 1:
            raise SpecError([f"{where}: {segment!r}: process {number} would span nodes {nodes}, expected one node"])
        found.append(Process(number, nodes[0], tuple(d for _, devices in own for d in devices)))
    return found


def _ranks(where: str, text: str) -> list[int]:
    match = re.fullmatch(r"(\d{1,7})(?:\s*-\s*(\d{1,7}))?", text)
    if match is None:
        raise SpecError([f"{where}: {text!r}, expected a rank or a range, such as 3 or 0-7, or all"])
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise SpecError([f"{where}: {text!r} runs backwards; write {last}-{first}"])
    return list(range(first, last + 1))


# ---------------------------------------------------------------- node groups


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def read_groups(node_groups: Sequence[Any], cluster: Cluster) -> tuple[dict[str, Group], list[str]]:
    nodes = tuple((node, ()) for node in range(len(cluster.gpus)))
    groups = {"cluster": _accelerators("cluster", range(len(cluster.gpus)), cluster)}
    groups["node"] = Group("node", "node", nodes)
    notes, faults = [], []
    for i, entry in enumerate(node_groups):
        where = f"{KEY}.node_groups.{i}"
        if not isinstance(entry, Mapping) or "label" not in entry or "node_ranks" not in entry:
            faults.append(f"{where}: {entry!r}, expected a mapping with the keys label and node_ranks")
            continue
        label = str(entry["label"])
        if unknown := [key for key in entry if key not in _GROUP_KEYS]:
            faults.append(f"{where}.{unknown[0]}: unknown key{near(unknown[0], _GROUP_KEYS)}")
        elif label in _RESERVED:
            faults.append(f"{where}.label: {label!r} is reserved; choose another")
        elif label in groups:
            faults.append(f"{where}.label: {label!r} names two groups; choose another for one of them")
        elif entry.get("hardware") is not None and entry.get("ignore_hardware"):
            faults.append(f"{where}.ignore_hardware: true with hardware; remove one of them")
        else:
            try:
                groups[label] = _group(where, label, entry, cluster)
            except SpecError as error:
                faults += error.faults
            if entry.get("env_configs"):
                notes.append(f"{where}.env_configs is not applied: interpreter and variables are Ray's to set")
    if faults:
        raise SpecError(faults)
    return groups, notes


def _group(where: str, label: str, entry: Mapping[str, Any], cluster: Cluster) -> Group:
    text, last = str(entry["node_ranks"]), len(cluster.gpus) - 1
    parts = [part.strip() for part in text.split(",")]
    every = text.strip().lower() == "all"
    ranks = list(range(last + 1)) if every else [r for part in parts for r in _ranks(f"{where}.node_ranks", part)]
    if beyond := [rank for rank in ranks if rank > last]:
        raise SpecError([f"{where}.node_ranks: node {beyond[0]} of {text!r} does not exist: 0 to {last}"])
    if entry.get("hardware") is not None:
        hardware = entry["hardware"]
        if not isinstance(hardware, Mapping) or not isinstance(hardware.get("type"), str):
            raise SpecError([f"{where}.hardware: {hardware!r}, expected a mapping with the keys type and configs"])
        own: list[Any] = [
            c.get("node_rank") if isinstance(c, Mapping) else c for c in _listed(hardware.get("configs") or [])
        ]
        if strange := [node for node in own if node not in ranks]:
            raise SpecError([f"{where}.hardware.configs: node_rank {strange[0]!r} is not among node_ranks {text}"])
        return Group(label, hardware["type"], tuple((node, ()) for node in own))
    if entry.get("ignore_hardware"):
        return Group(label, "node", tuple((node, ()) for node in ranks))
    return _accelerators(label, ranks, cluster)


def _accelerators(label: str, ranks: Iterable[int], cluster: Cluster) -> Group:
    """The group's accelerators; its nodes, where none of them has any."""
    nodes = list(ranks)
    found = tuple((node, (device,)) for node in nodes for device in range(cluster.gpus[node]))
    return Group(label, "GPU", found) if found else Group(label, "node", tuple((node, ()) for node in nodes))
