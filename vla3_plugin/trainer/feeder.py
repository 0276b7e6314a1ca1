"""Groups for the learner: keeps the env workers supplied as far as the staleness bound allows, and waits for them.

The only place where the driver's thread, the dispatching thread (episodes finish) and the publication lane (versions
arrive) meet; one lock guards the bookkeeping, which itself is ``admission.Admission``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from vla3_plugin.rollout.episodes import Assignment
from vla3_plugin.rollout.manager import InteractionManager
from vla3_plugin.rollout.plan import EpisodePlan
from vla3_plugin.telemetry.timeline import Timeline
from vla3_plugin.trainer.admission import Admission, Group


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
    ) -> None:
        self.interaction, self.plan, self.admission, self.ahead = interaction, plan, admission, ahead
        self.timeline, self.drop = timeline, drop
        self._changed = threading.Condition(threading.RLock())
        self._open, self._published = False, -1
        self._error: BaseException | None = None
        self.finished_episodes = 0
        interaction.on_failure(self._fail)

    def begin_step(self, now: int) -> None:
        """The step that trains at version ``now`` starts taking groups."""
        with self._changed:
            self._open = True
            self.admission.begin_step(now)
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
            self.finished_episodes += 1
            self.admission.finished(summary)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def groups(self, limit: int) -> list[Group]:
        """Finished groups, at least one, until this step holds ``limit``; waits for the first.

        Raises:
            the interaction's error, when no further group can finish.
        """
        start = time.time()
        with self._changed:
            while True:
                chosen, stale = self.admission.take(limit)
                if stale:
                    self.drop(stale)
                if chosen or stale:
                    self._admit()
                if chosen:
                    self._open = len(self.admission.taken) < self.admission.groups_per_step
                    break
                if self._error is not None:
                    raise self._error
                self._changed.wait()  # the interaction keeps the deadline and reports it through on_failure
        self.timeline.add("step", "wait:data", start, time.time())
        return chosen

    def state(self) -> dict[str, Any]:
        with self._changed:
            return self.admission.state()
