# ruff: noqa: E501  tables
"""Predicted scaling from 8 to 1,024 GPUs, and what training takes on paper from 3 B to 1 T parameters.

    python benchmarks/scaling.py > benchmarks/scaling.md
    python benchmarks/scaling.py --profiles benchmarks/profiles   # the assumed profiles, for vla3 plan

Nothing here was measured on such a cluster. Every assumption stands in the table that the script prints; the planner
and the simulation are those of ``vla3 plan``.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from vla3_plugin.envs.latency_draw import Duration
from vla3_plugin.placement.plan import Plan, format_plans, plan
from vla3_plugin.placement.plan_costs import (
    GB,
    Link,
    Sharding,
    flat_reduce_s,
    gradient_bytes_across,
    publish_s,
    reduce_s,
    replica_bytes,
    state_bytes,
    weight_bytes_across,
)
from vla3_plugin.placement.profile_file import EnvProfile, Hardware, PolicyProfile, Profile
from vla3_plugin.placement.simulate_model import HostCosts

PER_NODE = 8
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
NODE = Hardware("H100 SXM 80 GB (assumed)", 80.0, 112, 2000.0, within_gb_s=450.0, between_gb_s=50.0)
TFLOPS = 0.4 * 989  # of dense bf16, sustained


def forward_ms(parameters: float, tokens: int) -> float:
    """2 FLOPs a parameter and token."""
    return 2 * parameters * tokens / (TFLOPS * 1e12) * 1e3


HOST = HostCosts(
    request_ms=6.2, request_ms_per_row=0.08, batch_ms=1.2, deliver_ms=10.0, assign_ms=2.7, prepare_ms=12.8,
    prepare_ms_per_sample=0.46, update_ms_per_sample=0.72, micro_ms=17.8, fetch_ms=36.7, publish_ms=75.5,
    snapshot_ms=2.1, step_ms=31.8,
)  # fmt: skip
SHARED_DRIVER = replace(HOST, prepare_ms_per_sample=0.0, update_ms_per_sample=0.0)
PI05_PREFIX = forward_ms(2.4e9, 2 * 256 + 200)
OFT_PREFIX = forward_ms(7.0e9, 256 + 40 + 56)
POLICIES = {
    "π0.5": PolicyProfile(
        "pi05", int(3.6e9), int(0.43e9), 4, (8.0, round(PI05_PREFIX, 2)), (2.0, 0.1), (20.0, round(1.3 * PI05_PREFIX, 2)),
        1 / 1.3, 50.0, 2 * 224 * 224 * 3 + 20_000, "bfloat16", memory_gb=12.0, activation_gb=0.4,
    ),
    "OpenVLA-OFT": PolicyProfile(
        "openvla_oft", int(7.5e9), int(0.11e9), 1, (8.0, round(OFT_PREFIX, 2)), (0.0, 0.0),
        (20.0, round(3 * OFT_PREFIX, 2)), 1 / 3, 50.0, 224 * 224 * 3 + 20_000, "bfloat16", memory_gb=18.0,
        activation_gb=0.8,
    ),
}  # fmt: skip


def lognormal(median: float, sigma: float) -> tuple[float, ...]:
    draw = Duration(median, sigma)
    return tuple(round(draw.quantile((i + 0.5) / 64), 2) for i in range(64))


ENVS = {
    "LIBERO": EnvProfile("libero", lognormal(190.0, 0.3), 190.0, 1000.0, 190.0, 30.0, 2.0, gpu=False),
    "ManiSkill": EnvProfile("maniskill", lognormal(120.0, 0.05), 1.0, 20.0, 0.0, 10.0, 5.0, 0.03, gpu=True),
}
ASSUMPTIONS = f"""\
| what | value | from |
|---|---|---|
| GPU | 80 GB, 989 TFLOP/s bf16 dense of which 40% are sustained | NVIDIA's H100 SXM data sheet; the share is an assumption |
| links | 450 GB/s inside a node, 50 GB/s between nodes, per GPU, one direction; 10 µs a hop | NVLink 4 (900 GB/s both ways), 400 Gb/s InfiniBand |
| node | 8 GPUs, 112 cores, 2 TB | DGX H100 |
| π0.5 | 3.6 B parameters, 0.43 B trained (action expert and heads), 2 cameras and 200 text tokens, 4 denoising steps of 2 ms + 0.1 ms a row, prefix 8 ms + {PI05_PREFIX:.1f} ms a row | preset `pi05`; 2 FLOPs a parameter and token; step and prefix bases are assumptions |
| OpenVLA-OFT | 7.5 B parameters, LoRA (0.11 B), one camera, 352 tokens, 8 ms + {OFT_PREFIX:.1f} ms a row, training three forwards a sample | preset `openvla-oft`; forward, its recomputation, and gradients through frozen weights |
| training | π0.5 {1.3 * PI05_PREFIX:.1f} ms, OFT {3 * OFT_PREFIX:.1f} ms a sample and 20 ms a micro-batch of 8, one epoch | the same FLOPs |
| LIBERO | a process an environment on CPU cores: a chunk of 8 steps 190 ms (lognormal, sigma 0.3) of one core, reset 1 s, 30 chunks an episode, 2 GB | measured here at 64 pixels with software rendering: 170 to 220 ms |
| ManiSkill | on the policy's GPU: a chunk 120 ms + 1 ms an environment, 10 chunks an episode, 5 GB + 0.03 GB an environment | assumption |
| host | the costs that the emulator's runs showed on two shared cores | benchmarks/prediction.md; a cluster's are smaller |
| batch | 8 episodes a GPU, so that the work grows with the machine; GRPO groups of 8 | assumption |
"""


def profile(policy: str, env: str, host: HostCosts = HOST) -> Profile:
    return Profile(
        POLICIES[policy], ENVS[env], NODE, host, micro_batch=8, group_size=8,
        note="assumed, not measured: see benchmarks/scaling.md",
    )  # fmt: skip


def study(policy: str, env: str) -> list[str]:
    lines = [
        f"### {policy} on {env}",
        "",
        "| GPUs | collocated | disaggregated | cells | best, efficiency | limited by | one driver, as today | GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = 0.0
    for gpus in SIZES:
        nodes = max(1, gpus // PER_NODE)
        plans = [p for p in plan(profile(policy, env, SHARED_DRIVER), gpus, nodes, simulated=4, chunk_steps=3000,
                                 seconds=60) if p.prediction]  # fmt: skip
        modes = {mode: next((p for p in plans if p.candidate.mode == mode), None) for mode in
                 ("collocated", "disaggregated", "cells")}  # fmt: skip
        today = min(plans[0].samples_per_s, 1e3 / HOST.prepare_ms_per_sample)
        best = plans[0]
        first = first or best.samples_per_s / gpus
        lines.append(
            f"| {gpus:,} | {_cell(modes['collocated'])} | {_cell(modes['disaggregated'])} | {_cell(modes['cells'])} | "
            f"{best.candidate.mode}, {100 * best.samples_per_s / gpus / first:.0f}% | {best.limiting} | "
            f"{today:,.0f} | {best.candidate.device_gb:.0f} |"
        )
    return [*lines, ""]


def _cell(found: Plan | None) -> str:
    if found is None:
        return "–"
    layout = found.candidate.work.layout
    ratio = "" if layout.shared else f" ({layout.replicas}:{layout.ranks})"
    return f"{found.samples_per_s:,.0f}{ratio}"


def paper() -> list[str]:
    """Memory and communication per step, 3 B to 1 T parameters, all trained, on 1,024 GPUs of which half learn."""
    within, between = Link(NODE.within_gb_s), Link(NODE.between_gb_s)
    lines = [
        "| parameters | sharded over | training state a rank, GB | replica with receive buffer, GB | gradients across cells a rank, GB | "
        "collectives, cells, s | flat, s | weights out, relay, GB | without, GB | publish, relay, s | without, s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ranks, nodes, replicas = 512, 64, 512
    for billions in (3, 7, 13, 34, 70, 180, 400, 1000):
        n = billions * 1e9
        per_cell = next((c for c in (8, 16, 32, 64, 128, 256, 512) if state_bytes(n, n, c) / GB <= 60), 512)
        sharding = Sharding(ranks, per_cell)
        inner = within if per_cell <= PER_NODE else between
        lines.append(
            f"| {billions:,} B | {per_cell} | {state_bytes(n, n, per_cell) / GB:.0f} | {replica_bytes(n) / GB:,.0f} | "
            f"{gradient_bytes_across(n, sharding) / GB:.1f} | {reduce_s(n, n, sharding, inner, between):.2f} | "
            f"{flat_reduce_s(n, n, ranks, PER_NODE, within, between):.2f} | "
            f"{weight_bytes_across(n, nodes, replicas) / GB:,.0f} | "
            f"{weight_bytes_across(n, nodes, replicas, relay=False) / GB:,.0f} | "
            f"{publish_s(n, nodes, replicas, within, between):.2f} | "
            f"{publish_s(n, nodes, replicas, within, between, relay=False):.1f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, help="write the assumed profiles there instead")
    parser.add_argument("--seconds", type=float, default=12.0, help="of simulation, a size")
    parser.add_argument("--example", type=int, help="the planner's table for so many GPUs instead")
    parser.add_argument("--only-paper", action="store_true", help="leave the simulations out")
    args = parser.parse_args()
    pairs = [(policy, env) for policy in POLICIES for env in ENVS]
    if args.profiles:
        for policy, env in pairs:
            profile(policy, env).save(args.profiles / f"assumed-{POLICIES[policy].family}-{env.lower()}.json")
    elif args.example:
        for policy, env in pairs:
            nodes = math.ceil(args.example / PER_NODE)
            print(
                policy,
                env,
                format_plans(plan(profile(policy, env), args.example, nodes, seconds=args.seconds)),
                "",
                sep="\n",
            )
    else:
        print(ASSUMPTIONS)
        for policy, env in pairs if not args.only_paper else []:
            print("\n".join(study(policy, env)), flush=True)
        print("\n".join(paper()))


if __name__ == "__main__":
    main()
