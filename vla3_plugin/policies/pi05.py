"""The pi0.5 family: pi0 with the state in the prompt, as numbers of 256 bins, and the time in the expert's norms."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from transformers import PI0Config

from vla3_plugin.policies.flow_settings import FlowSettings
from vla3_plugin.policies.pi0_modules import Prefix
from vla3_plugin.policies.pi0_paligemma import PaliGemmaPolicy
from vla3_plugin.policies.pi05_modules import PI05Config, PI05Network
from vla3_plugin.policies.pi05_prompt import STATE_PROMPT
from vla3_plugin.policies.processing import Processing, ProcessingError

# Published names (openpi's PyTorch port, lerobot with or without its leading "model.") to ours.
_RENAMES: list[tuple[str, str]] = [
    (r"^model\.(?=paligemma_with_expert\.|action_|time_mlp)", ""),
    (r"^paligemma_with_expert\.paligemma\.lm_head\.", "vlm.language_model.embed_tokens."),
    (r"^paligemma_with_expert\.paligemma\.model\.", "vlm."),
    (r"^paligemma_with_expert\.gemma_expert\.model\.", "expert."),
    (r"\.vision_tower\.vision_model\.", ".vision_tower."),
]
_UNUSED = r"^(model\.)?paligemma_with_expert\.gemma_expert\.(lm_head|model\.embed_tokens)\."  # it reads no tokens


class PI05Policy(PaliGemmaPolicy):
    """See ``PaliGemmaPolicy``. The prompt, made in ``prepare``, holds the state; the value head sees it as a vector."""

    family = "pi05"
    base_model_prefix = "pi05"
    config_class = PI05Config
    network_name = "pi05"
    published_preset = "pi05"
    _no_split_modules = ["GemmaDecoderLayer", "SiglipEncoderLayer", "PI05ExpertLayer"]

    def __init__(self, config: PI0Config, policy: FlowSettings, processing: Processing) -> None:
        if "{state}" not in processing.prompt:
            raise ProcessingError(
                f"prompt is {processing.prompt!r}: pi0.5 reads the state from the prompt and would not know where the "
                f"arm is; expected {STATE_PROMPT!r} or another with {{state}}"
            )
        super().__init__(config, policy, processing)

    def build_network(self, config: PI0Config) -> PI05Network:
        return PI05Network(config)

    @property
    def vlm(self) -> Any:
        return self.network.vlm

    @property
    def expert(self) -> Any:
        return self.network.expert

    def features(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        return self.network(x.to(self.dtype), time, prefix.mask, prefix.cache)

    @classmethod
    def published_key(cls, name: str) -> str | None:
        if re.match(_UNUSED, name):
            return None
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        return name
