"""The parts that pi0 needs beside transformers' network: time features, the prefix's cache, the value head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PI0Config
from transformers.cache_utils import Cache, DynamicLayer


class DoubleTimestepEmbeddings(nn.Module):
    """Sine and cosine features of the time, computed in float64 as the published weights were trained with.

    Angles reach 2*pi/min_period = 1571 rad, where float32 leaves errors of 1e-4 that pass into the velocity.
    """

    def __init__(self, config: PI0Config) -> None:
        super().__init__()
        expert: Any = config.dit_config
        self.width = expert.hidden_size
        self.min_period, self.max_period = config.min_period, config.max_period

    def forward(self, time: Tensor) -> Tensor:
        """float32 [B] to float32 [B, width of the expert]."""
        fraction = torch.linspace(0.0, 1.0, self.width // 2, dtype=torch.float64, device=time.device)
        period = self.min_period * (self.max_period / self.min_period) ** fraction
        angle = time.double()[:, None] * (2.0 * torch.pi / period)
        return torch.cat([angle.sin(), angle.cos()], dim=1).float()


class WriteLayer(DynamicLayer):
    """Keeps the prefix's keys and values. Writing twice is harmless: gradient checkpointing runs a layer again."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class ReadLayer(DynamicLayer):
    """Shows the prefix's keys and values before the suffix's, and keeps none of the latter."""

    def __init__(self, written: WriteLayer) -> None:
        super().__init__()
        keys, values = written.keys, written.values
        if keys is None or values is None:
            raise RuntimeError(
                "the prefix was not run: transformers dropped the cache (its own gradient checkpointing is on?)"
            )
        self.lazy_initialization(keys, values)
        self.keys: Tensor = keys
        self.values: Tensor = values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


class Prefix(NamedTuple):
    cache: Cache
    mask: Tensor  # int64 [B, P]
    hidden: Tensor  # [B, P, width], after the last norm
    state: Tensor  # float32 [B, max_state_dim], normalised


class ValueHead(nn.Module):
    """V(s) from the prefix and the proprioceptive state.

    The mean of the prefix's last hidden states over its real tokens, layer-normalised, beside the normalised state:
    in pi0 the state token belongs to the suffix, so the prefix alone does not know where the arm is.
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
        weight = mask[:, :, None].to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / weight.sum(1)
        value = self.mlp(torch.cat([self.norm(pooled), state.to(hidden.dtype)], dim=-1))
        return value if value.dtype == torch.float64 else value.float()


def checkpointed(forward: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(layer, *args, **kwargs)
    return checkpoint(forward, layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def is_fsdp(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)
