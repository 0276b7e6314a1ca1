"""A policy that takes time and no processor: the counterpart of the ``latency`` environment.

Its network is one linear layer, its likelihood a real Gaussian with real gradients, and inference and training sleep
for as long as the policy it stands for would take: inference affine in the batch and in the denoising steps, training
affine in the micro-batch. Everything around it (engine, optimizer, weight plane, batcher, store) is the real thing.

It is a flow policy of the plainest kind: from x = std * noise the velocity is the same at every step, so that K steps
of mean / K lead to mean + std * noise; and a chain that shares its steps with others gives what ``act`` gives.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vla3_plugin.contract import EnvSpec, Observation
from vla3_plugin.policies.base import ActionChunk, NoiseKey, VLAPolicy
from vla3_plugin.policies.chains import Chains, run_chains
from vla3_plugin.policies.noise import keyed_generator
from vla3_plugin.rows import stack_rows

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class LatencySettings:
    """Sizes, and times in ms. Inference of B rows: ``prefix_ms`` once, then ``step_ms`` per denoising step, each a base
    and a part per row.
    """

    state_dim: int = 42
    action_dim: int = 7
    chunk: int = 8
    std: float = 0.3
    seed: int = 0  # of the fresh weights
    denoising_steps: int = 4
    prefix_ms_base: float = 0.0
    prefix_ms_per_sample: float = 0.0
    step_ms_base: float = 0.0
    step_ms_per_sample: float = 0.0
    train_ms_base: float = 0.0  # forward and backward of one micro-batch
    train_ms_per_sample: float = 0.0
    forward_share: float = 1 / 3  # of these, where no gradient is asked for
    sync_ms: float = 0.0  # taking in a new version: slept in load_state_dict, where a replica swaps its weights

    def __post_init__(self) -> None:
        where = "actor_rollout_ref.model.options"
        for name in ("state_dim", "action_dim", "chunk", "denoising_steps"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{where}.{name}: {getattr(self, name)!r}, expected a whole number, at least 1")
        for name in (f.name for f in fields(self) if "_ms" in f.name or f.name == "forward_share"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{where}.{name}: {value!r}, expected a finite number, 0 or more")
        if not self.std > 0:
            raise ValueError(f"{where}.std: {self.std}, expected more than 0: without spread there is no likelihood")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LatencySettings:
        """Raises ``ValueError`` for a setting that is not one."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a setting of latency; known: {', '.join(known)}")
        return cls(**options)

    def prefix_ms(self, batch: float) -> float:
        return self.prefix_ms_base + self.prefix_ms_per_sample * batch

    def step_ms(self, batch: float) -> float:
        return self.step_ms_base + self.step_ms_per_sample * batch

    def inference_ms(self, batch: float) -> float:
        """A whole chain of ``batch`` rows."""
        return self.prefix_ms(batch) + self.denoising_steps * self.step_ms(batch)

    def train_ms(self, batch: float) -> float:
        return self.train_ms_base + self.train_ms_per_sample * batch


class _Card:
    """What verl's checkpoint manager and FLOPs counter ask of ``model.config``."""

    tie_word_embeddings = False
    num_attention_heads = 0
    model_type = "latency"

    def save_pretrained(self, path: str) -> None:
        Path(path, CONFIG).write_text(json.dumps({"model_type": self.model_type}))


