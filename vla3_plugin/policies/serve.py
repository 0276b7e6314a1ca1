"""A policy behind numpy: what env workers, evaluation and tests call, whatever process the policy lives in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vla3_plugin.policies.base import NoiseKey, VLAPolicy


class ServedPolicy:
    """``policy`` on ``device`` answering batches as version ``version``; see ``rollout.interaction.Act``."""

    def __init__(self, policy: VLAPolicy, device: Any = "cpu", version: int = -1, name: str = "policy") -> None:
        self.policy, self.device, self.version, self.name = policy.eval().to(device), device, version, name

    def act(self, inputs: dict[str, np.ndarray], noise_keys: Sequence[NoiseKey], mode: str) -> dict[str, np.ndarray]:
        """Arrays ``actions``, ``logprob``, ``value``, ``trace.*``, ``version``, a row a request.

        Raises:
            FloatingPointError: the network gave a number that is not finite; it never reaches a simulator.
        """
        tensors = {name: torch.from_numpy(np.array(value)).to(self.device) for name, value in inputs.items()}
        with torch.inference_mode():
            chunk = self.policy.act(tensors, noise_keys, mode)  # type: ignore[arg-type]
        output = {"actions": chunk.actions, "logprob": chunk.logprob, "value": chunk.value}
        output |= {f"trace.{name}": value for name, value in chunk.trace.items()}
        arrays = {name: value.cpu().numpy() for name, value in output.items()}
        for name in ("actions", "logprob", "value"):
            if not np.isfinite(arrays[name]).all():
                row = int(np.argwhere(~np.isfinite(arrays[name]))[0][0])
                raise FloatingPointError(
                    f"{self.name}, version {self.version}: {name} of request {tuple(noise_keys[row])} (seed, episode, "
                    "chunk) is not finite; lower actor_rollout_ref.actor.optim.lr or its clip_grad"
                )
        arrays["version"] = np.full(len(noise_keys), self.version, dtype=np.int64)
        return arrays
