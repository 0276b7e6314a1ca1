"""Groups in flight across a restart: finished episodes are kept with their samples, the others are played again.

A checkpoint's admission state always counts every admitted, untrained group under ``replay``, which is enough to play
it again from the start. What of these has finished stands under ``groups`` too, with its samples in
``in_flight/group_N.safetensors`` (rows in the order of the trajectories' keys): it is trained on as it is, under the
versions that made it, so the staleness bound means the same after the restart as before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from vla3_plugin.contract import Episode
from vla3_plugin.rollout.plan import EpisodePlan
from vla3_plugin.trainer.admission import Admission, Group

FOLDER = "in_flight"
State = dict[str, Any]


def state_of(admission: Admission) -> State:
    """What a checkpoint keeps of the groups that are under way, as JSON."""
    # a group that lost an episode to quarantine will be dropped whole: there is nothing to keep of it
    groups = [g for g in (*admission.ready.values(), *admission.started.values()) if g.trajectories]
    kept = [
        {"index": g.index, "admitted_under": g.admitted_under, "trajectories": list(g.trajectories)}
        for g in sorted(groups, key=lambda g: g.index)
        if not g.quarantined
    ]
    untold = list(admission.dropped_groups)  # since the ledger's last line: the next one will have them
    return {**admission.state(), "groups": kept, "dropped": dict(admission.dropped), "dropped_groups": untold}


def play_again(state: State) -> State:
    """``state`` without its finished episodes: their groups start from the beginning, as all in ``replay`` do."""
    return {**state, "groups": []}


def restore(admission: Admission, state: State) -> None:
    """Put the saved groups where they were: ready, or started with some of their episodes finished."""
    admission.dropped, admission.dropped_groups = dict(state.get("dropped", {})), list(state.get("dropped_groups", ()))
    for saved in state.get("groups", []):
        # their samples lie with who restores them, not where they were made
        found = [{name: value for name, value in t.items() if name != "node"} for t in saved["trajectories"]]
        group = Group(saved["index"], saved["admitted_under"], found)
        admission.replay.remove(group.index)
        whole = len(group.trajectories) == admission.group_size
        (admission.ready if whole else admission.started)[group.index] = group
        admission.admitted += 1


def unfinished(admission: Admission, plan: EpisodePlan) -> list[Episode]:
    """The episodes that started groups still wait for."""
    episodes = []
    for group in admission.started.values():
        finished = {t["episode"]["episode_id"] for t in group.trajectories}
        everything = plan.episodes(group.index * plan.group_size, plan.group_size)
        episodes += [e for e in everything if e.episode_id not in finished]
    return episodes


def count(state: State) -> int:
    """Finished episodes in ``state``."""
    return sum(len(group["trajectories"]) for group in state.get("groups", []))


def write_samples(directory: Path, state: State, fetch: Callable[[list[str]], dict[str, Tensor]]) -> None:
    """Store the samples of ``state``'s finished episodes; ``fetch`` gets all fields of rows by their keys."""
    for group in state.get("groups", []):
        (directory / FOLDER).mkdir(exist_ok=True)
        rows = {name: tensor.contiguous() for name, tensor in fetch(_keys(group)).items()}
        save_file(rows, directory / FOLDER / _file(group))


def read_samples(directory: Path, state: State, put: Callable[[Sequence[str], dict[str, Tensor]], None]) -> None:
    """Hand the samples of ``state``'s finished episodes to ``put``, a group at a time.

    Raises:
        ValueError: a file does not hold a row for each of its group's samples.
    """
    for group in state.get("groups", []):
        file, keys = directory / FOLDER / _file(group), _keys(group)
        rows = load_file(file)
        if {len(tensor) for tensor in rows.values()} != {len(keys)}:
            raise ValueError(f"{file} does not hold the {len(keys)} samples of group {group['index']}")
        put(keys, rows)


def _file(group: dict[str, Any]) -> str:
    return f"group_{group['index']}.safetensors"


def _keys(group: dict[str, Any]) -> list[str]:
    return [key for trajectory in group["trajectories"] for key in trajectory["keys"]]
