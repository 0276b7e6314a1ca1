"""One-step transitions and whole chains of flow policies, in float64: ``policies.flow`` against golden vectors.

There is no network: a case's name says the number of steps, the step, the noise level and the method.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from vla3_plugin.parity.golden import Golden
from vla3_plugin.policies import flow

NOT_COMPUTED: dict[str, str] = {}

_CONVENTIONS: dict[str, flow.Convention] = {"openpi": "pi", "gr00t": "gr00t"}  # the files' name: ours
_CASE = re.compile(r"(K(\d+)\.i(\d+)\.a([\d.]+)\.(flow_\w+))\.x")
_CHAIN = re.compile(r"(chain\.K(\d+)\.(\w+)\.sde_(\w+))\.x0")
_CHAIN_NOISE = 0.5  # of every chain, as the directory's README says; a config key of the name below overrides it


def outputs(golden: Golden) -> dict[str, Tensor]:
    computed: dict[str, Tensor] = {}
    for name in golden.inputs:
        if case := _CASE.fullmatch(name):
            prefix, steps, step, level, method = case.groups()
            computed |= _transition(golden, prefix, int(steps), int(step), float(level), method)
        elif chain := _CHAIN.fullmatch(name):
            prefix, steps, convention, which = chain.groups()
            computed |= _chain(golden, prefix, int(steps), _CONVENTIONS[convention], which)
    if "noise_net.raw" in golden.inputs:
        low, high = golden.config["noise_net_range"]
        computed["noise_net.std"] = flow.bounded_std(golden.inputs["noise_net.raw"], std_min=low, std_max=high)
    return computed


def _transition(golden: Golden, name: str, steps: int, step: int, level: float, method: str) -> dict[str, Tensor]:
    x, v, z = (golden.inputs[f"{name}.{part}"] for part in "xvz")
    learned = golden.inputs.get(f"{name}.std")
    computed: dict[str, Tensor] = {}
    for theirs, convention in _CONVENTIONS.items():
        mean, std = flow.step_mean_std(
            x, v, step, steps, noise_level=level, convention=convention, method=method, std=learned  # type: ignore[arg-type]
        )  # fmt: skip
        x_next = mean + std * z
        grid = flow.time_grid(steps, convention)
        parts = {
            "mean": mean,
            "std": std,
            "x_next": x_next,
            "logprob": flow.elementwise_logprob(x_next, mean, std, require_density=False),
            "t_dt": torch.stack(
                [flow.step_time(step, steps, convention=convention), (grid[step + 1] - grid[step]).abs()]
            ),
        }
        computed |= {f"{name}.{theirs}.{part}": tensor for part, tensor in parts.items()}
    return computed


def _chain(golden: Golden, name: str, steps: int, convention: flow.Convention, which: str) -> dict[str, Tensor]:
    """A chain whose velocity is affine in x and t; ``which`` steps are stochastic: a number, ``all`` or ``None``."""
    weight, bias, slope = (golden.inputs[f"chain.{part}"] for part in ("W", "b", "c"))
    x, noise = golden.inputs[f"{name}.x0"], golden.inputs[f"{name}.z"]
    level = float(golden.config.get("chain_noise_level", _CHAIN_NOISE))
    states, means, stds, logprobs = [x], [], [], []
    for step in range(steps):
        v = x @ weight.T + bias + slope * flow.step_time(step, steps, convention=convention)
        # The stochastic step is a property of the sample, so it is given per row.
        rows = torch.full((len(x),), which == "all" or which == str(step))
        mean, std = flow.step_mean_std(
            x, v, step, steps, noise_level=level, convention=convention, method="flow_sde", stochastic=rows
        )
        x = mean + std * noise[step]
        states.append(x)
        means.append(mean)
        stds.append(std)
        logprobs.append(flow.elementwise_logprob(x, mean, std, require_density=False))
    parts = {"x": states, "mean": means, "std": stds, "logprob": logprobs}
    return {f"{name}.{part}": torch.stack(tensors) for part, tensors in parts.items()}
