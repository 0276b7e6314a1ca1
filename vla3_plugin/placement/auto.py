"""``vla3.placement.mode: auto``: the plan of ``vla3 plan`` for this run's own batch, chosen at start and said aloud.

It needs a profile of the hardware, and sets what the planner searched: where learner, policy workers and simulators
go, how many environments, which stages, batching and staleness. What it chose is kept in the run directory, and a run
that is resumed there keeps it: another one would not fit its checkpoints.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf, open_dict

from vla3_plugin import config_cross
from vla3_plugin.config_checks import contradictions
from vla3_plugin.placement import resolve
from vla3_plugin.placement.memory import GB, available_memory
from vla3_plugin.placement.plan import Plan, plan, settings_of
from vla3_plugin.placement.profile_file import Profile, read_profile
from vla3_plugin.placement.spec import KEY, Cluster, SpecError
from vla3_plugin.profile import joins_a_cluster

if TYPE_CHECKING:
    from vla3_plugin.config import VLA3Config

CHOICE_FILE = "placement_choice.json"  # in the run directory
SECONDS = 8.0  # of simulation, at start
_OF_THE_RUN = (  # planned for as given
    "data.train_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "vla3.algorithm.num_mini_batches",
)  # fmt: skip
_TRIED = 100  # plans, best first, until one passes the config's checks


@dataclass(frozen=True)
class Choice:
    """``settings``: what was set, by key; ``why``: a line for the user."""

    settings: dict[str, Any]
    why: str

    def summary(self) -> dict[str, Any]:
        """For the preflight."""
        return {"chosen": self.why, **self.settings}

    def keep(self, run_dir: Path) -> None:
        """For the run that is resumed there. Called by who holds the directory's lock."""
        beside = run_dir / f"{CHOICE_FILE}.tmp"
        beside.write_text(json.dumps({"settings": self.settings, "why": self.why}, indent=1) + "\n")
        beside.replace(run_dir / CHOICE_FILE)


def settle(config: Any, vla3: VLA3Config) -> tuple[Choice | None, list[str]]:
    """Choose and set, where the planner is asked to: (what was set, faults), (None, []) where it is not."""
    if not resolve.chooses(vla3.placement):
        if vla3.placement.profile is None:
            return None, []
        if vla3.placement.mode != "auto":
            return None, [f"{KEY}.profile says nothing without {KEY}.mode=auto"]
        nothing = {"component_placement": "{}", "ratio": "null"}
        return None, [
            f"{KEY}.profile says nothing beside {KEY}.{name}: {value!r}, which says where things go; set "
            f"{KEY}.{name}={none} for the planner to choose"
            for name, none in nothing.items()
            if (value := getattr(vla3.placement, name))
        ]
    try:
        cluster = resolve.cluster_of(config, vla3.placement)
    except SpecError as error:
        return None, error.faults
    choice, faults = choose(config, vla3, cluster)
    if choice is not None:
        apply(config, vla3, choice)
    return choice, faults


def choose(config: Any, vla3: VLA3Config, cluster: Cluster) -> tuple[Choice | None, list[str]]:
    """(what to run, faults). Neither ``config`` nor ``vla3`` is changed."""
    if vla3.placement.profile is None:
        return None, [
            f"{KEY}.profile: null, mode 'auto' chooses by a profile of this hardware; make one with `vla3 profile "
            f"--recipe RECIPE --out profile.json` and set {KEY}.profile=profile.json, or name a ratio or a "
            "component_placement"
        ]
    try:
        if (kept := _kept(config, vla3)) is not None:
            return kept, []
        profile = _of_this_run(read_profile(vla3.placement.profile), config, vla3)
        plans = plan(profile, *_size(cluster), episodes=int(config.data.train_batch_size), seconds=SECONDS)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:  # a profile's numbers are the user's
        kind = "" if isinstance(error, ValueError) else f"{vla3.placement.profile}: {type(error).__name__}: "
        return None, [f"{KEY}.mode: 'auto': {kind}{error}"]
    first: list[str] = []
    for rank, found in enumerate(plans[:_TRIED]):
        settings = {key: value for key, value in settings_of(found.candidate).items() if key not in _OF_THE_RUN}
        settings["vla3.placement.node_gpus"] = list(cluster.gpus)  # with those that have none
        if not (faults := _faults(config, vla3, settings)):
            return Choice(settings, _why(found, rank, len(plans), cluster)), []
        first = first or faults
    return None, [f"{KEY}.mode: 'auto': none of the {min(_TRIED, len(plans))} best plans can run here; the first: {f}"
                  for f in first]  # fmt: skip


