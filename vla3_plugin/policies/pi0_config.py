"""Settings of the pi0 family beside the network's own sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Where LoRA goes by default, by the last part of the module's name: attention and MLPs of both Gemmas and of SigLIP.
# The value head and the projections around the expert are small and trained whole (peft's ``modules_to_save``).
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj", "fc1", "fc2"]
LORA_WHOLE = ["value_head", "embed_action_time", "action_out_proj"]


@dataclass
class PI0PolicyConfig:
    """How the network is used as a policy.

    ``executed``: C, how many of the H predicted actions are executed. ``num_steps``: K denoising steps.
    ``noise_level``: a of the stochastic ``method`` (see ``flow``). ``sde_mode``: ``mixed`` (one stochastic step a
    sample, drawn) or ``joint`` (all K; ``joint_reduction`` of their log-probs). ``value_level``: one value a ``chunk``
    or one an ``action``. ``detach_value``: the value loss does not reach the backbone. ``freeze_vlm``: only the expert,
    the projections and the value head are trained.
    """

    executed: int
    num_steps: int = 4
    noise_level: float = 0.5
    sde_mode: Literal["mixed", "joint"] = "mixed"
    joint_reduction: Literal["sum", "mean"] = "sum"
    method: Literal["flow_sde", "flow_cps"] = "flow_sde"
    value_level: Literal["chunk", "action"] = "chunk"
    value_hidden: int = 512
    detach_value: bool = False
    freeze_vlm: bool = False

    def check(self, horizon: int) -> None:
        def refuse(key: str, expected: str) -> None:
            raise ValueError(f"policy.{key} is {getattr(self, key)!r}, expected {expected}")

        if not 1 <= self.executed <= horizon:
            refuse("executed", f"1 to {horizon}, the model's chunk_size")
        if self.num_steps < 1:
            refuse("num_steps", "at least 1")
        if self.noise_level < 0:
            refuse("noise_level", "at least 0")
        if self.sde_mode not in ("mixed", "joint"):
            refuse("sde_mode", "mixed or joint")
        if self.joint_reduction not in ("sum", "mean"):
            refuse("joint_reduction", "sum or mean")
        if self.method not in ("flow_sde", "flow_cps"):
            refuse("method", "flow_sde or flow_cps")
        if self.value_level not in ("chunk", "action"):
            refuse("value_level", "chunk or action")
        if self.value_hidden < 1:
            refuse("value_hidden", "at least 1")
