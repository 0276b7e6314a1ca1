"""Groups for the learner: keeps the env workers supplied as far as the staleness bound allows, and waits for them.

The only place where the driver's thread, the dispatching thread (episodes finish) and the publication lane (versions
arrive) meet; one lock guards the bookkeeping, which itself is ``admission.Admission``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vla3_plugin.rollout.episodes import Assignment
from vla3_plugin.rollout.manager import InteractionManager
from vla3_plugin.rollout.plan import EpisodePlan
from vla3_plugin.rollout.stopping import Stopped
from vla3_plugin.telemetry import clock
from vla3_plugin.telemetry.timeline import Timeline
from vla3_plugin.trainer import checkpoint_groups
from vla3_plugin.trainer.admission import Admission, Group

if TYPE_CHECKING:
    from vla3_plugin.trainer.trainer import VLA3Trainer


class Feeder:
    """``ahead``: whether groups may start outside a step (decoupled training); otherwise only between ``begin_step``
    and the step's last group.
    """

    def __init__(
        self,
        interaction: InteractionManager,
        plan: EpisodePlan,
        admission: Admission,
        ahead: bool,
        timeline: Timeline,
        drop: Callable[[list[Group]], None],
        deadline_s: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.stop = stop
        self.interaction, self.plan, self.admission, self.ahead = interaction, plan, admission, ahead
        self.timeline, self.drop, self.deadline_s = timeline, drop, deadline_s
        self._changed = threading.Condition(threading.RLock())
        self._open, self._published = False, -1
        self._error: BaseException | None = None
        interaction.on_failure(self.fail)
        # what a resumed run had begun; there is nothing otherwise
        interaction.submit([Assignment(e) for e in checkpoint_groups.unfinished(admission, plan)], self._finished)

    def begin_step(self, now: int) -> None:
        """The step that trains at version ``now`` starts taking groups."""
        with self._changed:
            self._open = True
            self.admission.begin_step(now, time.monotonic())
            self._admit()

    def published(self, version: int) -> None:
        """Every policy worker serves ``version`` now."""
        with self._changed:
            self._published = version
            self._admit()

    def _admit(self) -> None:
        if not (self._open or self.ahead):
            return
        size = self.plan.group_size
        groups = self.admission.admit(self._published)
        episodes = [e for group in groups for e in self.plan.episodes(group * size, size)]
        self.interaction.submit([Assignment(e) for e in episodes], self._finished)

    def _finished(self, summary: dict[str, Any]) -> None:
        with self._changed:
            dropped = self.admission.finished(summary)
            if dropped:
                self.drop(dropped)
                self._admit()
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No further group can come: who waits for one gets ``error``."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def groups(self, limit: int, samples: float = math.inf) -> list[Group]:
        """Finished groups, at least one, until this step holds ``limit``; waits for the first. See ``Admission.take``.

        Raises:
            Stopped: the run was asked to stop.
            TimeoutError: nothing is being played and no version came that would let anything start.
            Exception: that of the interaction or of a publication, when no further group can finish.
        """
        start = clock.now()
        asked = idle_since = time.monotonic()
        with self._changed:
            while True:
                if self.stop():
                    raise Stopped
                chosen, stale = self.admission.take(limit, samples)
                self.admission.waits(time.monotonic() - asked, took=bool(chosen))
                if stale:
                    self.drop(stale)
                self._admit()
                if chosen:
                    self._open = len(self.admission.taken) < self.admission.groups_per_step
                    break
                if self._error is not None:
                    raise self._error
                if self.admission.started:
                    idle_since = time.monotonic()  # the interaction keeps this deadline and reports it through fail
                elif time.monotonic() - idle_since > self.deadline_s:
                    raise TimeoutError(
                        f"the step at version {self.admission.now} waits for {limit - len(self.admission.taken)} "
                        f"groups and none is being played: policy workers serve version {self._published}, and no "
                        f"newer one came within vla3.deadline_s = {self.deadline_s} s"
                    )
                self._changed.wait(timeout=1.0)
        self.timeline.add("step", "wait:data", start, clock.now())
        return chosen

    def account(self) -> tuple[list[int], list[int]]:
        """(groups of this step, which has been trained; groups dropped since the last call)."""
        with self._changed:
            self.admission.trained(time.monotonic())
            dropped, self.admission.dropped_groups = self.admission.dropped_groups, []
            return list(self.admission.taken), dropped

    def metrics(self) -> dict[str, float]:
        """Groups dropped so far, by reason; ``rollout/lead``: how many may wait at the learner."""
        with self._changed:
            found = {f"rollout/dropped_{why}": float(n) for why, n in self.admission.dropped.items()}
            if self.admission.lead is not None:
                found["rollout/lead"] = float(self.admission.lead.groups)
            return found

    def give_back(self) -> None:
        """See ``Admission.give_back``: the step is given up."""
        with self._changed:
            self.admission.give_back()

    def state(self) -> dict[str, Any]:
        with self._changed:
            return checkpoint_groups.state_of(self.admission)


def build_feeder(trainer: VLA3Trainer, init_states: list[int]) -> Feeder:
    """The feeder of a run that begins, or goes on after a checkpoint, with the episodes of ``init_states``."""
    stage, size, resumed = trainer.vla3.stages.training, trainer.vla3.algorithm.group_size, trainer.admission_state
    admission = Admission(
        group_size=size,
        groups_per_step=trainer.groups_per_step,
        max_staleness=trainer.max_staleness,
        just_in_time=stage.just_in_time,
        total=(trainer.total_training_steps - trainer.global_steps) * trainer.groups_per_step,
        next_group=resumed.get("next_group", 0),
        replay=resumed.get("replay"),
    )
    checkpoint_groups.restore(admission, resumed)
    feeder = Feeder(
        trainer.interaction,
        EpisodePlan(trainer.vla3.seed, trainer.tasks, init_states, size),
        admission,
        stage.enabled,
        trainer.timeline,
        trainer.drop,
        trainer.vla3.deadline_s,
        lambda: trainer.stop() and not trainer.publisher.moved,
    )
    admission.begin_step(trainer.global_steps)
    feeder.published(trainer.global_steps)
    return feeder
