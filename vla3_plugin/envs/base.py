"""The interfaces simulators implement: ``ChunkEnv``, and ``ExpertEnv`` where demonstrations can be made.

An implementation runs inside a child interpreter (``envs.child``) and never sees torch, ray or verl; or, where it is
asked for, in the env worker's process (``envs.inline``). The parent's handle (``envs.process.EnvProcess``) has the same
methods, so code above does not know on which side it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence, runtime_checkable

import numpy as np

from vla3_plugin.contract import ChunkResult, EnvSpec, Episode, Observation


@runtime_checkable
class ChunkEnv(Protocol):
    """One or more environments ("slots") of one simulator that execute action chunks.

    Constructed as ``Env(num_slots=1, **options)``; options are JSON values from the ``env`` config. What it returns has
    to keep its values until the slot's next chunk or reset; images of all slots in one piece of memory are handed on
    without a copy (``rows``).
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


@dataclass
class ExpertChunk:
    """``actions`` float32 [C, A]: what the expert wanted at each step, zeros where ``result.valid`` is false.

    With noise this is not what was executed: the state is disturbed, the label is not (DART, Laskey et al. 2017).
    """

    actions: np.ndarray
    result: ChunkResult


@runtime_checkable
class ExpertEnv(ChunkEnv, Protocol):
    """A ``ChunkEnv`` that can drive itself with a scripted expert; ``imitation.demos`` makes demonstrations with it.

    The expert reads privileged state on the simulator's side; the observations it leaves behind are those that a policy
    gets. It must be usable in any state that its own (noisy) actions lead to, since it is asked anew at every step.
    """

    def expert_chunk(self, slots: list[int], length: int, noise: float = 0.0) -> list[ExpertChunk]:
        """Let the expert act for ``length`` control steps, closed loop, stopping early where an episode ends.

        ``noise``: see ``ActionNoise``. Images are rendered once, after the last executed step.
        """
        ...


NO_ERROR = (0.0, 0.0, 0.0)


def check_grasp_error(grasp_error: Sequence[float]) -> None:
    """ValueError unless it is three finite numbers: m along x, y and z of the world, beside an expert's grasp point."""
    if len(grasp_error) != 3 or not np.isfinite(np.asarray(grasp_error, np.float64)).all():
        raise ValueError(f"env.grasp_error is {grasp_error}, expected three numbers, m along x, y and z")


class ActionNoise:
    """Disturbance of an expert's actions: Gaussian with standard deviation ``std`` (in units of half the action range)
    and correlation ``memory`` from one control step to the next; the gripper (last dimension) is left alone.

    One object an episode, seeded by the episode, so that an episode is the same whoever runs it.
    """

    def __init__(self, spec: EnvSpec, seed: int, std: float, memory: float = 0.8) -> None:
        self._low = np.asarray(spec.action_low, dtype=np.float32)
        self._high = np.asarray(spec.action_high, dtype=np.float32)
        self._scale = std * (self._high - self._low) / 2
        self._scale[-1] = 0.0
        self._memory = memory
        self._generator = np.random.default_rng([seed, 0xDA27])
        self._state = self._generator.standard_normal(spec.action_dim)

    def __call__(self, action: np.ndarray) -> np.ndarray:
        """float32 [A]: ``action`` disturbed and kept inside the bounds."""
        fresh = self._generator.standard_normal(len(action))
        self._state = self._memory * self._state + np.sqrt(1 - self._memory**2) * fresh
        return np.clip(action + self._scale * self._state, self._low, self._high).astype(np.float32)