class LatencyPolicy(VLAPolicy):
    """See ``VLAPolicy`` and ``DenoisingPolicy``. Inputs: ``pixels`` uint8 [B, cameras, H, W, 3] (nobody looks at them;
    they are what has to be carried) and ``state`` float32 [B, S]. Trace: ``action`` float32 [B, C, A], as sampled.
    """

    family = "latency"
    _no_split_modules = ["Linear"]

    def __init__(self, settings: LatencySettings) -> None:
        super().__init__()
        self.settings, self.config = settings, _Card()
        self.mean = nn.Linear(settings.state_dim, settings.chunk * settings.action_dim)
        self.value_head = nn.Linear(settings.state_dim, 1)
        generator = torch.Generator("cpu").manual_seed(settings.seed)
        with torch.no_grad():
            for parameter in self.parameters():  # copied, so that a summary on the meta device works too
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator, device="cpu"))

    # observations to stored inputs

    def check_env(self, spec: EnvSpec) -> None:
        """Refuse an environment of other sizes.

        Raises:
            ValueError: with the option to change.
        """
        for name in ("state_dim", "action_dim"):
            mine, theirs = getattr(self.settings, name), getattr(spec, name)
            if mine != theirs:
                raise ValueError(f"actor_rollout_ref.model.options.{name}: {mine}, the environment has {theirs}")

    def prepare(self, observations: Sequence[Observation]) -> dict[str, Tensor]:
        images = [stack_rows([o.images[camera] for camera in sorted(o.images)]) for o in observations]
        return {
            "pixels": torch.from_numpy(stack_rows(images)),
            "state": torch.stack([torch.from_numpy(o.state) for o in observations]),
        }

    # sampling

    @property
    def num_denoising_steps(self) -> int:
        return self.settings.denoising_steps

    def act(
        self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Literal["train", "eval"]
    ) -> ActionChunk:
        return run_chains(self, inputs, noise_keys, mode)

    @torch.no_grad()
    def begin(
        self, inputs: dict[str, Tensor], noise_keys: Sequence[NoiseKey], mode: Literal["train", "eval"]
    ) -> Chains:
        start, s, size = time.perf_counter(), self.settings, len(noise_keys)
        if mode not in ("train", "eval"):
            raise ValueError(f"mode is {mode!r}, expected train or eval")
        if size != len(inputs["state"]):
            raise ValueError(f"{size} noise keys for a batch of {len(inputs['state'])}")
        velocity, value = self._heads(inputs["state"])
        shape = (s.chunk, s.action_dim)
        chain = torch.zeros(size, s.denoising_steps + 1, *shape)
        if mode == "train":
            noise = [torch.randn(shape, generator=keyed_generator(key)) for key in noise_keys]
            chain[:, 0] = s.std * torch.stack(noise)
        chains = Chains(
            prefix={"velocity": velocity},
            chain=chain.to(velocity.device),
            noise=velocity.new_zeros(size, 1, *shape),
            logprob=velocity.new_zeros(size, *shape),
            value=value,
            sde_step=torch.full((size,), -1),
            train=torch.full((size,), mode == "train"),
            step=torch.zeros(size, dtype=torch.int64),
        )
        _sleep_until(start, s.prefix_ms(size))
        return chains

    @torch.no_grad()
    def denoise(self, chains: Chains) -> None:
        start, size = time.perf_counter(), len(chains)
        if bool(chains.complete.any()):
            raise IndexError(f"chains at steps {chains.step.tolist()} of {chains.num_steps}: one is complete already")
        moved = _state(chains) + chains.prefix["velocity"] / chains.num_steps
        chains.step += 1
        chains.chain[torch.arange(size), chains.step] = moved
        if bool(chains.complete.any()):
            done = chains.complete.to(moved.device)[:, None, None] & chains.train.to(moved.device)[:, None, None]
            density = self._density(chains.prefix["velocity"]).log_prob(moved)
            chains.logprob = torch.where(done, density, chains.logprob)
        _sleep_until(start, self.settings.step_ms(size))

    @torch.no_grad()
    def finish(self, chains: Chains) -> ActionChunk:
        if not bool(chains.complete.all()):
            raise ValueError(f"chains at steps {chains.step.tolist()} of {chains.num_steps} are not all complete")
        if bool(chains.train.any()) != bool(chains.train.all()):
            raise ValueError("training and evaluation chains cannot end in one batch: only training has a trace")
        action = _state(chains)
        trace = {"action": action} if bool(chains.train.all()) else {}
        return ActionChunk(action, chains.logprob, chains.value, trace)

    # learning

    def forward(self, batch: dict[str, Tensor], task: Literal["evaluate", "sft"]) -> dict[str, Tensor]:
        """With gradients it takes as long as forward and backward of what it stands for: backward itself is instant."""
        if task != "evaluate":
            raise ValueError(f"task is {task!r}: a latency policy only evaluates, there is nothing to clone")
        start, action = time.perf_counter(), batch["trace.action"]
        mean, value = self._heads(batch["state"])
        density = self._density(mean)
        output = {"logprob": density.log_prob(action), "entropy": density.entropy().expand_as(action), "value": value}
        share = 1.0 if torch.is_grad_enabled() else self.settings.forward_share
        _sleep_until(start, share * self.settings.train_ms(len(action)))
        return output

    def _heads(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, C, A] and value [B, 1], float32."""
        state = state.to(self.mean.weight.device, self.mean.weight.dtype)
        mean = self.mean(state).float().unflatten(1, (self.settings.chunk, self.settings.action_dim))
        return mean, self.value_head(state).float()

    def _density(self, mean: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(mean, self.settings.std, validate_args=False)

    # what verl's engine asks of a model

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes ``sync_ms``, in whichever lane a new version is taken in."""
        start = time.perf_counter()
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        _sleep_until(start, self.settings.sync_ms)
        return result

    # files

    def save(self, path: Path, state: dict[str, Tensor] | None = None) -> None:
        path.mkdir(parents=True, exist_ok=True)
        tensors = self.state_dict() if state is None else state
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path / WEIGHTS)
        (path / CONFIG).write_text(json.dumps({"family": self.family, "settings": asdict(self.settings)}, indent=1))

    @classmethod
    def load(cls, path: Path, **options: Any) -> LatencyPolicy:
        """A directory written by ``save``; ``options`` override its settings."""
        stored = json.loads((path / CONFIG).read_text())["settings"]
        policy = cls(LatencySettings.of({**stored, **options}))
        nn.Module.load_state_dict(policy, load_file(path / WEIGHTS))
        return policy

    @classmethod
    def build(cls, preset: str, processing: None = None, **options: Any) -> LatencyPolicy:
        """Fresh weights, the same for the same ``seed``."""
        return cls(LatencySettings.of(options))

    def describe(self) -> dict[str, Any]:
        count = sum(p.numel() for p in self.parameters())
        return {**super().describe(), "trainable": count, **asdict(self.settings)}


def _state(chains: Chains) -> Tensor:
    """[B, C, A]: where each chain stands."""
    return chains.chain[torch.arange(len(chains)), chains.step]


def _sleep_until(start: float, duration_ms: float) -> None:
    """Let ``duration_ms`` have passed since ``start``: what was computed meanwhile counts."""
    left = start + duration_ms / 1000 - time.perf_counter()
    if left > 0:
        time.sleep(left)
