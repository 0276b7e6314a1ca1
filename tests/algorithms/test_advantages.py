"""GAE against a loop written step by step, GRPO's invariances, and the padding of trajectories."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from vla3_plugin.algorithms.advantages import (
    broadcast_trajectory,
    gae,
    grpo,
    pad,
    per_trajectory,
    trajectory_layout,
    trajectory_returns,
    unpad,
    whiten,
)

NAN = float("nan")
seeds = st.integers(0, 2**31 - 1)


def trajectories(seed: int, batch: int, length: int, chunk: int, several_episodes: bool = False) -> dict[str, Tensor]:
    """Padded random trajectories that end by termination, truncation or neither, most of them inside a chunk.

    What must not be read is NaN: rewards and values after an end and in padding, and final values where nothing ends.
    """
    gen = torch.Generator().manual_seed(seed)
    rewards, values, final_values = (
        torch.randn(batch, length, chunk, generator=gen, dtype=torch.float64) for _ in range(3)
    )
    valid = torch.zeros(batch, length, chunk, dtype=torch.bool)
    terminated, truncated = torch.zeros_like(valid), torch.zeros_like(valid)
    for b in range(batch):
        count = int(torch.randint(1, length + 1, (), generator=gen))
        for t in range(count):
            ends = t == count - 1 or (several_episodes and bool(torch.rand((), generator=gen) < 0.4))
            partly = ends or bool(torch.rand((), generator=gen) < 0.3)  # a chunk need not be executed to its end
            last = int(torch.randint(chunk, (), generator=gen)) if partly else chunk - 1
            valid[b, t, : last + 1] = True
            kind = int(torch.randint(3 if t == count - 1 else 2, (), generator=gen))
            if ends and kind < 2:
                (terminated if kind == 0 else truncated)[b, t, last] = True
            if ends and kind == 2:  # cut by the end of collection
                valid[b, t] = True
    rewards[~valid] = NAN
    values[~valid] = NAN
    behind = valid.flatten(1).flip(1).cumsum(1).flip(1).view_as(valid)  # valid steps from here on, this one included
    final_values[~(terminated | truncated | (valid & (behind == 1)))] = NAN
    return dict(
        rewards=rewards, values=values, valid=valid, terminated=terminated, truncated=truncated,
        final_values=final_values,
    )  # fmt: skip


def gae_by_hand(data: dict[str, Tensor], gamma: float, lam: float, always: bool = False) -> Tensor:
    """Every valid control step in order, one trajectory at a time, as in the textbook."""
    out = torch.zeros_like(data["rewards"])
    _, length, chunk = out.shape
    for b in range(len(out)):
        steps = [(t, c) for t in range(length) for c in range(chunk) if data["valid"][b, t, c]]
        running = 0.0
        for k in range(len(steps) - 1, -1, -1):
            at = (b, *steps[k])
            value = float(data["values"][at])
            if bool(data["terminated"][at]) and not always:
                following, running = 0.0, 0.0
            elif data["truncated"][at] or data["terminated"][at] or k == len(steps) - 1:
                following, running = float(data["final_values"][at]), 0.0
            else:
                following = float(data["values"][(b, *steps[k + 1])])
            delta = float(data["rewards"][at]) + gamma * following - value
            running = delta + gamma * lam * running
            out[at] = running
    return out


def as_chunks(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same trajectories seen as single-action chunks, whose action-level GAE is the chunk-level one."""
    valid = data["valid"]
    any_of = {k: (data[k] & valid).any(-1, keepdim=True) for k in ("terminated", "truncated", "valid")}
    last = (valid * torch.arange(1, valid.shape[-1] + 1)).argmax(-1, keepdim=True)
    return any_of | dict(
        rewards=torch.where(valid, data["rewards"], 0.0).sum(-1, keepdim=True),
        values=data["values"][..., :1],
        final_values=data["final_values"].gather(-1, last),
    )


