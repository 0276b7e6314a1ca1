"""What all flow-matching policies share: sampling by denoising, likelihoods, cloning. Families bring the network.

A family encodes an observation once (``encode``), then predicts from it, a noisy chunk and a time, as often as there
are denoising steps (``features``, ``project``). Everything that needs gradients happens below ``FlowPolicy.forward``,
and every submodule is called through ``__call__``, so that FSDP's and LoRA's wrappers see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from vla3_plugin.contract import Observation
from vla3_plugin.policies import checkpoints, flow
from vla3_plugin.policies.base import ActionChunk, NoiseKey, VLAPolicy
from vla3_plugin.policies.chains import Chains, Mode, run_chains
from vla3_plugin.policies.flow_parts import NoiseHead, ValueHead, checkpointing, promote, require_float32
from vla3_plugin.policies.flow_settings import FlowSettings
from vla3_plugin.policies.noise import keyed_generator
from vla3_plugin.policies.processing import Processing

if TYPE_CHECKING:
    from typing_extensions import Self


class FlowPolicy(VLAPolicy):
    """See ``VLAPolicy``. Trace: ``chain`` float32 [B, K + 1, H, width], ``sde_step`` int64 [B], -1 in the joint form.

    A family sets the class attributes and implements the methods of the first block; its ``__init__`` sets ``config``,
    ``policy`` and ``processing`` and calls ``add_heads`` last.
    """

    convention: ClassVar[flow.Convention] = "pi"
    preset: str | None = None
    config: Any  # the network's sizes
    policy: FlowSettings
    processing: Processing
    value_head: ValueHead
    noise_head: NoiseHead | None

    # what a family implements

    @property
    def horizon(self) -> int:
        """H, how many actions the network predicts."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """The network's action dimension, at least the environment's."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """What the network computes in; under FSDP's mixed precision, what its parameters are gathered in."""
        raise NotImplementedError

    def encode(self, inputs: dict[str, Tensor]) -> Any:
        """The prefix: what the denoising steps and the value need of the prepared ``inputs``."""
        raise NotImplementedError

    def features(self, prefix: Any, x: Tensor, time: Tensor) -> Tensor:
        """The expert's last hidden states [B, H, E] for ``x`` [B, H, width] at ``time`` float32 [B]."""
        raise NotImplementedError

    def project(self, prefix: Any, features: Tensor) -> Tensor:
        """[B, H, E] to the velocity [B, H, width], in float32 by choice (``PreciseLinear``)."""
        raise NotImplementedError

    def value_inputs(self, prefix: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [B, P, W] of the encoded observation, their mask [B, P], and the normalised state [B, S]."""
        raise NotImplementedError

    def prefix_tensors(self, prefix: Any) -> dict[str, Tensor]:
        """What the denoising steps read of a prefix, as tensors [B, ...], so that ``Chains`` can carry it."""
        raise NotImplementedError

    def prefix_from(self, tensors: dict[str, Tensor]) -> Any:
        """The prefix again, good for denoising steps; the inverse of ``prefix_tensors``."""
        raise NotImplementedError

    def sample_time(self, size: int) -> Tensor:
        """Times of the cloning loss, float32 [size]."""
        raise NotImplementedError

    def anchored(self, prefix: Any) -> Any:
        """A hook for training below FSDP: the prefix, with every layer's output in the graph of what is read."""
        return prefix

    def checkpointed_layers(self) -> list[nn.Module]:
        """The layers that gradient checkpointing recomputes."""
        raise NotImplementedError

    # the network as families share it

    def prepare(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        return self.processing.prepare(observations)

    def add_heads(self, prefix_width: int, expert_width: int, state_dim: int) -> None:
        settings = self.policy
        source = expert_width if settings.value_source == "expert" else prefix_width
        outputs = settings.executed if settings.value_level == "action" else 1
        self.value_head = ValueHead(source, state_dim, settings.value_hidden, outputs)
        self.noise_head = None
        if settings.method == "flow_noise":
            self.noise_head = NoiseHead(
                expert_width, settings.noise_hidden, self.width, settings.noise_std_min, settings.noise_std_max
            )

    @property
    def lora_whole(self) -> list[str]:
        """Modules that are trained whole beside LoRA's adapters: they are new in RL, there is nothing to adapt."""
        return ["value_head"] if self.noise_head is None else ["value_head", "noise_head"]

    def velocity(self, prefix: Any, x: Tensor, time: Tensor) -> Tensor:
        """float32 [B, H, width] from ``x`` of that shape at ``time`` float32 [B]."""
        return promote(self.project(prefix, self.features(prefix, x, time)))

    def value(self, prefix: Any) -> Tensor:
        """float32 [B, 1] or [B, C]."""
        hidden, mask, state = self.value_inputs(prefix)
        if self.policy.value_source == "expert":
            size = len(mask)
            x = torch.zeros(size, self.horizon, self.width, device=mask.device)
            hidden = self.features(prefix, x, self._time(0, size, mask.device))
            mask = torch.ones(hidden.shape[:2], device=mask.device)
        return self.value_head(hidden.detach() if self.policy.detach_value else hidden, mask, state)

    def _time(self, step: int | Tensor, batch: int, device: torch.device) -> Tensor:
        """The time at grid point ``step``, float32 [B] (computed in float64, then rounded, as the references do)."""
        time = flow.step_time(step, self.policy.num_steps, convention=self.convention).float()
        return time.to(device).expand(batch)

    def _transition(
        self, x: Tensor, v: Tensor, step: int | Tensor, stochastic: bool | Tensor, std: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        policy = self.policy
        return flow.step_mean_std(
            x, v, step, policy.num_steps, noise_level=policy.noise_level, convention=self.convention,
            method=policy.method, std=std, stochastic=stochastic,
        )  # fmt: skip

    def _step(
        self, prefix: Any, x: Tensor, step: int | Tensor, stochastic: bool | Tensor = True
    ) -> tuple[Tensor, Tensor]:
        """Mean and std [B, H, width] of the step from ``x``: the network once, the same for sampler and learner."""
        features = self.features(prefix, x, self._time(step, len(x), x.device))
        std = None if self.noise_head is None else self.noise_head(features)
        return self._transition(x, promote(self.project(prefix, features)), step, stochastic, std)

    def _executed(self, x: Tensor) -> Tensor:
        """The part of [..., H, width] that reaches the simulator: [..., C, A]."""
        return x[..., : self.policy.executed, : self.processing.action_dim]

    # sampling

    @property
    def num_denoising_steps(self) -> int:
        return self.policy.num_steps

    @property
    def _stochastic_steps(self) -> int:
        settings = self.policy
        return flow.stochastic_steps(settings.num_steps, noise_level=settings.noise_level, method=settings.method)

    def act(self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Mode) -> ActionChunk:
        return run_chains(self, inputs, noise_keys, mode)

    @torch.no_grad()
    def begin(self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Mode) -> Chains:
        if mode not in ("train", "eval"):
            raise ValueError(f"mode is {mode!r}, expected train or eval")
        size, device = len(next(iter(inputs.values()))), next(self.parameters()).device
        if len(noise_keys) != size:
            raise ValueError(f"{len(noise_keys)} noise keys for a batch of {size}")
        self._set_dropout(False)
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        x, noise, sde_step = self._draw(noise_keys, mode)
        prefix = self.encode(inputs)
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        chain = torch.zeros(size, self.policy.num_steps + 1, *x.shape[1:], dtype=dtype, device=device)
        chain[:, 0] = x.to(device)
        return Chains(
            prefix=self.prefix_tensors(prefix),
            chain=chain,
            noise=noise.to(device),
            logprob=torch.zeros_like(self._executed(chain[:, 0])),
            value=self.value(prefix),
            sde_step=sde_step,
            train=torch.full((size,), mode == "train"),
            step=torch.zeros(size, dtype=torch.long),
        )

    @torch.no_grad()
    def denoise(self, chains: Chains) -> None:
        self._set_dropout(False)
        joint, device = self.policy.sde_mode == "joint", chains.chain.device
        rows, step = torch.arange(len(chains), device=device), chains.step.to(device)
        stochastic = chains.train if joint else chains.train & (chains.sde_step == chains.step)
        x = chains.chain[rows, step]
        mean, std = self._step(self.prefix_from(chains.prefix), x, chains.step, stochastic.to(device))
        x = mean + std * (chains.noise[rows, step] if joint else chains.noise[:, 0])
        chains.chain[rows, step + 1] = x
        chains.logprob += flow.elementwise_logprob(
            self._executed(x), self._executed(mean), self._executed(std), require_density=False
        )
        chains.step += 1

    @torch.no_grad()
    def finish(self, chains: Chains) -> ActionChunk:
        if not bool(chains.complete.all()):
            stand = chains.step.tolist()
            raise ValueError(f"chains stand at steps {stand}, expected {chains.num_steps}: denoise them on")
        train = bool(chains.train.any())
        if train and not bool(chains.train.all()):
            raise ValueError("chains of both modes in one batch: select the rows of each mode, finish twice")
        logprob = chains.logprob
        if train and self.policy.sde_mode == "joint" and self.policy.joint_reduction == "mean":
            logprob = logprob / self._stochastic_steps
        actions = self.processing.env_actions(self._executed(chains.chain[:, -1]))
        trace = {"chain": chains.chain, "sde_step": chains.sde_step.to(chains.chain.device)} if train else {}
        return ActionChunk(actions, logprob, chains.value, trace)

    def _draw(self, keys: Sequence[NoiseKey], mode: str) -> tuple[Tensor, Tensor, Tensor]:
        """Initial noise [B, H, width], noise of the stochastic steps [B, 1 or K, H, width], and which step [B] (-1:
        all). The initial noise is drawn first, so that it is the same in both modes. float32, on the CPU.
        """
        settings, shape = self.policy, (self.horizon, self.width)
        if mode == "train" and self._stochastic_steps == 0:
            raise ValueError(
                f"policy.noise_level is {settings.noise_level} with {settings.method} and {settings.num_steps} steps: "
                "no step is stochastic, so there is no likelihood to train on; raise policy.noise_level"
            )
        joint = settings.sde_mode == "joint"
        count = settings.num_steps if joint else 1
        how: dict[str, Any] = dict(noise_level=settings.noise_level, method=settings.method)
        first, later, steps = [], [], []
        for key in keys:
            generator = keyed_generator(key)
            first.append(torch.randn(shape, generator=generator))
            fixed = joint or mode == "eval"
            steps.append(-1 if fixed else flow.draw_sde_step(generator, settings.num_steps, **how))
            ode = mode == "eval"
            later.append(torch.zeros(count, *shape) if ode else torch.randn((count, *shape), generator=generator))
        return torch.stack(first), torch.stack(later), torch.tensor(steps)

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
        require_float32("trace.chain", chain)
        held, rows = chain.shape[1] - 1, torch.arange(len(chain), device=chain.device)
        if held != policy.num_steps:
            raise ValueError(f"trace.chain holds {held} denoising steps, policy.num_steps is {policy.num_steps}")
        self._set_dropout(False)
        prefix = self.anchored(self.encode(batch))
        logprobs, entropies = [], []
        for k in [step] if policy.sde_mode == "mixed" else range(self._stochastic_steps):
            x, x_next = (chain[:, k], chain[:, k + 1]) if isinstance(k, int) else (chain[rows, k], chain[rows, k + 1])
            mean, std = (self._executed(part) for part in self._step(prefix, x, k))
            logprobs.append(flow.elementwise_logprob(self._executed(x_next), mean, std))
            entropies.append(flow.elementwise_entropy(std))
        terms = len(logprobs) if policy.joint_reduction == "mean" else 1
        logprob, entropy = (torch.stack(parts).sum(0) / terms for parts in (logprobs, entropies))
        return {"logprob": logprob, "entropy": entropy, "value": self.value(prefix)}

    def _sft(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Flow-matching loss (target - v)^2 per element [B, L, A], L of ``actions`` [B, L, A] at most H.

        Over the environment's dimensions only. With L < H the rest of the chunk is pure noise and carries no loss.
        ``sft.noise`` [B, H, width] and ``sft.time`` [B] replace the random draws where given.
        """
        actions = batch["actions"]
        require_float32("actions", actions)
        size, length, device = len(actions), actions.shape[1], actions.device
        horizon, dim = self.horizon, self.processing.action_dim
        if length > horizon or actions.shape[2] != dim:
            raise ValueError(f"actions has shape {list(actions.shape)}, expected [B, at most {horizon}, {dim}]")
        noise, time = batch.get("sft.noise"), batch.get("sft.time")
        if noise is None:
            noise = torch.randn(size, horizon, self.width).to(device)
        if time is None:
            time = self.sample_time(size).to(device)
        self._set_dropout(self.training)
        target = self.processing.model_actions(actions, self.width)
        sign, share = (1.0, time) if self.convention == "pi" else (-1.0, 1.0 - time)  # share of noise
        share = share[:, None, None]
        x = noise.clone()
        x[:, :length] = share * noise[:, :length] + (1.0 - share) * target
        towards_noise = sign * self.velocity(self.anchored(self.encode(batch)), x, time)
        error = (noise - towards_noise)[:, :length, :dim] - target[..., :dim]
        return {"loss": error.square()}

    # what verl's engine and peft ask of a model

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recompute each layer's activations in the backward pass instead of keeping them.

        transformers' own switch drops the key-value cache, on which these policies stand, so layers are checkpointed
        here; not in the re-entrant form, for which the cache's tensors would have no history.
        """
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(f"gradient checkpointing of {self.family} needs use_reentrant: false")
        for layer in self.checkpointed_layers():
            layer.forward = checkpointing(layer)

    def gradient_checkpointing_disable(self) -> None:
        for layer in self.checkpointed_layers():
            vars(layer).pop("forward", None)

    # files

    @classmethod
    def config_from(cls, model: dict[str, Any]) -> Any:
        """The network's config from what ``config_dict`` gave."""
        raise NotImplementedError

    def config_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def save(self, path: Path, state: dict[str, Tensor] | None = None, dtype: torch.dtype | None = None) -> None:
        """See ``VLAPolicy.save``. ``dtype``: store weights in it (float16: half the size)."""
        checkpoints.save(
            Path(path), self.state_dict() if state is None else state, family=self.family, preset=self.preset,
            settings=self.policy, model=self.config_dict(), processing=self.processing, dtype=dtype,
        )  # fmt: skip

    def save_pretrained(self, path: str | Path, state_dict: dict[str, Tensor] | None = None, **_: Any) -> None:
        self.save(Path(path), state_dict)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        processing: Processing | str | Path | None = None,
        tokenizer: Any = None,
        dtype: str | torch.dtype = torch.float32,
        **settings: Any,
    ) -> Self:
        """Read a directory written by ``save``; ``settings`` override the stored ones.

        One that changes a head's shape, or adds a head, starts it anew, and a warning says so.
        """
        path = Path(path)
        data = checkpoints.read_saved(path, cls.family)
        merged = {**data["policy"], **settings}
        record = checkpoints.read_processing(processing, tokenizer, path)
        chosen = checkpoints.parse_settings(FlowSettings, merged, cls.family)
        loaded = checkpoints.empty(
            lambda: cls(cls.config_from(data["model"]), chosen, record),  # type: ignore[call-arg]
            checkpoints.parse_dtype(dtype),
        )
        loaded.preset = data.get("preset")
        checkpoints.fill_saved(loaded, path, f"{cls.family} model", overridden=merged != data["policy"])
        return loaded

    def describe(self) -> dict[str, Any]:
        trainable = sum(p.numel() for p in self.parameters() if p.requires_grad)
        record = self.processing
        return {
            **super().describe(),
            "trainable": trainable,
            "dtype": str(self.dtype).removeprefix("torch."),
            "cameras": ", ".join(record.cameras),
            "image_size": "x".join(map(str, record.image_size)),
            "horizon": self.horizon,
            **asdict(self.policy),
        }
