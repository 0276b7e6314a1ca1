"""The GR00T N1.5 family: Eagle 2.5, a flow-matching DiT, its own convention of time (0 noise, 1 actions).

The prefix (camera tokens and instruction, then the vision-language self-attention) is encoded once per decision, with
the keys and values that the DiT's cross-attention reads; each of K denoising steps runs the DiT on [state, future
tokens, H noisy actions].
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla3_plugin.policies import flow, gr00t_files
from vla3_plugin.policies.flow_parts import require_float32
from vla3_plugin.policies.flow_policy import FlowPolicy
from vla3_plugin.policies.flow_settings import FlowSettings
from vla3_plugin.policies.gr00t_config import LORA_TARGETS, LORA_WHOLE, GR00TConfig
from vla3_plugin.policies.gr00t_network import GR00T, Prefix, expand_images
from vla3_plugin.policies.gr00t_processing import GR00TProcessing
from vla3_plugin.policies.processing import Processing


class GR00TPolicy(FlowPolicy):
    """See ``FlowPolicy``. Inputs: ``pixels`` uint8 [B, cameras, H, W, 3], ``state`` float32 [B, S] in environment
    units, ``input_ids`` and ``attention_mask`` int64 [B, tokens], padded on the right, one image token a camera.
    """

    family = "gr00t_n1_5"
    convention = "gr00t"
    base_model_prefix = "gr00t"
    _no_split_modules = ["Qwen3DecoderLayer", "SiglipEncoderLayer", "GR00TVLBlock", "GR00TDiTBlock"]

    processing: GR00TProcessing

    def __init__(self, config: GR00TConfig, policy: FlowSettings, processing: Processing) -> None:
        super().__init__()
        record = GR00TProcessing.of(processing)
        head = config.action_head_cfg
        policy.check(head["action_horizon"])
        gr00t_files.check_fit(config, record)
        self.config, self.policy, self.processing = config, policy, record
        self.gr00t = GR00T(config)
        if policy.freeze_vlm:
            self.gr00t.backbone.requires_grad_(False)
        self.add_heads(head["backbone_embedding_dim"], head["hidden_size"], head["max_state_dim"])

    @property
    def horizon(self) -> int:
        return self.config.action_head_cfg["action_horizon"]

    @property
    def width(self) -> int:
        return self.config.action_head_cfg["action_dim"]

    @property
    def dtype(self) -> torch.dtype:
        return self.gr00t.action_head.model.proj_out_2.weight.dtype

    @property
    def lora_targets(self) -> list[str] | str:
        """Names for peft, or with a frozen VLM an expression that matches the action head's modules alone."""
        if not self.policy.freeze_vlm:
            return LORA_TARGETS
        return rf".*\.action_head\..*\.({'|'.join(map(re.escape, LORA_TARGETS))})"

    @property
    def lora_whole(self) -> list[str]:
        """The heads, and the projections of the embodiments, which are no linear layers that LoRA could adapt."""
        return [*super().lora_whole, *LORA_WHOLE]

    # the network

    def encode(self, inputs: dict[str, Tensor]) -> Prefix:
        require_float32("state", inputs["state"])
        images = self.processing.model_images(inputs["pixels"])
        state = self.processing.model_state(inputs["state"], self.config.action_head_cfg["max_state_dim"])
        backbone = self.gr00t.backbone
        ids, mask = expand_images(
            inputs["input_ids"], inputs["attention_mask"], backbone.image_token, images.shape[1], backbone.image_tokens
        )
        return self.encode_normalised(images, ids, mask, state, self._category(state))

    def encode_normalised(self, images: Tensor, ids: Tensor, mask: Tensor, state: Tensor, category: Tensor) -> Prefix:
        """``images`` [B, cameras, 3, h, w] in [-1, 1]; ``ids`` with every image token; ``category``: embodiment [B]."""
        return self.gr00t(images, ids, mask, state, category, self.policy.freeze_vlm)

    def _category(self, like: Tensor) -> Tensor:
        return torch.full((1,), self.processing.embodiment_id, dtype=torch.long, device=like.device)

    def features(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        return self.gr00t.features(prefix, x, time)

    def project(self, prefix: Prefix, features: Tensor) -> Tensor:
        return self.gr00t.project(prefix, features)

    def _time(self, step: int | Tensor, batch: int, device: torch.device) -> Tensor:
        """float64 [B]: the network truncates it to a bucket, and the reference counts buckets in double precision."""
        return flow.step_time(step, self.policy.num_steps, convention=self.convention).to(device).expand(batch)

    def value_inputs(self, prefix: Prefix) -> tuple[Tensor, Tensor, Tensor]:
        return prefix.hidden, prefix.mask, prefix.state

    def prefix_tensors(self, prefix: Prefix) -> dict[str, Tensor]:
        kept = {"mask": prefix.mask, "state": prefix.state, "state_token": prefix.state_token}
        for i, (keys, values) in enumerate(prefix.kept):
            kept |= {f"keys.{i}": keys, f"values.{i}": values}
        return kept

    def prefix_from(self, tensors: dict[str, Tensor]) -> Prefix:
        state, count = tensors["state"], (len(tensors) - 3) // 2
        kept = [(tensors[f"keys.{i}"], tensors[f"values.{i}"]) for i in range(count)]
        nothing = state.new_empty(len(state), 0, 0)
        return Prefix(kept, tensors["mask"], nothing, state, tensors["state_token"], self._category(state))

    # learning

    def sample_time(self, size: int) -> Tensor:
        cfg = self.config.action_head_cfg
        beta = torch.distributions.Beta(cfg["noise_beta_alpha"], cfg["noise_beta_beta"])
        return ((cfg["noise_s"] - beta.sample((size,))) / cfg["noise_s"]).clamp(0.0, 1.0).float()

    def _sft(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Shorter chunks repeat their last action, as in the published training, but carry the loss of their own."""
        actions = batch["actions"]
        length = actions.shape[1]
        if not 0 < length < self.horizon:
            return super()._sft(batch)
        actions = torch.cat([actions, actions[:, -1:].expand(-1, self.horizon - length, -1)], dim=1)
        return {"loss": super()._sft({**batch, "actions": actions})["loss"][:, :length]}

    def checkpointed_layers(self) -> list[nn.Module]:
        backbone, head = self.gr00t.backbone, self.gr00t.action_head
        return [*backbone.vision_model.encoder.layers, *backbone.language_model.layers,
                *head.vl_self_attention.transformer_blocks, *head.model.transformer_blocks]  # fmt: skip

    # files

    @classmethod
    def config_from(cls, model: dict[str, Any]) -> GR00TConfig:
        return GR00TConfig(**model)

    def config_dict(self) -> dict[str, Any]:
        return gr00t_files.config_dict(self.config)

    @classmethod
    def load(cls, path: Path, *, processing: Any = None, tokenizer: Any = None, **options: Any) -> GR00TPolicy:
        """See ``FlowPolicy.load``."""
        record = gr00t_files.read_record(Path(path), processing, tokenizer)
        return super().load(path, processing=record, **options)

    @classmethod
    def from_checkpoint(cls, source: str | Path, **options: Any) -> GR00TPolicy:
        """Read a published checkpoint, from a directory or a hub id; options: see ``gr00t_files.from_checkpoint``."""
        return gr00t_files.from_checkpoint(cls, source, **options)

    @classmethod
    def build(cls, preset: str, processing: Processing, **options: Any) -> GR00TPolicy:
        """A preset with fresh weights; options: see ``gr00t_files.build``."""
        return gr00t_files.build(cls, preset, processing, **options)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "embodiment": self.processing.embodiment}
