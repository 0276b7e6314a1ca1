"""The parts that pi0 and pi0.5 need beside transformers' networks: time features, the prefix and its cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
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
    hidden: Tensor  # [B, P, width], after the last norm; empty where the prefix was carried as tensors
    state: Tensor  # float32 [B, max_state_dim], normalised

    def tensors(self) -> dict[str, Tensor]:
        """What denoising steps read: not the last hidden states, which served the value alone."""
        kept = {"mask": self.mask, "state": self.state}
        for i, layer in enumerate(self.cache.layers):
            kept |= {f"keys.{i}": layer.keys, f"values.{i}": layer.values}
        return kept

    @classmethod
    def of(cls, kept: dict[str, Tensor]) -> Prefix:
        layers = []
        for i in range((len(kept) - 2) // 2):
            written = WriteLayer()
            written.update(kept[f"keys.{i}"], kept[f"values.{i}"])
            layers.append(ReadLayer(written))
        nothing = kept["state"].new_empty(len(kept["state"]), 0, 0)
        return cls(Cache(layers=list(layers)), kept["mask"], nothing, kept["state"])
