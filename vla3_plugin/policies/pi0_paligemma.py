"""What pi0 and pi0.5 share: a PaliGemma prefix, an action expert that reads its keys and values, and their checkpoints.

Time runs from 1 (noise) to 0 (actions). The prefix (camera tokens, then the prompt) is encoded once per decision and
its keys and values are kept; each denoising step runs only the action expert.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PI0Config
from transformers.cache_utils import Cache

from vla3_plugin.policies import pi0_files
from vla3_plugin.policies.flow_parts import is_fsdp, require_float32
from vla3_plugin.policies.flow_policy import FlowPolicy, FlowSettings
from vla3_plugin.policies.pi0_modules import Prefix, ReadLayer, WriteLayer
from vla3_plugin.policies.processing import Processing

if TYPE_CHECKING:
    from typing_extensions import Self

# Where LoRA goes by default, by the last part of the module's name: attention and MLPs of both Gemmas and of SigLIP.
# The value head is small and trained whole (peft's ``modules_to_save``).
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj", "fc1", "fc2"]


class PaliGemmaPolicy(FlowPolicy):
    """See ``FlowPolicy``. Inputs: ``pixels`` uint8 [B, cameras, H, W, 3], ``state`` float32 [B, S] in environment
    units, ``input_ids`` and ``attention_mask`` int64 [B, tokens].

    A family keeps its network in the attribute ``network_name``, with an ``action_out_proj``, and says with ``vlm`` and
    ``expert`` where in it the two Gemmas are.
    """

    config_class: ClassVar[type[PI0Config]] = PI0Config
    network_name: ClassVar[str]
    published_preset: ClassVar[str]  # the sizes of published checkpoints that do not state them

    def __init__(self, config: PI0Config, policy: FlowSettings, processing: Processing) -> None:
        super().__init__()
        policy.check(config.chunk_size)
        for key, need in (("max_state_dim", processing.state_dim), ("max_action_dim", processing.action_dim)):
            if getattr(config, key) < need:
                raise ValueError(f"model.{key} is {getattr(config, key)}, the environment has {need} dimensions")
        backbone: Any = config.vlm_config
        size = backbone.vision_config.image_size
        if processing.image_size != (size, size):
            raise ValueError(
                f"processing.image_size is {list(processing.image_size)}, the model looks at squares of {size}"
            )
        if processing.prompts is None:
            raise ValueError("no tokenizer.json beside the checkpoint; give `tokenizer`, the one it was trained with")
        tokens, vocabulary = processing.prompts.tokenizer.get_vocab_size(), backbone.text_config.vocab_size
        if tokens > vocabulary:
            raise ValueError(
                f"the tokenizer has {tokens} tokens, the model's embedding {vocabulary}: not made for each other"
            )
        config._attn_implementation = "sdpa"  # the suffix's block mask rules out flash attention
        self.config, self.policy, self.processing = config, policy, processing
        setattr(self, self.network_name, self.build_network(config))
        expert: Any = config.dit_config
        self.add_heads(backbone.text_config.hidden_size, expert.hidden_size, config.max_state_dim)
        if policy.freeze_vlm:
            self.vlm.requires_grad_(False)

    def build_network(self, config: PI0Config) -> nn.Module:
        raise NotImplementedError

    @property
    def network(self) -> Any:
        return getattr(self, self.network_name)

    @property
    def dtype(self) -> torch.dtype:
        return self.network.action_out_proj.weight.dtype

    def project(self, prefix: Prefix, features: Tensor) -> Tensor:
        return self.network.action_out_proj(features)

    @property
    def vlm(self) -> Any:
        """transformers' ``PaliGemmaModel``."""
        raise NotImplementedError

    @property
    def expert(self) -> Any:
        """The action expert, with ``layers``."""
        raise NotImplementedError

    @property
    def horizon(self) -> int:
        return self.config.chunk_size

    @property
    def width(self) -> int:
        return self.config.max_action_dim

    @property
    def lora_targets(self) -> list[str] | str:
        """Names for peft, or with a frozen VLM an expression that matches the expert's modules alone."""
        if not self.policy.freeze_vlm:
            return LORA_TARGETS
        return rf".*\.(dit|expert)\..*\.({'|'.join(LORA_TARGETS)})"

    def encode(self, inputs: dict[str, Tensor]) -> Prefix:
        """Run the vision-language model on [camera tokens, prompt tokens] and keep its keys and values."""
        require_float32("state", inputs["state"])
        images = self.processing.model_images(inputs["pixels"])
        state = self.processing.model_state(inputs["state"], self.config.max_state_dim)
        return self.encode_normalised(images, None, inputs["input_ids"], inputs["attention_mask"], state)

    def encode_normalised(
        self, images: Tensor, camera_mask: Tensor | None, ids: Tensor, token_mask: Tensor, state: Tensor
    ) -> Prefix:
        """``images`` [B, N, 3, h, w] in [-1, 1]; ``camera_mask`` bool [B, N], none: all present; ``state`` [B, padded].

        A missing camera's tokens stay in the sequence and are masked; they take no position, so the result is the one
        without them.
        """
        vlm, dtype = self.vlm, self.dtype
        batch, cameras = images.shape[:2]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.policy.freeze_vlm):
            seen = vlm.get_image_features(images.flatten(0, 1).to(dtype)).pooler_output
            seen = seen.reshape(batch, cameras, *seen.shape[1:])
            embeds = torch.cat([seen.flatten(1, 2), vlm.get_input_embeddings()(ids)], dim=1)
            if camera_mask is None:
                camera_mask = torch.ones(batch, cameras, dtype=token_mask.dtype, device=token_mask.device)
            mask = torch.cat([camera_mask.to(token_mask.dtype).repeat_interleave(seen.shape[2], 1), token_mask], dim=1)
            written = [WriteLayer() for _ in vlm.language_model.layers]
            hidden = vlm(
                inputs_embeds=embeds,
                attention_mask=mask,
                position_ids=mask.cumsum(-1) - 1,
                token_type_ids=torch.zeros_like(mask),
                past_key_values=Cache(layers=list(written)),
                use_cache=True,
            ).last_hidden_state
        return Prefix(Cache(layers=[ReadLayer(layer) for layer in written]), mask, hidden, state)

    def value_inputs(self, prefix: Prefix) -> tuple[Tensor, Tensor, Tensor]:
        return prefix.hidden, prefix.mask, prefix.state

    def prefix_tensors(self, prefix: Prefix) -> dict[str, Tensor]:
        return prefix.tensors()

    def prefix_from(self, tensors: dict[str, Tensor]) -> Prefix:
        return Prefix.of(tensors)

    def anchored(self, prefix: Prefix) -> Prefix:
        """Let the gradient of every output pass through the prefix's last layer.

        FSDP gathers a layer's parameters for the backward pass when the gradient of its *output* arrives. The last
        layer's output may feed nothing (no value loss), while its keys and values do.
        """
        if not (prefix.hidden.requires_grad and is_fsdp(self.vlm.language_model.layers[-1])):
            return prefix
        *layers, last = prefix.cache.layers
        keys: Any = last.keys
        anchored = WriteLayer()
        anchored.update(keys + 0.0 * prefix.hidden.mean().to(keys.dtype), last.values)
        return prefix._replace(cache=Cache(layers=[*layers, ReadLayer(anchored)]))

    def sample_time(self, size: int) -> Tensor:
        beta = torch.distributions.Beta(self.config.time_sampling_beta_alpha, self.config.time_sampling_beta_beta)
        time = beta.sample((size,)) * self.config.time_sampling_scale + self.config.time_sampling_offset
        return time.float()

    def checkpointed_layers(self) -> list[nn.Module]:
        vlm = self.vlm
        return [*vlm.language_model.layers, *self.expert.layers, *vlm.vision_tower.encoder.layers]

    # files

    @classmethod
    def config_from(cls, model: dict[str, Any]) -> PI0Config:
        return cls.config_class(**copy.deepcopy(model))

    @classmethod
    def published_key(cls, name: str) -> str | None:
        """The name in the network of a published checkpoint's tensor; none: the network does without it."""
        raise NotImplementedError

    @classmethod
    def from_checkpoint(cls, source: str | Path, **options: Any) -> Self:
        """Read a published checkpoint, from a directory or a hub id; options: see ``pi0_files.from_checkpoint``."""
        return pi0_files.from_checkpoint(cls, source, **options)

    @classmethod
    def build(cls, preset: str, processing: Processing, **options: Any) -> Self:
        """A preset with fresh weights; options: see ``pi0_files.build``."""
        return pi0_files.build(cls, preset, processing, **options)
