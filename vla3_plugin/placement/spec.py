"""Which process runs on which device: RLinf's ``component_placement`` syntax, ratios and modes, resolved; pure code.

A component's placement is a list of segments ``resources[:processes]``, such as ``0-3:0-7,5``: processes 0 to 7 on
resources 0 to 3, two on each, and process 8 on resource 5. Resources are the accelerators of the cluster, counted node
by node; those of a node group where one is named; or nodes, in a group that has no accelerators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vla3_plugin.placement.spec_syntax import read_groups, read_names, read_processes
from vla3_plugin.placement.spec_types import (
    COMPONENTS,
    ELSEWHERE,
    KEY,
    MODES,
    Cluster,
    Device,
    Placement,
    Process,
    SpecError,
    devices_text,
    near,
)

__all__ = ["COMPONENTS", "Cluster", "Device", "Placement", "Process", "SpecError", "nearest", "resolve"]

_WHAT = {"actor": "learner rank", "rollout": "policy worker", "env": "env worker"}


def resolve(
    cluster: Cluster,
    component_placement: Mapping[Any, Any] | None = None,
    *,
    mode: str | None = None,
    ratio: str | None = None,
    ratio_per_node: bool = False,
    node_groups: Sequence[Any] = (),
    env_workers: int = 1,
    required: Sequence[str] = COMPONENTS,
) -> Placement:
    """One place for every process.

    Args:
        component_placement: by component, or several with commas between them. What it leaves out is placed by ``mode``
            and ``ratio`` on the devices that it leaves free.
        mode: one of ``MODES``, what the result must be; None and ``auto`` take what comes.
        ratio: ``rollout:actor = 3:1``, parts of the free devices in the order named; env goes with rollout if it has
            no part.
        ratio_per_node: divide the devices of each node by the ratio instead of all at once: every node is a cell.
        node_groups: RLinf's ``cluster.node_groups``.
        env_workers: at least as many are placed where ``component_placement`` does not place env; as many on every
            device, and no fewer than there are policy workers.
        required: components without which the run cannot start.

    Raises:
        SpecError: with everything that is wrong.
    """
    if mode is not None and mode not in MODES:
        raise SpecError([f"{KEY}.mode: {mode!r}, expected one of {', '.join(MODES)}, or null{near(mode, MODES)}"])
    groups, notes = read_groups(node_groups, cluster)
    placed: dict[str, tuple[Process, ...]] = {}
    faults: list[str] = []
    for key, value in (component_placement or {}).items():
        where = f"{KEY}.component_placement.{key}"
        try:
            names, processes = read_names(where, key, placed), read_processes(where, value, groups)
        except SpecError as error:
            faults += error.faults
            continue
        placed.update(dict.fromkeys(names, processes))
    if faults:
        raise SpecError(faults)
    notes += [f"{name} is not placed: {ELSEWHERE[name]}" for name in placed if name in ELSEWHERE]
    components = {name: placed[name] for name in COMPONENTS if name in placed}
    components |= _divide(cluster, components, mode, ratio, ratio_per_node, env_workers)
    _check_roles(cluster, components, required)
    found = _mode_of(components)
    placement = Placement(cluster, found, {n: components[n] for n in COMPONENTS if n in components}, tuple(notes))
    if mode not in (None, "auto", found):
        raise SpecError([_wrong_mode(placement, mode)])
    return placement


def nearest(placement: Placement) -> list[int]:
    """The policy worker that each env worker asks: on its own device, else on its node, else any; evenly shared."""
    envs, policies = placement.components["env"], placement.components["rollout"]
    whole, more = divmod(len(envs), len(policies))
    room = {p.rank: whole + (p.rank < more) for p in policies}
    chosen: dict[int, int] = {}
    for close in (
        lambda e, p: bool(set(e.places) & set(p.places)),
        lambda e, p: e.node == p.node,
        lambda e, p: True,
    ):
        for env in envs:
            fits = [p.rank for p in policies if room[p.rank] and close(env, p)]
            if env.rank not in chosen and fits:
                chosen[env.rank] = max(fits, key=lambda rank: (room[rank], -rank))
                room[chosen[env.rank]] -= 1
    return [chosen[env.rank] for env in envs]


# ---------------------------------------------------------------- modes and ratios


def _divide(
    cluster: Cluster,
    placed: Mapping[str, tuple[Process, ...]],
    mode: str | None,
    ratio: str | None,
    per_node: bool,
    env_workers: int,
) -> dict[str, tuple[Process, ...]]:
    """Places for the components that ``component_placement`` left out."""
    parts = _ratio(ratio) if ratio is not None else {}
    if twice := [name for name in parts if name in placed]:
        raise SpecError([f"{KEY}.ratio: {ratio!r}: {twice[0]} is in component_placement too; name it once"])
    left = [name for name in COMPONENTS if name not in placed]
    if not left or (mode in (None, "auto") and not parts):
        return {}
    used = {place for group in placed.values() for p in group for place in p.places}
    free = [device for device in cluster.devices if device not in used]
    if mode == "collocated":  # where the others are
        free = sorted(used) or cluster.devices
    if not parts and mode == "disaggregated" and "actor" in left:
        raise SpecError([f"{KEY}.mode: disaggregated needs {KEY}.ratio, such as rollout:actor = 3:1, or places"])
    if not parts and mode == "hybrid":
        parts = {name: 1 for name in ("env", "rollout") if name in left}
    chosen = {name: free for name in left}
    if mode == "disaggregated" and "rollout" in placed:
        chosen["env"] = sorted({place for p in placed["rollout"] for place in p.places})
    if parts:
        cells = [[d for d in free if d[0] == node] for node in sorted({d[0] for d in free})] if per_node else [free]
        shares: dict[str, list[Device]] = {name: [] for name in parts}
        for cell in cells:
            for name, own in _share(cell, parts, ratio or "env:rollout = 1:1").items():
                shares[name] += own
        chosen |= shares
        if "env" not in parts and "rollout" in parts:
            chosen["env"] = shares["rollout"]
    policies = len(placed["rollout"]) if "rollout" in placed else len(chosen["rollout"])
    result = {}
    for name in left:
        if not chosen[name]:
            raise SpecError([f"{KEY}: {name} gets no device: {cluster}, and component_placement leaves none"])
        each = -(-max(policies, env_workers) // len(chosen[name])) if name == "env" else 1
        places = [device for device in chosen[name] for _ in range(each)]
        result[name] = tuple(Process(rank, node, (device,)) for rank, (node, device) in enumerate(places))
    return result


def _ratio(text: str) -> dict[str, int]:
    where = f"{KEY}.ratio: {text!r}"
    left, equals, right = str(text).partition("=")
    names, numbers = [[part.strip() for part in side.split(":")] for side in (left, right)]
    if not equals or not all(n.isdecimal() and len(n) < 7 for n in numbers):
        raise SpecError([f"{where}, expected names and whole numbers, such as rollout:actor = 3:1"])
    if unknown := [name for name in names if name not in COMPONENTS]:
        raise SpecError(
            [f"{where}: {unknown[0]!r} is not one of {', '.join(COMPONENTS)}{near(unknown[0], COMPONENTS)}"]
        )
    if len(names) != len(numbers) or len(names) < 2:
        raise SpecError([f"{where}: {len(names)} names and {len(numbers)} numbers, expected as many, two at least"])
    if len(set(names)) < len(names):
        raise SpecError([f"{where} names a component twice"])
    if "0" in {n.lstrip("0") or "0" for n in numbers}:
        raise SpecError([f"{where} gives a component no device, expected 1 or more of each"])
    return dict(zip(names, map(int, numbers), strict=True))


def _share(devices: list[Device], parts: Mapping[str, int], ratio: str) -> dict[str, list[Device]]:
    total = sum(parts.values())
    if len(devices) % total or not devices:
        lower, upper = len(devices) // total * total, -(-max(len(devices), 1) // total) * total
        raise SpecError(
            [
                f"{KEY}.ratio: {ratio!r}: {' + '.join(map(str, parts.values()))} = {total} parts do not divide "
                f"{len(devices)} devices; use {f'{lower} or ' * (lower > 0)}{upper}, or another ratio"
            ]
        )
    shares, start = {}, 0
    for name, part in parts.items():
        end = start + part * (len(devices) // total)
        shares[name], start = devices[start:end], end
    return shares


def _mode_of(components: Mapping[str, tuple[Process, ...]]) -> str:
    """Learner apart: disaggregated; everything that has a device on the same ones: collocated; else hybrid."""
    used = {name: {place for p in group for place in p.places} for name, group in components.items()}
    learner = used.get("actor", set())
    others = [places for name, places in used.items() if name != "actor" and places]
    if learner and others and not any(learner & places for places in others):
        return "disaggregated"
    return "collocated" if all(places == learner or not learner for places in others) else "hybrid"


def _wrong_mode(placement: Placement, wanted: str) -> str:
    where = f"{KEY}.mode: {wanted!r}, but the placement is {placement.mode}: "
    places = "; ".join(f"{name} on {text}" for name, text in placement.describe().items())
    shared = [d for d in placement.devices("actor") if d in placement.devices("rollout", "env")]
    why = {
        "collocated": "it wants all roles on the same devices",
        "disaggregated": f"it forbids that the learner shares a device, and {devices_text(shared) or 'none'} is shared",
        "hybrid": "it wants some devices shared, and some not",
    }[wanted]
    return f"{where}{why} ({places}); change one of the two, or set {KEY}.mode=null"


# ---------------------------------------------------------------- what the roles need


def _check_roles(cluster: Cluster, components: Mapping[str, tuple[Process, ...]], required: Sequence[str]) -> None:
    faults = []
    for name in required:
        if name not in components:
            faults.append(f"{KEY}.component_placement: {name} is not placed; add it, such as {name}: 0, or set a ratio")
    for name, group in components.items():
        where = f"{KEY}.component_placement.{name}"
        if name != "env" and (bare := [p for p in group if not p.devices]):
            faults.append(f"{where}: a {_WHAT[name]} needs a GPU, and node {bare[0].node} gives it none ({cluster})")
        if wide := [p for p in group if len(p.devices) > 1]:
            faults.append(
                f"{where}: {_WHAT[name]} {wide[0].rank} would have {len(wide[0].devices)} GPUs, expected at most one; "
                f"give it {sum(len(p.devices) for p in group)} processes"
            )
    ranks = components.get("actor", ())
    crowded = [place for place, count in Counter(place for p in ranks for place in p.places).items() if count > 1]
    if crowded:
        faults.append(
            f"{KEY}.component_placement.actor: two learner ranks on {devices_text(crowded)}, expected one a GPU"
        )
    by_node = Counter(p.node for p in ranks)
    if len(set(by_node.values())) > 1:
        how = " + ".join(f"{count} on node {node}" for node, count in sorted(by_node.items()))
        faults.append(
            f"{KEY}.component_placement.actor: {len(ranks)} learner ranks = {how}: they do not divide evenly over "
            f"{len(by_node)} nodes; every node that trains needs as many"
        )
    envs, policies = len(components.get("env", ())), len(components.get("rollout", ()))
    if "env" in components and envs < policies:
        faults.append(
            f"{KEY}.component_placement.env: {envs} env workers for {policies} policy workers, expected at least as "
            f"many: {policies - envs} would never be asked; write the processes too, such as 0-{envs - 1}:0-"
            f"{-(-policies // envs) * envs - 1}"
        )
    if faults:
        raise SpecError(faults)
