"""The pi0 family on transformers' own ``PI0ForConditionalGeneration``: the expert sees [state, H noisy actions]."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PI0Config, PI0ForConditionalGeneration

from vla3_plugin.policies import pi0_files
from vla3_plugin.policies.flow_parts import PreciseLinear
from vla3_plugin.policies.pi0_modules import DoubleTimestepEmbeddings, Prefix
from vla3_plugin.policies.pi0_paligemma import PaliGemmaPolicy


class PI0Policy(PaliGemmaPolicy):
    """See ``PaliGemmaPolicy``."""

    family = "pi0"
    base_model_prefix = "pi0"  # peft asks for it where a model's config is transformers'
    network_name = "pi0"
    published_preset = "pi0"
    _no_split_modules = ["GemmaDecoderLayer", "SiglipEncoderLayer"]  # what FSDP wraps one by one

    def build_network(self, config: PI0Config) -> PI0ForConditionalGeneration:
        network: Any = PI0ForConditionalGeneration(config)
        network.embed_action_time.sinusoid_embeds = DoubleTimestepEmbeddings(config)
        network.action_out_proj = PreciseLinear.of(network.action_out_proj)
        network.model.dit.embed_tokens = None  # a table that checkpoints carry and nothing reads
        return network

    @property
    def vlm(self) -> Any:
        return self.network.model.vlm

    @property
    def expert(self) -> Any:
        return self.network.model.dit

    def features(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        dtype, pi0 = self.dtype, self.network
        suffix = pi0.embed_action_time(prefix.state.to(dtype), x.to(dtype), time)
        hidden = pi0.model(
            action_embeds=suffix, attention_mask=prefix.mask, past_key_values=prefix.cache
        ).last_hidden_state
        return hidden[:, -self.horizon :]

    @classmethod
    def published_key(cls, name: str) -> str | None:
        key = pi0_files.transformers_key(name)
        return None if key == pi0_files.UNUSED else key
