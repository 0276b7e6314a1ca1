"""A simulator that fails is replaced and its episodes are played again; one that grew too large is replaced in time.

An episode that takes its simulator down again and again is *quarantined*: given up, counted, and the run goes on. Where
several environments share a process a failure does not say whose it was, so an episode that was there twice is played
alone the third time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation
from vla3_plugin.envs.base import ChunkEnv
from vla3_plugin.envs.process import EnvError

Event = dict[str, Any]  # kind, where, why, episodes
_STARTS, _PAUSE_S = 3, 1.0  # attempts to start a replacement, and what lies between them


@dataclass(frozen=True)
class Limits:
    """``attempts``: simulators an episode may take down before it is quarantined. ``failures``: of one simulator in a
    row, with no episode finished between them, before the run ends: then it is not the episodes. ``recycle_episodes``
    and ``recycle_mb``: a simulator that has played so many, or holds so much memory, is replaced between episodes.
    """

    attempts: int = 3
    failures: int = 10
    recycle_episodes: int | None = None
    recycle_mb: float | None = None


class EnvReplaced(RuntimeError):
    """The simulator failed and a new one stands in its place: what was running in it is lost."""


class SupervisedEnv:
    """A ``ChunkEnv`` on whose process nothing depends. ``make`` starts one; ``report`` hears of every replacement.

    Raises:
        EnvReplaced: by ``reset`` and ``chunk_step``; the next call finds a fresh simulator.
        EnvError: the simulator fails whatever it plays, or no replacement starts.
    """

    def __init__(self, make: Callable[[], ChunkEnv], limits: Limits, report: Callable[[Event], None]) -> None:
        self._make, self.limits, self._report = make, limits, report
        self._env = make()
        self.spec: EnvSpec = self._env.spec
        self.num_slots: int = self._env.num_slots
        self.failures_in_a_row = self.episodes_played = 0
        self._closed = False

    @property
    def name(self) -> str:
        return getattr(self._env, "name", self.spec.name)

    def reset(self, slot: int, episode: Episode) -> Observation:
        try:
            return self._env.reset(slot, episode)
        except EnvError as error:
            raise self._failed(error, [episode.episode_id]) from error

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        try:
            results = self._env.chunk_step(slots, actions, record=record)
        except EnvError as error:
            raise self._failed(error, []) from error
        ended = sum(result.done for result in results)
        if ended:
            self.failures_in_a_row, self.episodes_played = 0, self.episodes_played + ended
        return results

    @property
    def due(self) -> str | None:
        """Why the simulator should be replaced once nothing runs in it; None: it should not."""
        limits = self.limits
        if limits.recycle_episodes is not None and self.episodes_played >= limits.recycle_episodes:
            return f"it has played {self.episodes_played} episodes (vla3.env.recycle_episodes)"
        if limits.recycle_mb is not None and self.episodes_played > 0 and (size := self._resident_mb()) is not None:
            if size > limits.recycle_mb:
                return f"it holds {size:.0f} MB (vla3.env.recycle_mb = {limits.recycle_mb:g})"
        return None

    def recycle(self) -> None:
        why = self.due
        if why is not None:
            self._replace()
            self._report({"kind": "env_recycled", "where": self.name, "why": why, "episodes": []})

    def close(self) -> None:
        self._closed = True
        self._env.close()

    def _failed(self, error: EnvError, episodes: list[int]) -> Exception:
        if self._closed:
            return error
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= self.limits.failures:
            return EnvError(
                f"{self.name} failed {self.failures_in_a_row} times and finished no episode in between, so it is not "
                f"the episodes (vla3.env.max_failures = {self.limits.failures}); the last failure: {error}"
            )
        try:
            self._replace()
        except EnvError as another:
            return another
        self._report({"kind": "env_replaced", "where": self.name, "why": str(error), "episodes": episodes})
        return EnvReplaced(str(error))

    def _replace(self) -> None:
        self._env.close()
        self.episodes_played = 0
        for attempt in range(_STARTS):
            try:
                self._env = self._make()
                break
            except EnvError as error:
                if attempt == _STARTS - 1 or self._closed:
                    raise EnvError(f"{self.name} could not be replaced in {_STARTS} attempts: {error}") from error
                time.sleep(_PAUSE_S)
        if self._closed:
            self._env.close()

    def _resident_mb(self) -> float | None:
        process = getattr(self._env, "process", None)
        if process is None:
            return None
        import psutil

        try:
            return psutil.Process(process.pid).memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            return None