@given(
    seeds,
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.booleans(),
)
def test_action_level_gae_equals_a_loop_over_control_steps(seed, batch, length, chunk, gamma, lam, several) -> None:
    data = trajectories(seed, batch, length, chunk, several)
    for always in (False, True):
        unread = data["terminated"] & (not always)
        given_values = torch.where(unread, NAN, data["final_values"])
        advantages, returns = gae(
            **data | dict(final_values=given_values),
            gamma=gamma,
            gae_lambda=lam,
            reward_type="action",
            bootstrap_type="always" if always else "standard",
        )
        expected = gae_by_hand(data, gamma, lam, always)
        torch.testing.assert_close(advantages, expected, rtol=1e-10, atol=1e-10)
        values = torch.where(data["valid"], data["values"], 0.0)
        torch.testing.assert_close(returns, expected + values, rtol=1e-10, atol=1e-10)


@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_chunk_level_gae_equals_a_loop_over_chunks_with_summed_rewards(seed, batch, length, chunk, several) -> None:
    data = trajectories(seed, batch, length, chunk, several)
    expected = gae_by_hand(as_chunks(data), 0.97, 0.9)
    arguments = data | dict(values=data["values"][..., :1], gamma=0.97, gae_lambda=0.9, reward_type="chunk_level")
    advantages, _ = gae(**arguments)
    assert advantages.shape == (batch, length, 1)
    torch.testing.assert_close(advantages, expected, rtol=1e-10, atol=1e-10)
    # One value a chunk is the other way to hand over the bootstrap values.
    again, _ = gae(**arguments | dict(final_values=as_chunks(data)["final_values"]))
    assert torch.equal(again, advantages)


@given(seeds, st.integers(1, 4), st.integers(1, 4), st.floats(0.5, 1.0))
def test_lambda_one_gives_discounted_returns_minus_values(seed, length, chunk, gamma) -> None:
    data = trajectories(seed, 3, length, chunk)
    final = torch.randn(3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    _, returns = gae(**data | dict(final_values=final), gamma=gamma, gae_lambda=1.0, reward_type="action")
    for b in range(3):
        valid = data["valid"][b].flatten()
        rewards = data["rewards"][b].flatten()[valid]
        tail = 0.0 if data["terminated"][b].any() else float(final[b])
        for k in range(len(rewards)):
            rest = rewards[k:]
            powers = gamma ** torch.arange(len(rest), dtype=torch.float64)
            expected = float((powers * rest).sum()) + gamma ** len(rest) * tail
            assert float(returns[b].flatten()[valid][k]) == pytest.approx(expected, abs=1e-9)


def test_a_reward_at_termination_inside_a_chunk_is_kept_and_nothing_flows_in_from_behind_it() -> None:
    rewards = torch.tensor([[[0.0, 0.0], [1.0, NAN]]])
    valid = torch.tensor([[[True, True], [True, False]]])
    terminated = torch.tensor([[[False, False], [True, False]]])
    advantages, returns = gae(
        rewards=rewards, values=torch.zeros(1, 2, 2), valid=valid, terminated=terminated,
        truncated=torch.zeros_like(valid), final_values=torch.tensor([99.0]),
        gamma=0.5, gae_lambda=1.0, reward_type="action",
    )  # fmt: skip
    assert returns.tolist() == [[[0.25, 0.5], [1.0, 0.0]]]
    assert torch.equal(advantages, returns)


def test_truncation_bootstraps_from_the_final_observation_and_termination_does_not() -> None:
    shape = (1, 1, 2)
    base = dict(
        rewards=torch.ones(shape), values=torch.zeros(shape), valid=torch.ones(shape, dtype=torch.bool),
        final_values=torch.tensor([10.0]), gamma=0.9, gae_lambda=1.0, reward_type="action",
    )  # fmt: skip
    last, none = torch.tensor([[[False, True]]]), torch.zeros(shape, dtype=torch.bool)
    truncated = gae(**base, terminated=none, truncated=last)[1]
    terminated = gae(**base, terminated=last, truncated=none)[1]
    both = gae(**base | dict(final_values=None), terminated=last, truncated=last)[1]
    torch.testing.assert_close(truncated.flatten(), torch.tensor([1.0 + 0.9 * (1.0 + 0.9 * 10.0), 1.0 + 0.9 * 10.0]))
    torch.testing.assert_close(terminated.flatten(), torch.tensor([1.9, 1.0]))
    assert torch.equal(both, terminated)


def test_an_open_end_without_final_values_is_refused() -> None:
    data = trajectories(3, 2, 2, 2) | dict(final_values=None)
    data["terminated"][:], data["truncated"][:] = False, False
    with pytest.raises(ValueError, match="trajectory 0 was truncated or cut.*pass final_values"):
        gae(**data, gamma=0.9, gae_lambda=0.9, reward_type="action")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(values=torch.zeros(2, 3, 1)), r"values have shape \[2, 3, 1\], expected \[2, 3, 4\] at reward_type"),
        (dict(valid=torch.ones(2, 3, 4)), "valid is torch.float32"),
        (dict(final_values=torch.zeros(3)), r"final_values have shape \[3\], expected \[2\]"),
        (dict(reward_type="token"), "reward_type: 'token'"),
        (dict(bootstrap_type="never"), "bootstrap_type: 'never'"),
    ],
)
def test_gae_names_the_argument_that_does_not_fit(change: dict, message: str) -> None:
    arguments = trajectories(0, 2, 3, 4) | dict(gamma=0.9, gae_lambda=0.9, reward_type="action") | change
    with pytest.raises(ValueError, match=message):
        gae(**arguments)


