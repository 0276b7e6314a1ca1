"""Policy, value, KL and entropy losses, each as a sum over valid elements with what to divide it by.

A mean over a micro-batch cannot be put together again when micro-batches hold different numbers of valid elements; a
sum can. Every loss here returns a :class:`LossSum`: ``total`` (differentiable) and ``weight`` (the number of valid
elements, or the sum of their weights). Add them over any split of a batch, divide once, and value and gradient are
those of the full batch.

``logprob``, ``advantages``, ``mask`` and so on have equal shapes, one element a likelihood ratio; see ``granularity``
for how they come about. ``mask`` is bool; masked elements may hold anything. ``weights`` is broadcastable (length
normalisation). All arithmetic is in float32 or float64: half precision is refused, since exp(a − b) of two rounded
log-probs is mostly rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

KL_KINDS = {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3", "abs": "abs"}
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: beyond it a ratio says nothing and its square overflows float32


@dataclass(frozen=True)
class LossSum:
    """``total`` / ``weight`` is the loss. ``sums`` / ``elements`` are mean metrics, ``maxima`` and ``minima`` extremes.

    All are 0-d tensors; everything but ``total`` is detached. ``a + b`` is what one call on both batches had returned.
    """

    total: Tensor
    weight: Tensor
    elements: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: LossSum) -> LossSum:
        if not isinstance(other, LossSum):
            return NotImplemented
        return LossSum(
            total=self.total + other.total,
            weight=self.weight + other.weight,
            elements=self.elements + other.elements,
            sums={k: v + other.sums[k] for k, v in self.sums.items()},
            maxima={k: torch.maximum(v, other.maxima[k]) for k, v in self.maxima.items()},
            minima={k: torch.minimum(v, other.minima[k]) for k, v in self.minima.items()},
        )

    def mean(self) -> Tensor:
        """The loss of everything summed so far; zero if nothing was valid."""
        return self.total / self.weight.clamp_min(torch.finfo(self.weight.dtype).tiny)

    def metrics(self) -> dict[str, float]:
        """Means and extremes as floats (one device synchronisation each); empty if nothing was valid."""
        count = float(self.elements)
        if count == 0:
            return {}
        means = {k: float(v) / count for k, v in self.sums.items()}
        return means | {k: float(v) for part in (self.maxima, self.minima) for k, v in part.items()}


def add_losses(parts: Sequence[LossSum]) -> LossSum:
    """The sum of at least one :class:`LossSum`."""
    return reduce(lambda a, b: a + b, parts)


def _check(mask: Tensor, **tensors: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask has dtype {mask.dtype}, expected torch.bool")
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} has dtype {tensor.dtype}, expected float32 or float64; call .float() on it")
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected that of mask, {list(mask.shape)}")


def _only(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _collect(
    mask: Tensor,
    loss: Tensor,
    weights: Tensor | None,
    sums: dict[str, Tensor],
    maxima: dict[str, Tensor] | None = None,
    minima: dict[str, Tensor] | None = None,
) -> LossSum:
    """Sum per-element ``loss`` and metrics under ``mask``."""
    share = mask.to(loss.dtype) if weights is None else _only(mask, weights.to(loss.dtype).expand_as(loss))
    inf = float("inf")
    return LossSum(
        total=(_only(mask, loss) * share).sum(),
        weight=share.sum().detach(),
        elements=mask.sum().to(loss.dtype),
        sums={k: _only(mask, v.detach().to(loss.dtype)).sum() for k, v in sums.items()},
        maxima={k: torch.where(mask, v.detach(), -inf).amax() for k, v in (maxima or {}).items()},
        minima={k: torch.where(mask, v.detach(), inf).amin() for k, v in (minima or {}).items()},
    )


def _check_clip(low: float, high: float, c: float | None) -> None:
    if not 0.0 <= low < 1.0:
        raise ValueError(f"clip_ratio_low: {low}, expected 0 <= clip_ratio_low < 1 (the ratio is kept above 1 - low)")
    if high < 0.0:
        raise ValueError(f"clip_ratio_high: {high}, expected a number >= 0 (the ratio is kept below 1 + high)")
    if c is not None and c <= 1.0 + high:
        raise ValueError(
            f"clip_ratio_c: {c}, expected more than 1 + clip_ratio_high = {1.0 + high}, or null to turn dual clip off"
        )


def policy_loss(
    *,
    logprob: Tensor,
    old_logprob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
    clip_log_ratio_min: float | None = None,
    clip_log_ratio_max: float | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """Clipped surrogate (Schulman et al. 2017, eq. 7), to be minimised: max(−A·r, −A·clip(r, 1 − low, 1 + high)).

    r = exp(logprob − old_logprob). ``clip_ratio_high`` above ``clip_ratio_low`` is clip-higher (DAPO).
    ``clip_ratio_c`` bounds the loss of a negative advantage at −A·c (dual clip, Ye et al. 2020); None is off.
    ``clip_log_ratio_min/max`` clamp the log-ratio first; an element beyond them carries no gradient at all, also where
    the surrogate would pull it back. Whatever they are, |log-ratio| is clamped at 20.

    Metrics: ``approx_kl`` (k3 of old against new, mean), ``clip_fraction_low``, ``clip_fraction_high``,
    ``dual_clip_fraction`` (elements whose gradient the clip removed), ``ratio_mean``, ``ratio_max``, ``ratio_min``.
    """
    _check(mask, logprob=logprob, old_logprob=old_logprob, advantages=advantages)
    _check_clip(clip_ratio_low, clip_ratio_high, clip_ratio_c)
    log_ratio = _log_ratio(logprob, old_logprob, mask, clip_log_ratio_min, clip_log_ratio_max)
    advantages = _only(mask, advantages).detach()
    loss, ratio, sums = _clipped_surrogate(log_ratio, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    return _collect(mask, loss, weights, sums, {"ratio_max": ratio}, {"ratio_min": ratio})


def _log_ratio(new: Tensor, old: Tensor, mask: Tensor, low: float | None, high: float | None) -> Tensor:
    if low is not None and high is not None and low >= high:
        raise ValueError(f"clip_log_ratio_min: {low} is not below clip_log_ratio_max: {high}")
    # Masked first, so that nothing downstream, forward or backward, sees what stands in masked elements.
    log_ratio = _only(mask, new - old.detach())
    low = -MAX_LOG_RATIO if low is None else max(low, -MAX_LOG_RATIO)
    high = MAX_LOG_RATIO if high is None else min(high, MAX_LOG_RATIO)
    return log_ratio.clamp(low, high)


def _clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, c: float | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Per-element loss, ratio, and the per-element metrics of both policy losses."""
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high))
    negative = advantages < 0
    dual = torch.zeros_like(negative)
    if c is not None:
        dual = negative & (ratio > c)
        loss = torch.where(dual, -advantages * c, loss)
    sums = {
        "approx_kl": ratio - 1.0 - log_ratio,
        "clip_fraction_low": negative & (ratio < 1.0 - low),
        "clip_fraction_high": (advantages > 0) & (ratio > 1.0 + high),
        "dual_clip_fraction": dual,
        "ratio_mean": ratio,
    }
    return loss, ratio, sums


