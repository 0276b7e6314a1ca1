"""Keys of verl and of vla3 that must agree: divisibility, staleness and groups against the batch, roles, devices.

Both sides have been checked by themselves before (``config.parse``, ``config_verl.faults``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from vla3_plugin import config_megatron
from vla3_plugin.config import VLA3Config


def faults(config: Any, vla3: VLA3Config) -> list[str]:
    """One line a fault: key, value, what was expected, the fix; all of them."""
    return [
        *_batch_faults(config, vla3),
        *_device_faults(config),
        *_stage_faults(config, vla3),
        *_role_faults(config, vla3),
    ]


def _batch_faults(config: Any, vla3: VLA3Config) -> list[str]:
    found = []
    size, count = vla3.algorithm.group_size, config.data.train_batch_size
    if count % size:
        found.append(
            f"data.train_batch_size: {count} episodes do not divide into groups of vla3.algorithm.group_size = "
            f"{size}; use {max(1, count // size) * size}"
        )
    ahead = 1 + vla3.stages.training.max_staleness * vla3.stages.training.enabled
    room = config.transfer_queue.backend.SimpleStorage.total_storage_size
    if ahead * count > room:
        found.append(
            f"data.train_batch_size: {count} episodes, of {ahead} steps at once (vla3.stages.training.max_staleness), "
            f"and each has a sample at least: more than transfer_queue.backend.SimpleStorage.total_storage_size = "
            f"{room}; raise that, or lower one of the two"
        )
    return found


def _device_faults(config: Any) -> list[str]:
    found = []
    actor, engine = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.checkpoint_engine
    if config.trainer.device == "cpu" and actor.strategy == "fsdp":
        found.append("actor_rollout_ref.actor.strategy: 'fsdp' cannot shard CPU parameters; use fsdp2")
    if actor.strategy == "megatron":
        found += config_megatron.schedule_faults(actor.optim, config.trainer.total_training_steps)
        if config.trainer.device == "npu":
            found.append("model_engine: 'megatron' has no engine for trainer.device: npu; use model_engine=dp")
    if actor.strategy == "megatron" and actor.get("fsdp_config"):
        found.append(
            f"actor_rollout_ref.actor.fsdp_config: {', '.join(actor.fsdp_config)} with model_engine=megatron, which "
            "shards no parameters, in cells or elsewhere; leave it out, or use model_engine=dp"
        )
    if config.trainer.device == "cpu" and engine.backend != "vla3_gloo":
        found.append(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend: {engine.backend!r} needs an accelerator; use "
            "vla3_gloo"
        )
    return found


def _stage_faults(config: Any, vla3: VLA3Config) -> list[str]:
    found = []
    algorithm, actor, streaming = vla3.algorithm, config.actor_rollout_ref.actor, vla3.stages.streaming.enabled
    groups = config.data.train_batch_size // algorithm.group_size
    if (streaming or algorithm.mini_batches == "episodes") and algorithm.num_mini_batches > groups:
        found.append(
            f"vla3.algorithm.num_mini_batches: {algorithm.num_mini_batches} mini-batches of whole groups, but a step "
            f"has {groups}; use at most {groups}"
        )
    for key in ("param_offload", "optimizer_offload"):
        if streaming and (actor.get("fsdp_config") or {}).get(key):  # megatron's are refused anyway
            found.append(
                f"actor_rollout_ref.actor.fsdp_config.{key}: true with vla3.stages.streaming.enabled: what is "
                "offloaded between updates cannot take a micro-batch at any time; turn one of them off"
            )
    if vla3.evaluation.overlap and (fault := overlap_fault(vla3, samples_through_vllm(config))):
        found.append(fault)
    if samples_through_vllm(config) and algorithm.adv_type == "gae":
        found.append(
            "vla3.algorithm.adv_type: 'gae' with actor_rollout_ref.model.options.rollout_backend: vllm, which hands "
            "out no values; use grpo, or rollout_backend: in_process"
        )
    return found


def samples_through_vllm(config: Any) -> bool:
    """Whether policy workers sample as ``policies.openvla_vllm`` says."""
    options = OmegaConf.select(config, "actor_rollout_ref.model.options")
    return isinstance(options, Mapping) and options.get("rollout_backend") == "vllm"


def overlap_fault(vla3: VLA3Config, through_vllm: bool = False) -> str | None:
    """Why training cannot go on during an evaluation; None: it can."""
    key = "vla3.evaluation.overlap: true"
    if through_vllm:
        return f"{key}, but vllm (rollout_backend) holds one version of the weights; set overlap: false"
    if not vla3.stages.training.enabled:
        return f"{key}, but on one clock nothing goes on meanwhile; set vla3.stages.training.enabled=true"
    if vla3.stages.interaction.enabled and vla3.stages.interaction.batching != "run_to_completion":
        return (
            f"{key}, but chains of two versions cannot share a denoising step (vla3.stages.interaction.batching: "
            f"{vla3.stages.interaction.batching!r}); use run_to_completion, or overlap: false"
        )
    if vla3.evaluation.mode != "ode":
        return f"{key}, but the noisy policy is asked as training asks it (vla3.evaluation.mode: 'both'); use ode"
    return None


def evaluation_overlaps(vla3: VLA3Config, through_vllm: bool = False) -> bool:
    return vla3.evaluation.overlap is not False and overlap_fault(vla3, through_vllm) is None


def _role_faults(config: Any, vla3: VLA3Config) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    replicas = rollout.n_gpus_per_node * rollout.nnodes // rollout.tensor_model_parallel_size
    inline = vla3.env.isolation == "none" and vla3.env.host == "policy_worker"
    if inline and vla3.env.workers > replicas:
        return [
            f"vla3.env.isolation: 'none' with vla3.env.host: 'policy_worker' and vla3.env.workers: {vla3.env.workers} "
            f"for {replicas} policy workers, expected {replicas}: simulators in one process share its interpreter "
            "lock, its threads and whatever they keep in globals; raise envs_per_shard, or set isolation=child"
        ]
    if vla3.env.workers < replicas:
        return [
            f"vla3.env.workers: {vla3.env.workers} for {replicas} policy workers, expected at least as many: an env "
            f"worker asks one policy worker, so {replicas - vla3.env.workers} would never work; set it to {replicas}"
        ]
    return []


def notes(config: Any, vla3: VLA3Config) -> list[str]:
    """What runs, but not as well as it could."""
    env, stage = vla3.env, vla3.stages.training
    slots = env.workers * env.shards_per_worker * env.envs_per_shard
    episodes = config.data.train_batch_size * (1 + stage.max_staleness * stage.enabled)
    if slots <= episodes:
        return []
    return [
        f"vla3.env: {slots} environments, but at most {episodes} episodes are under way at once: {slots - episodes} of "
        "them never work; raise data.train_batch_size or lower vla3.env.envs_per_shard"
    ]
