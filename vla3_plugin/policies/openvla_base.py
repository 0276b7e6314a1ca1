"""What OpenVLA and OpenVLA-OFT share as policies: inputs, value head, and what verl's engine and peft ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vla3_plugin.contract import Observation
from vla3_plugin.policies import openvla_files, tokens
from vla3_plugin.policies.base import ActionChunk, NoiseKey, VLAPolicy
from vla3_plugin.policies.openvla_config import LORA_TARGETS, TokenSettings
from vla3_plugin.policies.openvla_processing import OpenVLAProcessing
from vla3_plugin.policies.prismatic import Prismatic, PrismaticSizes, attention_backend


class TokenValueHead(nn.Module):
    """V(s) from the language model's last hidden state at the last prompt token, the one that predicts the first
    action token: it has seen all patches and the whole instruction (where RLinf puts it too)."""

    def __init__(self, width: int, hidden: int, outputs: int) -> None:
        super().__init__()
        last = nn.Linear(hidden, outputs)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), last
        )
        nn.init.normal_(last.weight, std=0.01)  # first values near 0, whatever the backbone says
        nn.init.zeros_(last.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, width] to float32 [B, outputs]."""
        value = self.mlp(hidden)
        return value if value.dtype == torch.float64 else value.float()


def check_request(inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: str) -> None:
    if mode not in ("train", "eval"):
        raise ValueError(f"mode is {mode!r}, expected train or eval")
    if len(noise_keys) != len(inputs["input_ids"]):
        raise ValueError(f"{len(noise_keys)} noise keys for a batch of {len(inputs['input_ids'])}")


