"""The network of OpenVLA and OpenVLA-OFT: two vision towers, a projector and Llama, under the published names.

``vision_backbone.featurizer`` is DINOv2 with registers, ``vision_backbone.fused_featurizer`` SigLIP; the features of a
patch are both, side by side. Camera after camera, the projected patches stand right behind the first token.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache
from transformers.utils import is_flash_attn_2_available

from vla3_plugin.policies.checkpoints import CheckpointError
from vla3_plugin.policies.prismatic_vit import TowerSizes, VisionTower

VISION = "dinosiglip-vit-so-224px"  # the only one that public OpenVLA checkpoints use
_TIMM_HEADS = {"vit_large_patch14_reg4_dinov2.lvd142m": 16, "vit_so400m_patch14_siglip_224": 16}
_TEXT_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range",
              "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias",
              "mlp_bias")  # fmt: skip
BACKENDS = ("auto", "sdpa", "eager", "flash_attention_2")


@dataclass
class PrismaticSizes:
    """``text``: keyword arguments of ``LlamaConfig``. ``vocab_padding``: rows at the end of the vocabulary that stand
    for nothing; the action tokens are the last ``bins`` before them."""

    dino: TowerSizes
    siglip: TowerSizes
    text: dict[str, Any] = field(default_factory=dict)
    vocab_padding: int = 64
    bins: int = 256

    def __post_init__(self) -> None:
        self.dino, self.siglip = (TowerSizes(**t) if isinstance(t, dict) else t for t in (self.dino, self.siglip))
        if (self.dino.image, self.dino.patches) != (self.siglip.image, self.siglip.patches):
            raise ValueError(
                f"the towers must share one patch grid, dino has {self.dino.patches} patches of images of "
                f"{self.dino.image}, siglip {self.siglip.patches} of {self.siglip.image}"
            )
        if self.first_token <= 0:
            raise ValueError(
                f"text.vocab_size is {self.text.get('vocab_size')}, expected more than vocab_padding "
                f"{self.vocab_padding} and {self.bins} action tokens"
            )

    @property
    def end_token(self) -> int:
        return int(self.text["vocab_size"]) - self.vocab_padding

    @property
    def first_token(self) -> int:
        return self.end_token - self.bins

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def published_sizes(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], overrides: dict[str, Any] | None = None
) -> PrismaticSizes:
    """Sizes from a checkpoint's ``config.json`` and, where that is silent, from its tensors' shapes.

    ``overrides``: ``dino``, ``siglip`` and ``text``, each a dict merged over what was found (the number of attention
    heads of a tower is stated nowhere but in its timm name).

    Raises:
        CheckpointError: the towers or the language model are of another kind, or the weights have none of them.
    """
    vision = config.get("vision_backbone_id", VISION)
    if vision != VISION or not config.get("use_fused_vision_backbone", True):
        raise CheckpointError(f"config.json: vision_backbone_id is {vision!r}, only {VISION!r} is built")
    if (bins := config.get("n_action_bins", 256)) != 256:
        raise CheckpointError(f"config.json: n_action_bins is {bins}, expected 256")
    names = config.get("timm_model_ids") or list(_TIMM_HEADS)
    heads = [_TIMM_HEADS.get(name, 16) for name in names]
    overrides = overrides or {}
    sizes = PrismaticSizes(
        dino={**asdict(_tower(shapes, "vision_backbone.featurizer.", heads[0])), **overrides.get("dino", {})},  # type: ignore[arg-type]
        siglip={
            **asdict(_tower(shapes, "vision_backbone.fused_featurizer.", heads[-1])),
            **overrides.get("siglip", {}),
        },  # type: ignore[arg-type]
        text={**_text(config.get("text_config") or {}, shapes), **overrides.get("text", {})},
        vocab_padding=config.get("pad_to_multiple_of", 64),
    )
    for tower in (sizes.dino, sizes.siglip):
        stated = config.get("image_sizes")
        if stated and list(stated) != [tower.image] * len(stated):
            raise CheckpointError(
                f"config.json: image_sizes is {stated}, the position embeddings are for {tower.image}"
            )
    return sizes


def _tower(shapes: dict[str, tuple[int, ...]], prefix: str, heads: int) -> TowerSizes:
    try:
        _, positions, width = shapes[prefix + "pos_embed"]
        patch = shapes[prefix + "patch_embed.proj.weight"][-1]
        mlp = shapes[prefix + "blocks.0.mlp.fc1.weight"][0]
    except (KeyError, ValueError, IndexError):
        raise CheckpointError(
            f"the weights hold no {prefix}pos_embed, patch_embed and blocks of the expected form: no OpenVLA network"
        ) from None
    return TowerSizes(
        width=width,
        depth=_count(shapes, prefix + "blocks.") - 1,
        heads=heads,
        mlp=mlp,
        patch=patch,
        image=math.isqrt(positions) * patch,
        registers=shapes.get(prefix + "reg_token", (0, 0))[1],
        layer_scale=prefix + "blocks.0.ls1.scale_factor" in shapes,
    )


def _text(stated: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    if (kind := stated.get("model_type", "llama")) != "llama":
        raise CheckpointError(f"config.json: text_config.model_type is {kind!r}, expected 'llama'")
    layer = "language_model.model.layers.0."
    try:
        vocabulary, width = shapes["language_model.model.embed_tokens.weight"]
        mlp = shapes[layer + "mlp.gate_proj.weight"][0]
        keys = shapes[layer + "self_attn.k_proj.weight"][0]
    except (KeyError, ValueError):
        raise CheckpointError("the weights hold no language_model.model of Llama's form: no OpenVLA network") from None
    heads = stated.get("num_attention_heads", 32)
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": _count(shapes, "language_model.model.layers."),
        "num_attention_heads": heads,
        "num_key_value_heads": keys // stated.get("head_dim", max(width // heads, 1)),
        **{key: stated[key] for key in _TEXT_KEYS if stated.get(key) is not None},
    }


def _count(shapes: dict[str, tuple[int, ...]], prefix: str) -> int:
    return 1 + max((int(name[len(prefix) :].split(".")[0]) for name in shapes if name.startswith(prefix)), default=-1)


def is_unused(name: str, sizes: PrismaticSizes) -> bool:
    """Whether a published checkpoint's tensor is one that nothing reads (and that the network here does not have)."""
    vision = r"vision_backbone\.(fused_)?featurizer\."
    return bool(
        re.match(vision + r"(norm|attn_pool)\.", name)
        or re.match(rf"vision_backbone\.featurizer\.blocks\.{sizes.dino.depth}\.", name)
        or re.match(rf"vision_backbone\.fused_featurizer\.blocks\.{sizes.siglip.depth}\.", name)
        or name.endswith("rotary_emb.inv_freq")
    )


