"""A ``ManiSkillEnv`` that says in its instruction how often it has drawn images: rendering is what costs."""

from __future__ import annotations

from typing import Any

from vla3_plugin.contract import Observation
from vla3_plugin.envs.maniskill import ManiSkillEnv


class CountingEnv(ManiSkillEnv):
    def __init__(self, num_slots: int = 1, **options: Any) -> None:
        super().__init__(num_slots=num_slots, **options)
        self._drawn = 0
        for sim in self._sims:
            sim._draw = self._counted(sim._draw)

    def _counted(self, draw: Any) -> Any:
        def counted() -> Any:
            self._drawn += 1
            return draw()

        return counted

    def _observation(self, raw: dict[str, Any], row: int, own: bool) -> Observation:
        observation = super()._observation(raw, row, own)
        observation.instruction = str(self._drawn)
        return observation
