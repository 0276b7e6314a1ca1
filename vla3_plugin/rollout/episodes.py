"""Episodes on their way to a free slot: what is asked of an episode, and the queue that interaction loops draw from."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vla3_plugin.contract import Episode

Mode = Literal["train", "eval"]


@dataclass(frozen=True)
class Assignment:
    """One episode and what to do with it.

    ``mode``: ``train`` samples the stochastic policy, ``eval`` the noise-free one. ``keep``: its samples go into the
    store. ``record``: its images are kept for a video.
    """

    episode: Episode
    mode: Mode = "train"
    keep: bool = True
    record: bool = False

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
        self._closed = closed
        self._changed = threading.Condition()

    def put(self, assignments: Iterable[Assignment]) -> None:
        """Evaluation goes first: it is short, and someone waits for it."""
        with self._changed:
            for assignment in assignments:
                ahead = sum(a.mode == "eval" for a in self._waiting)
                self._waiting.insert(ahead if assignment.mode == "eval" else len(self._waiting), assignment)
            self._changed.notify_all()

    def take(self, wait: bool) -> Assignment | None:
        """The next assignment; None when there is none now (``wait`` false) or will be none (closed)."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._waiting or self._closed)
            return self._waiting.popleft() if self._waiting else None

    def close(self, drop: bool = False) -> None:
        """No further assignments; ``drop`` forgets the waiting ones too."""
        with self._changed:
            self._closed = True
            if drop:
                self._waiting.clear()
            self._changed.notify_all()
