"""Episodes on their way to a free slot: what is asked of an episode, and the queue that interaction loops draw from."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vla3_plugin.contract import Episode

Mode = Literal["train", "eval"]
SUSPECT = 2


@dataclass(frozen=True)
class Assignment:
    """One episode and what to do with it.

    ``mode``: ``train`` samples the stochastic policy, ``eval`` the noise-free one. ``keep``: its samples go into the
    store. ``record``: its images are kept for a video. ``failures``: simulators that failed while it was played; from
    ``SUSPECT`` on it is played alone in its simulator, so that a further failure is its own.
    """

    episode: Episode
    mode: Mode = "train"
    keep: bool = True
    record: bool = False
    failures: int = 0

    @property
    def suspect(self) -> bool:
        return self.failures >= SUSPECT

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Assignment:
        return cls(**{**data, "episode": Episode(**data["episode"])})


class EpisodeQueue:
    """Assignments in order, shared by the interaction loops of one worker. Thread-safe.

    ``put`` is atomic: a loop that wakes sees all of what was put at once, so that a lock-step loop fills all its slots.
    """

    def __init__(self, assignments: Iterable[Assignment] = (), closed: bool = False) -> None:
        self._waiting = deque(assignments)
        self._closed, self._dropped = closed, False
        self._changed = threading.Condition()

    def put(self, assignments: Iterable[Assignment]) -> None:
        """Evaluation goes first: it is short, and someone waits for it."""
        with self._changed:
            for assignment in assignments:
                ahead = sum(a.mode == "eval" for a in self._waiting)
                self._waiting.insert(ahead if assignment.mode == "eval" else len(self._waiting), assignment)
            self._changed.notify_all()

    def put_back(self, assignments: Iterable[Assignment]) -> None:
        """First in line again, in the given order: somebody waits for them already."""
        with self._changed:
            if not self._dropped:
                self._waiting.extendleft(reversed(list(assignments)))
                self._changed.notify_all()

    def take(self, wait: bool, alone: bool = True) -> Assignment | None:
        """The next assignment; None when there is none now (``wait`` false) or will be none (closed).

        ``alone``: whether a suspect would be alone in its simulator; otherwise suspects are passed over.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._waiting or self._closed)
            for i, assignment in enumerate(self._waiting):
                if alone or not assignment.suspect:
                    del self._waiting[i]
                    return assignment
            return None

    @property
    def finished(self) -> bool:
        """Closed and empty: nothing will come."""
        with self._changed:
            return self._closed and not self._waiting

    def close(self, drop: bool = False) -> None:
        """No further assignments; ``drop`` forgets the waiting ones too."""
        with self._changed:
            self._closed, self._dropped = True, drop
            if drop:
                self._waiting.clear()
            self._changed.notify_all()
