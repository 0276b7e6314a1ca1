"""The driver's end of the swimlanes: collects every process's spans once a step, for the trace and for metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from vla3_plugin.rollout.batcher import BatcherStats
from vla3_plugin.telemetry import clock, traffic
from vla3_plugin.telemetry.timeline import TRAFFIC_LANE, Span
from vla3_plugin.telemetry.trace import TraceWriter
from vla3_plugin.telemetry.utilisation import carry_over, utilisation_metrics

if TYPE_CHECKING:
    from vla3_plugin.trainer.trainer import VLA3Trainer

_DEADLINE_S = 60.0  # a worker answers between two batches


class Swimlanes:
    """Windows run from one ``drain`` to the next."""

    def __init__(self, trainer: VLA3Trainer) -> None:
        self.trainer = trainer
        self.writer = TraceWriter(trainer.run_dir)
        self._start, self._open = clock.now(), []  # type: float, list[Span]
        self._lanes: set[tuple[str, str]] = set()

    def drain(self) -> dict[str, float]:
        """Shares of every lane since the last call, and the batchers' figures; the spans go into the trace."""
        trainer, end = self.trainer, clock.now()
        spans: list[Span] = trainer.timeline.drain() + traffic.drain("driver") + trainer.interaction.drain_timeline()
        metrics: dict[str, float] = {}
        batchers = []
        for call in [s.drain_timeline.remote() for s in trainer.get_llm_client()]:
            try:
                part, stats = ray.get(call, timeout=_DEADLINE_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                continue  # it is being restarted, or will be: the supervisor's business
            spans += part
            batchers += [] if stats is None else [stats]
        if batchers:
            merged = BatcherStats.merged(batchers)
            metrics = merged.metrics("rollout/batcher") | merged.histograms("rollout/batcher")
        for rank, (part, skipped) in enumerate(trainer.actor_rollout_wg.drain_timeline()):
            spans += part
            for _ in range(skipped if rank == 0 else 0):  # every rank skips the same ones
                trainer.faults({"kind": "update_skipped", "where": "learner", "why": "its gradient was not finite",
                                "episodes": []})  # fmt: skip
        self.writer.append(spans)
        metrics |= traffic.traffic_metrics(spans)
        spans = self._open + spans
        self._lanes |= {(s.role, s.lane) for s in spans if s.lane != TRAFFIC_LANE}
        self._open = carry_over(spans, end)
        metrics |= utilisation_metrics(spans, self._start, end, self._lanes)
        self._start = end
        return metrics

    def close(self) -> None:
        self.writer.close()