def decoupled_policy_loss(
    *,
    logprob: Tensor,
    proximal_logprob: Tensor,
    behaviour_logprob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    behave_weight_threshold: float | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
    clip_log_ratio_min: float | None = None,
    clip_log_ratio_max: float | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """Decoupled PPO (Hilton et al. 2022): the clip is around a recent *proximal* policy, the importance weight
    against the *behaviour* policy that made the data.

    loss = w · surrogate(exp(logprob − proximal)), w = exp(proximal − behaviour), constant. Elements with
    w > ``behave_weight_threshold`` are left out (no gradient) but stay in ``weight``, which thus depends on the data
    alone and is known before the forward pass. With proximal = behaviour this is :func:`policy_loss`.

    Further metrics: ``behave_weight_mean``, ``behave_weight_max``, ``behave_masked_fraction``.
    """
    _check(
        mask,
        logprob=logprob,
        proximal_logprob=proximal_logprob,
        behaviour_logprob=behaviour_logprob,
        advantages=advantages,
    )
    _check_clip(clip_ratio_low, clip_ratio_high, clip_ratio_c)
    if behave_weight_threshold is not None and behave_weight_threshold <= 0:
        raise ValueError(f"behave_weight_threshold: {behave_weight_threshold}, expected > 0, or null to turn it off")
    log_ratio = _log_ratio(logprob, proximal_logprob, mask, clip_log_ratio_min, clip_log_ratio_max)
    advantages = _only(mask, advantages).detach()
    loss, ratio, sums = _clipped_surrogate(log_ratio, advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    behave = _log_ratio(proximal_logprob.detach(), behaviour_logprob, mask, None, None).exp()
    too_far = torch.zeros_like(mask) if behave_weight_threshold is None else behave > behave_weight_threshold
    sums |= {"behave_weight_mean": behave, "behave_masked_fraction": too_far}
    loss = _only(~too_far, loss * behave)
    return _collect(mask, loss, weights, sums, {"ratio_max": ratio, "behave_weight_max": behave}, {"ratio_min": ratio})


@torch.no_grad()
def interpolate_proximal(*, logprob: Tensor, behaviour_logprob: Tensor, version: Tensor, version_now: int) -> Tensor:
    """Proximal log-probs without a second forward pass: behaviour + α (current − behaviour).

    The proximal policy is the one before the update being computed. Seen on the line from the sample's version to
    ``version_now`` + 1 (what the update will produce), it stands at α = (now − version) / (now + 1 − version): 0 for
    fresh samples, towards 1 with staleness. ``version`` int [N], broadcast over the other dimensions of ``logprob``.
    """
    age = (version_now - version).to(logprob.dtype).view(-1, *[1] * (logprob.dim() - 1))
    if bool((age < 0).any()):
        raise ValueError(f"a sample has version {int(version.max())}, newer than the learner's, {version_now}")
    return behaviour_logprob + age / (age + 1.0) * (logprob - behaviour_logprob)


@torch.no_grad()
def truncated_weights(proximal: Tensor, behaviour: Tensor, mask: Tensor, threshold: float | None) -> Tensor:
    """min(threshold, proximal / behaviour), from log-probs: the truncated importance weight of V-trace (Espeholt et
    al. 2018, eq. 1). 1 where ``mask`` is false.
    """
    weight = _log_ratio(proximal, behaviour, mask, None, None).exp()
    return weight if threshold is None else weight.clamp(max=threshold)


def value_loss(
    *,
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    old_values: Tensor | None = None,
    value_clip: float | None = None,
    huber_delta: float | None = None,
    weights: Tensor | None = None,
) -> LossSum:
    """Half squared error ½(V − R)², or Huber with ``huber_delta`` (quadratic within δ, slope δ outside).

    ``value_clip`` keeps V within that distance of ``old_values`` (in units of return) and takes the larger of clipped
    and unclipped loss, so that it only ever removes gradients. Metrics: ``value_error`` (mean of V − R),
    ``value_clip_fraction`` (elements where the clipped, gradient-free branch was taken).
    """
    _check(mask, values=values, returns=returns)
    for key, number in (("value_clip", value_clip), ("huber_delta", huber_delta)):
        if number is not None and number <= 0:
            raise ValueError(f"{key}: {number}, expected a number > 0, or null to turn it off")
    target = _only(mask, returns).detach()
    kept = _only(mask, values)
    loss = _regression(kept, target, huber_delta)
    clipped = torch.zeros_like(mask)
    if value_clip is not None:
        if old_values is None:
            raise ValueError(f"value_clip: {value_clip} needs old_values, the values at collection")
        _check(mask, old_values=old_values)
        old = _only(mask, old_values).detach()
        near = _regression(old + (kept - old).clamp(-value_clip, value_clip), target, huber_delta)
        clipped = near > loss
        loss = torch.maximum(loss, near)
    return _collect(mask, loss, weights, {"value_error": kept - target, "value_clip_fraction": clipped})


def _regression(prediction: Tensor, target: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * (prediction - target).square()
    return functional.huber_loss(prediction, target, reduction="none", delta=huber_delta)


def kl_estimate(logprob: Tensor, ref_logprob: Tensor, *, kind: str) -> Tensor:
    """Per-element estimate of KL(policy ‖ reference) from samples of the policy (Schulman 2020, "Approximating KL").

    With d = logprob − ref_logprob: ``k1`` (``kl``) d, unbiased, high variance; ``k2`` (``mse``) ½d², whose gradient is
    the unbiased one; ``k3`` (``low_var_kl``) exp(−d) − 1 + d, unbiased and never negative; ``abs`` |d|. The names in
    brackets are verl's. k3 stops at d = −20 (its exponential would overflow;
    there it has no gradient).
    """
    if kind not in KL_KINDS:
        raise ValueError(f"KL estimator {kind!r} is unknown; use one of {', '.join(KL_KINDS)}")
    difference = logprob - ref_logprob.detach()
    match KL_KINDS[kind]:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "abs":
            return difference.abs()
    difference = difference.clamp_min(-MAX_LOG_RATIO)
    return torch.expm1(-difference) + difference


def kl_loss(
    *, logprob: Tensor, ref_logprob: Tensor, mask: Tensor, kind: str = "k3", weights: Tensor | None = None
) -> LossSum:
    """KL to a frozen reference policy, summed; the caller multiplies by its coefficient. Metric: ``kl``."""
    _check(mask, logprob=logprob, ref_logprob=ref_logprob)
    estimate = kl_estimate(_only(mask, logprob), _only(mask, ref_logprob), kind=kind)
    return _collect(mask, estimate, weights, {"kl": estimate})


def entropy_bonus(*, entropy: Tensor, mask: Tensor, weights: Tensor | None = None) -> LossSum:
    """Entropy, summed. It is a bonus: the caller *subtracts* coefficient × mean. Metric: ``entropy``."""
    _check(mask, entropy=entropy)
    return _collect(mask, entropy, weights, {"entropy": entropy})


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 − Var(R − V) / Var(R) over valid elements: 1 perfect, 0 no better than a constant, negative worse.

    NaN where the returns do not vary (nothing to explain) or fewer than two elements are valid.
    """
    target, error = returns[mask].double(), (returns - values)[mask].double()
    if target.numel() < 2 or float(target.var()) == 0.0:
        return float("nan")
    return 1.0 - float(error.var() / target.var())
