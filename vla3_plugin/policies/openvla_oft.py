"""OpenVLA-OFT with discrete tokens as a policy: all tokens of a chunk of actions from one forward."""

from __future__ import annotations

import torch
from torch import Tensor

from vla3_plugin.policies import tokens
from vla3_plugin.policies.openvla_base import TokenPolicy
from vla3_plugin.policies.openvla_config import OFTSettings
from vla3_plugin.policies.prismatic import last_real

STOP = 2  # Llama's end-of-sequence token


class OpenVLAOFTPolicy(TokenPolicy):
    """See ``TokenPolicy``. The sequence is prompt, H * A empty embeddings, stop token; tokens are independent given
    the observation, so the log-probs of the C executed actions do not depend on the others."""

    family = "openvla_oft"
    settings_class = OFTSettings
    policy: OFTSettings

    def _decode(self, inputs: dict[str, Tensor], gumbel: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.predict(inputs)
        logprobs = self.logprobs(hidden[:, : self.policy.executed * self.processing.action_dim])
        return logprobs, tokens.choose(logprobs, gumbel), hidden[:, 0]

    def _evaluated(self, inputs: dict[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.predict(inputs)
        return hidden[:, : ids.shape[1]], hidden[:, 0]

    def predict(self, inputs: dict[str, Tensor]) -> Tensor:
        """Hidden states [B, H * A, width] that predict the chunk's tokens, from prepared inputs."""
        return self.parallel(*self.embed(inputs, self.stop(inputs["input_ids"])))

    def stop(self, ids: Tensor) -> Tensor:
        """The token ids behind the empty places, int64 [B, 1 or 0]."""
        return ids.new_full((len(ids), int(self.policy.stop_token)), STOP)

    def parallel(self, embeds: Tensor, mask: Tensor, later: Tensor) -> Tensor:
        """``predict`` from embedded parts. The first token is predicted at the prompt's last, the others at the empty
        places, the last of which (like the stop token behind it) is only looked at."""
        prompt, count = embeds.shape[1], self.policy.predicted * self.processing.action_dim
        empty = embeds.new_zeros(len(embeds), count, embeds.shape[2])
        real = mask.new_ones(len(mask), count + later.shape[1])
        hidden = self.network.run(
            torch.cat([embeds, empty, later], dim=1), torch.cat([mask, real], dim=1), causal=self.policy.causal
        )
        first = hidden[torch.arange(len(mask), device=mask.device), last_real(mask)]
        return torch.cat([first[:, None], hidden[:, prompt : prompt + count - 1]], dim=1)
