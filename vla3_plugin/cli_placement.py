"""``vla3 profile`` and ``vla3 plan``: how long the parts take here, and which placement that makes best."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def compose_recipe(recipe: str, overrides: list[str]) -> Any:
    """The config of ``python -m verl.trainer.main recipe=RECIPE OVERRIDES``, without starting anything."""
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException

    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=[f"+recipe={recipe}", *overrides])
    except HydraException as error:
        raise ValueError(f"recipe {recipe!r} with {overrides}: {error}") from None
    return config


def profile(args: argparse.Namespace) -> int:
    import torch
    import verl  # noqa: F401  loads the plugin
    from omegaconf import OmegaConf

    from vla3_plugin.envs.registry import make_env
    from vla3_plugin.placement.profile_host import host_costs, host_points, read_run
    from vla3_plugin.placement.profile_measure import measure_env, measure_policy, profile_of
    from vla3_plugin.placement.simulate_model import HostCosts
    from vla3_plugin.policies.registry import load_policy

    config = compose_recipe(args.recipe, args.override)
    algorithm = config.vla3.algorithm
    env, model = config.vla3.env, config.actor_rollout_ref.model
    options: Any = OmegaConf.to_container(env.options, resolve=True)
    settings: Any = OmegaConf.to_container(model.options, resolve=True)
    threads = int(model.get("cpu_threads") or 1)
    of_rollout = int(model.get("rollout_cpu_threads") or threads)
    policy = load_policy(model.path, **settings)
    chunk = _chunk(policy, settings)

    def make(index: int, slots: int) -> Any:
        return make_env(env.name, options, num_slots=slots, python=env.python, name=f"{env.name} {index}")

    gpu = env.name == "maniskill" and torch.cuda.is_available() and options.get("sim_backend") != "cpu"
    slots = args.slots or ([1] if env.name == "libero" else [1, 2, 4])  # LIBERO has one environment a process
    simulator, observation = measure_env(
        env.name, make, args.processes, slots, chunk, args.env_seconds, gpu=gpu, tasks=list(env.tasks or ())
    )
    measured = measure_policy(
        policy, observation, args.batches, args.micro_batches, args.seconds, threads=(of_rollout, threads)
    )
    costs = host_costs([host_points(read_run(run)) for run in args.runs]) if args.runs else HostCosts()
    made = profile_of(
        measured, simulator, host=costs,
        micro_batch=int(config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu),
        group_size=int(algorithm.group_size), epochs=int(algorithm.update_epoch),
        mini_batches=int(algorithm.num_mini_batches), advantage_statistics=str(algorithm.advantage_statistics),
        normalize_advantages=bool(algorithm.normalize_advantages), adv_type=str(algorithm.adv_type),
        note=f"recipe {args.recipe}" + ("" if args.runs else "; host costs not measured (--runs)"),
    )  # fmt: skip
    made.save(args.out)
    print(f"{args.out}")
    print(f"policy {measured.family}: prefix {_line(measured.prefix_ms)}, step {_line(measured.step_ms)} x "
          f"{measured.denoising_steps}, training {_line(measured.train_ms)}; publication {measured.publish_ms:.1f} ms, "
          f"{measured.sample_bytes:,} bytes a sample")  # fmt: skip
    print("largest distance from the lines: "
          + ", ".join(f"{name} {100 * value:.0f}%" for name, value in measured.residual.items()))  # fmt: skip
    for count, slots, mean, middle, longest, used in simulator.points["chunk"]:
        print(f"{env.name}, {count:.0f} processes of {slots:.0f}: chunk step mean {mean:.1f}, median {middle:.1f}, "
              f"longest {longest:.1f} ms, of which {used:.1f} ms processor")  # fmt: skip
    return 0


def _chunk(policy: Any, settings: dict[str, Any]) -> int:
    """Control steps of a chunk."""
    for holder, name in ((policy, "executed"), (getattr(policy, "settings", None), "executed"),
                         (getattr(policy, "settings", None), "chunk"), (policy, "horizon")):  # fmt: skip
        value = getattr(holder, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return int(settings.get("chunk", 8))


def _line(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.2f} + {pair[1]:.3f} ms a row"


def plan(args: argparse.Namespace) -> int:
    from vla3_plugin.placement.plan import format_plans
    from vla3_plugin.placement.plan import plan as search
    from vla3_plugin.placement.profile_file import read_profile

    found = read_profile(args.profile)
    try:
        plans = search(found, args.gpus, args.nodes, args.episodes, args.seconds)
    except (TypeError, ArithmeticError, LookupError) as error:  # a profile's numbers are the user's
        raise ValueError(f"{args.profile}: no plan from its numbers ({type(error).__name__}: {error})") from None
    for name, counts in (("within_gb_s", args.gpus > 1), ("between_gb_s", args.nodes > 1)):
        if counts and not getattr(found.hardware, name):
            print(f"note: hardware.{name} is 0 in {args.profile}, so what is sent there counts as taking no time; "
                  "write it into the file", file=sys.stderr)  # fmt: skip
    if args.json:
        print(json.dumps([p.to_dict() for p in plans[: args.show]], indent=1))
    else:
        where = f"{args.gpus} x {found.hardware.device} in {args.nodes} node(s)"
        print(f"{found.policy.family} on {found.env.name}, {where}" + (f"; {found.note}" if found.note else ""))
        print(format_plans(plans, args.show))
    return 0


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """``command(name, run, help)`` makes a subcommand's parser."""
    measure = command("profile", profile, "measure a recipe's policy and simulator on this hardware, for vla3 plan")
    measure.add_argument("--recipe", required=True)
    measure.add_argument("--out", type=Path, required=True, help="JSON file")
    measure.add_argument("--override", nargs="*", default=[], help="Hydra overrides of the recipe")
    measure.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    measure.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8, 16])
    measure.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    measure.add_argument("--slots", type=int, nargs="+", help="environments of a process; 1 2 4, LIBERO 1")
    measure.add_argument("--seconds", type=float, default=0.5, help="of each point of the policy")
    measure.add_argument("--env-seconds", type=float, default=4.0, help="of each point of the simulator")
    measure.add_argument("--runs", type=Path, nargs="*", default=[], help="directories of emulator runs: host costs")

    best = command("plan", plan, "rank placements and schedules for a profile, before anything is started")
    best.add_argument("--profile", type=Path, required=True)
    best.add_argument("--gpus", type=int, required=True)
    best.add_argument("--nodes", type=int, default=1)
    best.add_argument("--episodes", type=int, help="of a global batch; 8 a GPU by default")
    best.add_argument("--seconds", type=float, default=12.0, help="to simulate at most")
    best.add_argument("--show", type=int, default=10)
    best.add_argument("--json", action="store_true")
