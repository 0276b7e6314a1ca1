"""``vla3 demos | sft | eval | parity | policy | report | check-env | doctor``: what is useful outside a run."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vla3_plugin.cli_placement import add_commands as add_placement_commands
from vla3_plugin.cli_policy import add_commands as add_policy_commands


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """``key=value`` pairs; values are JSON where they parse as it, else text."""
    options = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise SystemExit(f"vla3: option {pair!r}: expected key=value")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def _demos(args: argparse.Namespace) -> int:
    from vla3_plugin.imitation.demos import DemoConfig, generate

    tasks = tuple(args.tasks) if args.tasks is not None else None
    config = DemoConfig(args.episodes, args.chunk, args.stride, args.noise, seed=args.seed, tasks=tasks,
                        held_out_init_states=args.held_out_init_states)  # fmt: skip
    card = generate(args.env, parse_options(args.option), args.out, config, args.expert, args.workers, args.python)
    print(json.dumps({k: v for k, v in card.items() if k != "spec"}, indent=1))
    return 0


def _sft(args: argparse.Namespace) -> int:
    import verl  # noqa: F401  loads the plugin: platform and engine

    from vla3_plugin.imitation.sft import SFTConfig, train

    names = {f.name for f in fields(SFTConfig)}
    config = SFTConfig(**{k: v for k, v in vars(args).items() if k in names})
    print(json.dumps(train(args.demos, args.out, config), indent=1))
    return 0


def _eval(args: argparse.Namespace) -> int:
    from vla3_plugin.trainer.offline import evaluate_checkpoint

    evaluation = evaluate_checkpoint(
        args.policy, args.env, parse_options(args.option), parse_options(args.policy_option), tasks=args.tasks,
        episodes=args.episodes, held_out=args.held_out_init_states, mode=args.mode, processes=args.processes,
        slots=args.slots, python=args.python, seed=args.seed, videos=args.videos, out=args.out,
    )  # fmt: skip
    print(json.dumps(evaluation.to_dict(), indent=1) if args.json else evaluation.table.format())
    return 0


def _report(args: argparse.Namespace) -> int:
    from vla3_plugin.telemetry.report import write_report

    print(write_report(args.run_dir))
    return 0


def _check_env(args: argparse.Namespace) -> int:
    from vla3_plugin.envs.check import check_env
    from vla3_plugin.envs.registry import make_env

    env = make_env(args.env, parse_options(args.option), python=args.python)
    try:
        check_env(env)
    finally:
        env.close()
    print(f"{args.env}: follows the contract")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from vla3_plugin.doctor import examine, format_findings

    findings = examine(args.quick, args.python, args.recipe)
    print(json.dumps(findings, indent=1) if args.json else format_findings(findings))
    return 0 if findings["ok"] else 1


def _env_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", required=True, help="maniskill, libero, a third party's name or module:Class")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the environment")
    parser.add_argument("--python", help="another interpreter for the simulator")
    parser.add_argument("--tasks", type=int, nargs="+", help="task ids; all by default")
    parser.add_argument("--held-out-init-states", type=int, default=0, help="initial states kept for evaluation")
    parser.add_argument("--seed", type=int, default=0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vla3", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int] | None, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    demos = command("demos", _demos, "make demonstrations with a scripted expert")
    _env_arguments(demos)
    demos.add_argument("--out", type=Path, required=True)
    demos.add_argument("--episodes", type=int, default=200)
    demos.add_argument("--chunk", type=int, default=8)
    demos.add_argument("--stride", type=int)
    demos.add_argument("--noise", type=float, default=0.0, help="of the executed actions (DART)")
    demos.add_argument("--workers", type=int, default=1)
    demos.add_argument("--expert", help="module:Class; the built-in one by default")

    sft = command("sft", _sft, "clone demonstrations into a policy, on the engine that RL uses")
    sft.add_argument("--demos", type=Path, nargs="+", required=True)
    sft.add_argument("--out", type=Path, required=True)
    for name, kind, default in (
        ("preset", str, "pi0-nano"), ("steps", int, 2000), ("batch-size", int, 64), ("lr", float, 1e-3),
        ("shift", int, 3), ("seed", int, 0), ("threads", int, 2), ("minutes", float, None),
    ):  # fmt: skip
        sft.add_argument(f"--{name}", type=kind, default=default)
    sft.add_argument("--store-dtype", choices=["float32", "float16"], default="float32")

    evaluate = command("eval", _eval, "evaluate a policy on assigned episodes, with 95% intervals")
    _env_arguments(evaluate)
    evaluate.add_argument("--policy", required=True, help="checkpoint directory, embedded name or hub id")
    evaluate.add_argument("--policy-option", action="append", default=[], metavar="KEY=VALUE")
    evaluate.add_argument("--episodes", type=int, default=20, help="per task")
    evaluate.add_argument("--mode", choices=["ode", "sde"], default="ode", help="noise-free or noisy policy")
    evaluate.add_argument("--processes", type=int, default=2)
    evaluate.add_argument("--slots", type=int, default=1, help="environments of one process")
    evaluate.add_argument("--videos", type=int, default=0)
    evaluate.add_argument("--out", type=Path, help="directory for videos and the record")
    evaluate.add_argument("--json", action="store_true")

    report = command("report", _report, "write report.html of a run")
    report.add_argument("run_dir", type=Path)

    check = command("check-env", _check_env, "check that an environment follows the contract")
    _env_arguments(check)

    doctor = command("doctor", _doctor, "what is installed, what is patched, what is missing")
    doctor.add_argument("--json", action="store_true")
    doctor.add_argument("--quick", action="store_true", help="leave out the recipe's fit and the simulators' smoke")
    doctor.add_argument("--python", help="another interpreter for the simulators, as vla3.env.python")
    doctor.add_argument("--recipe", default="vla3_quickstart", help="whose placement must fit here")

    add_policy_commands(command)
    add_placement_commands(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"vla3: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