def attention_backend(wanted: str, *, causal: bool) -> str:
    """What Llama's attention runs on. ``auto``: FlashAttention 2 on a GPU that has it and for half-precision weights
    (of the default dtype), else PyTorch's own. Full attention needs a mask that only the latter takes.

    Raises:
        ValueError: ``wanted`` is unknown, or cannot do what is asked.
    """
    if wanted not in BACKENDS:
        raise ValueError(f"policy.attention_backend is {wanted!r}, expected one of {', '.join(BACKENDS)}")
    if not causal:
        if wanted not in ("auto", "sdpa"):
            raise ValueError(
                f"policy.attention_backend is {wanted!r}, policy.attention bidirectional needs sdpa: the others would "
                "silently run causally"
            )
        return "sdpa"
    if wanted != "auto":
        return wanted
    half = torch.get_default_dtype() in (torch.bfloat16, torch.float16)
    return "flash_attention_2" if half and torch.cuda.is_available() and is_flash_attn_2_available() else "sdpa"


class FusedVision(nn.Module):
    def __init__(self, sizes: PrismaticSizes) -> None:
        super().__init__()
        self.featurizer = VisionTower(sizes.dino)
        self.fused_featurizer = VisionTower(sizes.siglip)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 6, H, W], DINOv2's channels first, to [B, patches, both widths]."""
        return torch.cat([self.featurizer(images[:, :3]), self.fused_featurizer(images[:, 3:])], dim=-1)


