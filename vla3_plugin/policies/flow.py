"""Likelihoods of flow-matching policies: one denoising step as a Gaussian transition.

A flow policy integrates a predicted velocity from noise to an action chunk in K steps. To have a likelihood, steps are
made stochastic: x′ ~ N(mean, std²) with a mean that is linear in the noisy chunk x and the velocity v,

    mean = x_weight · x + v_weight · v.

Two conventions of time are in use. ``pi`` (π0, π0.5): t runs from 1 (noise) to 0 (data), v = noise − action. ``gr00t``
(GR00T N1.5): t runs from 0 (noise) to 1 (data), v = action − noise. They are mirror images, so the formulas below are
written once, in τ, the share of noise: τ = t and u = v for pi, τ = 1 − t and u = −v for gr00t. With τ′ the next grid
point, δ = τ − τ′ = 1/K, and the end points that v points at, data = x − τu and noise = x + (1 − τ)u:

``flow_ode``    mean = x − δu,  std = 0
``flow_sde``    mean = x − δ[u + σ²/(2τ) · noise],  std = √δ·σ,  σ = a√(τ/(1 − τ)); at τ = 1 the denominator (alone)
                takes the next grid point, so that σ = a√K there
``flow_cps``    mean = (1 − τ′) data + τ′cos(πa/2) noise,  std = τ′sin(πa/2), which is 0 at the last step
``flow_noise``  mean of flow_ode, std from a learned head (:func:`bounded_std`)

(π_RL, arXiv 2510.25889, for flow_sde and flow_noise; Flow-CPS, arXiv 2509.05952.) ``a`` is the noise level. With few
steps the distribution of the resulting actions depends on it, so the noisy policy and the ODE policy differ.

Step indices are an int or an int tensor [B]: samples at different steps share one forward pass. Weights are computed in
float64 and means, stds and log-probs in float32, or in float64 for float64 input, whatever the model's precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

Convention = Literal["pi", "gr00t"]
Method = Literal["flow_ode", "flow_sde", "flow_noise", "flow_cps"]
Step = int | Tensor

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def _check_names(convention: str, method: str, num_steps: int, noise_level: float) -> None:
    if convention not in get_args(Convention):
        raise ValueError(f"convention: {convention!r}, expected one of {', '.join(get_args(Convention))}")
    if method not in get_args(Method):
        raise ValueError(f"method: {method!r}, expected one of {', '.join(get_args(Method))}")
    if num_steps < 1:
        raise ValueError(f"num_steps: {num_steps}, expected at least 1")
    if noise_level < 0 or not math.isfinite(noise_level):
        raise ValueError(f"noise_level: {noise_level}, expected a finite number >= 0")
    if method == "flow_cps" and noise_level > 1:
        raise ValueError(f"noise_level: {noise_level}, expected 0 to 1 with flow_cps (it is a quarter turn at most)")


def _noise_share(index: int, num_steps: int) -> float:
    return 1.0 - index / num_steps


@lru_cache(maxsize=128)
def _weights(num_steps: int, noise_level: float, convention: str, method: str) -> tuple[Tensor, Tensor, Tensor]:
    """x_weight, v_weight and std of every step, float64 [K] each, on the CPU."""
    _check_names(convention, method, num_steps, noise_level)
    rows = []
    for i in range(num_steps):
        tau, after = _noise_share(i, num_steps), _noise_share(i + 1, num_steps)
        delta = tau - after
        x_weight, u_weight, std = 1.0, -delta, 0.0
        if method == "flow_sde":
            sigma = noise_level * math.sqrt(tau / (1.0 - (after if i == 0 else tau)))
            pull = sigma * sigma / (2.0 * tau)
            x_weight, u_weight = 1.0 - delta * pull, -delta * (1.0 + pull * (1.0 - tau))
            std = math.sqrt(delta) * sigma
        elif method == "flow_cps":
            keep, std = after * math.cos(0.5 * math.pi * noise_level), after * math.sin(0.5 * math.pi * noise_level)
            x_weight, u_weight = (1.0 - after) + keep, -tau * (1.0 - after) + (1.0 - tau) * keep
        rows.append((x_weight, u_weight if convention == "pi" else -u_weight, std))
    with torch.inference_mode(False):  # a rollout may fill the cache that training reads
        table = torch.tensor(rows, dtype=torch.float64, device="cpu")
    return table[:, 0], table[:, 1], table[:, 2]


def _at(table: Tensor, step: Step, like: Tensor) -> Tensor:
    """``table`` [K] at ``step``, in the dtype and on the device of ``like``, shaped to broadcast with it."""
    num_steps = len(table)
    if isinstance(step, int) or step.dim() == 0:
        index = int(step)
        if not 0 <= index < num_steps:
            raise IndexError(f"step {index} of {num_steps} denoising steps")
        return table[index].to(device=like.device, dtype=like.dtype)
    if step.shape != like.shape[:1]:
        raise ValueError(f"step has shape {list(step.shape)}, expected an int or [{like.shape[0]}]")
    # looked at where looking is free; in a compiled denoising step it would break the graph
    looks = step.device.type == "cpu" and not torch.compiler.is_compiling()
    if looks and bool(((step < 0) | (step >= num_steps)).any()):
        raise IndexError(f"steps {step.tolist()} of {num_steps} denoising steps")
    picked = table.to(dtype=like.dtype).to(like.device).index_select(0, step.to(like.device))
    return picked.view(-1, *[1] * (like.dim() - 1))


def _promote(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def time_grid(num_steps: int, convention: Convention) -> Tensor:
    """The K + 1 grid times, float64: pi 1, 1 − 1/K, …, 0; gr00t 0, 1/K, …, 1."""
    _check_names(convention, "flow_ode", num_steps, 0.0)
    index = torch.arange(num_steps + 1, dtype=torch.float64)
    return 1.0 - index / num_steps if convention == "pi" else index / num_steps


def step_time(step: Step, num_steps: int, *, convention: Convention) -> Tensor:
    """The time to feed the model with at ``step`` (int or int [B]), float64, 0-d or [B].

    Keep it in float64 until after the sinusoidal embedding: in float32 that is off by up to 1e-4.
    """
    grid = time_grid(num_steps, convention)[:-1]
    return _at(grid, step, torch.as_tensor(step, dtype=torch.float64))


def stochastic_steps(num_steps: int, *, noise_level: float, method: Method) -> int:
    """How many steps have a density; they are the first ones. All K for flow_sde and flow_noise, K − 1 for flow_cps,
    none for flow_ode or, except with flow_noise, at noise level 0."""
    _check_names("pi", method, num_steps, noise_level)
    if method == "flow_noise":
        return num_steps
    if method == "flow_ode" or noise_level == 0.0:
        return 0
    return num_steps - 1 if method == "flow_cps" else num_steps


def draw_sde_step(generator: torch.Generator, num_steps: int, *, noise_level: float, method: Method) -> int:
    """The one stochastic step of a sample in mixed mode, uniform over the steps that have a density.

    ``generator`` is the sample's own, so that the draw does not depend on the batch it happens to be in.
    """
    count = stochastic_steps(num_steps, noise_level=noise_level, method=method)
    if count == 0:
        raise ValueError(
            f"{method} with num_steps {num_steps} and noise_level {noise_level} has no stochastic step, so the policy "
            "has no likelihood to train on; raise noise_level (or num_steps, for flow_cps)"
        )
    return int(torch.randint(count, (), generator=generator, device=generator.device))


def step_mean_std(
    x: Tensor,
    v: Tensor,
    step: Step,
    num_steps: int,
    *,
    noise_level: float,
    convention: Convention,
    method: Method,
    std: Tensor | None = None,
    stochastic: bool | Tensor = True,
) -> tuple[Tensor, Tensor]:
    """Mean and std of x′ given x, both of the shape of ``x`` [B, C, A]; see the module's text for the formulas.

    ``step`` int or int [B]. ``std`` is the learned one, given for flow_noise and only there, broadcastable to ``x``.
    ``stochastic`` bool or bool [B]: rows where it is false take the ODE step (mixed mode).
    """
    if x.shape != v.shape:
        raise ValueError(f"x has shape {list(x.shape)}, v {list(v.shape)}: expected equal shapes")
    if (std is not None) != (method == "flow_noise"):
        raise ValueError(f"std is {'given' if std is not None else 'missing'} with {method}; only flow_noise takes one")
    x, v = _promote(x), _promote(v)
    tables = _weights(num_steps, float(noise_level), convention, method)
    x_weight, v_weight, table_std = (_at(table, step, x) for table in tables)
    spread = table_std if std is None else std.to(x.dtype)
    if not isinstance(stochastic, bool) or not stochastic:
        _, ode_weight, _ = _weights(num_steps, 0.0, convention, "flow_ode")
        rows = torch.as_tensor(stochastic, device=x.device).view(-1, *[1] * (x.dim() - 1))
        x_weight = torch.where(rows, x_weight, torch.ones_like(x_weight))
        v_weight = torch.where(rows, v_weight, _at(ode_weight, step, x))
        spread = torch.where(rows, spread, torch.zeros_like(spread))
    return x_weight * x + v_weight * v, spread.expand_as(x)


def bounded_std(raw: Tensor, *, std_min: float = 0.08, std_max: float = 0.16) -> Tensor:
    """Std of the flow_noise head from its unbounded output: log-variance = lo + (hi − lo)(tanh(raw) + 1)/2."""
    if not 0.0 < std_min <= std_max:
        raise ValueError(f"std_min: {std_min}, std_max: {std_max}, expected 0 < std_min <= std_max")
    low, high = 2.0 * math.log(std_min), 2.0 * math.log(std_max)
    return torch.exp(0.5 * (low + (high - low) * 0.5 * (torch.tanh(_promote(raw)) + 1.0)))


def _density_std(std: Tensor, require_density: bool) -> tuple[Tensor, Tensor]:
    """Where ``std`` is not 0, and ``std`` with 1 elsewhere. NaN counts as not 0: it must show, not turn into 0."""
    has_density = std != 0
    if require_density and not bool(has_density.all()):
        raise ValueError(
            "std is 0 for some elements: a deterministic step has no density, its ratio would be 1 and nothing would "
            "be learned; raise noise_level, or train only on steps with noise"
        )
    return has_density, torch.where(has_density, std, torch.ones_like(std))


def elementwise_logprob(x_next: Tensor, mean: Tensor, std: Tensor, *, require_density: bool = True) -> Tensor:
    """Log-density per element, −½((x′ − mean)/std)² − ln std − ½ ln 2π, in float32 (float64 stays).

    Where std is 0 there is none: an error with ``require_density`` (training), otherwise 0 by convention.
    """
    x_next, mean = _promote(x_next), _promote(mean)
    has_density, safe = _density_std(_promote(std), require_density)
    logprob = -0.5 * ((x_next - mean) / safe).square() - safe.log() - HALF_LOG_2PI
    return torch.where(has_density, logprob, torch.zeros_like(logprob))


def elementwise_entropy(std: Tensor, *, require_density: bool = True) -> Tensor:
    """Differential entropy per element, ½ ln(2πe) + ln std; 0 where std is 0, as for the log-prob.

    It depends on the policy's parameters for flow_noise only; elsewhere it is a constant without gradient.
    """
    has_density, safe = _density_std(_promote(std), require_density)
    entropy = safe.log() + HALF_LOG_2PI + 0.5
    return torch.where(has_density, entropy, torch.zeros_like(entropy))


def joint_logprob(
    chain: Tensor,
    velocity: Tensor | Callable[[int], Tensor],
    num_steps: int,
    *,
    noise_level: float,
    convention: Convention,
    method: Method,
    std: Tensor | None = None,
    include_initial: bool = False,
    reduction: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Log-prob per element [B, C, A] of a whole denoising chain, all of whose steps were stochastic.

    ``chain`` [B, K + 1, C, A] from noise to action, ``velocity`` [B, K, C, A] or a function of the step index, ``std``
    [B, K, C, A] for flow_noise. flow_cps' last step is deterministic and adds nothing. ``include_initial`` adds
    log N(x_0; 0, 1), the same for every policy. ``reduction: mean`` divides by the number of terms, which tempers the
    ratio by as much: clip ranges do not carry over from one reduction to the other.
    """
    if chain.shape[1] != num_steps + 1:
        raise ValueError(f"chain has shape {list(chain.shape)}, expected [B, {num_steps + 1}, C, A]")
    count = stochastic_steps(num_steps, noise_level=noise_level, method=method)
    if count == 0:
        raise ValueError(f"{method} with num_steps {num_steps} and noise_level {noise_level} has no stochastic step")
    terms = []
    if include_initial:
        first = _promote(chain[:, 0])
        terms.append(elementwise_logprob(first, torch.zeros_like(first), torch.ones_like(first)))
    for i in range(count):
        v = velocity(i) if callable(velocity) else velocity[:, i]
        mean, spread = step_mean_std(
            chain[:, i],
            v,
            i,
            num_steps,
            noise_level=noise_level,
            convention=convention,
            method=method,
            std=None if std is None else std[:, i],
        )
        terms.append(elementwise_logprob(chain[:, i + 1], mean, spread))
    total = torch.stack(terms).sum(0)
    return total if reduction == "sum" else total / len(terms)
