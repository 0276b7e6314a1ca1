"""Losses: micro-batch exactness, where clips let gradients through, and the estimators' known values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vla3_plugin.algorithms.losses import (
    LossSum,
    add_losses,
    decoupled_policy_loss,
    entropy_bonus,
    explained_variance,
    interpolate_proximal,
    kl_estimate,
    kl_loss,
    policy_loss,
    value_loss,
)

NAN = float("nan")
seeds = st.integers(0, 2**31 - 1)
CLIPS = dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)


def batch(seed: int, n: int, chunk: int = 3, dim: int = 2) -> dict[str, Tensor]:
    """Random elements [n, chunk, dim]; ratios range well beyond the clips, masked elements are NaN."""
    gen = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(n, chunk, dim, generator=gen, dtype=torch.float64)

    data = dict(
        parameter=normal(0.5), old=normal(0.5), behaviour=normal(0.3), advantages=normal(1.0), weights=normal(1)
    )
    mask = torch.rand(n, chunk, dim, generator=gen) < 0.7
    data = {k: torch.where(mask, v, NAN) for k, v in data.items() if k != "parameter"} | dict(
        parameter=data["parameter"], mask=mask, weights=data["weights"][:, :1, :1].abs() + 0.1
    )
    data["behaviour"] = data["old"] + data["behaviour"]
    return data


Loss = Callable[[dict[str, Tensor], Tensor], LossSum]
LOSSES: dict[str, Loss] = {
    "policy": lambda d, x: policy_loss(
        logprob=x, old_logprob=d["old"], advantages=d["advantages"], mask=d["mask"], **CLIPS
    ),
    "policy, length weights": lambda d, x: policy_loss(
        logprob=x, old_logprob=d["old"], advantages=d["advantages"], mask=d["mask"], weights=d["weights"], **CLIPS
    ),
    "decoupled": lambda d, x: decoupled_policy_loss(
        logprob=x, proximal_logprob=d["old"], behaviour_logprob=d["behaviour"], advantages=d["advantages"],
        mask=d["mask"], behave_weight_threshold=1.2, **CLIPS,
    ),
    "value": lambda d, x: value_loss(
        values=x, returns=d["advantages"], old_values=d["old"], mask=d["mask"], value_clip=0.2, huber_delta=0.5
    ),
    "kl": lambda d, x: kl_loss(logprob=x, ref_logprob=d["old"], mask=d["mask"]),
    "entropy": lambda d, x: entropy_bonus(entropy=x, mask=d["mask"], weights=d["weights"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds, n=st.integers(1, 8), data=st.data())
def test_any_split_into_micro_batches_gives_the_full_batchs_loss_gradient_and_metrics(
    name: str, seed: int, n: int, data: st.DataObject
) -> None:
    loss, whole = LOSSES[name], batch(seed, n)
    parameter = whole["parameter"].requires_grad_()
    full = loss(whole, parameter)
    (full_gradient,) = torch.autograd.grad(full.mean(), parameter)

    order = data.draw(st.permutations(range(n)))
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))})
    parts, gradient = [], torch.zeros_like(parameter)
    for begin, end in zip(cuts, cuts[1:], strict=False):
        rows = torch.tensor(order[begin:end])
        part = loss({k: v[rows] for k, v in whole.items()}, parameter[rows])
        gradient += torch.autograd.grad(part.total, parameter)[0]  # accumulated as sums, scaled once at the end
        parts.append(part)
    total = add_losses(parts)
    torch.testing.assert_close(total.mean(), full.mean(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient / total.weight.clamp_min(1e-300), full_gradient, rtol=1e-12, atol=1e-12)
    assert total.metrics() == pytest.approx(full.metrics(), rel=1e-12, abs=1e-12)
    assert not full_gradient[~whole["mask"]].any()
    assert not any(math.isnan(v) for v in full.metrics().values())


def gradient_at(ratio: float, advantage: float, **kwargs: float | None) -> float:
    """d loss / d log-prob of one element; −advantage·ratio where nothing clips."""
    logprob = torch.full((1, 1, 1), math.log(ratio), dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.bool)
    arguments = CLIPS | kwargs
    loss = policy_loss(
        logprob=logprob, old_logprob=old, advantages=torch.full_like(old, advantage), mask=mask, **arguments
    )
    loss.total.backward()
    assert logprob.grad is not None
    return float(logprob.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows", "metric"),
    [
        (1.0, 2.0, True, None),
        (1.27, 2.0, True, None),
        (1.29, 2.0, False, "clip_fraction_high"),  # good action, already likelier: stop
        (0.5, 2.0, True, None),  # good action that became unlikely: pull back
        (0.81, -2.0, True, None),
        (0.79, -2.0, False, "clip_fraction_low"),  # bad action, already rarer: stop
        (1.5, -2.0, True, None),  # bad action that became likely: push down
        (3.1, -2.0, False, "dual_clip_fraction"),  # but not without bound
        (3.1, 2.0, False, "clip_fraction_high"),
    ],
)
def test_the_clip_stops_the_gradient_on_the_right_side_only(ratio, advantage, flows, metric) -> None:
    expected = -advantage * ratio if flows else 0.0
    assert gradient_at(ratio, advantage) == pytest.approx(expected, rel=1e-12)
    one = torch.full((1, 1, 1), ratio, dtype=torch.float64)
    loss = policy_loss(
        logprob=one.log(), old_logprob=torch.zeros_like(one), advantages=advantage * torch.ones_like(one),
        mask=torch.ones(1, 1, 1, dtype=torch.bool), **CLIPS,
    )  # fmt: skip
    metrics = loss.metrics()
    fractions = {k: v for k, v in metrics.items() if k.endswith("fraction") or "_fraction_" in k}
    assert {k for k, v in fractions.items() if v == 1.0} == ({metric} if metric else set())
    assert metrics["ratio_mean"] == metrics["ratio_max"] == metrics["ratio_min"] == pytest.approx(ratio)
    assert metrics["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))


def test_dual_clip_bounds_the_loss_of_a_bad_action_and_none_turns_it_off() -> None:
    assert gradient_at(50.0, -1.0, clip_ratio_c=None) == pytest.approx(50.0)
    assert gradient_at(50.0, -1.0) == 0.0
    big = torch.full((1, 1, 1), math.log(50.0), dtype=torch.float64)
    mask = torch.ones(1, 1, 1, dtype=torch.bool)
    bounded = policy_loss(logprob=big, old_logprob=0 * big, advantages=0 * big - 1, mask=mask, clip_ratio_c=3.0)
    assert float(bounded.total) == 3.0


def test_log_ratio_clip_removes_the_gradient_beyond_it_on_both_sides() -> None:
    limits = dict(clip_log_ratio_min=-0.5, clip_log_ratio_max=0.5, clip_ratio_c=None)
    assert gradient_at(math.exp(0.6), -1.0, **limits) == 0.0
    assert gradient_at(math.exp(-0.6), 1.0, **limits) == 0.0
    assert gradient_at(math.exp(0.4), -1.0, **limits) == pytest.approx(math.exp(0.4))


def test_an_enormous_log_ratio_gives_a_finite_loss() -> None:
    far = torch.full((1, 1, 1), 500.0)
    loss = policy_loss(
        logprob=far, old_logprob=-far, advantages=-torch.ones_like(far), mask=torch.ones(1, 1, 1, dtype=torch.bool)
    )
    assert loss.total.isfinite()


@given(seeds)
def test_decoupled_loss_with_proximal_equal_to_behaviour_is_the_plain_one(seed: int) -> None:
    d = batch(seed, 4)
    plain = LOSSES["policy"](d, d["parameter"])
    decoupled = decoupled_policy_loss(
        logprob=d["parameter"], proximal_logprob=d["old"], behaviour_logprob=d["old"], advantages=d["advantages"],
        mask=d["mask"], behave_weight_threshold=2.0, **CLIPS,
    )  # fmt: skip
    torch.testing.assert_close(decoupled.mean(), plain.mean(), rtol=1e-12, atol=1e-12)


def test_behaviour_weight_scales_and_beyond_the_threshold_silences_but_stays_in_the_count() -> None:
    zero = torch.zeros(1, 2, 1, dtype=torch.float64)
    logprob = zero.clone().requires_grad_()
    behaviour = torch.tensor([[[math.log(0.5)], [math.log(0.1)]]], dtype=torch.float64)  # weights 2 and 10
    loss = decoupled_policy_loss(
        logprob=logprob, proximal_logprob=zero, behaviour_logprob=behaviour, advantages=zero + 1.0,
        mask=torch.ones(1, 2, 1, dtype=torch.bool), behave_weight_threshold=5.0,
    )  # fmt: skip
    loss.total.backward()
    assert logprob.grad is not None and logprob.grad.flatten().tolist() == pytest.approx([-2.0, 0.0])
    assert float(loss.weight) == 2.0
    metrics = loss.metrics()
    assert metrics["behave_masked_fraction"] == 0.5
    assert metrics["behave_weight_max"] == pytest.approx(10.0)


def test_interpolated_proximal_is_the_behaviour_when_fresh_and_nears_the_current_policy_with_age() -> None:
    now, then = torch.ones(3, 2, 1), torch.zeros(3, 2, 1)
    version = torch.tensor([7, 6, 4])
    proximal = interpolate_proximal(logprob=now, behaviour_logprob=then, version=version, version_now=7)
    assert proximal[:, 0, 0].tolist() == [0.0, 0.5, 0.75]
    with pytest.raises(ValueError, match="version 7, newer than the learner's, 6"):
        interpolate_proximal(logprob=now, behaviour_logprob=then, version=version, version_now=6)


def one_value(value: float, target: float, old: float | None = None, **kwargs: float) -> tuple[float, float]:
    """Value loss of a single element, and its gradient."""
    v = torch.full((1, 1), value, dtype=torch.float64, requires_grad=True)
    loss = value_loss(
        values=v,
        returns=torch.full((1, 1), target, dtype=torch.float64),
        mask=torch.ones(1, 1, dtype=torch.bool),
        old_values=None if old is None else torch.full((1, 1), old, dtype=torch.float64),
        **kwargs,
    )
    loss.total.backward()
    assert v.grad is not None
    return float(loss.total.detach()), float(v.grad)


def test_value_loss_is_half_the_squared_error_and_huber_is_linear_beyond_delta() -> None:
    assert one_value(3.0, 1.0) == (2.0, 2.0)
    assert one_value(3.0, 1.0, huber_delta=10.0) == (2.0, 2.0)
    assert one_value(3.0, 1.0, huber_delta=0.5) == (0.5 * (2.0 - 0.25), 0.5)
    assert one_value(-1.0, 1.0, huber_delta=0.5) == (0.5 * (2.0 - 0.25), -0.5)


def test_value_clip_stops_a_value_that_has_moved_enough_towards_its_target_but_never_one_that_moved_away() -> None:
    clip = dict(value_clip=0.2)
    assert one_value(0.5, 2.0, old=0.0, **clip) == (0.5 * 1.8**2, 0.0)  # moved 0.5 towards 2: clipped at 0.2
    assert one_value(0.1, 2.0, old=0.0, **clip) == pytest.approx((0.5 * 1.9**2, -1.9))  # within the clip
    assert one_value(-0.5, 2.0, old=0.0, **clip) == (0.5 * 2.5**2, -2.5)  # moved away: full pull back
    with pytest.raises(ValueError, match="value_clip: 0.2 needs old_values"):
        one_value(0.5, 2.0, **clip)


@given(seeds, st.floats(0.01, 3.0))
def test_kl_estimators_agree_with_their_definitions_and_k3_is_never_negative(seed: int, scale: float) -> None:
    gen = torch.Generator().manual_seed(seed)
    logprob, ref = (scale * torch.randn(50, generator=gen, dtype=torch.float64) for _ in range(2))
    d = logprob - ref
    for names, expected in (
        (("k1", "kl"), d),
        (("k2", "mse"), d.square() / 2),
        (("k3", "low_var_kl"), (-d).exp() - 1 + d),
        (("abs",), d.abs()),
    ):
        for name in names:
            torch.testing.assert_close(kl_estimate(logprob, ref, kind=name), expected)
    assert (kl_estimate(logprob, ref, kind="k3") >= 0).all()
    assert (kl_estimate((logprob * 100).float(), ref.float(), kind="k3") >= 0).all()
    assert not kl_estimate(ref, ref, kind="k3").any()


def test_k1_and_k3_estimate_the_kl_of_two_gaussians_and_k3_with_less_variance() -> None:
    policy, reference = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.2, 1.1)
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = float(torch.distributions.kl_divergence(policy, reference))
    estimates = {k: kl_estimate(policy.log_prob(x), reference.log_prob(x), kind=k) for k in ("k1", "k3")}
    for samples in estimates.values():
        assert abs(float(samples.mean()) - exact) < 5 * float(samples.std()) / math.sqrt(len(x))
    assert estimates["k3"].std() < 0.5 * estimates["k1"].std()


def test_the_gradient_of_the_kl_stays_out_of_the_reference() -> None:
    logprob, ref = torch.zeros(1, 1, 1, requires_grad=True), torch.ones(1, 1, 1, requires_grad=True)
    kl_loss(logprob=logprob, ref_logprob=ref, mask=torch.ones(1, 1, 1, dtype=torch.bool)).total.backward()
    assert ref.grad is None and logprob.grad is not None
    assert float(logprob.grad) == pytest.approx(1 - math.e)


def test_explained_variance_is_one_for_perfect_zero_for_constant_and_undefined_for_constant_returns() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 4.0, NAN]), torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((4,), 9.0), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, torch.ones(4), mask))


def test_a_batch_with_nothing_valid_has_zero_loss_zero_gradient_and_no_metrics() -> None:
    x = torch.zeros(2, 1, 1, requires_grad=True)
    loss = policy_loss(
        logprob=x, old_logprob=torch.full((2, 1, 1), NAN), advantages=torch.full((2, 1, 1), NAN),
        mask=torch.zeros(2, 1, 1, dtype=torch.bool),
    )  # fmt: skip
    loss.mean().backward()
    assert x.grad is not None and not x.grad.any()
    assert loss.metrics() == {}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(clip_ratio_low=1.0), ValueError, "clip_ratio_low: 1.0"),
        (dict(clip_ratio_high=-0.1), ValueError, "clip_ratio_high: -0.1"),
        (dict(clip_ratio_c=1.1), ValueError, "clip_ratio_c: 1.1, expected more than 1 .* or null"),
        (dict(clip_log_ratio_min=1.0, clip_log_ratio_max=0.5), ValueError, "clip_log_ratio_min: 1.0"),
        (
            dict(logprob=torch.zeros(2, 1, 1).bfloat16()),
            TypeError,
            "logprob has dtype torch.bfloat16, expected float32",
        ),
        (dict(advantages=torch.zeros(2, 1)), ValueError, r"advantages has shape \[2, 1\], expected that of mask"),
        (dict(mask=torch.ones(2, 1, 1)), TypeError, "mask has dtype torch.float32, expected torch.bool"),
    ],
)
def test_bad_arguments_name_the_key_and_the_value(change: dict, error: type[Exception], message: str) -> None:
    zero = torch.zeros(2, 1, 1)
    arguments = dict(logprob=zero, old_logprob=zero, advantages=zero, mask=torch.ones(2, 1, 1, dtype=torch.bool))
    with pytest.raises(error, match=message):
        policy_loss(**(arguments | change))


def test_an_unknown_kl_estimator_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="'k4' is unknown; use one of k1, kl, k2"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind="k4")
