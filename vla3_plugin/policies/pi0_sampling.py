"""Sampling of the pi0 family, in the three parts that ``DenoisingPolicy`` names: begin, one step, finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from vla3_plugin.policies import flow
from vla3_plugin.policies.base import ActionChunk, NoiseKey
from vla3_plugin.policies.chains import Chains, Mode
from vla3_plugin.policies.noise import keyed_generator
from vla3_plugin.policies.pi0_modules import Prefix, ReadLayer, WriteLayer

if TYPE_CHECKING:
    from vla3_plugin.policies.pi0 import PI0Policy


def begin(policy: PI0Policy, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Mode) -> Chains:
    if mode not in ("train", "eval"):
        raise ValueError(f"mode is {mode!r}, expected train or eval")
    size, device = len(inputs["state"]), next(policy.parameters()).device
    if len(noise_keys) != size:
        raise ValueError(f"{len(noise_keys)} noise keys for a batch of {size}")
    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
    x, noise, sde_step = policy._draw(noise_keys, mode)
    prefix = policy.encode(inputs)
    dtype = torch.float64 if policy.dtype == torch.float64 else torch.float32
    chain = torch.zeros(size, policy.policy.num_steps + 1, *x.shape[1:], dtype=dtype, device=device)
    chain[:, 0] = x.to(device)
    return Chains(
        prefix=_kept(prefix),
        chain=chain,
        noise=noise.to(device),
        logprob=torch.zeros_like(policy._executed(chain[:, 0])),
        value=policy.value(prefix),
        sde_step=sde_step,
        train=torch.full((size,), mode == "train"),
        step=torch.zeros(size, dtype=torch.long),
    )


def denoise(policy: PI0Policy, chains: Chains) -> None:
    joint, device = policy.policy.sde_mode == "joint", chains.chain.device
    rows, step = torch.arange(len(chains), device=device), chains.step.to(device)
    x = chains.chain[rows, step]
    v = policy.velocity(_shown(chains.prefix), x, policy._time(chains.step, len(chains), device))
    stochastic = chains.train if joint else chains.train & (chains.sde_step == chains.step)
    mean, std = policy._transition(x, v, chains.step, stochastic.to(device))
    x = mean + std * (chains.noise[rows, step] if joint else chains.noise[:, 0])
    chains.chain[rows, step + 1] = x
    chains.logprob += flow.elementwise_logprob(
        policy._executed(x), policy._executed(mean), policy._executed(std), require_density=False
    )
    chains.step += 1


def finish(policy: PI0Policy, chains: Chains) -> ActionChunk:
    if not bool(chains.complete.all()):
        raise ValueError(f"chains stand at steps {chains.step.tolist()}, expected {chains.num_steps}: denoise them on")
    train = bool(chains.train.any())
    if train and not bool(chains.train.all()):
        raise ValueError("chains of both modes in one batch, expected one: select the rows of each mode, finish twice")
    logprob = chains.logprob
    if train and policy.policy.sde_mode == "joint" and policy.policy.joint_reduction == "mean":
        logprob = logprob / policy._stochastic_steps
    actions = policy.processing.env_actions(policy._executed(chains.chain[:, -1]))
    trace = {"chain": chains.chain, "sde_step": chains.sde_step.to(chains.chain.device)} if train else {}
    return ActionChunk(actions, logprob, chains.value, trace)


def draw(policy: PI0Policy, keys: Sequence[NoiseKey], mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """Initial noise [B, H, A], noise of the stochastic steps [B, 1 or K, H, A], and which step [B] (-1: all).

    The initial noise is drawn first, so that it is the same in both modes. float32, on the CPU.
    """
    settings, shape = policy.policy, (policy.config.chunk_size, policy.config.max_action_dim)
    if mode == "train" and policy._stochastic_steps == 0:
        raise ValueError(
            f"policy.noise_level is {settings.noise_level} with {settings.method} and {settings.num_steps} steps: "
            "no step is stochastic, so there is no likelihood to train on; raise policy.noise_level"
        )
    joint = settings.sde_mode == "joint"
    first, later, steps = [], [], []
    for key in keys:
        generator = keyed_generator(key)
        first.append(torch.randn(shape, generator=generator))
        if mode == "eval":
            steps.append(-1)
            later.append(torch.zeros(settings.num_steps if joint else 1, *shape))
            continue
        steps.append(
            -1
            if joint
            else flow.draw_sde_step(
                generator, settings.num_steps, noise_level=settings.noise_level, method=settings.method
            )
        )
        later.append(torch.randn((settings.num_steps if joint else 1, *shape), generator=generator))
    return torch.stack(first), torch.stack(later), torch.tensor(steps)


def _kept(prefix: Prefix) -> dict[str, Tensor]:
    """What the steps read: not the last hidden states, which served the value alone."""
    kept = {"mask": prefix.mask, "state": prefix.state}
    for i, layer in enumerate(prefix.cache.layers):
        kept |= {f"keys.{i}": layer.keys, f"values.{i}": layer.values}
    return kept


def _shown(kept: dict[str, Tensor]) -> Prefix:
    layers = []
    for i in range((len(kept) - 2) // 2):
        written = WriteLayer()
        written.update(kept[f"keys.{i}"], kept[f"values.{i}"])
        layers.append(ReadLayer(written))
    nothing = kept["state"].new_empty(len(kept["state"]), 0, 0)
    return Prefix(Cache(layers=list(layers)), kept["mask"], nothing, kept["state"])
