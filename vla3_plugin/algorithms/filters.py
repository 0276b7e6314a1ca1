"""Which trajectories are worth a gradient: the success-rate filter on group means."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vla3_plugin.algorithms.advantages import group_rows


@dataclass(frozen=True)
class FilterResult:
    """``keep`` bool [B], and how many trajectories each reason accounts for (they add up to B)."""

    keep: Tensor
    kept: int
    below_lower_bound: int
    above_upper_bound: int


@torch.no_grad()
def filter_rewards(
    *, returns: Tensor, group_ids: Tensor, rewards_lower_bound: float, rewards_upper_bound: float
) -> FilterResult:
    """Keep the groups whose mean return lies in [rewards_lower_bound, rewards_upper_bound], bounds included.

    A group that nearly always fails, or nearly always succeeds, teaches little; the bounds are in units of return, so
    with a success reward of 5 "between 10 % and 90 % success" is 0.5 to 4.5. ``returns`` [B], ``group_ids`` int [B] in
    any order. A group is kept or dropped as a whole.
    """
    if not rewards_lower_bound <= rewards_upper_bound:
        raise ValueError(
            f"rewards_lower_bound: {rewards_lower_bound} is above rewards_upper_bound: {rewards_upper_bound}, so every "
            "group would be dropped; swap them"
        )
    _, row, _, means = group_rows(group_ids, returns)
    # A mean like 0.1 is not exact in float32; a group that sits on a bound is inside.
    slack = 1e-6 * max(1.0, abs(rewards_lower_bound), abs(rewards_upper_bound))
    below = (means < rewards_lower_bound - slack)[row]
    above = (means > rewards_upper_bound + slack)[row]
    keep = ~(below | above)
    return FilterResult(
        keep=keep,
        kept=int(keep.sum()),
        below_lower_bound=int(below.sum()),
        above_upper_bound=int(above.sum()),
    )
