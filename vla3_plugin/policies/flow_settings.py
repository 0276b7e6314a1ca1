"""Settings of a flow policy beside the network's own sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass
class FlowSettings:
    """How the network is used as a policy.

    ``executed``: C, how many of the H predicted actions are executed. ``num_steps``: K denoising steps. ``method``:
    ``flow_sde`` and ``flow_cps`` at ``noise_level`` a, or ``flow_noise`` with a learned std between ``noise_std_min``
    and ``noise_std_max`` (see ``flow``). ``sde_mode``: ``mixed`` (one stochastic step a sample, drawn) or ``joint``
    (all K; ``joint_reduction`` of their log-probs). ``value_level``: one value a ``chunk`` or one an ``action``.
    ``value_source``: ``vlm``, from the encoded observation, or ``expert``, from the action expert's hidden states on a
    chunk of zeros at the time of pure noise (the same for sampler and learner, at the price of one more expert pass).
    ``detach_value``: the value loss does not reach the backbone. ``freeze_vlm``: only the expert, the projections and
    the heads are trained.
    """

    executed: int
    num_steps: int = 4
    noise_level: float = 0.5
    sde_mode: Literal["mixed", "joint"] = "mixed"
    joint_reduction: Literal["sum", "mean"] = "sum"
    method: Literal["flow_sde", "flow_cps", "flow_noise"] = "flow_sde"
    value_level: Literal["chunk", "action"] = "chunk"
    value_hidden: int = 512
    detach_value: bool = False
    freeze_vlm: bool = False
    value_source: Literal["vlm", "expert"] = "vlm"
    noise_hidden: int = 128
    noise_std_min: float = 0.08
    noise_std_max: float = 0.16

    def check(self, horizon: int) -> None:
        def refuse(key: str, expected: str) -> None:
            raise ValueError(f"policy.{key} is {getattr(self, key)!r}, expected {expected}")

        if not 1 <= self.executed <= horizon:
            refuse("executed", f"1 to {horizon}, the model's chunk_size")
        for key in ("num_steps", "value_hidden", "noise_hidden"):
            if getattr(self, key) < 1:
                refuse(key, "at least 1")
        if self.noise_level < 0:
            refuse("noise_level", "at least 0")
        for key, known in (
            ("sde_mode", ("mixed", "joint")),
            ("joint_reduction", ("sum", "mean")),
            ("method", ("flow_sde", "flow_cps", "flow_noise")),
            ("value_level", ("chunk", "action")),
            ("value_source", ("vlm", "expert")),
        ):
            if getattr(self, key) not in known:
                refuse(key, f"{', '.join(known[:-1])} or {known[-1]}")
        if not 0.0 < self.noise_std_min <= self.noise_std_max:
            refuse("noise_std_min", f"above 0 and at most noise_std_max, {self.noise_std_max}")
