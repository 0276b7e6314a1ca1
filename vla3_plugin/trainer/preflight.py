"""What is said, and checked, before anything heavy starts: devices, sizes, samples and updates a step, memory."""

import difflib
import functools
import importlib
import inspect
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from vla3_plugin import config_cross
from vla3_plugin.config import VLA3Config
from vla3_plugin.config_checks import show
from vla3_plugin.envs.registry import env_fault, env_target
from vla3_plugin.placement import memory
from vla3_plugin.placement.fit import local_faults
from vla3_plugin.policies.registry import policy_summary
from vla3_plugin.profile import has_gpu, requested_profile
from vla3_plugin.telemetry.console import describe_machine


def preflight(config: Any, vla3: VLA3Config) -> tuple[dict[str, Any], list[str]]:
    """(summary by section, faults): a fault stops the run."""
    faults = [*_place_faults(vla3), *_env_faults(vla3), *local_faults(config)]
    policy, wrong = _policy(config.actor_rollout_ref.model)
    faults += wrong
    estimate = _memory(config, vla3, policy) if "parameters" in policy else {}
    faults += _fit(estimate, vla3) if estimate else []
    wanted = requested_profile()
    why = "asked for" if wanted != "auto" else f"{'a' if has_gpu() else 'no'} CUDA device was found"
    algorithm = vla3.algorithm
    sections: dict[str, Any] = {
        "profile": {"name": vla3.profile, "why": why},
        "machine": describe_machine(),
        "policy": {"path": config.actor_rollout_ref.model.path, **policy},
        "env": {
            "name": vla3.env.name,
            "slots": vla3.env.workers * vla3.env.shards_per_worker * vla3.env.envs_per_shard,
            "processes": vla3.env.workers * vla3.env.shards_per_worker,
            **{str(k): v for k, v in vla3.env.options.items()},
        },
        "step": {
            "episodes": config.data.train_batch_size,
            "groups": f"{config.data.train_batch_size // algorithm.group_size} of {algorithm.group_size}",
            "optimizer_steps": algorithm.update_epoch * algorithm.num_mini_batches,
            "steps": config.trainer.total_training_steps,
            "stages": _stages(vla3),
            "algorithm": f"{algorithm.adv_type}, {algorithm.logprob_type}-level ratio",
        },
        "run_dir": str(vla3.run_dir),
    }
    if estimate:
        sections["memory"] = estimate
    if notes := config_cross.notes(config, vla3):
        sections["note"] = notes
    return sections, faults


def memory_faults(config: Any, vla3: VLA3Config) -> list[str]:
    """Whether it would fit, for who tries several configs; of a policy that is no policy nothing is said here."""
    model = config.actor_rollout_ref.model
    policy, _ = _policy_once(str(model.path), json.dumps(OmegaConf.to_container(model.options, resolve=True)))
    return _fit(_memory(config, vla3, policy), vla3) if "parameters" in policy else []


@functools.lru_cache(maxsize=1)
def _policy_once(path: str, options: str) -> tuple[dict[str, Any], list[str]]:
    return _policy(OmegaConf.create({"path": path, "options": json.loads(options)}))


