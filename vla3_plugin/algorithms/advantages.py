"""Advantages: GAE at action or chunk level, and GRPO. Also the move between flat samples and padded trajectories.

A training sample is one chunk step; samples arrive flat, [N, ...], in any order. A trajectory is the ordered list of
its samples. Advantage functions take padded [B, T, ...] tensors with a mask; :func:`trajectory_layout` says where each
sample belongs, :func:`pad` and :func:`unpad` move data there and back.

Everything here is arithmetic on data, nothing carries a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vla3_plugin.algorithms.granularity import aggregate_flags, aggregate_rewards, parse_reward_level

EQUAL_RETURNS_RTOL = 1e-6  # returns of a group that differ by less than this share of the largest are equal


@dataclass(frozen=True)
class TrajectoryLayout:
    """Where flat sample n sits among padded trajectories: ``row[n]``, ``column[n]``, both int64 [N].

    ``mask`` bool [B, T] marks the cells that hold a sample; row b is trajectory ``trajectory_ids[b]`` (ascending).
    """

    row: Tensor
    column: Tensor
    mask: Tensor
    trajectory_ids: Tensor


def trajectory_layout(trajectory: Tensor, chunk: Tensor) -> TrajectoryLayout:
    """Layout of N samples from their trajectory ids and chunk indices, both int [N], in any order.

    Raises ValueError when a trajectory misses a chunk or has one twice: its advantages would be silently wrong.
    """
    if trajectory.dim() != 1 or trajectory.shape != chunk.shape or len(trajectory) == 0:
        raise ValueError(
            f"trajectory {list(trajectory.shape)} and chunk {list(chunk.shape)}: expected equal shapes [N], N > 0"
        )
    ids, row = torch.unique(trajectory, return_inverse=True)
    column = chunk.long()
    lengths = torch.bincount(row, minlength=len(ids))
    longest = int(lengths.max())
    fits = (column >= 0) & (column < lengths[row])
    hits = torch.zeros(len(ids), longest, dtype=torch.long, device=row.device)
    hits.index_put_((row[fits], column[fits]), torch.ones((), dtype=torch.long, device=row.device), accumulate=True)
    mask = torch.arange(longest, device=row.device) < lengths.unsqueeze(1)
    if not bool(fits.all()) or not bool((hits == mask).all()):
        bad = int((hits != mask).any(1).nonzero()[0])
        found = sorted(column[row == bad].tolist())
        raise ValueError(
            f"trajectory {ids[bad].item()} has chunk indices {found}, expected each of 0..{len(found) - 1} once"
        )
    return TrajectoryLayout(row=row, column=column, mask=mask, trajectory_ids=ids)


def pad(x: Tensor, layout: TrajectoryLayout) -> Tensor:
    """Flat samples [N, ...] as padded trajectories [B, T, ...], zeros (false) where there is no sample."""
    if x.shape[:1] != layout.row.shape:
        raise ValueError(f"x has shape {list(x.shape)}, the layout holds {len(layout.row)} samples")
    padded = x.new_zeros(*layout.mask.shape, *x.shape[1:])
    padded[layout.row, layout.column] = x
    return padded


def unpad(padded: Tensor, layout: TrajectoryLayout) -> Tensor:
    """Padded trajectories [B, T, ...] back to flat samples [N, ...] in their original order."""
    if padded.shape[:2] != layout.mask.shape:
        raise ValueError(f"padded has shape {list(padded.shape)}, the layout is {list(layout.mask.shape)}")
    return padded[layout.row, layout.column]


def per_trajectory(x: Tensor, layout: TrajectoryLayout) -> Tensor:
    """What every sample of a trajectory carries alike (group id, success), [N, ...], once a trajectory: [B, ...]."""
    first = pad(x, layout)[:, 0]
    if not bool((first[layout.row] == x).all()):
        raise ValueError("a value that must be the same in all samples of a trajectory differs between them")
    return first


@torch.no_grad()
def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    valid: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor | None,
    gamma: float,
    gae_lambda: float,
    reward_type: str,
    bootstrap_type: Literal["standard", "always"] = "standard",
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) over padded trajectories.

    δ_t = r_t + γ V(s_{t+1}) − V(s_t),  A_t = δ_t + γλ A_{t+1},  return_t = A_t + V(s_t).

    ``reward_type`` ``action``: every valid control step is a step, ``values`` [B, T, C]. ``chunk``: every chunk is a
    step with the sum of its valid rewards, γ and λ act once a chunk, ``values`` [B, T, 1]. Invalid steps (after an end
    inside a chunk, not executed, or padding) are skipped: after the last valid step of a chunk comes the next chunk's.

    Where an episode ends the sum stops. After termination V(s_{t+1}) is 0. After truncation the world would have gone
    on, so V(s_{t+1}) is the value of the *final* observation (not of the one after a reset): ``final_values`` [B], one
    a trajectory, or [B, T, C] / [B, T, 1], read at the step that was truncated. A row whose last valid step has neither
    flag was cut by the end of collection; it bootstraps in the same way. With an action-level value head the value of
    an observation is its first entry. ``bootstrap_type: always`` treats termination as truncation. A step that is both
    terminated and truncated counts as terminated.

    ``rewards``, ``valid``, ``terminated``, ``truncated`` [B, T, C], the last three bool, ``valid`` false in padding.
    ``final_values`` None asserts that nothing needs a bootstrap. Returns advantages and returns, both of the shape of
    ``values``, zero where invalid, float32 (float64 if ``values`` are).
    """
    level = parse_reward_level(reward_type)
    batch, length, chunk_size = rewards.shape
    width = chunk_size if level == "action" else 1
    for name, tensor in (("valid", valid), ("terminated", terminated), ("truncated", truncated)):
        if tensor.shape != rewards.shape or tensor.dtype != torch.bool:
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected bool {list(rewards.shape)}")
    if values.shape != (batch, length, width):
        raise ValueError(
            f"values have shape {list(values.shape)}, expected {[batch, length, width]} at reward_type {level!r}"
        )
    if bootstrap_type not in ("standard", "always"):
        raise ValueError(f"bootstrap_type: {bootstrap_type!r}, expected standard or always")
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32

    ends_here = aggregate_flags(terminated, valid, reward_type=level).flatten(1)
    cut_here = aggregate_flags(truncated, valid, reward_type=level).flatten(1)
    if bootstrap_type == "always":
        cut_here, ends_here = cut_here | ends_here, torch.zeros_like(ends_here)
    cut_here = cut_here & ~ends_here
    bootstrap = _bootstrap_values(final_values, valid, level).to(dtype).flatten(1)
    reward = aggregate_rewards(rewards.to(dtype), valid, reward_type=level).flatten(1)
    live = aggregate_flags(valid, valid, reward_type=level).flatten(1)
    value = torch.where(live, values.to(dtype).flatten(1), 0.0)

    steps = torch.arange(live.shape[1], device=live.device)
    last = torch.where(live, steps, -1).amax(1)
    open_end = (steps == last.unsqueeze(1)) & ~ends_here & ~cut_here
    if final_values is None and bool((cut_here | open_end).any()):
        row = int((cut_here | open_end).any(1).nonzero()[0])
        raise ValueError(
            f"trajectory {row} was truncated or cut before its end, so its last step needs the value of the final "
            "observation; pass final_values"
        )

    advantage = torch.zeros_like(value)
    next_value, next_advantage = value.new_zeros(batch), value.new_zeros(batch)
    for t in reversed(range(live.shape[1])):
        after = torch.where(cut_here[:, t] | open_end[:, t], bootstrap[:, t], next_value)
        after = torch.where(ends_here[:, t], 0.0, after)
        goes_on = ~(ends_here[:, t] | cut_here[:, t] | open_end[:, t])
        delta = reward[:, t] + gamma * after - value[:, t]
        current = delta + gamma * gae_lambda * torch.where(goes_on, next_advantage, 0.0)
        advantage[:, t] = torch.where(live[:, t], current, 0.0)
        next_advantage = torch.where(live[:, t], current, next_advantage)
        next_value = torch.where(live[:, t], value[:, t], next_value)
    advantages = advantage.view_as(values)
    return advantages, advantages + value.view_as(values)


