"""pi0.5's network: transformers' PaliGemma, and an action expert of Gemma's parts whose norms are set by the time.

The names of the modules are the published ones, so that a checkpoint's keys need a change of prefix and no more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PI0Config
from transformers.cache_utils import Cache
from transformers.models.gemma.modeling_gemma import GemmaAttention, GemmaMLP, GemmaRotaryEmbedding

from vla3_plugin.policies.flow_parts import PreciseLinear, promote
from vla3_plugin.policies.pi0_modules import DoubleTimestepEmbeddings


class PI05Config(PI0Config):
    """The sizes of pi0, of which ``max_state_dim`` is read by the value head alone: the state is in the prompt."""

    model_type = "pi05"


class AdaptiveRMSNorm(nn.Module):
    """RMS norm with scale and shift from a condition, and a gate for the residual branch (adaLN, arXiv 2212.09748)."""

    def __init__(self, width: int, condition: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(condition, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [B, T, width] and ``condition`` [B, C] to the normed x and the gate [B, 1, width], in x's dtype."""
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        wide = promote(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + promote(scale)) + promote(shift)).to(x.dtype), gate


class PI05ExpertLayer(nn.Module):
    """Gemma's decoder layer with adaptive norms and gated residuals."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.self_attn = GemmaAttention(config, index)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = AdaptiveRMSNorm(config.hidden_size, config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AdaptiveRMSNorm(config.hidden_size, config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Cache,
    ) -> Tensor:
        normed, gate = self.input_layernorm(x, condition)
        attended, _ = self.self_attn(
            hidden_states=normed,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        x = x + gate * attended
        normed, gate = self.post_attention_layernorm(x, condition)
        return x + gate * self.mlp(normed)


class PI05Expert(nn.Module):
    """The action tokens, each of which sees the whole prefix and every other action."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PI05ExpertLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = AdaptiveRMSNorm(config.hidden_size, config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = GemmaRotaryEmbedding(config)

    def forward(
        self,
        inputs_embeds: Tensor,
        condition: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Cache,
    ) -> Tensor:
        """``inputs_embeds`` [B, H, width], ``condition`` [B, width], ``attention_mask`` bool [B, 1, H, P + H],
        ``position_ids`` int64 [B, H], ``past_key_values`` of the prefix, to [B, H, width]."""
        positions = self.rotary_emb(inputs_embeds, position_ids=position_ids)
        x = inputs_embeds
        for layer in self.layers:
            x = layer(
                x,
                condition,
                attention_mask=attention_mask,
                position_embeddings=positions,
                past_key_values=past_key_values,
            )
        return self.norm(x, condition)[0]


class PI05Network(nn.Module):
    """``vlm``, ``expert`` and the projections between action space and expert."""

    def __init__(self, config: PI0Config) -> None:
        super().__init__()
        expert: Any = config.dit_config
        width = expert.hidden_size
        expert._attn_implementation = config._attn_implementation
        self.vlm: Any = AutoModel.from_config(config.vlm_config)
        self.expert = PI05Expert(expert)
        self.sinusoid_embeds = DoubleTimestepEmbeddings(config)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        self.action_out_proj = PreciseLinear(width, config.max_action_dim)
        self._draw(expert.initializer_range)

    @torch.no_grad()
    def _draw(self, std: float) -> None:
        """Fresh weights of the expert. Modulations start small and gates near 1, or nothing would pass at first."""
        for module in self.expert.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.expert.modules():
            if isinstance(module, AdaptiveRMSNorm):
                module.dense.bias.view(3, -1)[2] = 1.0

    def condition(self, time: Tensor, dtype: torch.dtype) -> Tensor:
        """float32 [B] to what the expert's norms are set by, [B, width]."""
        embedded = self.time_mlp_in(self.sinusoid_embeds(time).to(dtype))
        return F.silu(self.time_mlp_out(F.silu(embedded)))

    def forward(self, x: Tensor, time: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """The expert's last hidden states [B, H, width] for ``x`` [B, H, max_action_dim], in the network's dtype.

        ``mask`` int64 [B, P] of the prefix whose keys and values ``cache`` shows; padding takes no position.
        """
        batch, horizon = x.shape[:2]
        seen = torch.cat([mask.bool(), mask.new_ones(batch, horizon, dtype=torch.bool)], dim=1)
        return self.expert(
            inputs_embeds=self.action_in_proj(x),
            condition=self.condition(time, x.dtype),
            attention_mask=seen[:, None, None].expand(batch, 1, horizon, -1),
            position_ids=mask.sum(1, keepdim=True) + torch.arange(horizon, device=mask.device),
            past_key_values=cache,
        )
