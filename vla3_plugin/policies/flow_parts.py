"""Parts of flow policies that know no family: the heads that RL adds, recomputed layers, rules for dtypes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vla3_plugin.policies import flow


class PreciseLinear(nn.Linear):
    """A linear layer that adds up in float32 and rounds no result, whatever dtype its weights are stored in.

    The last layer before a likelihood: a velocity rounded to bfloat16 is off by 0.4%, the log-prob by a hundredth.
    """

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(promote(x), promote(self.weight), promote(self.bias))

    @classmethod
    def of(cls, layer: nn.Linear) -> PreciseLinear:
        """``layer`` with its own parameters, computing so."""
        precise = cls(layer.in_features, layer.out_features, device="meta")
        precise.weight, precise.bias = layer.weight, layer.bias
        return precise


class ValueHead(nn.Module):
    """V(s) from a sequence of hidden states and the proprioceptive state.

    The mean of the hidden states over the real tokens, layer-normalised, beside the normalised state: in pi0 the state
    token belongs to the suffix, so the prefix alone does not know where the arm is.
    """

    def __init__(self, width: int, state_dim: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        last = nn.Linear(hidden, outputs)
        self.mlp = nn.Sequential(
            nn.Linear(width + state_dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), last
        )
        nn.init.normal_(last.weight, std=0.01)  # first values near 0, whatever the backbone says
        nn.init.zeros_(last.bias)

    def forward(self, hidden: Tensor, mask: Tensor, state: Tensor) -> Tensor:
        """``hidden`` [B, T, width], ``mask`` [B, T], ``state`` [B, S] to float32 [B, outputs]."""
        weight = mask[:, :, None].to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / weight.sum(1)
        value = self.mlp(torch.cat([self.norm(pooled), state.to(hidden.dtype)], dim=-1))
        return promote(value)


class NoiseHead(nn.Module):
    """Flow-Noise's std of a denoising step, per action element, from the expert's hidden states at that step.

    It knows the observation and the time through them. Bounded (``flow.bounded_std``), and in the middle of the bounds,
    on the log scale, before anything is learned.
    """

    def __init__(self, width: int, hidden: int, outputs: int, std_min: float, std_max: float) -> None:
        super().__init__()
        self.std_min, self.std_max = std_min, std_max
        last = PreciseLinear(hidden, outputs)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.Tanh(), last)
        nn.init.normal_(last.weight, std=0.01)
        nn.init.zeros_(last.bias)

    def forward(self, features: Tensor) -> Tensor:
        """[B, H, width] to float32 [B, H, outputs], inside [std_min, std_max]."""
        return flow.bounded_std(self.mlp(features), std_min=self.std_min, std_max=self.std_max)


def checkpointing(layer: nn.Module) -> Callable[..., Any]:
    """``layer``'s forward, recomputed in the backward pass; to be set as the instance's ``forward``."""
    return partial(_checkpointed, type(layer).forward, layer)


def _checkpointed(forward: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(layer, *args, **kwargs)
    # dropout (on where ``training`` is) must draw the same mask again
    return checkpoint(forward, layer, *args, use_reentrant=False, preserve_rng_state=layer.training, **kwargs)


def is_fsdp(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def promote(x: Tensor) -> Tensor:
    """float32, or float64 where the network computes in it."""
    return x if x.dtype == torch.float64 else x.float()


def require_float32(name: str, tensor: Tensor) -> None:
    """Refuse what mixed precision has already rounded: a log-prob of a rounded sample is another sample's."""
    if tensor.dtype != torch.float32 and tensor.dtype != torch.float64:
        raise TypeError(
            f"{name} is {tensor.dtype}, expected float32: FSDP's mixed precision casts the inputs of the wrapped root "
            "unless its policy has cast_forward_inputs=False"
        )