@given(seeds, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_padding_and_unpadding_return_every_sample_to_its_place(seed: int, lengths: list[int]) -> None:
    gen = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.full((n,), 10 * i + 3) for i, n in enumerate(lengths)])
    chunks = torch.cat([torch.arange(n) for n in lengths])
    order = torch.randperm(len(ids), generator=gen)
    ids, chunks = ids[order], chunks[order]
    x = torch.randn(len(ids), 2, 3, generator=gen)
    layout = trajectory_layout(ids, chunks)
    padded = pad(x, layout)
    assert torch.equal(unpad(padded, layout), x)
    assert layout.mask.sum(1).tolist() == lengths
    assert not padded[~layout.mask].any()
    for n in range(len(ids)):
        assert torch.equal(padded[list(layout.trajectory_ids).index(ids[n]), chunks[n]], x[n])
    assert torch.equal(per_trajectory(ids, layout), layout.trajectory_ids)


@pytest.mark.parametrize("chunks", [[0, 2, 0, 1], [0, 0, 0, 1], [1, 2, 0, 1], [-1, 0, 0, 1]])
def test_a_missing_or_doubled_chunk_is_refused_by_name(chunks: list[int]) -> None:
    with pytest.raises(ValueError, match=r"trajectory 5 has chunk indices .* expected each of 0\.\.1 once"):
        trajectory_layout(torch.tensor([5, 5, 8, 8]), torch.tensor(chunks))


def test_a_value_that_differs_within_a_trajectory_is_refused() -> None:
    layout = trajectory_layout(torch.tensor([1, 1]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="must be the same in all samples"):
        per_trajectory(torch.tensor([3, 4]), layout)


@given(seeds, st.integers(2, 30))
def test_whitened_values_have_zero_mean_and_unit_std_over_valid_elements_only(seed: int, count: int) -> None:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 7 + 2
    mask = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed + 1)) < 0.7
    assume(int(mask.sum()) >= 1)
    x = torch.where(mask, x, NAN)
    white = whiten(x, mask)
    picked = white[mask.expand_as(x)]
    assert float(picked.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(picked.std()) == pytest.approx(1.0, abs=1e-6)
    assert not white[~mask.expand_as(x)].any()
    scaled = whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(scaled[mask.expand_as(x)] - scaled[mask.expand_as(x)].mean(), picked)


def test_whitening_a_single_element_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 valid elements, got 1"):
        whiten(torch.ones(2), torch.tensor([True, False]))


# GRPO

group_sizes = st.lists(st.integers(2, 6), min_size=1, max_size=5)


def groups(seed: int, sizes: list[int]) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.full((n,), 100 - 7 * i) for i, n in enumerate(sizes)])
    return torch.randint(0, 4, ids.shape, generator=gen).double(), ids


