"""How far ahead of the learner groups start: just in time, where the learner is the slower one.

The staleness bound says how old a sample may become, not how old it should be. Where rollout is faster than the
learner, starting whatever the bound allows fills a queue: every sample waits in it until it is nearly as old as is
allowed, for no gain in speed. So the number of groups that wait (being played, or finished and not yet taken) is set
from what the learner finds: fewer, if finished ones are always left over when it takes its next; more, while it waits,
be it for any group or for one that must be in the step. Where rollout is the slower one the learner always waits, and
the bound alone holds.

What is given up is the reserve: a rollout that pauses, or whose episodes differ much in length, is felt sooner. So a
part of it is kept, and a lead that was too small is not tried again soon.
"""

from __future__ import annotations

import math

_TOLERATED = 0.01  # of a step: waiting that is no reason to start groups earlier
_REMEMBERED = 20  # steps for which a lead that was too small is not gone below again


class Lead:
    """``groups`` may wait at the learner, of the at most ``most`` that the staleness bound allows.

    A change shows when the groups that it started, or did not, are due: after ``max_staleness`` steps at the latest. So
    a lead is judged by all steps of such a window, and shrinks after it by what was left over throughout.
    """

    def __init__(self, groups_per_step: int, max_staleness: int) -> None:
        self.groups_per_step = groups_per_step
        self.most = (max_staleness + 1) * groups_per_step
        self.window = max_staleness + 1
        self.margin = math.ceil(groups_per_step / 4)  # left over at the worst moment
        # To begin with a step's and the reserve. It grows at once if that is too few; two steps' took a dozen steps to
        # shrink, and their samples were old just where a policy changes most.
        self.groups = min(groups_per_step + self.margin, self.most)
        self._floor = 1
        self._since_short = 0
        self._step_s = 0.0  # the last step's, from its beginning to the learner's end; 0: there was none
        self.step_begins(0.0)
        self._watch()

    def _watch(self) -> None:
        self._left, self._steps, self._waited = self.most, 0, False

    def step_begins(self, at: float) -> None:
        """``at``: seconds on any clock."""
        self._began, self._before = at, self.groups
        self._wait_s = self._waited_s = 0.0  # this wait so far; the step's former ones

    def waits(self, seconds: float) -> None:
        """The learner has waited so long for its next groups; called again while it goes on."""
        self._wait_s = seconds
        waited = self._waited_s + seconds
        if self._step_s <= 0 or waited <= _TOLERATED * self._step_s:
            return  # in the first step nothing could have been there
        self._waited = True
        if self._before < self.most:
            short = math.ceil(waited / self._step_s * self.groups_per_step)
            self.groups = self._floor = min(self.most, self._before + short)
            self._since_short = 0

    def took(self, left: int) -> None:
        """The learner has its next groups; ``left`` finished ones remain."""
        self._left = min(self._left, left)
        self._waited_s, self._wait_s = self._waited_s + self._wait_s, 0.0

    def step_ends(self, at: float) -> None:
        """The learner has trained on the step's groups."""
        self._step_s = max(0.0, at - self._began)
        self._steps += 1
        self._since_short += 1
        if self._since_short > _REMEMBERED:
            self._floor = 1
        if self._steps < self.window:
            return
        if not self._waited and self._left > self.margin:
            self.groups = max(self._floor, self.groups - (self._left - self.margin))
        self._watch()
