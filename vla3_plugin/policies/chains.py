"""Denoising chains that outlive one call, so that requests at different steps can share a forward of the expert.

A flow policy takes the time per sample: nothing binds the rows of a batch to one step. ``Chains`` keeps, row by row,
what a request needs to go on (its encoded prefix, its noise, how far it is), and ``run_chains`` is the simple way
through: everybody begins, steps and ends together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from vla3_plugin.policies.base import ActionChunk, NoiseKey

Mode = Literal["train", "eval"]


@dataclass(eq=False)
class Chains:
    """B running chains of K steps; every tensor leads with B.

    ``prefix``: what the policy encoded once, private to it, read by each step and changed by none. ``chain`` float32
    [B, K + 1, H, A] (float64 for a float64 policy): row i is filled up to ``step[i]``, zeros beyond. ``noise`` float32
    [B, 1 or K, H, A] of the stochastic steps. ``logprob`` [B, C, D]: the steps so far. ``value`` float32 [B, 1 or C].
    ``sde_step`` int64 [B]: the stochastic step, -1 where it is not one. ``train`` bool [B]: false rows take ODE steps
    only. ``step`` int64 [B]: steps done.

    ``sde_step``, ``train`` and ``step`` stay on the CPU, where the lane decides who leaves; the rest is on the device.
    """

    prefix: dict[str, Tensor]
    chain: Tensor
    noise: Tensor
    logprob: Tensor
    value: Tensor
    sde_step: Tensor
    train: Tensor
    step: Tensor

    def __len__(self) -> int:
        return len(self.step)

    @property
    def num_steps(self) -> int:
        return self.chain.shape[1] - 1

    @property
    def complete(self) -> Tensor:
        """bool [B], on the CPU."""
        return self.step >= self.num_steps

    def select(self, rows: Tensor) -> Chains:
        """The given rows, in that order, copied. ``rows``: int64 indices, or bool [B]."""
        index = (rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows).cpu()
        places = {self.step.device: index, self.chain.device: index.to(self.chain.device)}
        return Chains._map(lambda parts: parts[0].index_select(0, places[parts[0].device]), [self])

    def split(self, leaving: Tensor) -> tuple[Chains, Chains | None]:
        """Those that leave (``leaving`` bool [B]), without their prefix, and those that stay, None if nobody does."""
        bare = replace(self, prefix={})
        if bool(leaving.all()):
            return bare, None
        return bare.select(leaving), self.select(~leaving)

    @staticmethod
    def cat(parts: Sequence[Chains]) -> Chains:
        """One batch of all rows, in order; a single part is returned as it is.

        Raises:
            ValueError: the parts are of different policies or settings (their shapes differ beyond B).
        """
        if len(parts) == 1:
            return parts[0]
        if len({part._shape() for part in parts}) != 1:
            raise ValueError(
                f"chains of different shapes cannot share a batch: {[part._shape() for part in parts]}; inputs must be "
                "prepared, and chains begun, by one policy with one num_steps"
            )
        return Chains._map(torch.cat, parts)

    def _shape(self) -> tuple[Any, ...]:
        named = [*self.prefix.items(), ("chain", self.chain), ("noise", self.noise)]
        return tuple((name, *tensor.shape[1:]) for name, tensor in named)

    @staticmethod
    def _map(join: Callable[[list[Tensor]], Tensor], parts: Sequence[Chains]) -> Chains:
        """``join(tensors of one name, one a part)`` for every tensor."""
        joined: dict[str, Any] = {
            field.name: join([getattr(part, field.name) for part in parts])
            for field in fields(Chains)
            if field.name != "prefix"
        }
        prefix = {name: join([part.prefix[name] for part in parts]) for name in parts[0].prefix}
        return Chains(prefix=prefix, **joined)


@runtime_checkable
class DenoisingPolicy(Protocol):
    """A flow policy whose denoising steps can be shared between requests that did not begin together."""

    @property
    def num_denoising_steps(self) -> int: ...

    def begin(self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Mode) -> Chains:
        """Encode the prefix, draw the noise, stand at step 0."""
        ...

    def denoise(self, chains: Chains) -> None:
        """One step for every row, each at its own ``step``, in place.

        Raises:
            IndexError: a row is complete already.
        """
        ...

    def finish(self, chains: Chains) -> ActionChunk:
        """What ``act`` returns, for complete chains of one mode; needs no prefix.

        Raises:
            ValueError: a chain is not complete, or the modes are mixed (only training has a trace).
        """
        ...


def run_chains(
    policy: DenoisingPolicy, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Mode
) -> ActionChunk:
    """``act`` of a denoising policy: all rows from begin to end together."""
    chains = policy.begin(inputs, noise_keys, mode)
    for _ in range(policy.num_denoising_steps):
        policy.denoise(chains)
    return policy.finish(chains)