class Projector(nn.Module):
    def __init__(self, vision: int, text: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision, 4 * vision)
        self.fc2 = nn.Linear(4 * vision, text)
        self.fc3 = nn.Linear(text, text)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class OutputHead(nn.Linear):
    """Llama's output matrix, multiplied in float32: logits of 10 have steps of 0.06 in bfloat16, log-probs too then."""

    def forward(self, hidden: Tensor, rows: slice | None = None) -> Tensor:
        """float32 [..., width] (float64 for such weights) to the logits of all tokens, or of ``rows``."""
        weight = self.weight if rows is None else self.weight[rows]
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return F.linear(hidden.to(dtype), weight.to(dtype))


class Prismatic(nn.Module):
    """The parts and how a sequence goes through them; a policy family says what the sequence is."""

    def __init__(self, sizes: PrismaticSizes, backend: str) -> None:
        super().__init__()
        self.sizes = sizes
        self.config = LlamaConfig(**copy.deepcopy(sizes.text), tie_word_embeddings=False)
        self.config._attn_implementation = backend
        self.vision_backbone = FusedVision(sizes)
        self.projector = Projector(sizes.dino.width + sizes.siglip.width, self.config.hidden_size)
        self.language_model: Any = LlamaForCausalLM(self.config)
        head = OutputHead(self.config.hidden_size, self.config.vocab_size, bias=False, device="meta")
        head.weight = self.language_model.lm_head.weight
        self.language_model.lm_head = head
        self.action_rows = slice(sizes.first_token, sizes.end_token)

    def draw(self) -> None:
        """Fresh weights of what transformers does not draw itself."""
        self.vision_backbone.featurizer.draw()
        self.vision_backbone.fused_featurizer.draw()

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in; under FSDP's mixed precision, what its parameters are gathered in."""
        return self.projector.fc1.weight.dtype

    def embed(self, images: Tensor, ids: Tensor, mask: Tensor, tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``images`` [B, cameras, 6, H, W] and tokens to embeddings [B, 1 + patches + T - 1, width], their mask int64,
        and embeddings of the token ids ``tail`` [B, n] that come later.

        The first token must be a real one in every row; the rest of ``ids`` may be padding, where ``mask`` is 0.
        """
        batch, cameras = images.shape[:2]
        seen = self.projector(self.vision_backbone(images.flatten(0, 1).to(self.dtype)))
        seen = seen.reshape(batch, cameras * seen.shape[1], -1)
        words = self.language_model.model.embed_tokens(torch.cat([ids, tail], dim=1))  # one call: FSDP gathers once
        head, later = words[:, : ids.shape[1]], words[:, ids.shape[1] :]
        sequence = torch.cat([head[:, :1], seen, head[:, 1:]], dim=1)
        shown = mask.new_ones(batch, seen.shape[1])
        return sequence, torch.cat([mask[:, :1], shown, mask[:, 1:]], dim=1), later

    def run(self, embeds: Tensor, mask: Tensor, *, causal: bool = True, cache: Cache | None = None) -> Tensor:
        """Last hidden states [B, n, width] of ``embeds`` [B, n, width].

        ``mask`` int64 [B, past + n]: masked tokens are seen by nobody and take no position. Not ``causal``: every token
        sees every real one.
        """
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -embeds.shape[1] :]
        seen = mask if causal else mask.bool()[:, None, None].expand(-1, 1, embeds.shape[1], -1)
        return self.language_model.model(
            inputs_embeds=embeds,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def action_logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., bins] of the action tokens alone."""
        return self.language_model.lm_head(hidden, self.action_rows)


def last_real(mask: Tensor) -> Tensor:
    """int64 [B]: the index of each row's last real token."""
    return (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(-1)
