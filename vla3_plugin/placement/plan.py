"""Which placement and schedule to run, before anything is started: ``vla3 plan``.

All candidates are ranked in closed form; the best few are simulated (``simulate``), scaled down to a part that behaves
like the whole, and ranked by that. What does not fit into a device's memory is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from vla3_plugin.placement import closed_forms
from vla3_plugin.placement.plan_costs import (
    GB,
    Link,
    Sharding,
    flat_reduce_s,
    publish_s,
    reduce_s,
    replica_bytes,
    state_bytes,
)
from vla3_plugin.placement.profile_file import Profile
from vla3_plugin.placement.simulate import Prediction, simulate
from vla3_plugin.placement.simulate_model import Layout, Schedule, Workload
from vla3_plugin.profile import streamed_statistics

SIMULATED = 8  # candidates
CHUNK_STEPS = 20_000  # of one simulation, about
_RESERVE = 0.9  # of a device's memory may be planned


@dataclass(frozen=True)
class Candidate:
    """``mode``: collocated, disaggregated or cells (the ratio holds on every node, parameters shard inside it)."""

    mode: str
    work: Workload
    device_gb: float  # of the fullest device
    nodes: int
    estimate: float  # samples a second, closed form


@dataclass(frozen=True)
class Plan:
    candidate: Candidate
    prediction: Prediction | None  # of the part that was simulated; None: ranked by the closed form alone
    samples_per_s: float

    @property
    def limiting(self) -> str:
        if self.prediction is not None:
            return self.prediction.limiting
        found = closed_forms.bounds(self.candidate.work)
        return min(found, key=lambda role: found[role])

    def to_dict(self) -> dict[str, Any]:
        layout, schedule = self.candidate.work.layout, self.candidate.work.schedule
        return {
            "mode": self.candidate.mode, "samples_per_s": round(self.samples_per_s, 2), "limiting": self.limiting,
            "simulated": self.prediction is not None, "device_gb": round(self.candidate.device_gb, 1),
            "busy": {k: round(v, 3) for k, v in self.prediction.busy.items()} if self.prediction else {},
            "closed_form": round(self.candidate.estimate, 2), "layout": asdict(layout), "schedule": asdict(schedule),
            "config": config_of(self.candidate),
        }  # fmt: skip


def plan(
    profile: Profile,
    gpus: int,
    nodes: int = 1,
    episodes: int | None = None,
    seconds: float = 12.0,
    simulated: int = SIMULATED,
    chunk_steps: int = CHUNK_STEPS,
) -> list[Plan]:
    """The best placements of ``profile``'s policy and simulator on ``gpus`` accelerators in ``nodes`` nodes.

    Args:
        episodes: a global batch; by default 8 a GPU.
        seconds: how long to simulate; what is not reached keeps its closed form.
        simulated: candidates to simulate, at least 4: the best of each mode is among them.
        chunk_steps: of each simulation, about; more of them, less chance.

    Raises:
        ValueError: ``gpus`` not a multiple of ``nodes``; nothing fits, with the least memory that would be needed.
    """
    if gpus < 1 or nodes < 1 or gpus % nodes:
        raise ValueError(f"{gpus} GPUs in {nodes} nodes: expected the same whole number of GPUs in every node")
    size = profile.group_size
    batch = episodes if episodes is not None else max(size, 8 * gpus // size * size)
    found = list(candidates(profile, gpus, nodes, batch))
    room = _RESERVE * profile.hardware.memory_gb
    fitting = [c for c in found if c.device_gb <= room]
    if not fitting:
        least = min(found, key=lambda c: c.device_gb)
        raise ValueError(
            f"nothing fits: the leanest of {len(found)} placements ({least.mode}, {least.work.layout.ranks} learner "
            f"ranks) needs {least.device_gb:.1f} GB of a device, of its {profile.hardware.memory_gb:.0f} GB "
            f"{room:.0f} may be planned; use more GPUs a node, train less (LoRA), or a smaller micro-batch"
        )
    fitting.sort(key=lambda c: -c.estimate)
    return _simulated(_spread(fitting, simulated), fitting, seconds, chunk_steps)


def _spread(ranked: list[Candidate], count: int) -> list[Candidate]:
    """The best of every mode, so that each is seen, then the next best."""
    modes = dict.fromkeys(c.mode for c in ranked)
    chosen = [next(c for c in ranked if c.mode == mode) for mode in modes]
    return chosen + [c for c in ranked[:count] if c not in chosen][: max(0, count - len(chosen))]


def _simulated(chosen: list[Candidate], ranked: list[Candidate], seconds: float, chunk_steps: int) -> list[Plan]:
    end, plans = time.monotonic() + seconds, []
    for candidate in chosen:
        if time.monotonic() > end:
            break
        part, factor = scaled_down(candidate.work, environments=max(16, chunk_steps // 150))
        episodes = part.schedule.train_batch_size * part.env.mean_chunks
        steps = max(4, min(12, round(chunk_steps / episodes)))
        prediction = simulate(part, steps=steps, warmup=1 + part.schedule.staleness)
        plans.append(Plan(candidate, prediction, factor * prediction.samples_per_s))
    plans.sort(key=lambda p: -p.samples_per_s)
    left = [c for c in ranked if c not in [p.candidate for p in plans]]
    return plans + [Plan(c, None, c.estimate) for c in left]


def scaled_down(work: Workload, environments: int = 128) -> tuple[Workload, int]:
    """A part of ``work`` that stands for all of it, and how many such parts there are: replicas with their env workers
    and a share of learner and batch. Costs of communication stay those of the whole, and what the one driver does for
    every sample is multiplied: it does it for all parts. In lock step the slowest of fewer workers is waited for, which
    is a little optimistic.
    """
    layout, schedule = work.layout, work.schedule
    common = math.gcd(layout.replicas, layout.ranks, layout.workers, schedule.groups_per_step)
    wanted = max(1, min(layout.environments // environments, schedule.groups_per_step // schedule.mini_batches))
    factor = max(d for d in range(1, common + 1) if common % d == 0 and (d <= wanted or d == 1))
    small = replace(
        work,
        layout=replace(
            layout, workers=layout.workers // factor, replicas=layout.replicas // factor, ranks=layout.ranks // factor
        ),
        schedule=replace(schedule, train_batch_size=schedule.train_batch_size // factor),
        host=replace(
            work.host,
            prepare_ms_per_sample=work.host.prepare_ms_per_sample * factor,
            update_ms_per_sample=work.host.update_ms_per_sample * factor,
        ),
    )
    return small, factor


# ---------------------------------------------------------------- candidates


def candidates(profile: Profile, gpus: int, nodes: int, batch: int) -> Iterator[Candidate]:
    per_node = gpus // nodes
    for mode, ranks in _splits(gpus, nodes):
        replicas = gpus if mode == "collocated" else gpus - ranks
        each = _on_fullest_node(mode, replicas, nodes, per_node)
        for slots, shards in _environments(profile, replicas, each, batch):
            for schedule in _schedules(profile, mode, shards, slots, batch, replicas):
                layout = Layout(replicas, shards, slots, replicas, ranks, mode == "collocated", profile.env.gpu)
                yield _candidate(profile, mode, layout, schedule, nodes, per_node)


def _splits(gpus: int, nodes: int) -> Iterator[tuple[str, int]]:
    """(mode, learner ranks)."""
    per_node = gpus // nodes
    yield "collocated", gpus
    eighths = [gpus * part // 8 for part in range(1, 8) if gpus * part % 8 == 0]
    for ranks in eighths if eighths and gpus >= 8 else range(1, gpus):
        if nodes == 1 or ranks % per_node == 0 or ranks <= per_node:  # as many ranks on each of the learner's nodes
            yield "disaggregated", ranks
        if nodes > 1 and ranks % nodes == 0:
            yield "cells", ranks


def _on_fullest_node(mode: str, replicas: int, nodes: int, per_node: int) -> int:
    """Replicas there, and the simulators with them. Where the learner is apart they fill the first nodes."""
    return min(replicas, per_node) if mode == "disaggregated" else math.ceil(replicas / nodes)


def _environments(profile: Profile, replicas: int, each: int, batch: int) -> Iterator[tuple[int, int]]:
    """(environments in a process, processes of a replica), as far as cores, memory and the batch go, where ``each`` of
    the replicas are on one node."""
    most = max(1, batch // replicas)  # more environments than episodes of a step would idle
    sizes = (1, 2, 4, 8, 16, 32, 64, 128) if profile.env.gpu or profile.env.memory_per_env_gb else (1,)
    for slots in sizes:
        for shards in (1, 2, 4, 8, 16, 32, 64):
            if slots * shards > 2 * most or (profile.env.gpu and shards > 4):
                continue
            memory = each * shards * (profile.env.memory_gb + (slots - 1) * profile.env.memory_per_env_gb)
            if profile.env.gpu or memory <= _RESERVE * profile.hardware.host_memory_gb:
                yield slots, shards


def _schedules(profile: Profile, mode: str, shards: int, slots: int, batch: int, replicas: int) -> Iterator[Schedule]:
    rows = shards * slots
    parts = max(1, min(profile.mini_batches, batch // profile.group_size))  # of whole groups
    base = Schedule(train_batch_size=batch, micro_batch=profile.micro_batch, group_size=profile.group_size,
                    epochs=profile.epochs, mini_batches=parts, bootstrap=profile.critic,
                    max_batch_size=rows)  # fmt: skip
    for stages in (1, 2, 4):
        if shards >= stages:
            yield replace(base, pipeline_stage_num=stages)
    if mode == "collocated":
        return
    whole = profile.critic and profile.normalize_advantages
    whole = whole and streamed_statistics(parts, profile.advantage_statistics) == "mini_batch"
    # the closed form cannot tell these apart, and the first of equals is simulated: the likely best comes first
    for limit in sorted({max(1, rows // 4), max(1, rows // 2), rows}, reverse=True):
        for wait in (0.0, 5.0):
            for staleness in (2, 1):
                yield replace(base, interaction=True, streaming=True, training=True, max_batch_size=limit,
                              max_wait_ms=wait, max_staleness=staleness,
                              whole_mini_batches=whole)  # fmt: skip


def _candidate(profile: Profile, mode: str, layout: Layout, schedule: Schedule, nodes: int, per_node: int) -> Candidate:
    policy, hardware = profile.policy, profile.hardware
    within, between = Link(hardware.within_gb_s), Link(hardware.between_gb_s)
    in_cell = layout.ranks // nodes if mode == "cells" or layout.shared else min(layout.ranks, per_node)
    in_cell = in_cell if in_cell and layout.ranks % in_cell == 0 else layout.ranks
    sharding = Sharding(layout.ranks, in_cell)
    if mode == "disaggregated":
        reduce = flat_reduce_s(policy.parameters, policy.trainable, layout.ranks, per_node, within, between)
        shards = layout.ranks
    else:
        reduce = reduce_s(policy.parameters, policy.trainable, sharding, within, between)
        shards = in_cell
    crossing = nodes if mode != "cells" else 1  # a cell publishes inside
    send = publish_s(policy.trainable, crossing, layout.replicas, within, between, per_node)
    host = replace(
        profile.host,
        reduce_ms=profile.host.reduce_ms + 1e3 * reduce,
        publish_ms=max(profile.host.publish_ms, policy.publish_ms) + 1e3 * send,
    )
    learner = (state_bytes(policy.parameters, policy.trainable, shards) + 2 * policy.parameters / max(1, shards)) / GB
    learner += policy.activation_gb * profile.micro_batch
    replica = policy.memory_gb or replica_bytes(policy.parameters) / GB
    simulator = profile.env.memory_gb + (layout.slots - 1) * profile.env.memory_per_env_gb if profile.env.gpu else 0.0
    rollout = replica + layout.shards * simulator
    processes = _on_fullest_node(mode, layout.replicas, nodes, per_node) * layout.shards
    env = profile.env.times(layout.slots, 0 if profile.env.gpu else processes, hardware.cores)
    name = f"{mode} {layout.replicas}:{layout.ranks}"
    work = Workload(env, policy.settings, layout, schedule, host, name)
    # the configs given out offload nothing, and a replica keeps its weights
    device_gb = learner + rollout if layout.shared else max(learner, rollout)
    return Candidate(mode, work, device_gb, nodes, estimate(work))


def estimate(work: Workload) -> float:
    """Samples a second in closed form: one clock the sum of its parts, three clocks the slowest of them, where an
    environment still waits for its own inference."""
    samples, host = work.schedule.train_batch_size * work.env.mean_chunks, work.host
    driver = (host.prepare_ms + host.prepare_ms_per_sample * samples) / 1e3
    learner = closed_forms.learner_s(work) + work.schedule.updates * host.reduce_ms / 1e3
    if not work.schedule.interaction:
        form = closed_forms.overlapping(work) if work.schedule.pipeline_stage_num > 1 else closed_forms.t_1(work)
        if work.layout.simulator_on_replica and work.schedule.pipeline_stage_num > 1:
            form = closed_forms.t_1(work)  # nothing overlaps on one device
        around = (host.publish_ms + host.update_ms + host.update_ms_per_sample * samples + 2 * host.switch_ms) / 1e3
        return samples / (form.rollout_s + driver + learner + around)
    limits = closed_forms.bounds(work)
    rows = max(1, min(work.schedule.max_batch_size, math.ceil(work.layout.environments / work.layout.replicas)))
    shard = work.env.shard_ms(work.layout.slots)
    answer = work.policy.inference_ms(min(rows, work.layout.slots)) + host.request_ms
    loop = 1e3 * work.layout.environments / (shard + answer)
    if work.layout.simulator_on_replica:  # the device does one after the other
        busy = shard / work.layout.slots + work.policy.inference_ms(rows) / rows
        loop = min(loop, 1e3 * work.layout.replicas / busy)
    return min(loop, limits["rollout"], samples / learner, samples / driver if driver else math.inf)


def settings_of(candidate: Candidate) -> dict[str, Any]:
    """The keys of a run's config that make it this candidate."""
    layout, s, nodes = candidate.work.layout, candidate.work.schedule, candidate.nodes
    found: dict[str, Any] = {"vla3.placement.mode": "collocated" if layout.shared else "disaggregated"}
    found["vla3.placement.node_gpus"] = [layout.devices // nodes] * nodes
    if layout.shared:  # what a recipe may have instead
        found["vla3.placement.ratio"] = None
        found["actor_rollout_ref.rollout.checkpoint_engine.backend"] = "vla3_gloo"  # nccl has no two ranks on a GPU
    else:
        common = math.gcd(layout.replicas, layout.ranks)
        ratio = f"rollout:actor = {layout.replicas // common}:{layout.ranks // common}"
        found["vla3.placement.ratio"] = ratio
    if candidate.mode == "cells":
        found["vla3.placement.ratio_per_node"] = True
    if candidate.mode == "cells" or (layout.shared and nodes > 1):  # parameters sharded inside a node
        found["actor_rollout_ref.actor.fsdp_config.fsdp_size"] = layout.ranks // nodes
    found |= {
        "vla3.env.workers": layout.workers,
        "vla3.env.shards_per_worker": layout.shards,
        "vla3.env.envs_per_shard": layout.slots,
    }
    found |= {f"vla3.stages.{n}.enabled": getattr(s, n) for n in ("interaction", "streaming", "training")}
    if s.interaction:
        found["vla3.stages.interaction.max_batch_size"] = s.max_batch_size
        found["vla3.stages.interaction.max_wait_ms"] = float(s.max_wait_ms)
        found["vla3.stages.interaction.batching"] = s.batching
    found["vla3.env.pipeline_stage_num"] = s.pipeline_stage_num
    if s.training:
        found["vla3.stages.training.max_staleness"] = s.max_staleness
        found["vla3.stages.training.just_in_time"] = s.just_in_time
    if s.streaming:  # what a streamed batch cannot have before it is complete
        statistics = "mini_batch" if s.whole_mini_batches else "previous"
        found |= {"vla3.algorithm.advantage_statistics": statistics, "vla3.algorithm.mini_batches": "episodes"}
    return found | {
        "data.train_batch_size": s.train_batch_size,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": s.micro_batch,
        "vla3.algorithm.num_mini_batches": s.mini_batches,
    }


def config_of(candidate: Candidate) -> list[str]:
    """Overrides to paste into a shell."""

    def text(key: str, value: Any) -> str:
        if isinstance(value, list):
            return f"'{key}=[{','.join(map(str, value))}]'"
        if isinstance(value, str) and " " in value:
            return f"'{key}=\"{value}\"'"
        plain = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        return f"{key}={plain:g}" if isinstance(value, float) else f"{key}={plain}"

    return [text(key, value) for key, value in settings_of(candidate).items()]


def format_plans(plans: list[Plan], shown: int = 10) -> str:
    """The table, and the config of its first line."""
    lines = [
        f"{'':2} {'samples/s':>10} {'mode':<14} {'rollout:actor':>13} {'envs':>7} {'batch':>5} {'wait':>5} "
        f"{'stale':>5} {'pipe':>4}  {'env':>4} {'roll':>4} {'learn':>5}  {'GB':>5}  limited by"
    ]
    for i, p in enumerate(plans[:shown], start=1):
        layout, s = p.candidate.work.layout, p.candidate.work.schedule
        busy = p.prediction.busy if p.prediction else {}
        cells = [f"{100 * busy[role]:.0f}%" if role in busy else "-" for role in ("env", "rollout", "learner")]
        lines.append(
            f"{i:2} {p.samples_per_s:>10.1f} {p.candidate.mode:<14} {f'{layout.replicas}:{layout.ranks}':>13} "
            f"{layout.environments:>7} {s.max_batch_size:>5} {s.max_wait_ms if s.interaction else 0:>5.0f} "
            f"{s.staleness:>5} {s.pipeline_stage_num:>4}  {cells[0]:>4} {cells[1]:>4} {cells[2]:>5}  "
            f"{p.candidate.device_gb:>5.1f}  {p.limiting}{'' if p.prediction else ' (closed form)'}"
        )
    return "\n".join([*lines, "", "To run the first:", *(f"  {line}" for line in plans[0].to_dict()["config"])])
