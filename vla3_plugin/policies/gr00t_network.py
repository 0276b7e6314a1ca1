"""GR00T N1.5's network: Eagle 2.5 on transformers' SigLIP and Qwen3, and the action head behind it.

The reference lets padding take part: neither its vision-language self-attention nor its DiT looks at the attention
mask, so an action there depends on how long the batch's longest prompt is. Here padding is masked in both, and prompts
are padded on the right, behind everything a causal model looks back at: what a request gets is what the reference
computes for it alone, unpadded, whatever batch it is in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model, SiglipVisionConfig, SiglipVisionModel

from vla3_plugin.policies.gr00t_config import GR00TConfig
from vla3_plugin.policies.gr00t_modules import ActionHead, KeysValues


class Prefix(NamedTuple):
    """What is encoded once a request. B rows, P tokens of images and instruction."""

    kept: list[KeysValues]  # of the DiT's even blocks, [B, heads, P, head width]
    mask: Tensor  # int64 [B, P]
    hidden: Tensor  # [B, P, width], after the vision-language self-attention
    state: Tensor  # float32 [B, max_state_dim], normalised
    state_token: Tensor  # [B, 1, DiT's width]
    category: Tensor  # int64 [B], or [1] where all rows are of one embodiment


class Backbone(nn.Module):
    """Eagle 2.5: SigLIP, one linear map, the first ``select_layer`` layers of Qwen3 and its final norm."""

    def __init__(self, config: GR00TConfig) -> None:
        super().__init__()
        eagle, cfg = config.eagle_config, config.backbone_cfg
        vision = SiglipVisionConfig(**{**eagle["vision_config"], "vision_use_head": False})
        text = dict(eagle["text_config"], num_hidden_layers=cfg["select_layer"], use_cache=False)
        text.pop("layer_types", None)  # transformers stores one entry a layer; cutting the layers makes it stale
        language = Qwen3Config(**text)
        for part in (vision, language):
            part._attn_implementation = "sdpa"
        self.vision_model, self.language_model = SiglipVisionModel(vision), Qwen3Model(language)
        self.mlp1 = nn.Sequential(nn.Linear(vision.hidden_size, language.hidden_size))
        width = cfg["project_to_dim"]
        self.eagle_linear = nn.Identity() if width is None else nn.Linear(language.hidden_size, width)
        self.image_token = eagle["image_token_index"]
        for layer in (self.mlp1[0], self.eagle_linear):
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=config.initializer_range)
                nn.init.zeros_(layer.bias)

    @property
    def image_tokens(self) -> int:
        """Tokens of one image."""
        return self.vision_model.embeddings.num_patches

    @property
    def dtype(self) -> torch.dtype:
        return self.vision_model.embeddings.patch_embedding.weight.dtype

    def image_features(self, images: Tensor) -> Tensor:
        """[N, 3, h, w] in [-1, 1] to [N, tokens, width of the language model]."""
        return self.mlp1(self.vision_model(images.to(self.dtype)).last_hidden_state)

    def forward(self, images: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """``images`` [N, 3, h, w]; ``ids`` and ``mask`` int64 [B, P], an image token for every feature, in order.

        Features [B, P, width]; those of padding mean nothing.
        """
        seen = self.image_features(images)
        words = self.language_model.get_input_embeddings()(ids)
        place = (ids == self.image_token)[:, :, None].expand_as(words)
        embeds = words.masked_scatter(place, seen.to(words.dtype))
        hidden = self.language_model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).last_hidden_state
        return self.eagle_linear(hidden)


class GR00T(nn.Module):
    """Backbone and action head. ``forward`` runs once a request, ``features`` at every denoising step."""

    def __init__(self, config: GR00TConfig) -> None:
        super().__init__()
        config.check()
        self.backbone = Backbone(config)
        self.action_head = ActionHead(config.action_head_cfg, config.initializer_range)

    def forward(
        self, images: Tensor, ids: Tensor, mask: Tensor, state: Tensor, category: Tensor, frozen: bool
    ) -> Prefix:
        """``images`` [B, cameras, 3, h, w]; ``ids``, ``mask`` int64 [B, P]; ``state`` [B, max_state_dim], normalised.

        ``frozen``: no gradient for the backbone.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            features = self.backbone(images.flatten(0, 1), ids, mask)
        return self.prefix(features, mask, state, category)

    def prefix(self, features: Tensor, mask: Tensor, state: Tensor, category: Tensor) -> Prefix:
        """The part of ``forward`` behind the backbone, from its features [B, P, width]."""
        head = self.action_head
        context = head.context(features, keys_mask(mask))
        token = head.state_encoder(state[:, None].to(context.dtype), category)
        return Prefix(head.model.keys_values(context), mask, context, state, token, category)

    def features(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """The DiT's outputs for the actions, [B, H, hidden], from ``x`` [B, H, action_dim] at ``time`` [B] in [0, 1].

        The network sees the time's integer bucket, truncated in the precision that ``time`` has: the grid's times are
        given in float64, since some of them in float32 fall into the bucket below their own.
        """
        head = self.action_head
        bucket = (time * head.buckets).long()
        tokens = head.tokens(prefix.state_token, x.to(prefix.state_token.dtype), bucket, prefix.category)
        return head.model(tokens, bucket, prefix.kept, keys_mask(prefix.mask))[:, -x.shape[1] :]

    def project(self, prefix: Prefix, features: Tensor) -> Tensor:
        """[B, H, hidden] to the velocity [B, H, action_dim]."""
        return self.action_head.action_decoder(features, prefix.category)


def keys_mask(mask: Tensor) -> Tensor:
    """int64 [B, P] to bool [B, 1, 1, P], true where a key may be looked at."""
    return mask.bool()[:, None, None]


def expand_images(ids: Tensor, mask: Tensor, image_token: int, cameras: int, each: int) -> tuple[Tensor, Tensor]:
    """Give every image its ``each`` tokens: rows are stored with one a camera. [B, T] to [B, T + cameras (each - 1)].

    Raises:
        ValueError: (on the CPU, where looking is free) a row has not one image token a camera.
    """
    image = ids == image_token
    if ids.device.type == "cpu" and not bool((image.sum(1) == cameras).all()):
        raise ValueError(
            f"input_ids hold {image.sum(1).tolist()} image tokens, expected {cameras}, one a camera, in each row"
        )
    length = ids.shape[1] + cameras * (each - 1)
    counts = torch.where(image, each, 1).flatten()
    ids, mask = (
        x.flatten().repeat_interleave(counts, output_size=len(ids) * length).view(-1, length) for x in (ids, mask)
    )
    return ids, mask
