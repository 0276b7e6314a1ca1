"""Levels of likelihood, entropy and reward: sums, masks, and the direction advantages broadcast in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vla3_plugin.algorithms.granularity import (
    aggregate_entropy,
    aggregate_flags,
    aggregate_logprob,
    aggregate_rewards,
    broadcast_advantages,
    check_granularity,
    length_weights,
    level_mask,
    parse_level,
    parse_reward_level,
)

LEVELS = ("token", "action", "chunk")
NAN = float("nan")

shapes = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31 - 1))


def sample(shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """x [N, C, D], NaN where invalid, and valid [N, C]: each sample ends after 1 to C steps."""
    n, chunk, dim, seed = shape
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, chunk, dim, generator=gen, dtype=torch.float64)
    ends = torch.randint(1, chunk + 1, (n, 1), generator=gen)
    valid = torch.arange(chunk) < ends
    return torch.where(valid.unsqueeze(-1), x, NAN), valid


@given(shapes)
def test_every_level_sums_to_the_same_chunk_log_prob(shape: tuple[int, int, int, int]) -> None:
    x, valid = sample(shape)
    by_hand = torch.tensor(
        [sum(x[i, c, d].item() for c in range(shape[1]) if valid[i, c] for d in range(shape[2])) for i in range(len(x))]
    )
    for level in LEVELS:
        for aggregate, key in ((aggregate_logprob, "logprob_type"), (aggregate_entropy, "entropy_type")):
            total = aggregate(x, valid, **{key: level}).sum((1, 2))
            torch.testing.assert_close(total, by_hand.double(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(total, aggregate(x, valid, **{key: "chunk"}).flatten(), rtol=1e-12, atol=1e-12)


@given(shapes)
def test_aggregates_and_masks_have_one_shape_a_level(shape: tuple[int, int, int, int]) -> None:
    x, valid = sample(shape)
    n, chunk, dim, _ = shape
    expected = {"token": (n, chunk, dim), "action": (n, chunk, 1), "chunk": (n, 1, 1)}
    for level in LEVELS:
        aggregated, mask = (
            aggregate_logprob(x, valid, logprob_type=level),
            level_mask(valid, level=level, token_dim=dim),
        )
        assert aggregated.shape == mask.shape == expected[level]
        assert not aggregated[~mask].any()  # exactly zero, NaN input notwithstanding
    assert int(level_mask(valid, level="token", token_dim=dim).sum()) == dim * int(valid.sum())


def test_what_stands_at_invalid_steps_reaches_neither_value_nor_gradient() -> None:
    x = torch.tensor([[[1.0], [NAN], [float("inf")]]], requires_grad=True)
    total = aggregate_logprob(x, torch.tensor([[True, False, False]]), logprob_type="chunk")
    total.sum().backward()
    assert total.item() == 1.0
    assert x.grad is not None and x.grad.flatten().tolist() == [1.0, 0.0, 0.0]


def test_half_precision_is_summed_in_float32() -> None:
    x = torch.full((1, 50, 7), 0.1).bfloat16()
    total = aggregate_logprob(x, torch.ones(1, 50, dtype=torch.bool), logprob_type="chunk")
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(350 * float(x[0, 0, 0]), rel=1e-5)


def test_chunk_rewards_are_the_sum_of_valid_rewards_and_flags_their_any() -> None:
    rewards = torch.tensor([[[1.0, 2.0, NAN], [0.5, 0.25, 4.0]]])
    valid = torch.tensor([[[True, True, False], [True, True, True]]])
    flags = torch.tensor([[[False, True, False], [False, False, False]]])
    late = torch.tensor([[[False, False, True], [False, False, False]]])  # set after the end: means nothing
    assert aggregate_rewards(rewards, valid, reward_type="chunk").tolist() == [[[3.0], [4.75]]]
    assert aggregate_rewards(rewards, valid, reward_type="action").tolist() == [[[1.0, 2.0, 0.0], [0.5, 0.25, 4.0]]]
    assert aggregate_flags(flags, valid, reward_type="chunk").tolist() == [[[True], [False]]]
    assert not aggregate_flags(late, valid, reward_type="chunk").any()


@given(shapes)
def test_advantages_broadcast_down_to_every_element_of_their_action_or_chunk(shape: tuple[int, int, int, int]) -> None:
    n, chunk, dim, seed = shape
    sizes = {"token": (chunk, dim), "action": (chunk, 1), "chunk": (1, 1)}
    for reward_type, width in (("chunk", 1), ("action", chunk)):
        advantages = torch.randn(n, width, generator=torch.Generator().manual_seed(seed))
        for level, (rows, columns) in sizes.items():
            if (reward_type, level) == ("action", "chunk"):
                continue
            out = broadcast_advantages(
                advantages, reward_type=reward_type, logprob_type=level, chunk_size=chunk, token_dim=dim
            )
            assert out.shape == (n, rows, columns)
            for c in range(rows):
                source = advantages[:, c if reward_type == "action" else 0]
                assert torch.equal(out[:, c], source.unsqueeze(-1).expand(n, columns))


def test_advantages_never_broadcast_up() -> None:
    with pytest.raises(ValueError, match="logprob_type: 'chunk_level' with reward_type: 'action_level'.*use"):
        check_granularity(reward_type="action_level", logprob_type="chunk_level")
    with pytest.raises(ValueError, match="logprob_type: 'chunk' with reward_type: 'action'"):
        broadcast_advantages(torch.zeros(2, 3), reward_type="action", logprob_type="chunk", chunk_size=3, token_dim=1)
    with pytest.raises(ValueError, match=r"advantages have shape \[2, 1\], expected \[N, 3\]"):
        broadcast_advantages(torch.zeros(2, 1), reward_type="action", logprob_type="token", chunk_size=3, token_dim=1)


def test_long_names_mean_the_same_and_unknown_ones_are_refused_with_the_list() -> None:
    for level in LEVELS:
        assert parse_level(level, key="k") == parse_level(f"{level}_level", key="k") == level
    assert check_granularity(reward_type="chunk_level", logprob_type="token_level") == ("chunk", "token")
    with pytest.raises(ValueError, match="entropy_type: 'step' is not a level; use one of token, action, chunk"):
        parse_level("step", key="entropy_type")
    with pytest.raises(ValueError, match="reward_type: 'token' does not exist"):
        parse_reward_level("token")


@pytest.mark.parametrize("level", LEVELS)
@given(shapes)
def test_length_weights_give_the_mean_over_trajectories_of_their_own_means(
    level: str, shape: tuple[int, int, int, int]
) -> None:
    n, chunk, dim, seed = shape
    gen = torch.Generator().manual_seed(seed)
    x, valid = sample(shape)
    trajectory = torch.randint(3, (n,), generator=gen) * 5 + 7
    limit = 4 * chunk + 1
    weights = length_weights(valid, trajectory, level=level, max_episode_steps=limit)
    mask = level_mask(valid, level=level, token_dim=dim)
    values = aggregate_logprob(x, valid, logprob_type=level)
    weighted = (weights * values * mask).sum() / (weights * mask).sum()
    means = []
    for i in trajectory.unique():
        means.append(values[trajectory == i][mask[trajectory == i]].mean())
    torch.testing.assert_close(weighted, torch.stack(means).mean(), rtol=1e-5, atol=1e-6)

    # The same as padding every trajectory to the step limit: x · mask / (Σ mask / limit), averaged over all cells.
    if level == "action":
        padded, masks = torch.zeros(len(means), limit, dtype=torch.float64), torch.zeros(len(means), limit)
        for row, i in enumerate(trajectory.unique()):
            picked = values[trajectory == i][mask[trajectory == i]][:limit]
            if len(picked) < int(mask[trajectory == i].sum()):
                return  # longer than the limit: cannot be padded to it
            padded[row, : len(picked)], masks[row, : len(picked)] = picked, 1.0
        reference = (padded * masks / (masks.sum(1, keepdim=True) / limit)).mean()
        torch.testing.assert_close(weighted, reference, rtol=1e-5, atol=1e-6)


def test_a_full_length_trajectory_has_weight_one_and_an_empty_one_is_refused() -> None:
    valid = torch.ones(4, 5, dtype=torch.bool)
    weights = length_weights(valid, torch.tensor([0, 0, 1, 0]), level="token", max_episode_steps=15)
    assert weights.flatten().tolist() == [1.0, 1.0, 3.0, 1.0]
    weights = length_weights(valid, torch.tensor([0, 0, 1, 0]), level="chunk", max_episode_steps=11)  # 3 chunks
    assert weights.flatten().tolist() == [1.0, 1.0, 3.0, 1.0]
    valid[2] = False
    with pytest.raises(ValueError, match="trajectory 1 has no valid step"):
        length_weights(valid, torch.tensor([0, 0, 1, 0]), level="token", max_episode_steps=15)