def _bootstrap_values(final_values: Tensor | None, valid: Tensor, level: str) -> Tensor:
    """``final_values`` in any accepted form as [B, T, C] (action) or [B, T, 1] (chunk)."""
    batch, length, chunk_size = valid.shape
    width = chunk_size if level == "action" else 1
    if final_values is None:
        return torch.zeros(batch, length, width, device=valid.device)
    if final_values.shape == (batch,):
        return final_values.view(batch, 1, 1).expand(batch, length, width)
    if final_values.shape == (batch, length, 1):
        return final_values.expand(batch, length, width)
    if final_values.shape == (batch, length, chunk_size):
        if level == "action":
            return final_values
        # The one entry of a chunk that matters is at its last valid step: an episode ends there or not at all.
        last = torch.where(valid, torch.arange(chunk_size, device=valid.device), -1).argmax(-1, keepdim=True)
        return final_values.gather(-1, last)
    raise ValueError(
        f"final_values have shape {list(final_values.shape)}, expected [{batch}], {[batch, length, 1]} or "
        f"{[batch, length, chunk_size]}"
    )


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares (float64) of a set of numbers; sets are joined by adding them."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Moments:
        picked = x[mask.expand_as(x)].double()
        return cls(picked.numel(), float(picked.sum()), float(picked.square().sum()))

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def std(self) -> float:
        """Unbiased over the count."""
        return max(0.0, (self.squares - self.count * self.mean**2) / (self.count - 1)) ** 0.5


