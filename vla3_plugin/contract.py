"""The data that crosses a process border: observations, chunk results, episodes and what an environment declares.

numpy alone is needed here (Python 3.9 and newer): simulators live in child interpreters that may have neither torch
nor ray nor verl. Everything is checked once, at the border, and an error names the producer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Optional

import numpy as np


class ContractError(ValueError):
    """A producer handed over data that does not follow its declaration."""


def _check(producer: str, name: str, value: Any, dtype: Any, shape: tuple[Optional[int], ...]) -> None:
    if not isinstance(value, np.ndarray):
        raise ContractError(f"{producer}: {name} is {type(value).__name__}, expected a numpy array, {np.dtype(dtype)}")
    if value.dtype != np.dtype(dtype):
        raise ContractError(f"{producer}: {name} has dtype {value.dtype}, expected {np.dtype(dtype)}")
    if len(value.shape) != len(shape) or any(e is not None and e != g for e, g in zip(shape, value.shape)):
        raise ContractError(f"{producer}: {name} has shape {list(value.shape)}, expected {list(shape)}")
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        where = np.argwhere(~np.isfinite(value))[0].tolist()
        raise ContractError(f"{producer}: {name} is not finite (first at index {where}: {value[tuple(where)]})")


@dataclass
class EnvSpec:
    """What an environment declares about itself; every later check is made against it.

    ``action_low`` and ``action_high`` bound one atomic action of dimension A in environment units. ``cameras`` maps a
    camera's name to its (height, width). ``max_steps`` counts control steps: an episode that reaches it is truncated.
    """

    name: str
    cameras: dict[str, tuple[int, int]]
    state_names: list[str]
    action_names: list[str]
    action_low: list[float]
    action_high: list[float]
    max_steps: int
    control_hz: float
    success: str
    num_tasks: int = 1
    num_init_states: int = 0  # 0: initial states are drawn from the episode's seed
    instructions: list[str] = field(default_factory=list)

    @property
    def action_dim(self) -> int:
        return len(self.action_names)

    @property
    def state_dim(self) -> int:
        return len(self.state_names)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EnvSpec:
        data = dict(data)
        data["cameras"] = {k: (int(v[0]), int(v[1])) for k, v in data["cameras"].items()}
        return cls(**data)


@dataclass
class Episode:
    """One assigned episode. Equal ``group_id`` means equal task and initial state (a GRPO group).

    ``seed`` fixes the simulator's own randomness; sampling noise is keyed by (run seed, ``episode_id``, chunk index).
    """

    episode_id: int
    task_id: int
    init_state_id: int
    seed: int
    group_id: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class Observation:
    """What one environment shows at a decision point.

    ``images``: camera name to uint8 [H, W, 3], upright, RGB. ``state``: float32 [S] in the simulator's units, in the
    order of ``EnvSpec.state_names``.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    instruction: str

    def check(self, spec: EnvSpec, producer: str) -> None:
        if set(self.images) != set(spec.cameras):
            raise ContractError(f"{producer}: images of cameras {sorted(self.images)}, declared {sorted(spec.cameras)}")
        for camera, (height, width) in spec.cameras.items():
            _check(producer, f"images[{camera}]", self.images[camera], np.uint8, (height, width, 3))
        _check(producer, "state", self.state, np.float32, (spec.state_dim,))
        if not isinstance(self.instruction, str) or not self.instruction:
            raise ContractError(f"{producer}: instruction is {self.instruction!r}, expected a non-empty string")