@given(seeds, group_sizes)
def test_grpo_equals_standardising_each_group_by_itself(seed: int, sizes: list[int]) -> None:
    returns, ids = groups(seed, sizes)
    advantages, usable = grpo(returns=returns, group_ids=ids)
    plain, _ = grpo(returns=returns, group_ids=ids, normalize_by_std=False)
    for i in ids.unique():
        members = returns[ids == i]
        equal = bool((members == members[0]).all())
        assert (usable[ids == i] == (not equal)).all()
        expected = torch.zeros_like(members) if equal else (members - members.mean()) / (members.std() + 1e-6)
        torch.testing.assert_close(advantages[ids == i], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(plain[ids == i], members - members.mean(), rtol=1e-10, atol=1e-12)


@given(seeds, group_sizes)
def test_grpo_does_not_depend_on_order_or_on_other_groups(seed: int, sizes: list[int]) -> None:
    returns, ids = groups(seed, sizes)
    advantages, usable = grpo(returns=returns, group_ids=ids)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    shuffled, usable_shuffled = grpo(returns=returns[order], group_ids=ids[order])
    torch.testing.assert_close(shuffled, advantages[order], rtol=1e-12, atol=1e-12)
    assert torch.equal(usable_shuffled, usable[order])
    first = ids == ids[0]
    torch.testing.assert_close(grpo(returns=returns[first], group_ids=ids[first])[0], advantages[first])


@given(seeds, group_sizes, st.floats(0.01, 100.0), st.floats(-10.0, 10.0))
def test_grpo_does_not_feel_scale_or_offset_of_returns(
    seed: int, sizes: list[int], scale: float, offset: float
) -> None:
    returns, ids = groups(seed, sizes)
    advantages, usable = grpo(returns=returns, group_ids=ids, eps=0.0)
    moved, usable_moved = grpo(returns=scale * returns + offset, group_ids=ids, eps=0.0)
    torch.testing.assert_close(moved, advantages, rtol=1e-7, atol=1e-9)
    assert torch.equal(usable_moved, usable)


def test_equal_returns_carry_no_advantage_even_when_rounding_makes_them_differ() -> None:
    equal = torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert len(equal.unique()) == 2
    returns, ids = torch.cat([equal, torch.tensor([0.0, 5.0]).double()]), torch.tensor([1, 1, 1, 1, 2, 2])
    advantages, usable = grpo(returns=returns, group_ids=ids)
    assert usable.tolist() == [False] * 4 + [True] * 2
    assert advantages[:4].tolist() == [0.0] * 4 and advantages[4] == -advantages[5] != 0


def test_a_group_of_one_or_an_incomplete_group_is_refused() -> None:
    with pytest.raises(ValueError, match="group 7 has 1 trajectories, expected at least 2.*raise group_size"):
        grpo(returns=torch.tensor([1.0, 0.0, 1.0]), group_ids=torch.tensor([3, 3, 7]))
    with pytest.raises(ValueError, match="group 7 has 2 trajectories, expected group_size = 3"):
        grpo(returns=torch.ones(5), group_ids=torch.tensor([3, 7, 3, 7, 3]), group_size=3)
    with pytest.raises(ValueError, match="group_size: 1"):
        grpo(returns=torch.ones(2), group_ids=torch.tensor([0, 1]), group_size=1)
    with pytest.raises(ValueError, match=r"return of trajectory 1 \(group 3\) is nan"):
        grpo(returns=torch.tensor([1.0, NAN]), group_ids=torch.tensor([3, 3]))


def test_a_trajectorys_advantage_reaches_its_valid_actions_and_no_others() -> None:
    data = trajectories(11, 4, 3, 4)
    returns = trajectory_returns(data["rewards"], data["valid"])
    torch.testing.assert_close(returns, data["rewards"].nansum((1, 2)))
    advantages, usable = grpo(returns=returns, group_ids=torch.tensor([0, 1, 0, 1]))
    spread = broadcast_trajectory(advantages, data["valid"], reward_type="action")
    for b in range(4):
        assert (spread[b][data["valid"][b]] == advantages[b]).all()
        assert not spread[b][~data["valid"][b]].any()
    chunks = broadcast_trajectory(usable, data["valid"], reward_type="chunk")
    assert torch.equal(chunks, data["valid"].any(-1, keepdim=True) & usable.view(-1, 1, 1))
