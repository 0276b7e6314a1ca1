"""The success-rate filter drops whole groups by their mean return and says why."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.algorithms.filters import filter_rewards


def test_groups_outside_the_bounds_are_dropped_whole_and_counted_by_reason() -> None:
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    groups = torch.tensor([4, 9, 4, 9, 2, 2, 9])  # means: group 4 is 0, group 9 is 1, group 2 is 0.5
    result = filter_rewards(returns=returns, group_ids=groups, rewards_lower_bound=0.1, rewards_upper_bound=0.9)
    assert result.keep.tolist() == [False, False, False, False, True, True, False]
    assert (result.kept, result.below_lower_bound, result.above_upper_bound) == (2, 2, 3)


def test_a_group_on_a_bound_is_kept() -> None:
    returns = torch.tensor([1.0] + [0.0] * 9 + [1.0] * 9 + [0.0])  # means 0.1 and 0.9
    groups = torch.tensor([0] * 10 + [1] * 10)
    result = filter_rewards(returns=returns, group_ids=groups, rewards_lower_bound=0.1, rewards_upper_bound=0.9)
    assert result.kept == 20


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_the_filter_follows_the_group_mean_in_any_order(samples: list[tuple[int, int]], random) -> None:
    random.shuffle(samples)
    groups, rewards = zip(*samples, strict=True)
    result = filter_rewards(
        returns=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.tensor(groups),
        rewards_lower_bound=1.0,
        rewards_upper_bound=3.0,
    )
    for kept, group in zip(result.keep.tolist(), groups, strict=True):
        members = [r for g, r in samples if g == group]
        assert kept == (len(members) <= sum(members) <= 3 * len(members))
    assert result.kept + result.below_lower_bound + result.above_upper_bound == len(samples)


def test_bounds_in_the_wrong_order_and_returns_that_are_not_numbers_are_refused() -> None:
    returns, groups = torch.tensor([0.0, float("nan")]), torch.tensor([3, 3])
    with pytest.raises(ValueError, match="rewards_lower_bound: 0.9 is above rewards_upper_bound: 0.1"):
        filter_rewards(returns=returns, group_ids=groups, rewards_lower_bound=0.9, rewards_upper_bound=0.1)
    with pytest.raises(ValueError, match=r"return of trajectory 1 \(group 3\) is nan"):
        filter_rewards(returns=returns, group_ids=groups, rewards_lower_bound=0.1, rewards_upper_bound=0.9)
