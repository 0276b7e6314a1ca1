"""At which level likelihoods, entropies, rewards and advantages live.

Three levels of one action chunk, finest first: ``token`` (every element [C, D]: an action dimension of a flow policy,
a token of a token policy), ``action`` (one control step: the sum over D) and ``chunk`` (the sum over C and D). Elements
of one chunk are conditionally independent or autoregressive, so log-probabilities and entropies add.

Everything returned here keeps three dimensions, so that levels broadcast against each other without thought: token
[N, C, D], action [N, C, 1], chunk [N, 1, 1]. Steps after the end of an episode (``valid`` false) contribute exactly
zero, whatever value, NaN included, stands there.

Advantages broadcast down (a chunk's advantage to its actions and tokens) and never up: one likelihood ratio for the
whole chunk has no use for C different advantages, so ``reward_type: action`` with ``logprob_type: chunk`` is refused.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
from torch import Tensor

Level = Literal["token", "action", "chunk"]
RewardLevel = Literal["action", "chunk"]

FINENESS: dict[str, int] = {"token": 0, "action": 1, "chunk": 2}


def parse_level(value: str, *, key: str) -> Level:
    """The level named by config key ``key``; RLinf's long names (``token_level`` and so on) mean the same."""
    short = value.removesuffix("_level") if isinstance(value, str) else value
    if short not in get_args(Level):
        raise ValueError(
            f"{key}: {value!r} is not a level; use one of token, action, chunk (or the long names token_level, "
            "action_level, chunk_level)"
        )
    return cast(Level, short)


def parse_reward_level(value: str, *, key: str = "reward_type") -> RewardLevel:
    """As :func:`parse_level`, for what exists at action and chunk level only (rewards, values)."""
    level = parse_level(value, key=key)
    if level == "token":
        raise ValueError(f"{key}: {value!r} does not exist, a single token has no reward; use action or chunk")
    return level


def check_granularity(*, reward_type: str, logprob_type: str) -> tuple[RewardLevel, Level]:
    """Parse both keys and refuse advantages that would have to broadcast up. Returns the short names."""
    reward_level = parse_reward_level(reward_type)
    logprob_level = parse_level(logprob_type, key="logprob_type")
    if FINENESS[logprob_level] > FINENESS[reward_level]:
        raise ValueError(
            f"logprob_type: {logprob_type!r} with reward_type: {reward_type!r} would give the single likelihood ratio "
            "of a chunk one advantage for each of its actions; use reward_type: chunk, or logprob_type: action or token"
        )
    return reward_level, logprob_level


def _check_valid(x: Tensor, valid: Tensor, name: str) -> None:
    if valid.dtype != torch.bool:
        raise TypeError(f"valid has dtype {valid.dtype}, expected torch.bool")
    if x.dim() != 3 or x.shape[:2] != valid.shape:
        raise ValueError(f"{name} has shape {list(x.shape)}, expected [N, C, D] with valid [N, C] {list(valid.shape)}")


def aggregate(x: Tensor, valid: Tensor, *, level: Level, name: str = "x") -> Tensor:
    """Sum ``x`` [N, C, D] up to ``level`` under ``valid`` [N, C]; the result is token [N, C, D], action [N, C, 1] or
    chunk [N, 1, 1].

    Half-precision input is summed, and returned, in float32.
    """
    _check_valid(x, valid, name)
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    x = torch.where(valid.unsqueeze(-1), x, torch.zeros((), dtype=x.dtype, device=x.device))
    if level == "token":
        return x
    return x.sum(-1, keepdim=True) if level == "action" else x.sum((-2, -1), keepdim=True)


def aggregate_logprob(logprob: Tensor, valid: Tensor, *, logprob_type: str) -> Tensor:
    """Log-probabilities [N, C, D] at ``logprob_type``; see :func:`aggregate`."""
    return aggregate(logprob, valid, level=parse_level(logprob_type, key="logprob_type"), name="logprob")


def aggregate_entropy(entropy: Tensor, valid: Tensor, *, entropy_type: str) -> Tensor:
    """Entropies [N, C, D] at ``entropy_type``; the levels of entropy and log-prob are independent of each other."""
    return aggregate(entropy, valid, level=parse_level(entropy_type, key="entropy_type"), name="entropy")


