"""How far ahead of the learner groups start: just in time, where the learner is the slower one.

The staleness bound says how old a sample may become, not how old it should be. Where rollout is faster than the
learner, starting whatever the bound allows fills a queue: every sample waits in it until it is nearly as old as is
allowed, for no gain in speed. So the number of groups that wait (being played, or finished and not yet taken) is set
once a step from what that step found: fewer, if some were always left over when the learner took its next ones; more,
if it waited. Where rollout is the slower one the learner always waits, and the bound alone holds.
"""

from __future__ import annotations

import math

_TOLERATED = 0.01  # of a step: waiting that is no reason to start groups earlier


class Lead:
    """``groups`` may wait at the learner, of the at most ``most`` that the staleness bound allows."""

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.groups_per_step = groups_per_step
        self.most = self.groups = (max_staleness + 1) * groups_per_step
        self.margin = math.ceil(groups_per_step / 4)  # left over at the worst moment: episodes differ in length
        self._since = 0.0
        self._left: int | None = None  # None: the step took nothing so far
        self._waited_s = 0.0

    def took(self, left: int, waited_s: float) -> None:
        """The learner has its next groups; ``left`` finished ones remain."""
        self._left = left if self._left is None else min(self._left, left)
        self._waited_s += waited_s

    def step_begins(self, at: float) -> None:
        """``at``: seconds on any clock."""
        if self._left is not None:
            self._adjust(self._left, self._waited_s / max(at - self._since, 1e-9))
        self._since, self._left, self._waited_s = at, None, 0.0

    def _adjust(self, left: int, waited: float) -> None:
        if waited > _TOLERATED:
            self.groups += math.ceil(min(1.0, waited) * self.groups_per_step)
        elif left > self.margin:
            self.groups -= math.ceil((left - self.margin) / 2)  # half of it: what one step finds is one draw
        self.groups = max(1, min(self.groups, self.most))