@torch.no_grad()
def normalise(x: Tensor, mask: Tensor, mean: float, std: float, eps: float = 1e-8) -> Tensor:
    """(x − mean) / (std + eps) under ``mask`` (broadcastable bool), zero elsewhere. With a streaming learner mean and
    std are those of an earlier batch, because this one's are not known before it is complete.
    """
    white = (x.double() - mean) / (std + eps)
    return torch.where(mask.expand_as(x), white, 0.0).to(x.dtype)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """``normalise`` by the mean and the unbiased standard deviation of the elements under ``mask`` themselves.

    With ``shift_mean`` false only the scale changes.
    """
    mask = mask.expand_as(x)
    count = int(mask.sum())
    if count < 2:
        raise ValueError(f"whitening needs at least 2 valid elements, got {count}")
    picked = x[mask].double()
    return normalise(x, mask, float(picked.mean()) if shift_mean else 0.0, float(picked.std()), eps)


def trajectory_returns(rewards: Tensor, valid: Tensor) -> Tensor:
    """Undiscounted return [B] (float64) of each padded trajectory: the sum of its valid rewards [B, T, C]."""
    return torch.where(valid, rewards, 0.0).double().sum((1, 2))


def group_rows(group_ids: Tensor, returns: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distinct group ids [G], group index of each trajectory [B], group sizes [G], mean return of each group [G]."""
    if returns.dim() != 1 or group_ids.shape != returns.shape:
        raise ValueError(
            f"returns {list(returns.shape)} and group_ids {list(group_ids.shape)}: expected equal shapes [B]"
        )
    if not bool(torch.isfinite(returns).all()):
        bad = int((~torch.isfinite(returns)).nonzero()[0])
        raise ValueError(f"return of trajectory {bad} (group {group_ids[bad].item()}) is {returns[bad].item()}")
    ids, row = torch.unique(group_ids, return_inverse=True)
    sizes = torch.bincount(row, minlength=len(ids))
    sums = torch.zeros(len(ids), dtype=torch.float64, device=returns.device).index_add_(0, row, returns.double())
    return ids, row, sizes, sums / sizes


@torch.no_grad()
def grpo(
    *,
    returns: Tensor,
    group_ids: Tensor,
    group_size: int | None = None,
    normalize_by_std: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantages: A = (R − mean) / (std + eps) inside the group (Shao et al. 2024, section 4.1).

    ``returns`` [B]; ``group_ids`` int [B], in any order. The std is the unbiased one (division by n − 1), as RLinf and
    verl take it; in a group of 8 the biased one would make every advantage 7 % larger. ``normalize_by_std`` false
    leaves the division out (Dr. GRPO). A group whose returns are all equal has nothing to say: its advantages are
    exactly zero and its trajectories are marked unusable, so that they do not dilute the loss denominator.

    Returns advantages float32 [B] (float64 if ``returns`` are) and ``usable`` bool [B]. Raises ValueError for a group
    of one (its std does not exist) and, given ``group_size``, for a group of any other size.
    """
    ids, row, sizes, means = group_rows(group_ids, returns)
    if group_size is not None and group_size < 2:
        raise ValueError(f"group_size: {group_size}, a group must have at least 2 trajectories to compare; use 4 to 16")
    wrong = (sizes < 2) if group_size is None else (sizes != group_size)
    if bool(wrong.any()):
        bad = int(wrong.nonzero()[0])
        expected = "at least 2" if group_size is None else f"group_size = {group_size}"
        raise ValueError(
            f"group {ids[bad].item()} has {int(sizes[bad])} trajectories, expected {expected}: relative advantages "
            "need the whole group; raise group_size, or wait for the rest of the group"
        )
    centred = returns.double() - means[row]
    variance = torch.zeros_like(means).index_add_(0, row, centred.square()) / (sizes - 1)
    spread = torch.zeros_like(means).scatter_reduce_(0, row, centred.abs(), "amax")
    largest = torch.zeros_like(means).scatter_reduce_(0, row, returns.double().abs(), "amax")
    usable = (spread > EQUAL_RETURNS_RTOL * largest)[row]
    scaled = centred / (variance.sqrt()[row] + eps) if normalize_by_std else centred
    dtype = torch.float64 if returns.dtype == torch.float64 else torch.float32
    return torch.where(usable, scaled, 0.0).to(dtype), usable


def broadcast_trajectory(x: Tensor, valid: Tensor, *, reward_type: str) -> Tensor:
    """One number a trajectory, [B], to all its valid actions [B, T, C] or chunks [B, T, 1]; zero (false) elsewhere."""
    live = aggregate_flags(valid, valid, reward_type=reward_type)
    return torch.where(live, x.view(-1, 1, 1), torch.zeros((), dtype=x.dtype, device=x.device))
