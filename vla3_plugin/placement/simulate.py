"""Discrete-event simulation of a run: what a placement and a schedule will give, before anything is started.

The scheduler is the real one: ``rollout.batcher.BatchRule`` decides about batches, ``trainer.admission.Admission``
about groups; both run on a virtual clock (``simulate_clock``). Simulators, network, learner and the host's own costs
are times (``simulate_model``), measured by ``vla3 profile`` or assumed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from vla3_plugin.placement.simulate_clock import Clock, Device
from vla3_plugin.placement.simulate_envs import Draws, RandomDraws
from vla3_plugin.placement.simulate_lane import make_lane
from vla3_plugin.placement.simulate_learner import Learner, Trainer
from vla3_plugin.placement.simulate_model import Workload


@dataclass(frozen=True)
class Prediction:
    """Of the steady state, from the end of the warm-up steps to the end of the last one.

    ``samples_per_s``: env chunk steps trained on. ``busy``: share of time of ``env`` (an interaction loop's
    simulators, mean over all), ``rollout`` (a replica), ``learner`` (a rank). ``waits``: share of an interaction loop's
    time that it waits for the policy (``policy``) or for an episode (``episode``), and of the driver's that it waits
    for groups (``groups``). ``batch``: rows of a trip through the network, mean. ``staleness``: groups by age.
    """

    name: str
    samples_per_s: float
    step_s: float
    steps: int
    busy: dict[str, float]
    waits: dict[str, float]
    batch: float
    staleness: dict[int, int]
    dropped: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def limiting(self) -> str:
        """The busiest role."""
        return max(self.busy, key=lambda role: self.busy[role])


@dataclass(frozen=True)
class _Mark:
    """Running totals, so that the warm-up can be taken off."""

    time: float
    busy: dict[str, float]
    waits: dict[str, float]
    batches: int
    rows: int


def simulate(work: Workload, steps: int = 8, warmup: int = 3, draws: Draws | None = None) -> Prediction:
    """Run ``warmup`` + ``steps`` global steps of ``work`` on the virtual clock and measure the last ``steps``.

    Args:
        draws: the simulators' times; by default drawn from ``work.seed``.

    Raises:
        ValueError: ``steps`` below 1 or ``warmup`` negative; a size out of range.
        RuntimeError: the schedule stands still.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(f"{steps} steps after {warmup}, expected at least 1 after at least 0")
    clock = Clock()
    devices = [Device(clock) for _ in range(work.layout.replicas)]
    lanes = [make_lane(clock, work, device) for device in devices]
    learner = Learner(clock, work, devices if work.layout.shared else ())
    total = warmup + steps
    trainer = Trainer(clock, work, draws or RandomDraws(work), lanes, learner, total)

    def mark() -> _Mark:
        spent: Counter[str] = Counter()
        for worker in trainer.manager.workers:
            spent.update(worker.seconds)
        rollout = sum(device.busy.get("rollout", 0.0) for device in devices)
        busy = {"env": spent["chunk_step"] + spent["reset"], "rollout": rollout, "learner": learner.busy}
        waits = {"policy": spent["wait:batch"], "episode": spent["wait:data"], "groups": trainer.waited}
        return _Mark(clock.now, busy, waits, sum(x.batches for x in lanes), sum(x.rows for x in lanes))

    clock.run(lambda: len(trainer.steps) >= warmup)
    start = mark()
    clock.run(lambda: len(trainer.steps) >= total)
    end = mark()
    seconds = end.time - start.time
    if seconds <= 0:
        raise ValueError(f"{work.name}: nothing in this workload takes any time, so it has no throughput")
    measured = trainer.steps[warmup:]
    loops = sum(len(worker.loops) for worker in trainer.manager.workers)
    among = {"env": loops, "rollout": len(lanes), "learner": 1, "policy": loops, "episode": loops, "groups": 1}

    def share(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        return {name: (after[name] - before[name]) / seconds / among[name] for name in after}

    batches = end.batches - start.batches
    return Prediction(
        name=work.name,
        samples_per_s=sum(samples for _, samples, _ in measured) / seconds,
        step_s=seconds / steps,
        steps=steps,
        busy=share(start.busy, end.busy),
        waits=share(start.waits, end.waits),
        batch=(end.rows - start.rows) / batches if batches else 0.0,
        staleness=dict(sorted(Counter(age for _, _, ages in measured for age in ages).items())),
        dropped=sum(trainer.admission.dropped.values()),
    )
