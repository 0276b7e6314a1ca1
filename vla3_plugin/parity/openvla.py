"""OpenVLA against golden vectors of the published modelling code, from tensor names to un-normalised actions.

The directory becomes a checkpoint as the hub has it (``config.json`` with the language model's config inside,
``preprocessor_config.json``, ``model.safetensors``) and is read by ``from_checkpoint``. Prompts are token ids there, so
the tokenizer does not matter.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor

from vla3_plugin.parity.golden import Golden, GoldenError
from vla3_plugin.policies import tokens
from vla3_plugin.policies.openvla import OpenVLAPolicy
from vla3_plugin.policies.openvla_base import TokenPolicy
from vla3_plugin.policies.openvla_images import pillow_13_rows_first, resize_bicubic
from vla3_plugin.policies.prompts import word_tokenizer

NOT_COMPUTED: dict[str, str] = {}

P = TypeVar("P", bound=TokenPolicy)


def outputs(golden: Golden) -> dict[str, Tensor]:
    policy = load(golden, OpenVLAPolicy)
    found = {**preprocessing(golden, policy), **decoding(golden, policy), **vision(golden, policy)}
    for index in range(len(golden.inputs["ids_right_pad"])):
        if f"greedy.{index}.tokens" in golden.outputs:
            found |= prefixed(f"greedy.{index}.", _greedy(golden, policy, index))
    if "forced_action_tokens" in golden.inputs:
        found |= prefixed("rlinf_forced.", _forced(golden, policy))
    return found


def masks(golden: Golden) -> dict[str, Tensor]:
    """Of the prepared pixels, those that do not depend on Pillow's version: see ``resize_bicubic``."""
    raw, name = golden.inputs.get("pre.raw_image_u8"), "pre.pixel_values"
    if raw is None or name not in golden.outputs:
        return {}
    batch, channels, height, width = golden.outputs[name].shape
    if not pillow_13_rows_first((raw.shape[0], raw.shape[1]), (height, width)):
        return {}
    either = [resize_bicubic(raw[None], (height, width), rows_first) for rows_first in (False, True)]
    same = (either[0] == either[1]).permute(0, 3, 1, 2)
    return {name: same.repeat(batch, channels // 3, 1, 1)}


def _greedy(golden: Golden, policy: OpenVLAPolicy, index: int) -> dict[str, Tensor]:
    """One sample alone: the likeliest tokens of the whole vocabulary by the cached loop, then all in one forward."""
    count = golden.outputs[f"greedy.{index}.tokens"].shape[-1]
    ids, mask = unpadded(golden, index)
    network = policy.network
    embeds, mask, _ = network.embed(images(golden)[index : index + 1], ids, mask, ids[:, :0])
    chosen: list[Tensor] = []

    def likeliest(hidden: Tensor, _: int) -> Tensor:
        chosen.append(network.language_model.lm_head(hidden).argmax(-1))
        return chosen[-1]

    policy.generate(embeds, mask, count, likeliest)
    picked = torch.stack(chosen, 1)
    later = network.language_model.model.embed_tokens(picked)
    hidden, _ = policy.forced(embeds, mask, later[:, :-1])
    found = readings(policy, network.language_model.lm_head(hidden))
    length = golden.outputs[f"greedy.{index}.inputs_embeds"].shape[1]
    found["inputs_embeds"] = torch.cat([embeds, later], dim=1)[:, :length]  # the directory keeps all of it or its start
    found["tokens"] = picked[0]
    found["actions"] = actions(policy, picked)[0, 0]
    return found


def _forced(golden: Golden, policy: OpenVLAPolicy) -> dict[str, Tensor]:
    """Padded prompts in one batch, with given tokens."""
    ids, mask = golden.inputs["ids_bos_then_pad"], golden.inputs["mask_bos_then_pad"]
    given = golden.inputs["forced_action_tokens"]
    embeds, mask, later = policy.network.embed(images(golden), ids, mask, given)
    hidden, _ = policy.forced(embeds, mask, later[:, :-1])
    logits = policy.network.language_model.lm_head(hidden)
    offsets = tokens.token_offsets(given, policy.network.sizes.first_token)
    return {
        **readings(policy, logits),
        "logprobs_256": tokens.token_logprob(policy.logprobs(hidden), offsets),
        "logprobs_full_vocab": tokens.token_logprob(logits.log_softmax(-1), given),
        "position_ids": torch.cat([mask, torch.ones_like(given)], dim=1).cumsum(-1) - 1,
    }


# what both families share


def load(golden: Golden, family: type[P], **settings: Any) -> P:
    """The directory's weights behind ``family.from_checkpoint``."""
    weights = golden.path / "weights.safetensors"
    if not weights.is_file():
        raise GoldenError(f"{weights}: no such file; {golden.family} needs the weights that the outputs were made with")
    config = {**golden.config["openvla_config"], "text_config": golden.config["text_config"]}
    config["norm_stats"] = golden.config["norm_stats"]
    heads = golden.config["tiny"]["heads"]  # published checkpoints have it in their timm name
    cameras = golden.inputs["pixel_values"].shape[1] // 6
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "model.safetensors").symlink_to(weights.resolve())
        (path / "config.json").write_text(json.dumps(config))
        (path / "preprocessor_config.json").write_text(json.dumps(golden.config["image_processor"]))
        return family.from_checkpoint(
            path,
            unnorm_key=golden.config["unnorm_key"],
            convention="none",
            cameras=[f"camera{i}" for i in range(cameras)],
            tokenizer=word_tokenizer(["a"]),
            model={"dino": {"heads": heads}, "siglip": {"heads": heads}},
            **settings,
        ).eval()


def images(golden: Golden) -> Tensor:
    """float32 [B, cameras, 6, H, W]."""
    return golden.inputs["pixel_values"].unflatten(1, (-1, 6))


def unpadded(golden: Golden, index: int) -> tuple[Tensor, Tensor]:
    """Ids and mask int64 [1, length] of one prompt."""
    ids, mask = golden.inputs["ids_right_pad"][index], golden.inputs["mask_right_pad"][index]
    real = ids[mask.bool()][None]
    return real, torch.ones_like(real)


def preprocessing(golden: Golden, policy: TokenPolicy) -> dict[str, Tensor]:
    if "pre.raw_image_u8" not in golden.inputs:
        return {}
    return {"pre.pixel_values": policy.processing.model_images(golden.inputs["pre.raw_image_u8"][None])}


def decoding(golden: Golden, policy: TokenPolicy) -> dict[str, Tensor]:
    """Every action token, and as many of its neighbours on both sides as the directory has."""
    if "decode.token_ids" not in golden.outputs:
        return {}
    sizes, count = policy.network.sizes, len(golden.outputs["decode.token_ids"])
    ids = torch.arange(count) + sizes.first_token - (count - sizes.bins) // 2
    offsets = tokens.token_offsets(ids, sizes.first_token)
    each = offsets[:, None].expand(-1, policy.processing.action_dim)
    return {
        "decode.token_ids": ids,
        "decode.normalized": tokens.offset_values()[offsets],
        "decode.unnormalized": policy.processing.offset_actions(each),
    }


def vision(golden: Golden, policy: TokenPolicy) -> dict[str, Tensor]:
    """Patch features of all cameras, one after the other."""
    seen = images(golden)
    flat, network = seen.flatten(0, 1), policy.network
    features = network.vision_backbone(flat)
    found = {
        "vision.featurizer_dinov2": network.vision_backbone.featurizer(flat[:, :3]),
        "vision.featurizer_siglip": network.vision_backbone.fused_featurizer(flat[:, 3:]),
        "vision.patch_features": features,
        "vision.projected": network.projector(features),
    }
    return {name: x.reshape(len(seen), -1, x.shape[-1]) for name, x in found.items()}


def readings(policy: TokenPolicy, logits: Tensor) -> dict[str, Tensor]:
    """What the directories keep of logits [B, n, vocabulary]."""
    sizes = policy.network.sizes
    logprobs = tokens.log_probabilities(logits[..., sizes.first_token : sizes.end_token], policy.policy.temperature)
    first, whole = sizes.first_token, logits.shape[-1]
    return {
        f"logits_{first}_{whole}": logits[..., first:],
        "logprob_over_256": logprobs,
        "logsumexp_full": logits.logsumexp(-1),
        "argmax_full": logits.argmax(-1),
        "argmax_256_token": tokens.choose(logprobs, None) + first,
    }


def actions(policy: TokenPolicy, ids: Tensor) -> Tensor:
    """float64 [B, n / A, A] from token ids [B, n]."""
    dim = policy.processing.action_dim
    offsets = tokens.token_offsets(ids, policy.network.sizes.first_token).unflatten(1, (-1, dim))
    return policy.processing.offset_actions(offsets)


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