class TokenPolicy(VLAPolicy):
    """See ``VLAPolicy``. Inputs: ``pixels`` uint8 [B, cameras, H, W, 3] as the simulator gave them, ``input_ids`` and
    ``attention_mask`` int64 [B, tokens], whose first token is real. Trace: ``ids`` int64 [B, C, A], the vocabulary's
    token ids of the executed actions. Log-probs are those of tokens among the action tokens, at ``policy.temperature``.
    """

    preset: str | None = None
    settings_class: ClassVar[type[TokenSettings]]
    lora_targets = LORA_TARGETS
    base_model_prefix = "network"  # peft asks for it where a model's config is transformers'
    _no_split_modules = ["LlamaDecoderLayer", "VisionBlock"]  # what FSDP wraps one by one

    def __init__(self, sizes: PrismaticSizes, policy: TokenSettings, processing: OpenVLAProcessing) -> None:
        super().__init__()
        policy.check()
        if processing.image_size != (sizes.dino.image, sizes.dino.image):
            raise ValueError(
                f"processing.image_size is {list(processing.image_size)}, the model looks at squares of "
                f"{sizes.dino.image}"
            )
        self.policy, self.processing = policy, processing
        self.network = Prismatic(sizes, attention_backend(policy.attention_backend, causal=policy.causal))
        self.config = self.network.config
        self.value_head = TokenValueHead(
            self.config.hidden_size, policy.value_hidden, policy.executed if policy.value_level == "action" else 1
        )
        if policy.freeze_vision:
            self.network.vision_backbone.requires_grad_(False)

    @property
    def horizon(self) -> int:
        return self.policy.horizon

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    def prepare(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        return self.processing.prepare(observations)

    # acting

    def act(
        self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Literal["train", "eval"]
    ) -> ActionChunk:
        check_request(inputs, noise_keys, mode)
        device = next(self.parameters()).device
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        gumbel, bins = None, self.network.sizes.bins
        if mode == "train":
            count = self.policy.executed * self.processing.action_dim
            gumbel = tokens.keyed_gumbel(noise_keys, count, bins).to(device)
        with torch.no_grad():
            self._set_dropout(False)
            logprobs, offsets, hidden = self._decode(inputs, gumbel)
            offsets = self._chunked(offsets)
            logprob = tokens.token_logprob(self._chunked(logprobs), offsets)
            value = self.value(hidden)
        actions = self.processing.token_actions(offsets)
        if mode == "eval":
            return ActionChunk(actions, torch.zeros_like(logprob), value)
        return ActionChunk(actions, logprob, value, {"ids": offsets + self.network.sizes.first_token})

    def _decode(self, inputs: dict[str, Tensor], gumbel: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [B, C * A, bins] and offsets [B, C * A] of the executed tokens, and the value's hidden state."""
        raise NotImplementedError

    def _evaluated(self, inputs: dict[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [B, n, width] that predict the tokens ``ids`` int64 [B, n], and the value's [B, width]."""
        raise NotImplementedError

    def _chunked(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.processing.action_dim))

    def embed(self, inputs: dict[str, Tensor], tail: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Prismatic.embed``."""
        images = self.processing.model_images(inputs["pixels"])
        return self.network.embed(images, inputs["input_ids"], inputs["attention_mask"], tail)

    def logprobs(self, hidden: Tensor) -> Tensor:
        """float32 [..., bins] at the sampling temperature."""
        return tokens.log_probabilities(self.network.action_logits(hidden), self.policy.temperature)

    def value(self, hidden: Tensor) -> Tensor:
        """float32 [B, 1] or [B, C] from hidden states [B, width]."""
        return self.value_head(hidden.detach() if self.policy.detach_value else hidden)

    # learning

    def forward(self, batch: dict[str, Tensor], task: Literal["evaluate", "sft"]) -> dict[str, Tensor]:
        if task == "evaluate":
            self._set_dropout(False)
            ids = batch["trace.ids"]
            expected = [self.policy.executed, self.processing.action_dim]
            if list(ids.shape[1:]) != expected:
                raise ValueError(f"trace.ids has shape {list(ids.shape)}, expected [B, {expected[0]}, {expected[1]}]")
            return self.evaluate_tokens(*self._evaluated(batch, ids.flatten(1)), ids)
        if task == "sft":
            self._set_dropout(self.training)
            return self._sft(batch)
        raise ValueError(f"task is {task!r}, expected evaluate or sft")

    def evaluate_tokens(self, hidden: Tensor, first: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """``logprob`` and ``entropy`` [B, C, A] of tokens ``ids`` [B, C, A] that ``hidden`` [B, C * A, width] predicts,
        and ``value`` from ``first`` [B, width]."""
        logprobs = self._chunked(self.logprobs(hidden))
        offsets = tokens.token_offsets(ids, self.network.sizes.first_token, self.network.sizes.bins)
        return {
            "logprob": tokens.token_logprob(logprobs, offsets),
            "entropy": tokens.token_entropy(logprobs),
            "value": self.value(first),
        }

    def _sft(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cross-entropy over the action tokens per element [B, L, A]; ``actions`` [B, L, A], L at most the horizon."""
        actions, dim = batch["actions"], self.processing.action_dim
        if actions.shape[1] > self.horizon or actions.shape[2] != dim:
            raise ValueError(f"actions has shape {list(actions.shape)}, expected [B, at most {self.horizon}, {dim}]")
        offsets = self.processing.action_offsets(actions)
        hidden, _ = self._evaluated(batch, offsets.flatten(1) + self.network.sizes.first_token)
        logprobs = tokens.log_probabilities(self.network.action_logits(hidden), 1.0)
        return {"loss": -tokens.token_logprob(self._chunked(logprobs), offsets)}

    # what verl's engine and peft ask of a model

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute each layer's activations in the backward pass instead of keeping them."""
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("gradient checkpointing needs use_reentrant: false: log-probs and value share the layers")
        self.network.language_model.gradient_checkpointing_enable({"use_reentrant": False})
        self._recompute_vision(True)

    def gradient_checkpointing_disable(self) -> None:
        self.network.language_model.gradient_checkpointing_disable()
        self._recompute_vision(False)

    def _recompute_vision(self, on: bool) -> None:
        vision = self.network.vision_backbone
        for block in [*vision.featurizer.blocks, *vision.fused_featurizer.blocks]:
            block.recompute = on

    # files

    def save(self, path: Path, state: dict[str, Tensor] | None = None, dtype: torch.dtype | None = None) -> None:
        """See ``VLAPolicy.save``. ``dtype``: store weights in it (bfloat16: half the size)."""
        openvla_files.save(self, Path(path), state, dtype)

    def save_pretrained(self, path: str | Path, state_dict: dict[str, Tensor] | None = None, **_: Any) -> None:
        self.save(Path(path), state_dict)

    @classmethod
    def load(cls, path: Path, **options: Any) -> Any:
        """Read a directory written by ``save``; options: see ``openvla_files.load``."""
        return openvla_files.load(cls, Path(path), **options)

    @classmethod
    def from_checkpoint(cls, source: str | Path, **options: Any) -> Any:
        """Read a published checkpoint, from a directory or a hub id; see ``openvla_files.from_checkpoint``."""
        return openvla_files.from_checkpoint(cls, source, **options)

    @classmethod
    def build(cls, preset: str, processing: Any, **options: Any) -> Any:
        """A preset with fresh weights; options: see ``openvla_files.build``."""
        return openvla_files.build(cls, preset, processing, **options)

    def describe(self) -> dict[str, Any]:
        record = self.processing
        return {
            **super().describe(),
            "trainable": sum(p.numel() for p in self.parameters() if p.requires_grad),
            "dtype": str(self.dtype).removeprefix("torch."),
            "cameras": ", ".join(record.cameras),
            "image_size": "x".join(map(str, record.image_size)),
            "horizon": self.horizon,
            "attention_kernel": self.config._attn_implementation,
            **asdict(self.policy),
        }
