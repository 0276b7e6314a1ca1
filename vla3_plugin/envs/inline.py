"""A simulator in this very process: what it draws is handed on by reference, and its faults are this process's.

For simulators that share a device with the policy (``vla3.env.isolation: none``). ``envs.process`` is the other way.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Optional, TypeVar

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation, check_results
from vla3_plugin.envs.base import ChunkEnv
from vla3_plugin.envs.process import EnvError

T = TypeVar("T")


class InlineEnv:
    """``target`` 'module:Class' with ``options`` in this process; implements ``ChunkEnv``, held to its declaration.

    Observations keep their values as long as those of an ``EnvProcess`` that lends them.
    Nothing bounds the time that it takes, and if it crashes this process does.

    Raises:
        EnvError: it could not start, raised, or handed over what it had not declared.
    """

    def __init__(
        self,
        target: str,
        options: Optional[Mapping[str, Any]] = None,
        num_slots: int = 1,
        name: Optional[str] = None,
    ) -> None:
        self.name = name or target
        self._episodes: dict[int, Episode] = {}
        module, _, kind = target.partition(":")
        self._env: ChunkEnv = self._guarded(
            lambda: getattr(importlib.import_module(module), kind)(num_slots=num_slots, **dict(options or {})),
            "starting",
        )
        self.spec: EnvSpec = self._env.spec
        self.num_slots: int = self._env.num_slots

    def reset(self, slot: int, episode: Episode) -> Observation:
        self._episodes[slot] = episode

        def reset() -> Observation:
            observation = self._env.reset(slot, episode)
            observation.check(self.spec, f"{self.name}, slot {slot}")
            return observation

        return self._guarded(reset, f"resetting slot {slot} ({episode})")

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        def step() -> list[ChunkResult]:
            results = self._env.chunk_step(slots, actions, record=record)
            check_results(results, self.spec, slots, actions.shape[1], self.name)
            return [_lent(result) for result in results]

        playing = ", ".join(f"slot {slot} ({self._episodes.get(slot)})" for slot in slots)
        return self._guarded(step, f"executing a chunk of {actions.shape[1]} actions, {playing}")

    def close(self) -> None:
        """One that failed may fail at this too; that it did is known already."""
        try:
            self._env.close()
        except Exception as error:
            print(f"{self.name}, in this process, while closing: {type(error).__name__}: {error}", file=sys.stderr)

    def _guarded(self, call: Callable[[], T], what: str) -> T:
        try:
            return call()
        except Exception as error:
            raise EnvError(f"{self.name}, in this process, while {what}: {type(error).__name__}: {error}") from error


def _lent(result: ChunkResult) -> ChunkResult:
    """``result`` with copies of what has to outlast the slot's next reset: a simulator may draw all in one place."""
    final, names = result.final_observation, ("rewards", "terminated", "truncated", "valid")
    if final is not None:
        images = {camera: image.copy() for camera, image in final.images.items()}
        final = Observation(images, final.state.copy(), final.instruction)
    return replace(result, final_observation=final, **{name: getattr(result, name).copy() for name in names})