def level_mask(valid: Tensor, *, level: Level, token_dim: int = 1) -> Tensor:
    """Which elements count at ``level``: token [N, C, token_dim], action [N, C, 1], chunk [N, 1, 1] (any step)."""
    if valid.dtype != torch.bool or valid.dim() != 2:
        raise ValueError(f"valid is {valid.dtype} {list(valid.shape)}, expected torch.bool [N, C]")
    if level == "chunk":
        return valid.any(-1).view(-1, 1, 1)
    mask = valid.unsqueeze(-1)
    return mask.expand(-1, -1, token_dim) if level == "token" else mask


def aggregate_rewards(rewards: Tensor, valid: Tensor, *, reward_type: str) -> Tensor:
    """Rewards [..., C] at ``reward_type``: action [..., C] with zeros where invalid, chunk [..., 1] their sum."""
    if rewards.shape != valid.shape:
        raise ValueError(f"rewards have shape {list(rewards.shape)}, valid {list(valid.shape)}: expected equal shapes")
    rewards = torch.where(valid, rewards, torch.zeros((), dtype=rewards.dtype, device=rewards.device))
    return rewards if parse_reward_level(reward_type) == "action" else rewards.sum(-1, keepdim=True)


def aggregate_flags(flags: Tensor, valid: Tensor, *, reward_type: str) -> Tensor:
    """``terminated``, ``truncated`` or ``valid`` [..., C] at ``reward_type``; a chunk has it if a valid step has."""
    flags = flags & valid
    return flags if parse_reward_level(reward_type) == "action" else flags.any(-1, keepdim=True)


def broadcast_advantages(
    advantages: Tensor, *, reward_type: str, logprob_type: str, chunk_size: int, token_dim: int
) -> Tensor:
    """Advantages [N, 1] (``reward_type: chunk``) or [N, C] (``action``), expanded to the shape of ``logprob_type``.

    Raises ValueError where that would be a broadcast up, or where the shape is not that of ``reward_type``.
    """
    reward_level, logprob_level = check_granularity(reward_type=reward_type, logprob_type=logprob_type)
    width = chunk_size if reward_level == "action" else 1
    if advantages.dim() != 2 or advantages.shape[1] != width:
        raise ValueError(
            f"advantages have shape {list(advantages.shape)}, expected [N, {width}] at reward_type {reward_level!r}"
        )
    if logprob_level == "chunk":
        return advantages.unsqueeze(-1)
    return advantages.unsqueeze(-1).expand(-1, chunk_size, token_dim if logprob_level == "token" else 1)


def length_weights(valid: Tensor, trajectory: Tensor, *, level: Level, max_episode_steps: int) -> Tensor:
    """Weights [N, 1, 1] that give every trajectory the same say, however long it is.

    ``mean(x · mask / (Σ mask / max_episode_steps))`` over trajectories padded to the step limit is the mean over
    trajectories of each one's own mean. Without padding the same number is Σ w·x / Σ w over valid elements with
    w = L / n, n the valid elements of the sample's trajectory and L those of a full-length one, both counted in control
    steps (in chunks at chunk level, so that a half-used last chunk does not tilt the weights). Both sums add up over
    micro-batches, and the losses return exactly these two. ``trajectory`` int [N]; n is counted over the samples given,
    so call it with whole trajectories and let the weight travel with the sample.
    """
    if trajectory.shape != valid.shape[:1]:
        raise ValueError(f"trajectory has shape {list(trajectory.shape)}, expected [{valid.shape[0]}]")
    chunk_size = valid.shape[1]
    full = -(-max_episode_steps // chunk_size) if level == "chunk" else max_episode_steps
    counts = (valid.any(-1) if level == "chunk" else valid.sum(-1)).float()
    ids, row = torch.unique(trajectory, return_inverse=True)
    lengths = torch.zeros(len(ids), device=valid.device).index_add_(0, row, counts)
    if (lengths == 0).any():
        empty = ids[lengths == 0][0].item()
        raise ValueError(f"trajectory {empty} has no valid step, so it has no length to normalise by; drop it before")
    return (full / lengths)[row].view(-1, 1, 1)
