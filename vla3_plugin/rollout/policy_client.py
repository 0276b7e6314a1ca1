"""Asking the policy from an env worker: one policy worker is its own, the others step in while that one is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import ray

from vla3_plugin.policies.base import NoiseKey
from vla3_plugin.rollout.episodes import Mode
from vla3_plugin.telemetry import traffic

_PAUSE_S = 0.5  # between two rounds of asking workers of which none can answer


class NotServingError(RuntimeError):
    """The policy worker holds no verified weights yet: it was restarted a moment ago."""


class NoAnswer(RuntimeError):
    """A policy of this process did not answer in time."""


class InProcess(Protocol):
    """A policy of this process: see ``hosting.LocalPolicy``."""

    version: int

    def act(
        self, inputs: dict[str, np.ndarray], keys: Sequence[NoiseKey], mode: Mode, timeout: float
    ) -> dict[str, np.ndarray]: ...


class PolicyClient:
    """``act`` as ``interaction.Act``. ``workers``: actor handles, or a policy ``InProcess``.

    A request whose worker dies is asked again elsewhere: noise is keyed by episode and chunk, so whoever answers under
    the same version gives the same chunk.
    """

    def __init__(self, workers: Sequence[Any], deadline_s: float) -> None:
        self.workers, self.deadline_s = list(workers), deadline_s

    def act(self, inputs: dict[str, np.ndarray], keys: Sequence[NoiseKey], mode: Mode) -> dict[str, np.ndarray]:
        """
        Raises:
            TimeoutError: no worker answered within the deadline; says why each did not.
        """
        start, why = time.monotonic(), {}
        while (left := start + self.deadline_s - time.monotonic()) > 0:
            for rank, worker in enumerate(self.workers):
                try:
                    return _ask(worker, inputs, keys, mode, max(left, 0.001))
                except (ray.exceptions.GetTimeoutError, NoAnswer):
                    why[rank] = "no answer"
                    break
                except (ray.exceptions.RayActorError, NotServingError) as error:
                    why[rank] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            else:
                time.sleep(_PAUSE_S)
        raise TimeoutError(
            f"no policy worker answered {len(keys)} requests within vla3.deadline_s = {self.deadline_s} s, first "
            f"request (seed, episode, chunk): {tuple(keys[0])}; "
            + "; ".join(f"{self.workers[rank]}: {reason}" for rank, reason in why.items())
        )


def _ask(
    worker: Any, inputs: dict[str, np.ndarray], keys: Sequence[NoiseKey], mode: Mode, timeout: float
) -> dict[str, np.ndarray]:
    if isinstance(worker, ray.actor.ActorHandle):
        output = ray.get(worker.act.remote(inputs, list(keys), mode), timeout=timeout)
        traffic.count("policy_to_env", output)
        return output
    if worker.version < 0:
        raise NotServingError("it was restarted and waits for its weights")
    return worker.act(inputs, list(keys), mode, timeout)
