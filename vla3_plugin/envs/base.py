"""The interface every simulator implements: ``ChunkEnv``.

An implementation runs inside a child interpreter (``envs.child``) and never sees torch, ray or verl. The parent's
handle (``envs.process.EnvProcess``) has the same methods, so code above does not know on which side it stands.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation


@runtime_checkable
class ChunkEnv(Protocol):
    """One or more environments ("slots") of one simulator that execute action chunks.

    Constructed as ``Env(num_slots=1, **options)``; options are JSON values from the ``env`` config.
    """

    spec: EnvSpec
    num_slots: int

    def reset(self, slot: int, episode: Episode) -> Observation:
        """Start the assigned episode in ``slot``: its task, its initial state, its seed."""
        ...

    def chunk_step(self, slots: list[int], actions: np.ndarray, record: bool = False) -> list[ChunkResult]:
        """Execute ``actions`` float32 [len(slots), C, A] open loop, stopping early where an episode ends.

        ``record`` asks for ``ChunkResult.frames``. A slot whose episode ended must be reset before its next chunk.
        """
        ...

    def close(self) -> None: ...
