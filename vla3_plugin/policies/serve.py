"""A policy behind numpy: what env workers, evaluation and tests call, whatever process the policy lives in."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla3_plugin.policies.base import ActionChunk, NoiseKey, VLAPolicy
from vla3_plugin.policies.chains import Chains, DenoisingPolicy

Arrays = dict[str, np.ndarray]


class ServedPolicy:
    """``policy`` on ``device`` answering batches as version ``version``; see ``rollout.interaction.Act``.

    ``act`` is a whole batch at once. ``begin``, ``denoise`` and ``finish`` are the same in parts, for a policy whose
    denoising steps can be shared (``shares_steps``); see ``rollout.denoising``.
    """

    def __init__(self, policy: VLAPolicy, device: Any = "cpu", version: int = -1, name: str = "policy") -> None:
        policy.serve_on(device)
        self.policy, self.device, self.version, self.name = policy, device, version, name
        self.pinned: ServedPolicy | None = None

    def pin(self) -> None:
        """From now on ``act`` answers ``eval`` requests with a copy of the present weights, whatever is swapped in."""
        self.pinned = ServedPolicy(copy.deepcopy(self.policy), self.device, self.version, self.name)

    def unpin(self) -> None:
        self.pinned = None

    def act(self, inputs: Arrays, noise_keys: Sequence[NoiseKey], mode: str) -> Arrays:
        """Arrays ``actions``, ``logprob``, ``value``, ``trace.*``, ``version``, a row a request.

        Raises:
            FloatingPointError: the network gave a number that is not finite; it never reaches a simulator.
        """
        if mode == "eval" and self.pinned is not None:
            return self.pinned.act(inputs, noise_keys, mode)
        with torch.inference_mode():
            chunk = self.policy.act(self._tensors(inputs), noise_keys, mode)  # type: ignore[arg-type]
        return self._arrays(chunk, noise_keys)

    @property
    def shares_steps(self) -> bool:
        return isinstance(self.policy, DenoisingPolicy)

    def begin(self, inputs: Arrays, noise_keys: Sequence[NoiseKey], mode: str) -> Chains:
        with torch.inference_mode():
            return self._denoising.begin(self._tensors(inputs), noise_keys, mode)  # type: ignore[arg-type]

    def denoise(self, chains: Chains) -> None:
        """One step of every row, in place."""
        with torch.inference_mode():
            self._denoising.denoise(chains)

    def finish(self, chains: Chains, noise_keys: Sequence[NoiseKey]) -> Arrays:
        """What ``act`` would have returned and raised for these complete chains, all of one mode."""
        with torch.inference_mode():
            chunk = self._denoising.finish(chains)
        return self._arrays(chunk, noise_keys)

    @property
    def _denoising(self) -> DenoisingPolicy:
        return self.policy  # type: ignore[return-value]

    def _tensors(self, inputs: Arrays) -> dict[str, Tensor]:
        # what came from another process by Ray cannot be written to, and torch wants tensors that can
        ready = {name: value if value.flags.writeable else value.copy() for name, value in inputs.items()}
        return {name: torch.from_numpy(value).to(self.device) for name, value in ready.items()}

    def _arrays(self, chunk: ActionChunk, noise_keys: Sequence[NoiseKey]) -> Arrays:
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
