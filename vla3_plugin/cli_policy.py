"""``vla3 parity`` and ``vla3 policy inspect``: checkpoints and ports looked at without a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parity(args: argparse.Namespace) -> int:
    """0: all within tolerance. 1: not all. 2: a directory could not be checked."""
    from vla3_plugin.parity.report import check, format_report

    records: list[dict[str, Any]] = []
    status, printed = 0, False
    for path in args.directories:
        try:
            report = check(path)
        except (ValueError, OSError) as error:
            status = 2
            records.append({"path": str(path), "ok": False, "error": str(error)})
            print(f"vla3: {error}", file=sys.stderr)
            continue
        status = max(status, 0 if report.ok else 1)
        records.append(report.to_dict())
        if not args.json:
            print(*([""] if printed else []), format_report(report), sep="\n")
            printed = True
    if args.json:
        print(json.dumps({"ok": status == 0, "directories": records}, indent=1))
    return status


def inspect(args: argparse.Namespace) -> int:
    """0: a run can start from it. 1: not as it is. 2: there is nothing to inspect."""
    from vla3_plugin.cli import parse_options
    from vla3_plugin.policies.inspect import inspect_policy
    from vla3_plugin.policies.inspect_text import format_inspection

    found = inspect_policy(args.checkpoint, gpus=args.gpus, **parse_options(args.policy_option))
    print(json.dumps(found, indent=1, default=str) if args.json else format_inspection(found))
    return 1 if found["problems"] else 0


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """``command(name, run, help)`` makes a subcommand's parser; ``run`` None: its own subcommands say what to do."""
    golden = command("parity", parity, "compare our loaders and policies with tensors of published implementations")
    golden.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="golden directory")
    golden.add_argument("--json", action="store_true")

    policy = command("policy", None, "look at checkpoints and presets")
    looks = policy.add_subparsers(required=True, metavar="COMMAND")
    text = "family, sizes, keys, normalisation, what is trained, memory; reads headers alone"
    look = looks.add_parser("inspect", help=text, description=text)
    look.set_defaults(run=inspect)
    look.add_argument("checkpoint", help="directory, hub id, preset or embedded name")
    look.add_argument("--policy-option", action="append", default=[], metavar="KEY=VALUE",
                      help="of the policy (freeze_vlm=true, processing=FILE, ...), or lora_rank=N")  # fmt: skip
    look.add_argument("--gpus", type=int, default=1, help="that share the training state")
    look.add_argument("--json", action="store_true")
