"""What other systems' papers predict with, in closed form, over the same ``Workload``; to compare the simulation with.

RLinf-VLA (arXiv 2510.06710; the arithmetic is that of its placement tool, ``toolkits/auto_placement/placement.py`` in
RLinf/RLinf at 085621d): generation alternates simulator and policy, ``t_1`` one after the other with all environments
at once, ``t_2`` in k stages that take turns, first and last stage not overlapped; training follows on the same or on
other devices and is added. The names t_1 and t_2 stand here for these two; the paper's own text was not at hand.

D-VLA (no public code; from third-party notes): rollout and actor on devices of their own, one step apart, so that a
step takes the longer of the two.

All of them know means alone: no tail, no queue, no host. That is what the simulation adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vla3_plugin.placement.simulate_model import Workload


@dataclass(frozen=True)
class ClosedForm:
    """Seconds of one global step, and chunk steps a second."""

    rollout_s: float
    learner_s: float
    step_s: float
    samples_per_s: float


def _samples(work: Workload) -> float:
    return work.schedule.train_batch_size * work.env.mean_chunks


def _rounds(work: Workload) -> float:
    """Rounds of all environments that a step's episodes take, each chunk step of every environment."""
    waves = math.ceil(work.schedule.train_batch_size / work.layout.environments)
    return waves * work.env.mean_chunks


def _reset_s(work: Workload) -> float:
    waves = math.ceil(work.schedule.train_batch_size / work.layout.environments)
    return waves * work.layout.slots * work.env.reset_ms.mean_ms / 1e3


def learner_s(work: Workload) -> float:
    """All epochs over the samples of a step, on every rank its part, without what happens between ranks."""
    mine = math.ceil(_samples(work) / work.layout.ranks)
    whole, rest = divmod(mine, work.schedule.micro_batch)
    train = work.policy.train_ms
    ms = whole * train(work.schedule.micro_batch) + (train(rest) if rest else 0.0)
    return work.schedule.epochs * ms / 1e3


def t_1(work: Workload) -> ClosedForm:
    """One clock: every environment steps, then the policy answers all of them, then the learner trains."""
    rows = math.ceil(work.layout.environments / work.layout.replicas)
    slowest = work.env.shard_ms(work.layout.slots)
    if work.env.per == "env":
        slowest = work.env.chunk_ms.mean_of_max_ms(rows)
    rollout = (
        _rounds(work) * (slowest + work.policy.inference_ms(rows)) / 1e3 + _reset_s(work) + _last_values(work, rows)
    )
    return _closed(work, rollout, rollout + learner_s(work))


def t_2(work: Workload, stages: int | None = None) -> ClosedForm:
    """``stages`` groups of environments take turns with the policy; a round of all of them takes the longer of the two
    times per stage, and filling the pipeline adds the shorter one once.

    As RLinf has it, simulator and policy are one server each: while a stage is being simulated no other is. Simulators
    that are processes of their own, as here on CPUs, overlap more: that is ``overlapping``.
    """
    k = stages if stages is not None else work.schedule.pipeline_stage_num
    env, policy = _per_stage(work, k)
    rollout = _rounds(work) * (max(env, policy) * (k - 1) + env + policy) / 1e3
    return _closed(work, rollout, rollout + learner_s(work))


def overlapping(work: Workload, stages: int | None = None) -> ClosedForm:
    """``t_2`` where each stage has simulators of its own: a round takes at least every stage's inference, one after the
    other, and at least one stage's inference and simulation; and in the end the first values of each stage's last
    observations.
    """
    k = stages if stages is not None else work.schedule.pipeline_stage_num
    env, policy = _per_stage(work, k)
    rollout = _rounds(work) * max(k * policy, env + policy) / 1e3 + _reset_s(work)
    return _closed(work, rollout, rollout + learner_s(work))


def d_vla(work: Workload) -> ClosedForm:
    """Two clocks, one step apart: the longer of a rollout as in ``t_1`` and the learner."""
    rollout = t_1(work).rollout_s
    return _closed(work, rollout, max(rollout, learner_s(work)))


def bounds(work: Workload) -> dict[str, float]:
    """Chunk steps a second that ``env``, ``rollout`` and ``learner`` could each give if they never waited."""
    layout, schedule = work.layout, work.schedule
    shard_ms = work.env.shard_ms(layout.slots) + layout.slots * work.env.reset_ms.mean_ms / work.env.mean_chunks
    most = math.ceil(layout.environments / layout.replicas)
    sizes = range(1, (min(schedule.max_batch_size, most) if schedule.interaction else most) + 1)
    best = max(size / (work.policy.inference_ms(size) or 1e-9) for size in sizes)
    requests = 1 + (1 - work.env.ends_itself) / work.env.mean_chunks if schedule.bootstrap else 1.0
    # a last, shorter micro-batch costs more a sample: only whole ones bound from above
    train = schedule.epochs * work.policy.train_ms(schedule.micro_batch) / schedule.micro_batch
    return {
        "env": 1e3 * layout.environments / shard_ms if shard_ms else math.inf,
        "rollout": 1e3 * best * layout.replicas / requests,
        "learner": 1e3 * layout.ranks / train if train else math.inf,
    }


def _per_stage(work: Workload, stages: int) -> tuple[float, float]:
    """ms of simulator and of policy, for one stage."""
    rows = math.ceil(work.layout.environments / work.layout.replicas / stages)
    env = work.env.chunk_ms.mean_of_max_ms(rows) if work.env.per == "env" else work.env.shard_ms(work.layout.slots)
    return env, work.policy.inference_ms(rows)


def _last_values(work: Workload, rows: int) -> float:
    """Seconds of the inference that values the last observations, where any episode is cut."""
    cut = work.schedule.bootstrap and work.env.ends_itself < 1
    return work.policy.inference_ms(rows) / 1e3 if cut else 0.0


def _closed(work: Workload, rollout: float, step: float) -> ClosedForm:
    return ClosedForm(rollout, learner_s(work), step, _samples(work) / step if step else math.inf)
