"""The two vision towers of OpenVLA, with the parameter names of the published checkpoints.

Own modules and not transformers' Dinov2WithRegisters and Siglip: those split the fused query-key-value matrix, keep
position embeddings in another layout, and Siglip's activation is the tanh approximation where the published towers use
the exact one. The features are the patches of the last block but one, before any final norm; the last block, that norm
and SigLIP's attention pooling are in the checkpoints and are not built, since nothing reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

EPS = 1e-6


@dataclass
class TowerSizes:
    """``depth``: blocks that are run. ``registers``: register tokens; with any there is a class token too.

    ``layer_scale``: each residual branch is scaled by learned factors (DINOv2).
    """

    width: int
    depth: int
    heads: int
    mlp: int
    patch: int
    image: int
    registers: int = 0
    layer_scale: bool = False

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class VisionBlock(nn.Module):
    """A pre-norm transformer block; FSDP shards these one by one."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width, eps=EPS)
        self.attn = Attention(sizes.width, sizes.heads)
        self.norm2 = nn.LayerNorm(sizes.width, eps=EPS)
        self.mlp = MLP(sizes.width, sizes.mlp)
        self.ls1: nn.Module = LayerScale(sizes.width) if sizes.layer_scale else nn.Identity()
        self.ls2: nn.Module = LayerScale(sizes.width) if sizes.layer_scale else nn.Identity()
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            recomputed: Any = checkpoint(self._run, x, use_reentrant=False, preserve_rng_state=False)
            return recomputed
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, sizes.width, sizes.patch, stride=sizes.patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class VisionTower(nn.Module):
    """float [B, 3, image, image], normalised, to patch features [B, patches, width]."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.patch_embed = PatchEmbed(sizes)
        self.pos_embed = nn.Parameter(torch.empty(1, sizes.patches, sizes.width))
        if sizes.registers:
            self.cls_token = nn.Parameter(torch.empty(1, 1, sizes.width))
            self.reg_token = nn.Parameter(torch.empty(1, sizes.registers, sizes.width))
        self.blocks = nn.ModuleList(VisionBlock(sizes) for _ in range(sizes.depth))

    def draw(self) -> None:
        """Fresh weights: truncated normals scaled to the width (0.02 suits widths of a thousand), positions as sines
        and cosines."""
        from vla3_plugin.policies.pi0_files import sincos_positions

        std = min(0.06, 0.64 / math.sqrt(self.sizes.width))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        self.pos_embed.data.copy_(sincos_positions(*self.pos_embed.shape[1:]))
        for token in ("cls_token", "reg_token"):
            if hasattr(self, token):
                nn.init.trunc_normal_(getattr(self, token), std=std)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images) + self.pos_embed
        if self.sizes.registers:  # these take no position
            extra = torch.cat([self.cls_token, self.reg_token], dim=1).expand(len(x), -1, -1)
            x = torch.cat([extra, x], dim=1)
        for block in self.blocks:
            x = block(x)
        return x[:, -self.sizes.patches :]
