"""OpenVLA as a policy: one action, token by token, each after those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from vla3_plugin.policies import openvla_vllm, tokens
from vla3_plugin.policies.base import ActionChunk, NoiseKey
from vla3_plugin.policies.openvla_base import TokenPolicy, check_request
from vla3_plugin.policies.openvla_config import TokenSettings
from vla3_plugin.policies.prismatic import last_real

Pick = Callable[[Tensor, int], Tensor]  # (hidden [B, width], token index) -> token ids int64 [B]


class OpenVLAPolicy(TokenPolicy):
    """See ``TokenPolicy``. C is 1 and D, the tokens of an action, is A."""

    family = "openvla"
    settings_class = TokenSettings
    sampler: openvla_vllm.VllmSampler | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.policy.rollout_backend == "vllm":
            openvla_vllm.check(self)

    def serve_on(self, device: Any) -> None:
        if self.policy.rollout_backend != "vllm":
            return super().serve_on(device)
        self.eval()
        self.sampler = openvla_vllm.VllmSampler(self, self.policy.rollout_options)

    def renewed(self) -> None:
        if self.sampler is not None:
            self.sampler.load()

    def act(
        self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Literal["train", "eval"]
    ) -> ActionChunk:
        if self.sampler is None:
            return super().act(inputs, noise_keys, mode)
        check_request(inputs, noise_keys, mode)
        return self.sampler.act(inputs, noise_keys, mode)

    def _decode(self, inputs: dict[str, Tensor], gumbel: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        none = inputs["input_ids"][:, :0]
        embeds, mask, _ = self.embed(inputs, none)
        logprobs: list[Tensor] = []
        offsets: list[Tensor] = []

        def pick(hidden: Tensor, index: int) -> Tensor:
            logprobs.append(self.logprobs(hidden))
            offsets.append(tokens.choose(logprobs[-1], None if gumbel is None else gumbel[:, index]))
            return offsets[-1] + self.network.sizes.first_token

        hidden = self.generate(embeds, mask, self.processing.action_dim, pick)
        return torch.stack(logprobs, 1), torch.stack(offsets, 1), hidden

    def generate(self, embeds: Tensor, mask: Tensor, count: int, pick: Pick) -> Tensor:
        """Let ``pick`` choose ``count`` tokens after the prompt; returns the hidden state at its last token.

        The prompt runs once; its keys and values are kept, and each token costs one position. Padding stays where it
        is, masked, so a request's tokens do not depend on the lengths of others.
        """
        cache = DynamicCache(config=self.config)
        hidden = self.network.run(embeds, mask, cache=cache)
        first = hidden = hidden[torch.arange(len(mask), device=mask.device), last_real(mask)]
        for index in range(count):
            ids = pick(hidden, index)
            if index + 1 < count:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
                step = self.network.language_model.model.embed_tokens(ids[:, None])
                hidden = self.network.run(step, mask, cache=cache)[:, 0]
        return first

    def _evaluated(self, inputs: dict[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
        embeds, mask, later = self.embed(inputs, ids[:, :-1])
        return self.forced(embeds, mask, later)

    def forced(self, embeds: Tensor, mask: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
        """One forward of prompt and given tokens: hidden states that predict each token and the one after them all."""
        prompt = embeds.shape[1]
        real = mask.new_ones(len(mask), later.shape[1])
        hidden = self.network.run(torch.cat([embeds, later], dim=1), torch.cat([mask, real], dim=1))
        first = hidden[torch.arange(len(mask), device=mask.device), last_real(mask)]
        return torch.cat([first[:, None], hidden[:, prompt:]], dim=1), first
