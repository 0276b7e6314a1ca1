"""Behaviour cloning of a policy from demonstrations, on the engine that RL uses.

The loss is the family's own (flow matching for pi0); normalisation statistics come from the demonstrations and are
saved with the policy. One process; ``torchrun`` starts several ranks of the same program.
"""

import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from vla3_plugin.contract import Observation
from vla3_plugin.learner import fields


@dataclass(frozen=True)
class SFTConfig:
    """``shift``: images are moved by up to this many pixels, each sample and camera by its own draw."""

    preset: str = "pi0-nano"
    steps: int = 2000
    batch_size: int = 64
    micro_batch_size: int = 64
    lr: float = 5e-4
    warmup: float = 0.03
    weight_decay: float = 1e-4
    clip_grad: float = 1.0
    shift: int = 3
    seed: int = 0
    threads: int = 2
    minutes: float | None = None  # stop early, where the schedule stands
    store_dtype: str = "float32"  # of the weights on disk; float16 halves a policy that is shipped


class DemoError(ValueError):
    """Demonstrations that cannot be learned from."""


def load_demos(paths: list[Path]) -> dict[str, np.ndarray]:
    """All ``*.npz`` below ``paths``, concatenated. See ``imitation.demos`` for the format."""
    files = sorted(f for p in paths for f in ([p] if p.is_file() else p.rglob("*.npz")))
    if not files:
        raise DemoError(f"no .npz file below {', '.join(map(str, paths))}; make some with `vla3 demos`")
    parts = [dict(np.load(file, allow_pickle=False)) for file in files]
    names = set(parts[0])
    for file, part in zip(files, parts, strict=True):
        if set(part) != names:
            raise DemoError(f"{file} holds {sorted(part)}, {files[0]} {sorted(names)}: not the same environment")
    return {name: np.concatenate([part[name] for part in parts]) for name in sorted(names)}


@dataclass
class CloningLoss:
    """Mean of the family's per-element loss over the demonstrated actions."""

    def counts(self, data: TensorDict) -> dict[str, float]:
        return {"actions": float(data["action_mask"].sum() * data["in.actions"].shape[-1])}

    def __call__(self, model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None):
        masked = model_output["loss"] * data["action_mask"][..., None]
        loss = masked.sum() / data["actions_count"]
        return loss, {"sft_loss": loss.item()}


def shifted(pixels: Tensor, shift: int, generator: torch.Generator) -> Tensor:
    """``pixels`` uint8 [B, cameras, H, W, 3], each image moved by its own (dy, dx) in ±shift, edges repeated."""
    if shift == 0:
        return pixels
    batch, cameras, height, width, _ = pixels.shape
    images = pixels.reshape(-1, height, width, 3)
    count = len(images)
    move = torch.randint(-shift, shift + 1, (2, count), generator=generator)
    rows = (torch.arange(height) + move[0][:, None]).clamp(0, height - 1)
    columns = (torch.arange(width) + move[1][:, None]).clamp(0, width - 1)
    index = torch.arange(count)[:, None, None]
    return images[index, rows[:, :, None], columns[:, None, :]].reshape(batch, cameras, height, width, 3)