def apply(config: Any, vla3: VLA3Config, choice: Choice) -> None:
    """Set what was chosen, in verl's config and in ``vla3``.

    Raises:
        AttributeError: a key that ``vla3`` does not have.
    """
    for key, value in choice.settings.items():
        if not key.startswith("vla3."):
            with open_dict(config):
                OmegaConf.update(config, key, value, force_add=True)
            continue
        *path, last = key.split(".")[1:]
        node: Any = vla3
        for name in path:
            node = getattr(node, name)
        getattr(node, last)  # a damaged file must not add one
        setattr(node, last, value)


def _kept(config: Any, vla3: VLA3Config) -> Choice | None:
    """
    Raises:
        ValueError: what was kept is damaged; the message names the file.
    """
    file = Path(vla3.run_dir) / CHOICE_FILE
    if config.trainer.resume_mode == "disable" or not file.is_file():
        return None
    try:
        data = json.loads(file.read_text())
        settings, why = dict(data["settings"]), str(data["why"])
        apply(copy.deepcopy(config), copy.deepcopy(vla3), Choice(settings, why))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{file} is not what was kept ({type(error).__name__}: {error}); remove it to choose anew, which may not "
            "fit the checkpoints there, or start with trainer.resume_mode=disable"
        ) from None
    return Choice(settings, f"as chosen when this run began ({file.name}): {why}")


def _of_this_run(profile: Profile, config: Any, vla3: VLA3Config) -> Profile:
    """The profile's times with the run's own group size, epochs, mini-batches and micro-batch.

    Raises:
        ValueError: it is of another simulator.
    """
    if profile.env.name != vla3.env.name:
        raise ValueError(
            f"{KEY}.profile: {vla3.placement.profile} is of the simulator {profile.env.name!r}, this run's is "
            f"{vla3.env.name!r}; make one of this recipe"
        )
    hardware = profile.hardware
    if not joins_a_cluster(config.ray_kwargs.ray_init.get("address")):  # what is free here, now
        hardware = replace(hardware, host_memory_gb=min(hardware.host_memory_gb, available_memory().bytes / GB))
    return profile.but(
        hardware=hardware,
        group_size=vla3.algorithm.group_size,
        epochs=vla3.algorithm.update_epoch,
        mini_batches=vla3.algorithm.num_mini_batches,
        advantage_statistics=vla3.algorithm.advantage_statistics,
        normalize_advantages=vla3.algorithm.normalize_advantages,
        adv_type=vla3.algorithm.adv_type,
        micro_batch=int(config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu),
    )


def _size(cluster: Cluster) -> tuple[int, int]:
    """(devices, nodes) of a cluster, whose nodes without any carry simulators at most.

    Raises:
        ValueError: its nodes differ in how many they have.
    """
    counts = {count for count in cluster.gpus if count}
    if len(counts) != 1:
        raise ValueError(f"{KEY}.node_gpus: {list(cluster.gpus)}, the planner expects the same number in every node")
    return sum(cluster.gpus), sum(count > 0 for count in cluster.gpus)


def _faults(config: Any, vla3: VLA3Config, settings: dict[str, Any]) -> list[str]:
    """What the config's own checks would say to these settings."""
    config, vla3 = copy.deepcopy(config), copy.deepcopy(vla3)
    apply(config, vla3, Choice(settings, ""))
    placement, faults = resolve.place(config, vla3)
    if placement is None:
        return faults
    resolve.derive(config, vla3, placement)
    from vla3_plugin.trainer.preflight import memory_faults  # which asks the placement's memory

    return contradictions(vla3) or config_cross.faults(config, vla3) or memory_faults(config, vla3)


def _why(found: Plan, rank: int, count: int, cluster: Cluster) -> str:
    layout = found.candidate.work.layout
    best = "the best" if rank == 0 else f"number {rank + 1}, the best that this config allows,"
    return (
        f"{found.candidate.mode}, {layout.replicas} policy workers and {layout.ranks} learner ranks on {cluster}: "
        f"{best} of {count} plans, {found.samples_per_s:.1f} samples/s predicted, limited by {found.limiting}"
    )
