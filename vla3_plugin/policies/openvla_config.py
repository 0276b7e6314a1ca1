"""Settings of the two OpenVLA families beside the network's own sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# Where LoRA goes by default: attention and MLPs of Llama and of both towers, and the projector. The value head is small
# and trained whole.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "attn.qkv", "attn.proj",
                "mlp.fc1", "mlp.fc2", "projector.fc1", "projector.fc2", "projector.fc3"]  # fmt: skip


@dataclass
class TokenSettings:
    """How the network is used as a policy.

    ``executed``: C, how many actions of a prediction are executed. ``temperature``: of the sampled tokens and of their
    likelihood. ``value_level``: one value a ``chunk`` or one an ``action``. ``detach_value``: the value loss does not
    reach the backbone. ``freeze_vision``: the vision towers are not trained. ``attention_backend``: see
    ``prismatic.attention_backend``. ``rollout_backend``: what samples in policy workers: ``in_process`` is
    this module; ``vllm`` (OpenVLA alone) see ``openvla_vllm``, with ``rollout_options`` as arguments of ``vllm.LLM``.
    """

    executed: int = 1
    temperature: float = 1.0
    value_level: Literal["chunk", "action"] = "chunk"
    value_hidden: int = 512
    detach_value: bool = False
    freeze_vision: bool = False
    attention_backend: str = "auto"
    rollout_backend: Literal["in_process", "vllm"] = "in_process"
    rollout_options: dict[str, Any] = field(default_factory=dict)

    @property
    def horizon(self) -> int:
        """How many actions are predicted at once."""
        return 1

    @property
    def causal(self) -> bool:
        return True

    def check(self) -> None:
        if not 1 <= self.executed <= self.horizon:
            self._refuse("executed", f"1 to {self.horizon}, the number of actions predicted at once")
        if not self.temperature > 0:
            self._refuse("temperature", "above 0; evaluation is greedy whatever it is")
        if self.value_level not in ("chunk", "action"):
            self._refuse("value_level", "chunk or action")
        if self.value_hidden < 1:
            self._refuse("value_hidden", "at least 1")
        if self.rollout_backend not in ("in_process", "vllm"):
            self._refuse("rollout_backend", "in_process or vllm")
        if self.rollout_options and self.rollout_backend != "vllm":
            self._refuse("rollout_options", "none: they are arguments of vllm.LLM, for rollout_backend vllm")

    def _refuse(self, key: str, expected: str) -> None:
        raise ValueError(f"policy.{key} is {getattr(self, key)!r}, expected {expected}")


@dataclass
class OFTSettings(TokenSettings):
    """OpenVLA-OFT's, besides.

    ``predicted``: H, actions decoded at once; 8 in the published LIBERO fine-tunes, 25 for ALOHA, 5 for Bridge.
    ``attention``: ``bidirectional``, over the whole sequence, is what the reference runs with its own sdpa class and
    what its fine-tunes were trained with; ``causal`` is what stock Llama, FlashAttention and eager attention do, and so
    what weights were trained with where those were used. Logits differ by several units between the two.
    ``stop_token``: the sequence ends with the stop token, as in the reference; RLinf leaves it out, which changes
    nothing under causal attention and logits by units under bidirectional.
    """

    executed: int = 8
    predicted: int = 8
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    stop_token: bool = True

    @property
    def horizon(self) -> int:
        return self.predicted

    @property
    def causal(self) -> bool:
        return self.attention == "causal"

    def check(self) -> None:
        if self.predicted < 1:
            self._refuse("predicted", "at least 1")
        if self.attention not in ("bidirectional", "causal"):
            self._refuse("attention", "bidirectional or causal")
        if self.rollout_backend != "in_process":
            self._refuse("rollout_backend", "in_process: only OpenVLA is autoregressive")
        super().check()
