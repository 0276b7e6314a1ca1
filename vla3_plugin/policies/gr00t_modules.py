"""GR00T N1.5's action head: embodiment-specific projections, vision-language self-attention, the DiT.

Module names are those of the public checkpoints. Dropout is the published one; ``FlowPolicy`` leaves it to cloning.
Shapes: B rows, P prefix tokens (images and instruction), T tokens of the DiT (state, future tokens, H actions).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KeysValues = tuple[Tensor, Tensor]  # [B, heads, tokens, head width] each


def block_sizes(cfg: dict[str, Any]) -> tuple[int, int, float, bool]:
    """Heads, width of a head, dropout, and whether it also follows attention and MLP."""
    return cfg["num_attention_heads"], cfg["attention_head_dim"], cfg["dropout"], cfg["final_dropout"]


class CategoryLinear(nn.Module):
    """One affine map per embodiment. ``W`` is [embodiments, in, out]: x @ W, not x @ W.T."""

    def __init__(self, categories: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(categories, inputs, outputs) / math.sqrt(inputs))
        self.b = nn.Parameter(torch.zeros(categories, outputs))

    def forward(self, x: Tensor, category: Tensor) -> Tensor:
        """``x`` [B, tokens, in]; ``category`` int64 [B], or [1] where all rows share one."""
        return torch.matmul(x, self.W[category]) + self.b[category][:, None]


class CategoryMLP(nn.Module):
    def __init__(self, categories: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(categories, inputs, hidden)
        self.layer2 = CategoryLinear(categories, hidden, outputs)

    def forward(self, x: Tensor, category: Tensor) -> Tensor:
        return self.layer2(F.relu(self.layer1(x, category)), category)


class ActionEncoder(nn.Module):
    """Noisy actions and the time's bucket to tokens."""

    def __init__(self, categories: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.W1 = CategoryLinear(categories, action_dim, width)
        self.W2 = CategoryLinear(categories, 2 * width, width)
        self.W3 = CategoryLinear(categories, width, width)

    def forward(self, actions: Tensor, bucket: Tensor, category: Tensor) -> Tensor:
        """[B, H, action_dim] and int64 [B] to [B, H, width]."""
        x = self.W1(actions, category)
        half = x.shape[-1] // 2
        steps = torch.arange(half, dtype=torch.float32, device=x.device)
        # In float32 and in this order, as published: an angle is up to 1000 times the rounding of its frequency.
        exponent = -steps * (torch.full_like(steps[:1], 10000.0).log() / half)
        angle = bucket.float()[:, None] * exponent.exp()
        time = torch.cat([angle.sin(), angle.cos()], dim=-1).to(x.dtype)[:, None].expand_as(x)
        return self.W3(F.silu(self.W2(torch.cat([x, time], dim=-1), category)), category)


class TimestepEmbedder(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(inputs, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class TimestepEncoder(nn.Module):
    """Cosines, then sines, of the bucket at 128 wavelengths up to 10000, through an MLP."""

    FREQUENCIES = 128

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(2 * self.FREQUENCIES, width)

    def forward(self, bucket: Tensor) -> Tensor:
        """int64 [B] to [B, width]."""
        weight = self.timestep_embedder.linear_1.weight
        steps = torch.arange(self.FREQUENCIES, dtype=torch.float32, device=bucket.device)
        exponent = -math.log(10000.0) * steps / (self.FREQUENCIES - 1)  # this order: see ActionEncoder
        angle = bucket.float()[:, None] * exponent.exp()
        return self.timestep_embedder(torch.cat([angle.cos(), angle.sin()], dim=-1).to(weight.dtype))


class Attention(nn.Module):
    """Multi-head attention with biases; ``context_width`` other than ``width`` for cross-attention."""

    def __init__(self, width: int, heads: int, head_width: int, context_width: int, dropout: float) -> None:
        super().__init__()
        inner = heads * head_width
        self.heads = heads
        self.to_q = nn.Linear(width, inner)
        self.to_k, self.to_v = nn.Linear(context_width, inner), nn.Linear(context_width, inner)
        self.to_out = nn.Sequential(nn.Linear(inner, width), nn.Dropout(dropout))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, context: Tensor) -> KeysValues:
        return self._split(self.to_k(context)), self._split(self.to_v(context))

    def forward(self, x: Tensor, kept: KeysValues, mask: Tensor | None) -> Tensor:
        """``mask`` bool [B, 1, 1, keys], true where a key may be looked at; none: everywhere."""
        seen = F.scaled_dot_product_attention(self._split(self.to_q(x)), *kept, attn_mask=mask)
        return self.to_out(seen.transpose(1, 2).flatten(2))


class GELUProjection(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, width: int, dropout: float, final_dropout: bool) -> None:
        super().__init__()
        layers = [GELUProjection(width, 4 * width), nn.Dropout(dropout), nn.Linear(4 * width, width)]
        self.net = nn.Sequential(*layers, *([nn.Dropout(dropout)] if final_dropout else []))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class AdaLayerNorm(nn.Module):
    """Layer norm whose scale and shift come from the time's embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width, eps=1e-5, elementwise_affine=False)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(time))[:, None].chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift


class GR00TVLBlock(nn.Module):
    """Self-attention over the backbone's features."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        heads, head_width, dropout, final = block_sizes(cfg)
        width = heads * head_width
        self.norm1, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn1 = Attention(width, heads, head_width, width, dropout)
        self.final_dropout = nn.Dropout(dropout if final else 0.0)
        self.ff = FeedForward(width, dropout, final)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        normed = self.norm1(x)
        x = x + self.final_dropout(self.attn1(normed, self.attn1.keys_values(normed), mask))
        return x + self.ff(self.norm3(x))


class GR00TDiTBlock(nn.Module):
    """Attention of the DiT: to the prefix in even blocks, whose keys and values a request computes once; to the DiT's
    own tokens in odd ones.

    Both uses go through ``forward``, where FSDP gathers the block's parameters: with ``x`` none it returns the keys and
    values of ``context``.
    """

    def __init__(self, cfg: dict[str, Any], cross: bool) -> None:
        super().__init__()
        heads, head_width, dropout, final = block_sizes(cfg)
        width = heads * head_width
        self.norm1 = AdaLayerNorm(width)
        self.attn1 = Attention(width, heads, head_width, cfg["cross_attention_dim"] if cross else width, dropout)
        self.final_dropout = nn.Dropout(dropout if final else 0.0)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=False)
        self.ff = FeedForward(width, dropout, final)

    def forward(
        self,
        x: Tensor | None,
        time: Tensor | None = None,
        kept: KeysValues | None = None,
        mask: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor | KeysValues:
        if x is None or time is None:
            if context is None:
                raise TypeError("a block needs x and time, or context")
            keys, values = self.attn1.keys_values(context)
            return keys.contiguous(), values.contiguous()  # read K times, and FSDP wants no views at its border
        normed = self.norm1(x, time)
        if kept is None:
            kept, mask = self.attn1.keys_values(normed), None
        x = x + self.final_dropout(self.attn1(normed, kept, mask))
        return x + self.ff(self.norm3(x))


class VLSelfAttention(nn.Module):
    def __init__(self, cfg: dict[str, Any], blocks: int) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([GR00TVLBlock(cfg) for _ in range(blocks)])

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for block in self.transformer_blocks:
            x = block(x, mask)
        return x


class DiT(nn.Module):
    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        width = cfg["num_attention_heads"] * cfg["attention_head_dim"]
        self.timestep_encoder = TimestepEncoder(width)
        self.transformer_blocks = nn.ModuleList([GR00TDiTBlock(cfg, i % 2 == 0) for i in range(cfg["num_layers"])])
        self.norm_out = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.proj_out_1, self.proj_out_2 = nn.Linear(width, 2 * width), nn.Linear(width, cfg["output_dim"])

    def keys_values(self, context: Tensor) -> list[KeysValues]:
        """Of the even blocks, in order, from ``context`` [B, P, context width]."""
        return [block(None, context=context) for block in self.transformer_blocks[::2]]

    def forward(self, x: Tensor, bucket: Tensor, kept: list[KeysValues], mask: Tensor | None) -> Tensor:
        """[B, T, width] at int64 [B] to [B, T, outputs]."""
        time = self.timestep_encoder(bucket)
        for i, block in enumerate(self.transformer_blocks):
            x = block(x, time) if i % 2 else block(x, time, kept[i // 2], mask)
        shift, scale = self.proj_out_1(F.silu(time))[:, None].chunk(2, dim=-1)
        return self.proj_out_2(self.norm_out(x) * (1 + scale) + shift)


class ActionHead(nn.Module):
    """Everything behind the backbone. ``cfg``: the public ``action_head_cfg``."""

    def __init__(self, cfg: dict[str, Any], initializer_range: float) -> None:
        super().__init__()
        vl, width = cfg["vl_self_attention_cfg"], cfg["input_embedding_dim"]
        context, hidden, many = cfg["backbone_embedding_dim"], cfg["hidden_size"], cfg["max_num_embodiments"]
        self.horizon, self.buckets = cfg["action_horizon"], cfg["num_timestep_buckets"]
        self.model = DiT(cfg["diffusion_model_cfg"])
        self.state_encoder = CategoryMLP(many, cfg["max_state_dim"], hidden, width)
        self.action_encoder = ActionEncoder(many, cfg["action_dim"], width)
        self.action_decoder = CategoryMLP(many, hidden, hidden, cfg["action_dim"])
        self.future_tokens = nn.Embedding(cfg["num_target_vision_tokens"], width)
        self.vlln = nn.LayerNorm(context) if cfg["use_vlln"] else nn.Identity()
        self.vl_self_attention = VLSelfAttention(vl, vl["num_layers"] if cfg["use_vlln"] else 0)
        self.position_embedding = nn.Embedding(cfg["max_seq_len"], width) if cfg["add_pos_embed"] else None
        self.apply(lambda module: _draw(module, initializer_range))

    def context(self, features: Tensor, mask: Tensor | None) -> Tensor:
        """Backbone features [B, P, width] to what the DiT attends to; ``mask`` bool [B, 1, 1, P]."""
        return self.vl_self_attention(self.vlln(features), mask)

    def tokens(self, state: Tensor, x: Tensor, bucket: Tensor, category: Tensor) -> Tensor:
        """[state, future tokens, noisy actions]: [B, 1 + future + H, width] from encoded ``state`` [B, 1, width]."""
        actions = self.action_encoder(x, bucket, category)
        if self.position_embedding is not None:
            positions = torch.arange(x.shape[1], device=x.device)
            actions = actions + self.position_embedding(positions)
        future = self.future_tokens(torch.arange(self.future_tokens.num_embeddings, device=x.device))
        return torch.cat([state, future.expand(len(x), -1, -1), actions], dim=1)


def _draw(module: nn.Module, std: float) -> None:
    """Fresh weights. Modulations start at zero, as is usual for a DiT: a block begins as if there were no time."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=std)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    elif isinstance(module, AdaLayerNorm):
        nn.init.zeros_(module.linear.weight)
    elif isinstance(module, DiT):
        nn.init.zeros_(module.proj_out_1.weight)
