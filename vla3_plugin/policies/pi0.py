"""The pi0 family on transformers' own ``PI0ForConditionalGeneration``: flow matching, Flow-SDE likelihood, value head.

Time runs from 1 (noise) to 0 (actions). The prefix (camera tokens, then the instruction) is encoded once per decision
and its keys and values are kept; each of K denoising steps runs only the action expert on [state, H noisy actions].

Everything that needs gradients happens below ``PI0Policy.forward``, and every submodule is called through
``__call__``, so that FSDP's and LoRA's wrappers see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PI0Config, PI0ForConditionalGeneration
from transformers.cache_utils import Cache

from vla3_plugin.contract import Observation
from vla3_plugin.policies import flow, pi0_files, pi0_sampling
from vla3_plugin.policies.base import ActionChunk, NoiseKey, VLAPolicy
from vla3_plugin.policies.chains import Chains, run_chains
from vla3_plugin.policies.pi0_config import LORA_TARGETS, PI0PolicyConfig
from vla3_plugin.policies.pi0_modules import (
    DoubleTimestepEmbeddings,
    Prefix,
    ReadLayer,
    ValueHead,
    WriteLayer,
    checkpointed,
    is_fsdp,
)
from vla3_plugin.policies.processing import Processing


class PI0Policy(VLAPolicy):
    """See ``VLAPolicy``. Inputs: ``pixels`` uint8 [B, cameras, H, W, 3], ``state`` float32 [B, S] in environment units,
    ``input_ids`` and ``attention_mask`` int64 [B, tokens]. Trace: ``chain`` float32 [B, K+1, H, max_action_dim],
    ``sde_step`` int64 [B], -1 in the joint form.
    """

    family = "pi0"
    preset: str | None = None
    lora_targets = LORA_TARGETS
    base_model_prefix = "pi0"  # peft asks for it where a model's config is transformers'
    _no_split_modules = ["GemmaDecoderLayer", "SiglipEncoderLayer"]  # what FSDP wraps one by one

    def __init__(self, config: PI0Config, policy: PI0PolicyConfig, processing: Processing) -> None:
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
        config._attn_implementation = "sdpa"  # the suffix's block mask rules out flash attention
        self.config, self.policy, self.processing = config, policy, processing
        pi0: Any = PI0ForConditionalGeneration(config)
        self.pi0 = pi0
        self.pi0.embed_action_time.sinusoid_embeds = DoubleTimestepEmbeddings(config)
        self.value_head = ValueHead(
            backbone.text_config.hidden_size,
            config.max_state_dim,
            policy.value_hidden,
            policy.executed if policy.value_level == "action" else 1,
        )
        self.pi0.model.dit.embed_tokens = None  # a table that checkpoints carry and nothing reads
        if policy.freeze_vlm:
            self.pi0.model.vlm.requires_grad_(False)

    # observations to stored inputs

    def prepare(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        return self.processing.prepare(observations)

    # the network

    def encode(self, inputs: dict[str, Tensor]) -> Prefix:
        """Run the vision-language model on [camera tokens, instruction tokens] and keep its keys and values."""
        _require_float32("state", inputs["state"])
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
        vlm, dtype = self.pi0.model.vlm, self.dtype
        batch, cameras = images.shape[:2]
        frozen = self.policy.freeze_vlm
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            seen = vlm.get_image_features(images.flatten(0, 1).to(dtype)).pooler_output
            seen = seen.reshape(batch, cameras, *seen.shape[1:])
            embeds = torch.cat([seen.flatten(1, 2), vlm.get_input_embeddings()(ids)], dim=1)
            if camera_mask is None:
                camera_mask = torch.ones(batch, cameras, dtype=token_mask.dtype, device=token_mask.device)
            mask = torch.cat([camera_mask.to(token_mask.dtype).repeat_interleave(seen.shape[2], 1), token_mask], dim=1)
            layers = len(vlm.language_model.layers)
            written = [WriteLayer() for _ in range(layers)]
            hidden = vlm(
                inputs_embeds=embeds,
                attention_mask=mask,
                position_ids=mask.cumsum(-1) - 1,
                token_type_ids=torch.zeros_like(mask),
                past_key_values=Cache(layers=list(written)),
                use_cache=True,
            ).last_hidden_state
        reader = Cache(layers=[ReadLayer(layer) for layer in written])
        return Prefix(reader, mask, hidden, state)

    def velocity(self, prefix: Prefix, x: Tensor, time: Tensor) -> Tensor:
        """float32 [B, H, max_action_dim] from ``x`` of that shape at ``time`` float32 [B]."""
        dtype = self.dtype
        v = self.pi0(
            state=prefix.state.to(dtype),
            noise=x.to(dtype),
            timestep=time,
            attention_mask=prefix.mask,
            past_key_values=prefix.cache,
        ).logits
        return v if v.dtype == torch.float64 else v.float()

    def value(self, prefix: Prefix) -> Tensor:
        """float32 [B, 1] or [B, C]."""
        hidden = prefix.hidden.detach() if self.policy.detach_value else prefix.hidden
        return self.value_head(hidden, prefix.mask, prefix.state)

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in; under FSDP's mixed precision, what its parameters are gathered in."""
        return self.pi0.action_out_proj.weight.dtype

    # sampling: the parts are in ``pi0_sampling``

    def act(
        self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Literal["train", "eval"]
    ) -> ActionChunk:
        return run_chains(self, inputs, noise_keys, mode)

    @property
    def num_denoising_steps(self) -> int:
        return self.policy.num_steps

    @torch.no_grad()
    def begin(
        self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Literal["train", "eval"]
    ) -> Chains:
        return pi0_sampling.begin(self, inputs, noise_keys, mode)

    @torch.no_grad()
    def denoise(self, chains: Chains) -> None:
        pi0_sampling.denoise(self, chains)

    @torch.no_grad()
    def finish(self, chains: Chains) -> ActionChunk:
        return pi0_sampling.finish(self, chains)

    def _draw(self, keys: Sequence[NoiseKey], mode: str) -> tuple[Tensor, Tensor, Tensor]:
        return pi0_sampling.draw(self, keys, mode)

    @property
    def _stochastic_steps(self) -> int:
        policy = self.policy
        return flow.stochastic_steps(policy.num_steps, noise_level=policy.noise_level, method=policy.method)

    def _time(self, step: int | Tensor, batch: int, device: torch.device) -> Tensor:
        """The time at grid point ``step``, float32 [B] (computed in float64, then rounded, as the reference does)."""
        time = flow.step_time(step, self.policy.num_steps, convention="pi").float()
        return time.to(device).expand(batch)

    def _transition(self, x: Tensor, v: Tensor, step: int | Tensor, stochastic: bool | Tensor) -> tuple[Tensor, Tensor]:
        policy = self.policy
        return flow.step_mean_std(
            x, v, step, policy.num_steps, noise_level=policy.noise_level, convention="pi", method=policy.method,
            stochastic=stochastic,
        )  # fmt: skip

    def _executed(self, x: Tensor) -> Tensor:
        """The part of [..., H, max_action_dim] that reaches the simulator: [..., C, A]."""
        return x[..., : self.policy.executed, : self.processing.action_dim]

    # learning

    def forward(self, batch: dict[str, Tensor], task: Literal["evaluate", "sft"]) -> dict[str, Tensor]:
        if task == "evaluate":
            return self._evaluate(batch)
        if task == "sft":
            return self._sft(batch)
        raise ValueError(f"task is {task!r}, expected evaluate or sft")

    def _evaluate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Log-probs of stored chains. Mixed: one forward of the expert, each sample at its own step. Joint: K."""
        policy, chain, step = self.policy, batch["trace.chain"], batch["trace.sde_step"]
        _require_float32("trace.chain", chain)
        steps, size, device = policy.num_steps, len(chain), chain.device
        if chain.shape[1] != steps + 1:
            raise ValueError(f"trace.chain holds {chain.shape[1] - 1} denoising steps, policy.num_steps is {steps}")
        prefix = self._anchored(self.encode(batch))
        settings: dict[str, Any] = dict(noise_level=policy.noise_level, convention="pi", method=policy.method)
        if policy.sde_mode == "mixed":
            rows = torch.arange(size, device=device)
            x, x_next = chain[rows, step], chain[rows, step + 1]
            v = self.velocity(prefix, x, self._time(step, size, device))
            mean, std = self._transition(x, v, step, True)
            logprob = flow.elementwise_logprob(self._executed(x_next), self._executed(mean), self._executed(std))
            entropy = flow.elementwise_entropy(self._executed(std))
        else:
            logprob = flow.joint_logprob(
                self._executed(chain),
                lambda k: self._executed(self.velocity(prefix, chain[:, k], self._time(k, size, device))),
                steps, reduction=policy.joint_reduction, **settings,
            )  # fmt: skip
            x = self._executed(chain[:, 0])
            terms = [
                flow.elementwise_entropy(flow.step_mean_std(x, x, k, steps, **settings)[1])
                for k in range(self._stochastic_steps)
            ]
            entropy = torch.stack(terms).sum(0)
            if policy.joint_reduction == "mean":
                entropy = entropy / len(terms)
        return {"logprob": logprob, "entropy": entropy, "value": self.value(prefix)}

    def _sft(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Flow-matching loss (noise - action - v)^2 per element [B, L, A], L of ``actions`` [B, L, A] at most H.

        Over the environment's dimensions only. With L < H the rest of the chunk is pure noise and carries no loss.
        ``sft.noise`` [B, H, max_action_dim] and ``sft.time`` [B] replace the random draws where given.
        """
        actions = batch["actions"]
        _require_float32("actions", actions)
        size, length, device = len(actions), actions.shape[1], actions.device
        horizon, width, dim = self.config.chunk_size, self.config.max_action_dim, self.processing.action_dim
        if length > horizon or actions.shape[2] != dim:
            raise ValueError(f"actions has shape {list(actions.shape)}, expected [B, at most {horizon}, {dim}]")
        noise, time = batch.get("sft.noise"), batch.get("sft.time")
        if noise is None:
            noise = torch.randn(size, horizon, width).to(device)
        if time is None:
            beta = torch.distributions.Beta(self.config.time_sampling_beta_alpha, self.config.time_sampling_beta_beta)
            time = beta.sample((size,)) * self.config.time_sampling_scale + self.config.time_sampling_offset
            time = time.float().to(device)
        target = self.processing.model_actions(actions, width)
        t = time[:, None, None]
        x = noise.clone()
        x[:, :length] = t * noise[:, :length] + (1.0 - t) * target
        v = self.velocity(self._anchored(self.encode(batch)), x, time)
        error = (noise - v)[:, :length, :dim] - target[..., :dim]
        return {"loss": error.square()}

    def _anchored(self, prefix: Prefix) -> Prefix:
        """Let the gradient of every output pass through the prefix's last layer.

        FSDP gathers a layer's parameters for the backward pass when the gradient of its *output* arrives. The last
        layer's output may feed nothing (no value loss), while its keys and values do.
        """
        if not (prefix.hidden.requires_grad and is_fsdp(self.pi0.model.vlm.language_model.layers[-1])):
            return prefix
        return prefix._replace(state=prefix.state + 0.0 * prefix.hidden.sum().float())

    # what verl's engine and peft ask of a model

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PI0Policy:
        """Let ``.to(bfloat16)`` change parameters only: rounded rotary frequencies would move every position."""
        tables = [(module, name, table) for module in self.modules() for name, table in module._buffers.items()]
        super()._apply(fn, recurse)
        for module, name, table in tables:
            now = module._buffers[name]
            if table is not None and now is not None and now.dtype != table.dtype:
                module._buffers[name] = table.to(now.device)
        return self

    def can_generate(self) -> bool:
        return False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute each layer's activations in the backward pass instead of keeping them.

        transformers' own switch drops the key-value cache, on which this architecture stands; so the Gemma layers are
        checkpointed here (``gradient_checkpointing_kwargs`` is accepted for the interface; re-entrant form refused).
        """
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "gradient checkpointing of pi0 needs use_reentrant: false (the prefix's cache is a side output)"
            )
        for layer in [*self.pi0.model.vlm.language_model.layers, *self.pi0.model.dit.layers,
                      *self.pi0.model.vlm.vision_tower.encoder.layers]:  # fmt: skip
            layer.forward = partial(checkpointed, type(layer).forward, layer)

    def gradient_checkpointing_disable(self) -> None:
        for module in self.modules():
            if isinstance(vars(module).get("forward"), partial):
                del module.forward

    # files

    def save(self, path: Path, state: dict[str, Tensor] | None = None, dtype: torch.dtype | None = None) -> None:
        """See ``VLAPolicy.save``. ``dtype``: store weights in it (float16: half the size)."""
        pi0_files.save(self, Path(path), state, dtype)

    def save_pretrained(self, path: str | Path, state_dict: dict[str, Tensor] | None = None, **_: Any) -> None:
        self.save(Path(path), state_dict)

    @classmethod
    def load(cls, path: Path, **options: Any) -> PI0Policy:
        """Read a directory written by ``save``; options: see ``pi0_files.load``."""
        return pi0_files.load(cls, Path(path), **options)

    @classmethod
    def from_checkpoint(cls, source: str | Path, **options: Any) -> PI0Policy:
        """Read a published checkpoint, from a directory or a hub id; options: see ``pi0_files.from_checkpoint``."""
        return pi0_files.from_checkpoint(cls, source, **options)

    @classmethod
    def build(cls, preset: str, processing: Processing, **options: Any) -> PI0Policy:
        """A preset with fresh weights; options: see ``pi0_files.build``."""
        return pi0_files.build(cls, preset, processing, **options)

    def describe(self) -> dict[str, Any]:
        trainable = sum(p.numel() for p in self.parameters() if p.requires_grad)
        record = self.processing
        return {
            **super().describe(),
            "trainable": trainable,
            "dtype": str(self.dtype).removeprefix("torch."),
            "cameras": ", ".join(record.cameras),
            "image_size": "x".join(map(str, record.image_size)),
            "horizon": self.config.chunk_size,
            **asdict(self.policy),
        }


def _require_float32(name: str, tensor: Tensor) -> None:
    """Refuse what mixed precision has already rounded: a log-prob of a rounded sample is another sample's."""
    if tensor.dtype != torch.float32 and tensor.dtype != torch.float64:
        raise TypeError(
            f"{name} is {tensor.dtype}, expected float32: FSDP's mixed precision casts the inputs of the wrapped root "
            "unless its policy has cast_forward_inputs=False"
        )