def _place_faults(vla3: VLA3Config) -> list[str]:
    """Whether the run can write what it has to leave behind."""
    run_dir = Path(vla3.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        return [f"vla3.run_dir: {vla3.run_dir!r} cannot be written to ({error.strerror}); choose another place"]
    return []


def _env_faults(vla3: VLA3Config) -> list[str]:
    env = vla3.env
    faults = [env_fault(env.name, env.python) or _option_fault(env.name, env.python, env.options)]
    if env.python is not None and shutil.which(env.python) is None:
        faults.append(f"vla3.env.python: {env.python!r} is not a program; name a Python interpreter, or null for this")
    return [fault for fault in faults if fault]


def _option_fault(name: str, python: str | None, options: dict[Any, Any]) -> str | None:
    """An option that the simulator's class does not take; ours can be asked without importing a simulator."""
    module, _, attribute = env_target(name).partition(":")
    if python is not None or not module.startswith("vla3_plugin."):
        return None
    parameters = list(inspect.signature(getattr(importlib.import_module(module), attribute)).parameters)
    taken = [parameter for parameter in parameters if parameter != "num_slots"]
    for option in map(str, options):
        if option not in taken:
            near = difflib.get_close_matches(option, taken, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(taken)}"
            return f"vla3.env.options.{option}: {name} has no such option; {hint}"
    return None


def _policy(model: Any) -> tuple[dict[str, Any], list[str]]:
    """(what the policy is, faults); its constructor is given what a user wrote, so any of its errors is the user's."""
    options: Any = OmegaConf.to_container(model.options, resolve=True)
    try:
        return policy_summary(model.path, **options), []
    except Exception as error:
        why = str(error).strip() or type(error).__name__
        kind = (
            "" if isinstance(error, (ValueError, OSError)) else f" ({type(error).__name__}; options: {show(options)})"
        )
        return {}, [f"actor_rollout_ref.model.path: {show(model.path)}: {why}{kind}"]


def _fit(estimate: dict[str, Any], vla3: VLA3Config) -> list[str]:
    """Compare the estimate with what is free; a warning goes into ``estimate``."""
    processes = vla3.env.workers * vla3.env.shards_per_worker
    sides = [("host", f"vla3.env.shards_per_worker: {processes} simulator processes", memory.available_memory())]
    if estimate["device"] and (devices := memory.available_device_memory()) is not None:
        sides.append(("device", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", devices))
    estimate["available"] = sides[0][2].bytes
    faults, warnings = [], []
    for side, key, available in sides:
        try:
            warnings.append(memory.check_fit(estimate, available.bytes, available.source, side))
        except memory.MemoryFitError as error:
            faults.append(f"{key}: {error}")
    if told := [warning for warning in warnings if warning]:
        estimate["warning"] = "; ".join(told)
    return faults


def _stages(vla3: VLA3Config) -> str:
    stages = vla3.stages
    on = [name for name in ("interaction", "streaming", "training") if getattr(stages, name).enabled]
    lag = f", staleness at most {stages.training.max_staleness}" if stages.training.enabled else ""
    return (f"asynchronous: {', '.join(on)}" + lag) if on else "synchronous"


def _memory(config: Any, vla3: VLA3Config, policy: dict[str, Any]) -> dict[str, Any]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    slots = vla3.env.shards_per_worker * vla3.env.envs_per_shard
    through_vllm, megatron = config_cross.samples_through_vllm(config), actor.strategy == "megatron"
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    in_cell = ranks if megatron or actor.fsdp_config.fsdp_size in (-1, 0) else min(ranks, actor.fsdp_config.fsdp_size)
    return memory.estimate(
        parameters=int(policy["parameters"]),
        trainable=int(policy.get("trainable", policy["parameters"])),
        actor_workers=ranks,
        policy_workers=rollout.n_gpus_per_node * rollout.nnodes,
        reference=vla3.algorithm.kl_beta > 0,
        evaluation_copy=config_cross.evaluation_overlaps(vla3, through_vllm) and config.trainer.test_freq > 0,
        through_vllm=through_vllm,
        shards=1 if megatron else in_cell,
        state_shards=1 if megatron and not actor.megatron.use_distributed_optimizer else in_cell,
        micro_batch=actor.ppo_micro_batch_size_per_gpu,
        policy_batch=slots,
        checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        env=vla3.env.name,
        env_workers=vla3.env.workers,
        env_actors=vla3.env.workers if vla3.env.host == "own" else 0,
        env_processes=vla3.env.shards_per_worker,
        slots_per_process=vla3.env.envs_per_shard,
        device=config.trainer.device,
    )
