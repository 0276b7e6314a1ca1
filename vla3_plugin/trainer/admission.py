"""Which groups may start, and which may be trained on now: the staleness bound as bookkeeping, without Ray or clocks.

A group (``group_size`` episodes of one task and initial state; 1 for PPO) is *admitted* under the version that the
policy workers have then, which no sample of it can be older than. The step that trains at version ``now`` takes
``groups_per_step`` finished groups. A group admitted under version s has its *deadline* in the step at s +
max_staleness: that step waits for it. Admission and choice keep the groups with deadlines up to any step fewer than the
places left up to it, so nothing ever becomes too old by being late, and with ``max_staleness`` 0 a step takes exactly
its groups of the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from vla3_plugin.trainer.lead import Lead


@dataclass
class Group:
    """``trajectories``: summaries (see ``env_worker.summarise``) of its finished episodes. ``quarantined``: how many of
    its episodes were given up.
    """

    index: int
    admitted_under: int
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    quarantined: int = 0

    @property
    def version(self) -> int:
        """The oldest version that made one of its samples."""
        return min(t["version"] for t in self.trajectories)

    @property
    def samples(self) -> int:
        return sum(len(t["keys"]) for t in self.trajectories)


class Admission:
    """Groups from admission to training. ``total`` bounds how many will ever be admitted (the run's end);
    ``just_in_time``: groups start as late as they can without a wait, see ``lead``.
    """

    def __init__(
        self,
        *,
        group_size: int,
        groups_per_step: int,
        max_staleness: int,
        next_group: int = 0,
        replay: list[int] | None = None,
        total: int | None = None,
        just_in_time: bool = False,
    ) -> None:
        self.group_size, self.groups_per_step, self.max_staleness = group_size, groups_per_step, max_staleness
        self.next_group, self.total = next_group, total
        self.lead = Lead(groups_per_step, max_staleness) if just_in_time and max_staleness else None
        self.replay = list(replay or ())  # admitted before a restart, never trained on
        self.started: dict[int, Group] = {}
        self.ready: dict[int, Group] = {}
        self.now = 0  # the version that the current step trains at
        self.taken: list[int] = []  # groups of the current step
        self._in_step: list[Group] = []
        self.dropped: dict[str, int] = {}  # reason -> how many
        self.dropped_groups: list[int] = []  # which, since somebody asked
        self.admitted = 0

    def begin_step(self, now: int, at: float = 0.0) -> None:
        """``at``: seconds on any clock."""
        self.now, self.taken, self._in_step = now, [], []
        if self.lead is not None:
            self.lead.step_begins(at)

    @property
    def waiting(self) -> int:
        """Groups admitted and not yet trained on."""
        return len(self.started) + len(self.ready)

    def capacity(self, published: int) -> int:
        """Groups that steps up to version ``published + max_staleness`` can still take."""
        steps = published + self.max_staleness - self.now + 1
        return steps * self.groups_per_step - len(self.taken) if steps > 0 else 0

    def admit(self, published: int) -> list[int]:
        """Indices of the groups to start now, in the order of the plan."""
        room = self.capacity(published) - self.waiting
        if self.lead is not None:
            room = min(room, self.lead.groups - self.waiting)
        chosen: list[int] = []
        while len(chosen) < room:
            if self.replay:
                index = self.replay.pop(0)
            elif self.total is None or self.admitted < self.total:
                index, self.next_group = self.next_group, self.next_group + 1
            else:
                break
            self.admitted += 1
            self.started[index] = Group(index, published)
            chosen.append(index)
        return chosen

    def finished(self, trajectory: dict[str, Any]) -> list[Group]:
        """One episode has ended; its group is ready when all have.

        Returns the groups to drop: a group that lost an episode to quarantine is none, and another one takes its place.
        """
        index = trajectory["episode"]["group_id"]
        group = self.started[index]
        if "quarantined" in trajectory:
            group.quarantined += 1
        else:
            group.trajectories.append(trajectory)
        if len(group.trajectories) + group.quarantined < self.group_size:
            return []
        del self.started[index]
        if group.quarantined:
            self._dropped("quarantined", [group])
            return [group]
        self.ready[index] = group
        return []

    def _dropped(self, why: str, groups: list[Group]) -> None:
        self.dropped[why] = self.dropped.get(why, 0) + len(groups)
        self.dropped_groups += [group.index for group in groups]
        self.admitted -= len(groups)

    def _deadline(self, group: Group) -> int:
        """The last version at which the group may be trained on."""
        return group.admitted_under + self.max_staleness

    def _spare(self, before: int) -> int:
        """Places in this step that a group with deadline ``before`` can have without making an earlier one late.

        Of the places up to any earlier deadline d, those that groups with deadlines up to d will need are kept.
        """
        deadlines = [self._deadline(g) for g in (*self.started.values(), *self.ready.values())]
        spare = self.groups_per_step - len(self.taken)
        for d in range(self.now, before):
            places = (d - self.now + 1) * self.groups_per_step - len(self.taken)
            spare = min(spare, places - sum(deadline <= d for deadline in deadlines))
        return spare

    def take(self, limit: int, samples: float = math.inf) -> tuple[list[Group], list[Group]]:
        """(groups to train on, groups to drop), until the step holds ``limit`` groups. The second are too old.

        No more than it takes to have ``samples`` samples, so that the learner can begin on them.

        In the order of their deadlines, then of the plan. With ``max_staleness`` 0 the first ``limit`` groups of the
        plan's part for this step come first whatever arrives first, so that mini-batches are the plan's too.
        """
        stale = [g for g in self.ready.values() if self.now - g.version > self.max_staleness]
        for group in stale:
            del self.ready[group.index]
        if stale:
            self._dropped("stale", stale)
        candidates = sorted(self.ready.values(), key=lambda g: (self._deadline(g), g.index))
        if self.max_staleness == 0:
            members = set(sorted([*self.taken, *self.started, *self.ready])[:limit])
            candidates = [g for g in candidates if g.index in members]
        chosen = []
        for group in candidates:
            if samples <= 0:
                break
            if len(self.taken) < limit and self._spare(self._deadline(group)) > 0:
                samples -= group.samples
                del self.ready[group.index]
                self.taken.append(group.index)
                self._in_step.append(group)
                chosen.append(group)
        return chosen, stale

    def waits(self, seconds: float, took: bool) -> None:
        """How long the learner has waited for what ``take`` should choose, and whether it has it now."""
        if self.lead is not None:
            self.lead.waits(seconds)
            if took:
                self.lead.took(len(self.ready))

    def trained(self, at: float = 0.0) -> None:
        """The step's groups are behind: nothing gives them back any more. ``at``: as in ``begin_step``."""
        self._in_step = []
        if self.lead is not None:
            self.lead.step_ends(at)

    def give_back(self) -> None:
        """The step's groups will not be trained on now: they are ready, as they were. Nothing after ``trained``."""
        self.ready |= {group.index: group for group in self._in_step}
        self.taken, self._in_step = [], []

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: trained groups are behind, admitted ones will be played again."""
        return {"next_group": self.next_group, "replay": sorted([*self.started, *self.ready, *self.replay])}
