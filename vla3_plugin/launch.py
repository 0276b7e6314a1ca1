"""What ``python -m verl.trainer.main recipe=NAME …`` runs, and what every entry does before Ray starts.

``main`` only puts the ``+`` that Hydra wants before ``recipe=`` and hands over to verl's own ``main_ppo``. Both entries
then meet in ``before_start``: validate, derive, check the fit, say what will run.
"""

import contextlib
import difflib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from vla3_plugin.config import ConfigError, VLA3Config, parse, unknown_key
from vla3_plugin.profile import joins_a_cluster
from vla3_plugin.resources import recipe_names
from vla3_plugin.telemetry import clock

if TYPE_CHECKING:
    from vla3_plugin.placement.auto import Choice

TENSORBOARD = "TENSORBOARD_DIR"  # where verl's logger writes; without it, where the process happens to run


def _fail(lines: list[str]) -> None:
    print("vla3-plugin: this run cannot start:\n  " + "\n  ".join(lines), file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    arguments = ["+" + a if a.startswith("recipe=") else a for a in sys.argv[1:]]
    chosen = [a.split("=", 1)[1] for a in arguments if a.startswith("+recipe=")]
    known = recipe_names()
    for name in chosen:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            _fail([f"recipe: {name!r} is not a recipe{hint} The known ones are: {', '.join(known)}"])
    if not chosen and not any(a in ("--help", "-h", "--hydra-help", "--version") for a in arguments):
        _fail([f"no recipe was given; use recipe=NAME with one of: {', '.join(known)}"])
    from vla3_plugin.security import exposed_in_arguments

    if faults := exposed_in_arguments(arguments):
        _fail(faults)
    keys = [a.split("=", 1)[0].lstrip("+~") for a in arguments if "=" in a and not a.startswith("-")]
    if faults := [fault for key in keys if key.startswith("vla3.") and (fault := unknown_key(key))]:
        _fail(faults)
    from verl.trainer import main_ppo

    _validate_before_asking(main_ppo)
    sys.argv[1:] = arguments
    main_ppo.main()


def _validate_before_asking(main_ppo: Any) -> None:
    """verl asks two questions of a config before it validates it; what they do not understand, validation refuses."""
    for name in ("need_reference_policy", "need_critic"):
        original = getattr(main_ppo, name)

        def question(config: DictConfig, original: Any = original) -> bool:
            with contextlib.suppress(AttributeError, OmegaConfBaseException):
                return original(config)
            return False

        setattr(main_ppo, name, question)


@dataclass
class Ready:
    """What is known of a run before it starts, for its directory: written by who holds the directory's lock."""

    record: dict[str, Any]  # for the report; a Ray worker knows neither the summary nor the command line
    choice: "Choice | None"  # the planner's, if it was asked

    def keep(self, run_dir: Path) -> None:
        (run_dir / "preflight.json").write_text(json.dumps(self.record, indent=1))
        if self.choice is not None:
            self.choice.keep(run_dir)


def before_start(config: DictConfig) -> Ready:
    """Called by both entries between composing and starting; leaves on the first set of faults, with all of them.

    First each value by itself, then what must agree, then what the machine has. The run directory may be in use by
    another run: nothing in it is changed.
    """
    from vla3_plugin import config_cross, config_verl

    if faults := _exposed_secrets(config):
        _fail(faults)
    faults = config_verl.faults(config)
    try:
        vla3 = parse(OmegaConf.select(config, "vla3"))
    except ConfigError as error:
        faults += error.faults
    if faults:
        _fail(faults)
    from vla3_plugin.placement import auto, resolve

    choice, faults = auto.settle(config, vla3)
    if faults:
        _fail(faults)
    placement, unplaced = resolve.place(config, vla3)
    if placement is not None:
        resolve.derive(config, vla3, placement)
    faults = unplaced + config_cross.faults(config, vla3)
    if unplaced:  # nothing that follows from it can be said
        _fail(faults)
    _derive(config, vla3)
    faults += _stray_paths(config)
    from vla3_plugin.telemetry.console import command_line, format_preflight
    from vla3_plugin.telemetry.jsonl import plain
    from vla3_plugin.trainer.preflight import preflight

    summary, found = preflight(config, vla3)
    faults += found
    if faults:
        _fail(faults)
    if placement is not None:
        summary["placement"] = resolve.summary(placement) | (choice.summary() if choice is not None else {})
    print(format_preflight(summary))
    return Ready(plain({**summary, "command": command_line()}), choice)


def _exposed_secrets(config: DictConfig) -> list[str]:
    """Asked first: other faults quote the values that they refuse."""
    from vla3_plugin.security import exposed_secrets

    try:
        plain: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:  # refused later, with a message of its own
        plain = OmegaConf.to_container(config, resolve=False)
    exposed = exposed_secrets(plain)
    if exposed and HydraConfig.initialized():  # has written the config, secret and all, beside its log already
        hydra = HydraConfig.get()
        shutil.rmtree(Path(hydra.runtime.output_dir, hydra.output_subdir or ".hydra"), ignore_errors=True)
    return exposed


def _stray_paths(config: DictConfig) -> list[str]:
    from vla3_plugin.security import stray_paths

    plain: Any = OmegaConf.to_container(config, resolve=True)
    return stray_paths(plain, config.vla3.run_dir)


def _derive(config: DictConfig, vla3: VLA3Config) -> None:
    """What follows from other keys, so that nobody has to say it twice."""
    from vla3_plugin.placement.fit import demand

    with open_dict(config):
        config.vla3 = OmegaConf.structured(vla3)
        config.vla3.run_dir = os.fspath(Path(vla3.run_dir).absolute())
        config.trainer.default_local_dir = os.fspath(Path(config.trainer.default_local_dir).absolute())
        config.actor_rollout_ref.actor.use_kl_loss = vla3.algorithm.kl_beta > 0
        config.actor_rollout_ref.rollout.n = 1  # groups are the episode plan's; verl must not multiply by them again
        ray_init = config.ray_kwargs.ray_init
        if not joins_a_cluster(ray_init.get("address")):
            needed = demand(config)
            ray_init.num_cpus = max(needed.cpus, ray_init.get("num_cpus") or os.cpu_count() or 1)
            if config.trainer.device == "cpu":
                ray_init.num_gpus = needed.gpus
            ray_init.include_dashboard = False
            ray_init.address = "local"  # or Ray would join whatever cluster it finds on this machine
    OmegaConf.resolve(config)  # the resolvers of profile.py exist in this process alone
    os.environ.setdefault(TENSORBOARD, os.path.join(config.vla3.run_dir, "tensorboard"))


def prepare_cluster(config: DictConfig) -> None:
    """What a Ray of our own needs to know before it starts, and the workers of one that is joined from this process."""
    ray_init = config.ray_kwargs.ray_init
    if joins_a_cluster(ray_init.get("address")):  # they do not inherit this environment
        for name in (clock.ANCHOR, TENSORBOARD):
            if name in os.environ:
                OmegaConf.update(ray_init, f"runtime_env.env_vars.{name}", os.environ[name], force_add=True)
        return
    os.environ.setdefault("RAY_worker_niceness", "0")  # ray's 15 lets any other job starve the trainer
    # ray's record of every task, for a dashboard that is off: each request is a task, and it grew by 0.25 MB a second
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    from vla3_plugin.security import secure_local_cluster

    secure_local_cluster()


if __name__ == "__main__":
    main()