@dataclass
class ChunkResult:
    """What executing one action chunk (C control steps, open loop) in one environment gave.

    ``valid[i]`` is false for the steps after the episode ended inside the chunk; their rewards are 0. ``terminated``
    (the task ended by itself) and ``truncated`` (the step limit) are true at most at one step, the last valid one.
    ``final_observation`` is set exactly when the episode ended: the observation to bootstrap from. ``success`` is the
    simulator's own verdict at the last valid step or at any earlier one of the episode. ``frames`` are the images of
    the first camera after each valid step, when recording was asked for.
    """

    rewards: np.ndarray  # float32 [C]
    terminated: np.ndarray  # bool [C]
    truncated: np.ndarray  # bool [C]
    valid: np.ndarray  # bool [C]
    success: bool
    observation: Observation
    final_observation: Optional[Observation] = None
    frames: Optional[np.ndarray] = None  # uint8 [n valid, H, W, 3]

    @property
    def done(self) -> bool:
        return bool(self.terminated.any() or self.truncated.any())

    def check(self, spec: EnvSpec, producer: str) -> None:
        steps = len(self.valid)
        _check(producer, "rewards", self.rewards, np.float32, (steps,))
        for name in ("terminated", "truncated", "valid"):
            _check(producer, name, getattr(self, name), np.bool_, (steps,))
        count = int(self.valid.sum())
        if count == 0 or not self.valid[:count].all():
            raise ContractError(f"{producer}: valid is {self.valid.tolist()}, expected a non-empty run of true first")
        ends = np.flatnonzero(self.terminated | self.truncated)
        if len(ends) > 1 or (len(ends) == 1 and ends[0] != count - 1) or (count < steps and len(ends) == 0):
            raise ContractError(
                f"{producer}: the episode must end at its last valid step and only there; valid={self.valid.tolist()} "
                f"terminated={self.terminated.tolist()} truncated={self.truncated.tolist()}"
            )
        if self.rewards[~self.valid].any():
            raise ContractError(f"{producer}: rewards after the end of the episode: {self.rewards.tolist()}")
        if self.done != (self.final_observation is not None):
            raise ContractError(f"{producer}: final_observation must be given exactly when the episode ended")
        self.observation.check(spec, producer)
        if self.final_observation is not None:
            self.final_observation.check(spec, producer)


def check_results(results: list[ChunkResult], spec: EnvSpec, slots: list[int], length: int, producer: str) -> None:
    """Refuse what a chunk of ``length`` control steps in ``slots`` cannot have given."""
    if len(results) != len(slots):
        raise ContractError(f"{producer}: {len(results)} results for {len(slots)} slots")
    first = next(iter(spec.cameras.values()), (1, 1))
    for slot, result in zip(slots, results):
        where = f"{producer}, slot {slot}"
        result.check(spec, where)
        if len(result.valid) != length:
            raise ContractError(f"{where}: {len(result.valid)} steps for a chunk of {length}")
        frames, expected = result.frames, (int(result.valid.sum()), *first, 3)
        if frames is not None and (frames.shape != expected or frames.dtype != np.uint8):
            raise ContractError(
                f"{where}: frames are {frames.dtype} {list(frames.shape)}, expected uint8 {list(expected)}"
            )


def check_actions(actions: np.ndarray, spec: EnvSpec, producer: str) -> None:
    """Refuse an action batch [n, C, A] that is not float32, not of the declared dimension, or not finite."""
    _check(producer, "actions", actions, np.float32, (None, None, spec.action_dim))


@dataclass
class Trajectory:
    """One finished episode as T samples, one per chunk step.

    ``samples`` maps a field to an array [T, ...]: ``in.*`` (prepared inputs), ``trace.*``, ``logprob``, ``value``,
    ``rewards``, ``terminated``, ``truncated``, ``valid``, ``version``, ``bootstrap`` (the value of the final
    observation at the chunk that was truncated, else 0; shaped like ``value``) and ``bootstrap_version`` (whose it is).
    """

    episode: Episode
    samples: dict[str, np.ndarray]
    success: bool
    frames: list[np.ndarray] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.samples["valid"])

    @property
    def episode_return(self) -> float:
        return float(self.samples["rewards"].sum())

    @property
    def control_steps(self) -> int:
        return int(self.samples["valid"].sum())

    def keys(self) -> list[str]:
        """Names of the samples in the store; unique within a run, sortable into episode order."""
        return [f"{self.episode.episode_id}_{t}" for t in range(len(self))]
