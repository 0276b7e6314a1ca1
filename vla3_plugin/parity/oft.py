"""OpenVLA-OFT with discrete tokens against golden vectors: ``bidir.*`` and ``causal.*`` are the two values of
``policy.attention``; RLinf's sequence has no stop token (``policy.stop_token: false``). See ``parity.openvla``."""

from __future__ import annotations

import torch
from torch import Tensor

from vla3_plugin.parity.golden import Golden, GoldenError
from vla3_plugin.parity.openvla import (
    actions,
    decoding,
    images,
    load,
    masks,
    prefixed,
    preprocessing,
    readings,
    unpadded,
    vision,
)
from vla3_plugin.policies.openvla_oft import OpenVLAOFTPolicy

__all__ = ["NOT_COMPUTED", "masks", "outputs"]

NOT_COMPUTED: dict[str, str] = {}

_ATTENTION = {"bidir": "bidirectional", "causal": "causal"}


def outputs(golden: Golden) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for short, attention in _ATTENTION.items():
        if not any(name.startswith(f"{short}.") for name in golden.outputs):
            continue
        policy, rlinf = (
            load(
                golden, OpenVLAOFTPolicy, attention=attention, stop_token=stop,
                predicted=_horizon(golden), executed=_horizon(golden),
            )
            for stop in (True, False)
        )  # fmt: skip
        found |= preprocessing(golden, policy) | decoding(golden, policy) | vision(golden, policy)
        for index in range(len(golden.inputs["ids_right_pad"])):
            found |= prefixed(f"{short}.upstream.{index}.", _upstream(golden, policy, index))
        found |= prefixed(f"{short}.verl_rollout.", _verl(golden, policy))
        found |= prefixed(f"{short}.rlinf.", _rlinf(golden, rlinf))
    return found


def _horizon(golden: Golden) -> int:
    name = next((name for name in golden.outputs if name.endswith(".actions")), None)
    if name is None:
        raise GoldenError(f"{golden.path}: no output named *.actions, so the length of a chunk is unknown")
    return golden.outputs[name].shape[-2]


def _upstream(golden: Golden, policy: OpenVLAOFTPolicy, index: int) -> dict[str, Tensor]:
    """One sample alone; its actions are the likeliest tokens of the whole vocabulary, decoded."""
    ids, mask = unpadded(golden, index)
    embeds, mask, later = policy.network.embed(images(golden)[index : index + 1], ids, mask, policy.stop(ids))
    hidden = policy.parallel(embeds, mask, later)
    found = readings(policy, policy.network.language_model.lm_head(hidden))
    empty = embeds.new_zeros(1, hidden.shape[1], embeds.shape[2])
    found["inputs_embeds"] = torch.cat([embeds, empty, later], dim=1)
    found["mm_attention_mask"] = torch.ones(found["inputs_embeds"].shape[:2], dtype=torch.long)
    found["action_hidden"] = hidden
    found["actions"] = actions(policy, found["argmax_full"])[0]
    return found


def _verl(golden: Golden, policy: OpenVLAOFTPolicy) -> dict[str, Tensor]:
    """All samples in one batch, padding on the right."""
    ids, mask = golden.inputs["ids_right_pad"], golden.inputs["mask_right_pad"]
    hidden = policy.parallel(*policy.network.embed(images(golden), ids, mask, policy.stop(ids)))
    found = readings(policy, policy.network.language_model.lm_head(hidden))
    found["response_ids"] = found["argmax_256_token"]
    found["actions"] = actions(policy, found["response_ids"])
    return found


def _rlinf(golden: Golden, policy: OpenVLAOFTPolicy) -> dict[str, Tensor]:
    """All samples in one batch, padding behind the first token; sampled greedily, then evaluated."""
    ids, mask = golden.inputs["ids_bos_then_pad"], golden.inputs["mask_bos_then_pad"]
    embeds, mask, later = policy.network.embed(images(golden), ids, mask, policy.stop(ids))
    hidden = policy.parallel(embeds, mask, later)
    found = readings(policy, policy.network.language_model.lm_head(hidden))
    chosen = found["argmax_256_token"]
    evaluated = policy.evaluate_tokens(hidden, hidden[:, 0], policy._chunked(chosen))
    whole = torch.cat([mask, mask.new_ones(hidden.shape[:2])], dim=1)
    return {
        **found,
        "action_tokens": policy._chunked(chosen),
        "actions": actions(policy, chosen),
        "prev_logprobs": found["logprob_over_256"].max(-1).values,
        "train_logprobs": evaluated["logprob"].flatten(1),
        "train_entropy": evaluated["entropy"].flatten(1),
        "mm_attention_mask": whole,
        "position_ids": whole.cumsum(-1) - 1,
    }
