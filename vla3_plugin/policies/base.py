"""The interface every policy family implements: prepare, act, evaluate.

``prepare`` and ``act`` run in a policy worker; ``forward`` runs in the learner, wrapped by FSDP, which is why it is the
one entry point for everything that needs gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from vla3_plugin.contract import Observation

if TYPE_CHECKING:
    from typing_extensions import Self

NoiseKey = tuple[int, int, int]  # (run seed, episode id, chunk index)


@dataclass
class ActionChunk:
    """A batch of B predicted chunks of C actions of dimension A.

    ``actions`` float32 [B, C, A] in environment units, after un-normalisation and gripper convention. ``logprob``
    float32 [B, C, D], the finest level (D = A for flow policies), zeros in evaluation mode. ``value`` float32 [B, 1]
    or [B, C]. ``trace``: tensors [B, ...] that, with the prepared inputs, make the log-prob recomputable.
    """

    actions: Tensor
    logprob: Tensor
    value: Tensor
    trace: dict[str, Tensor] = field(default_factory=dict)


class VLAPolicy(nn.Module):
    """Base class of policy families."""

    family: str
    _no_split_modules: list[str]  # class names of the layers that FSDP shards one by one; verl reads it

    def prepare(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        """Model inputs [B, ...] of fixed shapes, compact enough to store: uint8 images, raw float state, token ids."""
        raise NotImplementedError

    def act(
        self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Literal["train", "eval"]
    ) -> ActionChunk:
        """Sample a chunk per row. Row i's noise depends on ``noise_keys[i]`` alone, not on its place in the batch.

        ``train`` samples from the stochastic policy whose log-prob is returned; ``eval`` is the noise-free policy
        (for a flow policy: the initial noise is still drawn from the key, the denoising is the ODE). ``inputs`` are
        read only: they may be the simulator's own memory.
        """
        raise NotImplementedError

    def serve_on(self, device: Any) -> None:
        """Get ready to ``act`` on ``device``; called once, in processes that sample and do not train."""
        self.eval().to(device)

    def renewed(self) -> None:
        """Other weights were loaded into the module, after ``serve_on``."""

    def forward(self, batch: dict[str, Tensor], task: Literal["evaluate", "sft"]) -> dict[str, Tensor]:
        """``evaluate``: ``logprob`` [B, C, D], ``entropy`` [B, C, D], ``value`` of the stored samples (inputs and
        ``trace.*`` keys). ``sft``: ``loss`` [B, C, A] per element against ``actions`` [B, C, A] in environment units.
        """
        raise NotImplementedError

    def save(self, path: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write a self-contained directory (safetensors, config, processing) that ``load_policy`` reads back."""
        raise NotImplementedError

    def _set_dropout(self, active: bool) -> None:
        """Dropout is for cloning. A stored sample's likelihood must not depend on a mask drawn in the learner, so for
        sampling and evaluation it is off even in training mode; the backward pass, which may recompute, finds it off.

        To be called first by ``act``, where no gradient is taken, and by each task of ``forward``.
        """
        if self.training:  # else it is off everywhere
            # transformers' layers recompute, and then keep no keys and values, in training mode alone; what drops
            # something is inside them
            recomputing = torch.is_grad_enabled()
            for module in self.modules():
                recomputed = recomputing and getattr(module, "gradient_checkpointing", False)
                module.training = active or module is self or recomputed

    # what verl's engine and peft ask of a model

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Let ``.to(bfloat16)`` change parameters only: rounded rotary frequencies would move every position."""
        tables = [(module, name, table) for module in self.modules() for name, table in module._buffers.items()]
        super()._apply(fn, recurse)
        for module, name, table in tables:
            now = module._buffers[name]
            if table is not None and now is not None and now.dtype != table.dtype:
                module._buffers[name] = table.to(now.device)
        return self

    def can_generate(self) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        """Sizes and settings for the preflight summary."""
        return {"family": self.family, "parameters": sum(p.numel() for p in self.parameters())}
