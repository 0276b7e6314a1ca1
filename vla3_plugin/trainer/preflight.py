"""What is said, and checked, before anything heavy starts: devices, sizes, samples and updates a step, memory."""

import json
from pathlib import Path
from typing import Any

from vla3_plugin.config import VLA3Config
from vla3_plugin.envs.registry import env_fault
from vla3_plugin.placement import memory
from vla3_plugin.policies.registry import policy_summary
from vla3_plugin.profile import has_gpu, requested_profile
from vla3_plugin.telemetry.console import command_line, describe_machine, format_preflight
from vla3_plugin.telemetry.metrics import plain


def preflight(config: Any, vla3: VLA3Config) -> tuple[dict[str, Any], list[str]]:
    """(summary by section, faults): a fault stops the run."""
    faults = []
    wrong = env_fault(vla3.env.name, vla3.env.python)
    if wrong:
        faults.append(wrong)
    model = config.actor_rollout_ref.model
    policy: dict[str, Any] = {}
    try:
        policy = policy_summary(model.path, **model.options)
    except (ValueError, OSError) as error:
        faults.append(f"actor_rollout_ref.model.path: {error}")
    estimate = _memory(config, vla3, policy) if "parameters" in policy else None
    if estimate and estimate["host"] > estimate["available"]:
        faults.append(
            f"vla3.env.shards_per_worker: {vla3.env.workers * vla3.env.shards_per_worker} simulator processes: "
            f"the run needs about {estimate['host'] / 1e9:.1f} GB of host memory, {estimate['available'] / 1e9:.1f} GB "
            f"are available ({memory.format_estimate(estimate)}); lower vla3.env.shards_per_worker"
        )
    wanted = requested_profile()
    why = "asked for" if wanted != "auto" else f"{'a' if has_gpu() else 'no'} CUDA device was found"
    algorithm = vla3.algorithm
    sections: dict[str, Any] = {
        "profile": {"name": vla3.profile, "why": why},
        "machine": describe_machine(),
        "policy": {"path": model.path, **policy},
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
    return sections, faults


def _stages(vla3: VLA3Config) -> str:
    stages = vla3.stages
    on = [name for name in ("interaction", "streaming", "training") if getattr(stages, name).enabled]
    lag = f", staleness at most {stages.training.max_staleness}" if stages.training.enabled else ""
    return (f"asynchronous: {', '.join(on)}" + lag) if on else "synchronous"


def announce(sections: dict[str, Any], run_dir: Path) -> None:
    """Print the summary, and keep it with the command line for the report: a Ray worker knows neither."""
    print(format_preflight(sections))
    run_dir.mkdir(parents=True, exist_ok=True)
    record = plain({**sections, "command": command_line()})
    (run_dir / "preflight.json").write_text(json.dumps(record, indent=1))


def _memory(config: Any, vla3: VLA3Config, policy: dict[str, Any]) -> dict[str, Any]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    slots = vla3.env.shards_per_worker * vla3.env.envs_per_shard
    estimate = memory.estimate(
        parameters=int(policy["parameters"]),
        trainable=int(policy.get("trainable", policy["parameters"])),
        actor_workers=config.trainer.n_gpus_per_node * config.trainer.nnodes,
        policy_workers=rollout.n_gpus_per_node * rollout.nnodes,
        reference=vla3.algorithm.kl_beta > 0,
        micro_batch=actor.ppo_micro_batch_size_per_gpu,
        policy_batch=slots,
        checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        env=vla3.env.name,
        env_workers=vla3.env.workers,
        env_processes=vla3.env.shards_per_worker,
        slots_per_process=vla3.env.envs_per_shard,
        device=config.trainer.device,
    )
    return estimate | {"available": memory.available_memory().bytes}
