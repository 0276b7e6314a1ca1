"""Flow kernels against golden vectors, closed forms and the 1-D Gaussian flow whose law is known exactly."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from vla3_plugin.policies.flow import (
    bounded_std,
    draw_sde_step,
    elementwise_entropy,
    elementwise_logprob,
    joint_logprob,
    step_mean_std,
    step_time,
    stochastic_steps,
    time_grid,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "flow_sde"
INPUTS = load_file(GOLDEN / "inputs.safetensors")
OUTPUTS = load_file(GOLDEN / "outputs.safetensors")
CONVENTIONS = {"pi": "openpi", "gr00t": "gr00t"}  # our name: the files' name
CASE = re.compile(r"K(\d+)\.i(\d+)\.a([\d.]+)\.(flow_\w+)\.x$")
CASES = [(k[:-2], *m.groups()) for k in sorted(INPUTS) if (m := CASE.match(k))]
METHODS = ("flow_ode", "flow_sde", "flow_noise", "flow_cps")

seeds = st.integers(0, 2**31 - 1)
conventions = st.sampled_from(["pi", "gr00t"])


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(got: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=atol)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_golden_transition_is_reproduced_in_float64(convention: str) -> None:
    assert len(CASES) == 45 + 45 + 15 + 15  # SDE, CPS, ODE, noise
    for name, steps, step, level, method in CASES:
        out = f"{name}.{CONVENTIONS[convention]}"
        mean, std = step_mean_std(
            INPUTS[f"{name}.x"],
            INPUTS[f"{name}.v"],
            int(step),
            int(steps),
            noise_level=float(level),
            convention=convention,
            method=method,
            std=INPUTS.get(f"{name}.std"),
        )
        x_next = mean + std * INPUTS[f"{name}.z"]
        close(mean, OUTPUTS[f"{out}.mean"])
        close(std, OUTPUTS[f"{out}.std"])
        close(x_next, OUTPUTS[f"{out}.x_next"])
        logprob = elementwise_logprob(x_next, mean, std, require_density=False)
        close(logprob, OUTPUTS[f"{out}.logprob"], atol=1e-10)
        time, width = OUTPUTS[f"{out}.t_dt"]
        close(step_time(int(step), int(steps), convention=convention), time)
        grid = time_grid(int(steps), convention)
        close((grid[int(step) + 1] - grid[int(step)]).abs(), width)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(("steps", "which"), [(4, None), (4, 0), (4, 3), (4, "all"), (10, 0), (10, 9), (10, "all")])
def test_golden_chains_are_reproduced_with_one_or_all_steps_stochastic(convention: str, steps: int, which) -> None:
    name = f"chain.K{steps}.{CONVENTIONS[convention]}.sde_{which}"
    x, noise = INPUTS[f"{name}.x0"], INPUTS[f"{name}.z"]
    chain, velocities = [x], []
    for i in range(steps):
        time = step_time(i, steps, convention=convention)
        velocities.append(x @ INPUTS["chain.W"].T + INPUTS["chain.b"] + INPUTS["chain.c"] * time)
        # The stochastic step is a property of the sample, so it is given per row.
        rows = torch.full((len(x),), which == "all" or which == i)
        mean, std = step_mean_std(
            x, velocities[-1], i, steps, noise_level=0.5, convention=convention, method="flow_sde", stochastic=rows
        )
        x = mean + std * noise[i]
        close(mean, OUTPUTS[f"{name}.mean"][i])
        close(std, OUTPUTS[f"{name}.std"][i])
        close(x, OUTPUTS[f"{name}.x"][i + 1])
        chain.append(x)
    if which != "all":
        return
    kwargs = dict(noise_level=0.5, convention=convention, method="flow_sde")
    states, v = torch.stack(chain, 1), torch.stack(velocities, 1)
    per_step = OUTPUTS[f"{name}.logprob"]
    close(joint_logprob(states, v, steps, **kwargs), per_step.sum(0), atol=1e-9)
    close(joint_logprob(states, lambda i: v[:, i], steps, **kwargs), per_step.sum(0), atol=1e-9)
    first = -0.5 * chain[0].square() - 0.5 * math.log(2 * math.pi)
    tempered = joint_logprob(states, v, steps, **kwargs, include_initial=True, reduction="mean")
    close(tempered, (per_step.sum(0) + first) / (steps + 1), atol=1e-9)


def test_learned_std_stays_inside_its_range_and_matches_the_golden_head() -> None:
    low, high = json.loads((GOLDEN / "config.json").read_text())["noise_net_range"]
    close(bounded_std(INPUTS["noise_net.raw"], std_min=low, std_max=high), OUTPUTS["noise_net.std"])
    extreme = bounded_std(torch.tensor([-1e4, 0.0, 1e4], dtype=torch.float64), std_min=low, std_max=high)
    close(extreme, torch.tensor([low, math.sqrt(low * high), high], dtype=torch.float64))


@given(seeds, st.integers(1, 12), st.floats(0.05, 2.0), st.data())
def test_flow_sde_equals_the_published_closed_forms(seed: int, steps: int, level: float, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, steps - 1))
    x, v, width = normal(seed, 2, 3, 4), normal(seed + 1, 2, 3, 4), 1.0 / steps
    kwargs = dict(noise_level=level, method="flow_sde")

    t = 1.0 - step / steps
    sigma = level * math.sqrt(t / (1.0 - t)) if step else level * math.sqrt(steps)
    mean, std = step_mean_std(x, v, step, steps, convention="pi", **kwargs)
    close(mean, x - width * (v + sigma**2 / (2 * t) * (x + (1 - t) * v)), atol=1e-11)
    close(std, torch.full_like(x, math.sqrt(width) * sigma))

    t = step / steps
    sigma = level * math.sqrt((1.0 - t) / t) if step else level * math.sqrt(steps)
    mean, std = step_mean_std(x, v, step, steps, convention="gr00t", **kwargs)
    close(mean, x + width * (v - sigma**2 / (2 * (1 - t)) * (x - t * v)), atol=1e-11)
    close(std, torch.full_like(x, math.sqrt(width) * sigma))


def gaussian_flow(steps: int, level: float, method: str, convention: str) -> tuple[float, float]:
    """Mean and variance of the actions when data ~ N(0.7, .25), noise ~ N(0, 1) and the velocity is the exact one.

    All is linear and Gaussian, so each step maps mean and variance in closed form: no sampling error.
    """
    centre, data_variance = 0.7, 0.25
    mean, variance = 0.0, 1.0  # of pure noise
    for step in range(steps):
        t = float(step_time(step, steps, convention=convention))
        share = t if convention == "pi" else 1.0 - t  # of noise
        slope = (share - (1 - share) * data_variance) / ((1 - share) ** 2 * data_variance + share**2)
        x = torch.tensor([[[mean, mean + 1.0]]], dtype=torch.float64)
        v = slope * (x - (1 - share) * centre) - centre  # E[noise - data | x]
        v = v if convention == "pi" else -v
        kwargs = dict(noise_level=level, convention=convention, method=method)
        (mean, one_more), (std, _) = (y.flatten().tolist() for y in step_mean_std(x, v, step, steps, **kwargs))
        variance = (one_more - mean) ** 2 * variance + std**2
    return mean, variance


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(
    ("steps", "level", "variance"),
    [(4, 0.0, 0.116), (4, 0.5, 0.171), (4, 1.0, 0.247), (100, 0.0, 0.2427), (100, 0.5, 0.2486), (100, 1.0, 0.2498)],
)
def test_few_steps_make_the_variance_depend_on_the_noise_level(convention, steps, level, variance) -> None:
    mean, got = gaussian_flow(steps, level, "flow_sde", convention)
    assert got == pytest.approx(variance, abs=5e-4 if steps == 4 else 5e-5)
    assert mean == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
def test_noise_level_zero_is_the_ode(convention: str, method: str) -> None:
    x, v = normal(1, 3, 2, 4), normal(2, 3, 2, 4)
    for step in range(5):
        mean, std = step_mean_std(x, v, step, 5, noise_level=0.0, convention=convention, method=method)
        ode, zero = step_mean_std(x, v, step, 5, noise_level=0.0, convention=convention, method="flow_ode")
        close(mean, ode)
        assert not std.any() and not zero.any()


@pytest.mark.parametrize("method", METHODS)
@given(seed=seeds, convention=conventions, steps=st.integers(1, 8))
def test_a_sample_does_not_feel_its_batch(method: str, seed: int, convention: str, steps: int) -> None:
    """Rows at different steps, some stochastic and some not, give bit for bit what they give alone, in any order."""
    batch = 6
    gen = torch.Generator().manual_seed(seed)
    x, v, x_next = (normal(seed + i, batch, 3, 4, dtype=torch.float32) for i in range(3))
    step = torch.randint(steps, (batch,), generator=gen)
    rows = torch.rand(batch, generator=gen) < 0.5
    std = bounded_std(x) if method == "flow_noise" else None
    kwargs = dict(noise_level=0.6, convention=convention, method=method)

    def evaluate(index: Tensor, steps_given: int | Tensor, stochastic: bool | Tensor) -> Tensor:
        given_std = None if std is None else std[index]
        mean, spread = step_mean_std(
            x[index], v[index], steps_given, steps, std=given_std, stochastic=stochastic, **kwargs
        )
        return torch.stack([mean, spread, elementwise_logprob(x_next[index], mean, spread, require_density=False)])

    everyone = torch.arange(batch)
    together = evaluate(everyone, step, rows)
    order = torch.randperm(batch, generator=gen)
    assert torch.equal(evaluate(order, step[order], rows[order]), together[:, order])
    for i in range(batch):
        alone = evaluate(everyone[i : i + 1], int(step[i]), bool(rows[i]))
        assert torch.equal(alone, together[:, i : i + 1])


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("method", ["flow_sde", "flow_cps", "flow_noise"])
def test_gradient_of_the_log_prob_matches_finite_differences(convention: str, method: str) -> None:
    x, v, z, raw = (normal(i, 3, 2, 2) for i in range(4))
    step = torch.tensor([0, 1, 2])
    x_next = x + 0.3 * z

    def logprob(x: Tensor, v: Tensor, raw: Tensor) -> Tensor:
        std = bounded_std(raw) if method == "flow_noise" else None
        mean, spread = step_mean_std(x, v, step, 4, noise_level=0.5, convention=convention, method=method, std=std)
        return elementwise_logprob(x_next, mean, spread)

    inputs = tuple(tensor.requires_grad_() for tensor in (x, v, raw))
    assert torch.autograd.gradcheck(logprob, inputs, eps=1e-6, atol=1e-6)


@given(seeds, st.floats(0.01, 3.0))
def test_log_prob_and_entropy_are_those_of_torchs_normal(seed: int, scale: float) -> None:
    mean, x_next = normal(seed, 2, 3, 4), normal(seed + 1, 2, 3, 4)
    std = scale * (0.1 + normal(seed + 2, 2, 3, 4).abs())
    reference = torch.distributions.Normal(mean, std)
    torch.testing.assert_close(elementwise_logprob(x_next, mean, std), reference.log_prob(x_next))
    torch.testing.assert_close(elementwise_entropy(std), reference.entropy())


def test_bfloat16_models_get_float32_log_probs_of_the_values_they_were_given() -> None:
    x, v = (normal(i, 2, 3, 4).to(torch.bfloat16) for i in range(2))
    kwargs = dict(noise_level=0.5, convention="pi", method="flow_sde")
    mean, std = step_mean_std(x, v, 1, 4, **kwargs)
    wide, _ = step_mean_std(x.double(), v.double(), 1, 4, **kwargs)
    logprob = elementwise_logprob(x, mean, std)
    assert mean.dtype == std.dtype == logprob.dtype == elementwise_entropy(std).dtype == torch.float32
    torch.testing.assert_close(mean.double(), wide, rtol=1e-6, atol=1e-6)


def test_training_can_use_step_weights_first_computed_in_inference_mode() -> None:
    kwargs = dict(noise_level=0.123, convention="pi", method="flow_sde")  # a noise level no other test has cached
    x, v = normal(1, 2, 3, 4), normal(2, 2, 3, 4)
    with torch.inference_mode():
        step_mean_std(x, v, 1, 7, **kwargs)
    v.requires_grad_()
    step_mean_std(x, v, 1, 7, **kwargs)[0].sum().backward()
    assert v.grad is not None and v.grad.any()


def test_a_deterministic_step_is_refused_in_training_and_zero_otherwise() -> None:
    x, v = normal(1, 2, 3, 4), normal(2, 2, 3, 4)
    mean, std = step_mean_std(x, v, 1, 4, noise_level=0.0, convention="pi", method="flow_sde")
    with pytest.raises(ValueError, match="raise noise_level"):
        elementwise_logprob(mean, mean, std)
    with pytest.raises(ValueError, match="raise noise_level"):
        elementwise_entropy(std)
    assert not elementwise_logprob(mean, mean, std, require_density=False).any()
    assert not elementwise_entropy(std, require_density=False).any()


def test_a_std_that_is_not_a_number_shows_in_the_log_prob() -> None:
    x = torch.zeros(1, 1, 2)
    logprob = elementwise_logprob(x, x, torch.tensor([[[float("nan"), 0.0]]]), require_density=False)
    assert logprob[0, 0, 0].isnan() and logprob[0, 0, 1] == 0.0


def test_the_drawn_step_is_uniform_over_steps_with_a_density_and_belongs_to_its_generator() -> None:
    def draws(method: str) -> list[int]:
        generators = [torch.Generator().manual_seed(seed) for seed in range(2000)]
        return [draw_sde_step(g, 4, noise_level=0.5, method=method) for g in generators]

    for method, count in (("flow_sde", 4), ("flow_noise", 4), ("flow_cps", 3)):
        drawn = torch.tensor(draws(method)).bincount(minlength=4)
        expected, spread = 2000 / count, math.sqrt(2000 / count * (1 - 1 / count))
        assert stochastic_steps(4, noise_level=0.5, method=method) == count
        assert ((drawn[:count] - expected).abs() < 5 * spread).all() and not drawn[count:].any()
    assert draws("flow_sde") == draws("flow_sde")
    for method, steps, level in (("flow_ode", 4, 0.5), ("flow_sde", 4, 0.0), ("flow_cps", 1, 0.5)):
        with pytest.raises(ValueError, match="no stochastic step"):
            draw_sde_step(torch.Generator(), steps, noise_level=level, method=method)


def test_joint_log_prob_of_cps_leaves_out_its_deterministic_last_step() -> None:
    steps, kwargs = 4, dict(noise_level=0.5, convention="gr00t", method="flow_cps")
    v = normal(1, 2, steps, 3, 4)
    chain = [normal(2, 2, 3, 4)]
    expected = torch.zeros(2, 3, 4, dtype=torch.float64)
    for i in range(steps):
        mean, std = step_mean_std(chain[i], v[:, i], i, steps, **kwargs)
        chain.append(mean + std * normal(10 + i, 2, 3, 4))
        expected += elementwise_logprob(chain[-1], mean, std, require_density=False)
    assert not std.any()
    close(joint_logprob(torch.stack(chain, 1), v, steps, **kwargs), expected)


def test_times_are_float64_and_exact_for_mixed_steps() -> None:
    step = torch.tensor([3, 0, 9])
    times = step_time(step, 10, convention="pi")
    assert times.dtype == torch.float64
    assert times.tolist() == [1.0 - 3 / 10, 1.0, 1.0 - 9 / 10]
    assert step_time(step, 10, convention="gr00t").tolist() == [0.3, 0.0, 0.9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(convention="openpi"), "convention: 'openpi', expected one of pi, gr00t"),
        (dict(method="sde"), "method: 'sde', expected one of flow_ode"),
        (dict(noise_level=-0.1), "noise_level: -0.1"),
        (dict(method="flow_cps", noise_level=1.5), "noise_level: 1.5, expected 0 to 1"),
        (dict(num_steps=0), "num_steps: 0"),
        (dict(method="flow_noise"), "std is missing with flow_noise"),
        (dict(std=torch.ones(1)), "std is given with flow_sde"),
        (dict(step=torch.tensor([0, 1, 2])), r"step has shape \[3\], expected an int or \[2\]"),
    ],
)
def test_bad_arguments_name_the_key_and_the_value(change: dict, message: str) -> None:
    arguments = dict(step=0, num_steps=4, noise_level=0.5, convention="pi", method="flow_sde") | change
    with pytest.raises(ValueError, match=message):
        step_mean_std(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), **arguments)


@pytest.mark.parametrize("step", [-1, 4, torch.tensor([0, 4]), torch.tensor([-1, 0])])
def test_a_step_outside_the_grid_is_refused(step: int | Tensor) -> None:
    with pytest.raises(IndexError, match="of 4 denoising steps"):
        step_mean_std(
            torch.zeros(2, 1, 1),
            torch.zeros(2, 1, 1),
            step,
            4,
            noise_level=0.5,
            convention="pi",
            method="flow_sde",
        )