def _engine(policy_path: Path, config: SFTConfig) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl.workers.engine import EngineRegistry

    import vla3_plugin.learner.engine_fsdp  # noqa: F401  registers the engine
    from vla3_plugin.learner.model_config import VLAModelConfig

    engine = EngineRegistry.new(
        model_type="vla_policy",
        backend="fsdp2",
        model_config=VLAModelConfig(path=os.fspath(policy_path), cpu_threads=config.threads),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=config.lr,
            weight_decay=config.weight_decay,
            clip_grad=config.clip_grad,
            lr_scheduler_type="cosine",
            lr_warmup_steps_ratio=config.warmup,
            total_training_steps=config.steps,
        ),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def train(demos: list[Path], out: Path, config: SFTConfig) -> dict[str, Any]:
    """Clone ``demos`` into a policy directory ``out``; returns (and writes beside it) what was done."""
    from vla3_plugin.policies.presets import PRESETS
    from vla3_plugin.policies.processing import Processing
    from vla3_plugin.policies.registry import build_policy

    data = load_demos(demos)
    cameras = [name.removeprefix("images.") for name in data if name.startswith("images.")]
    valid_actions = data["actions"][data["action_mask"]]
    preset = PRESETS[config.preset]
    processing = Processing.from_demos(
        data["state"],
        valid_actions,
        cameras=cameras,
        image_size=preset.image_size,
        max_tokens=preset.max_tokens,
        normalisation=preset.normalisation,
        prompt=preset.prompt,
        **_names(demos),
    )
    policy = build_policy(config.preset, processing, seed=config.seed)
    if not torch.distributed.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        backend = None if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, rank=rank, world_size=world)
    with tempfile.TemporaryDirectory() as scratch:
        policy.save(Path(scratch))
        engine = _engine(Path(scratch), config)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(config.seed * 1000 + rank)
    torch.manual_seed(config.seed * 1000 + rank)
    inputs = _inputs(engine.policy, data, cameras)
    from verl.utils import tensordict_utils as tu

    started, losses = time.monotonic(), []
    share = config.batch_size // world
    with engine.train_mode():
        for step in range(config.steps):
            rows = torch.randint(len(data["state"]), (share,), generator=generator)
            batch = {name: value[rows] for name, value in inputs.items()}
            batch["in.pixels"] = shifted(batch["in.pixels"], config.shift, generator)
            td = TensorDict(batch, batch_size=share)
            tu.assign_non_tensor(td, micro_batch_size_per_gpu=min(config.micro_batch_size, share), task="sft")
            output = engine.train_batch(td, loss_function=CloningLoss())
            engine.lr_scheduler_step()
            losses.append(sum(output["loss"]) / world)
            if rank == 0 and (step % 50 == 49 or step == 0):
                rate = (time.monotonic() - started) / (step + 1)
                recent = float(np.mean(losses[-50:]))
                print(f"sft: step {step + 1}/{config.steps}, loss {recent:.4f}, {rate:.2f} s/step", flush=True)
            if config.minutes is not None and time.monotonic() - started > 60 * config.minutes:
                break
    state = {name: tensor.detach().cpu() for name, tensor in engine.get_per_tensor_param()[0]}
    record = {
        "samples": len(data["state"]),
        "episodes": len(np.unique(data["episode"])),
        "steps": len(losses),
        "batch_size": config.batch_size,
        "loss": float(np.mean(losses[-100:])),
        "seconds": round(time.monotonic() - started, 1),
        "config": config.__dict__,
    }
    if rank == 0:
        temporary = out.with_name(out.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        engine.policy.save(temporary, {n: _stored(t, config.store_dtype) for n, t in state.items()})
        (temporary / "sft.json").write_text(json.dumps(record, indent=1))
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    return record


def _names(demos: list[Path]) -> dict[str, Any]:
    """Names of state and action dimensions from the demonstrations' card, to be checked against the environment."""
    cards = sorted(c for p in demos for c in (p if p.is_dir() else p.parent).rglob("card.json"))
    spec = json.loads(cards[0].read_text())["spec"] if cards else {}
    return {name: spec[name] for name in ("state_names", "action_names") if name in spec}


def _stored(tensor: Tensor, dtype: str) -> Tensor:
    return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def _inputs(policy: Any, data: dict[str, np.ndarray], cameras: list[str]) -> dict[str, Tensor]:
    """Prepared inputs of all samples under the store's names, ``in.*``, with the actions to clone."""
    observations = (
        Observation({c: data[f"images.{c}"][i] for c in cameras}, data["state"][i], str(data["instruction"][i]))
        for i in range(len(data["state"]))
    )
    prepared = policy.prepare(list(observations))
    inputs = {f"{fields.INPUT}{name}": value for name, value in prepared.items()}
    mask, demonstrated = (data[name][:, : policy.horizon] for name in ("action_mask", "actions"))
    actions = np.where(mask[..., None], demonstrated, 0.0)  # what stands behind the mask may be NaN
    inputs[f"{fields.INPUT}actions"] = torch.from_numpy(actions.astype(np.float32))
    inputs["action_mask"] = torch.from_numpy(mask)
    return inputs
