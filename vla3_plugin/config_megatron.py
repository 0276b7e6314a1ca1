"""verl's keys for ``model_engine=megatron``: what the engine of a policy cannot do is refused, before Ray starts.

The engine asks the same question of what it is built from, so that other ways to it get the same answer.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from packaging.version import Version

from vla3_plugin.config_checks import show

VERSION = "0.16.1"  # of megatron-core; the newest for Python 3.11
_WHOLE = "every learner rank holds the whole policy; set it back, or shard the policy with model_engine=dp (fsdp2)"
_RESIDENT = "what the engine holds stays on its device; set it to false, or use model_engine=dp with its fsdp_config"
_ADAM = "use Adam in float32, whose state a checkpoint holds"
_PLAIN = "checkpoints are the learner's files of one rank each; set it to false"
# below actor_rollout_ref.actor: what is allowed, and why not more or what to do
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "strategy": (("megatron",), "say model_engine=megatron on the command line and leave this out"),
    "megatron.strategy": (("megatron",), "leave it out"),
    "megatron.tensor_model_parallel_size": ((1,), _WHOLE),
    "megatron.pipeline_model_parallel_size": ((1,), _WHOLE),
    "megatron.virtual_pipeline_model_parallel_size": ((None, 1), _WHOLE),
    "megatron.context_parallel_size": ((1,), _WHOLE),
    "megatron.dynamic_context_parallel": ((False,), _WHOLE),
    "megatron.expert_model_parallel_size": ((1,), _WHOLE),
    "megatron.expert_tensor_parallel_size": ((None, 1), _WHOLE),
    "megatron.use_megatron_fsdp": ((False,), "sharded parameters are fsdp2's; set it to false, or use model_engine=dp"),
    "megatron.param_offload": ((False,), _RESIDENT),
    "megatron.optimizer_offload": ((False,), _RESIDENT),
    "megatron.dtype": (("bfloat16",), "float16 needs its loss scaled; use bfloat16 (on a CPU it is float32 anyway)"),
    "megatron.use_dist_checkpointing": ((False,), _PLAIN),
    "megatron.qat.enable": ((False,), "nothing is quantised; set it to false"),
    "checkpoint.async_save": ((False,), _PLAIN),
    "checkpoint.save_lora_only": ((False,), _PLAIN),
    "optim.optimizer": (("adam",), _ADAM),
    "optim.lr_decay_style": (("constant", "linear", "cosine"), "other schedules of megatron are not offered"),
    "optim.weight_decay_incr_style": (("constant",), "the weight decay stays what it is"),
    "optim.use_precision_aware_optimizer": ((False,), _ADAM),
}
_DDP = "override_ddp_config"
_DDP_KEYS: dict[str, type] = {
    "bucket_size": int,
    "grad_reduce_in_fp32": bool,
    "overlap_grad_reduce": bool,
    "pad_buckets_for_high_nccl_busbw": bool,
}
_OPTIM_KEYS: dict[str, type] = {"adam_eps": float}  # betas are optim.betas
_SAVED = {"model", "optimizer", "extra"}
_ABSENT = object()


def missing() -> str | None:
    """What to install, where megatron-core is not; None: it is there."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is not None:
        version = importlib.metadata.version("megatron-core")
        if Version("0.16") <= Version(version) < Version("0.17"):
            return None
        return (
            f"model_engine: 'megatron' with megatron-core {version}, expected 0.16; pip install 'vla3-plugin[megatron]'"
        )
    return (
        "model_engine: 'megatron' needs megatron-core, which is not installed; "
        f"pip install 'vla3-plugin[megatron]' (megatron-core=={VERSION}), or use model_engine=dp"
    )


def faults(actor: Any, prefix: str = "actor_rollout_ref.actor") -> list[str]:
    """One line a fault: key, value, what was expected, the fix; all of them. What is absent is as it should be.

    Args:
        actor: the mapping ``actor_rollout_ref.actor`` or ``….ref``, or those of its parts that the caller has.
        prefix: its key.
    """
    found = []
    for key, (allowed, why) in _ALLOWED.items():
        value = _select(actor, key)
        if value is _ABSENT or any(value == other and type(value) is type(other) for other in allowed):
            continue
        wanted = " or ".join(_as_written(other) for other in allowed)
        found.append(f"{prefix}.{key}: {_as_written(value)}, expected {wanted}: {why}")
    given: Any
    for key, known in ((f"megatron.{_DDP}", _DDP_KEYS), ("optim.override_optimizer_config", _OPTIM_KEYS)):
        given = _select(actor, key)
        for name, value in given.items() if isinstance(given, Mapping) else ():
            if name not in known:
                found.append(f"{prefix}.{key}.{name}: this engine has only {', '.join(known)}; leave it out")
            elif type(value) is not known[name] or (known[name] is not bool and not _positive(value)):
                wanted = "true or false" if known[name] is bool else f"{known[name].__name__} above 0"
                found.append(f"{prefix}.{key}.{name}: {_as_written(value)}, expected {wanted}")
    saved = _select(actor, "checkpoint.save_contents")
    if isinstance(saved, Sequence) and not isinstance(saved, str) and (left_out := sorted(_SAVED - set(saved))):
        found.append(f"{prefix}.checkpoint.save_contents: {', '.join(left_out)} left out; a run could not be resumed")
    return found


def schedule_faults(optim: Any, steps: int) -> list[str]:
    """What megatron's schedule asserts in a worker otherwise; ``optim``: ``actor_rollout_ref.actor.optim``."""
    key, found = "actor_rollout_ref.actor.optim", []
    horizon = optim.get("lr_decay_steps") or steps
    warmup = optim.get("lr_warmup_steps")
    warmup = warmup if warmup is not None and warmup > 0 else (optim.get("lr_warmup_steps_ratio") or 0.0) * steps
    if warmup >= horizon:
        found.append(f"{key}.lr_warmup_steps: {warmup:g} of {horizon} steps with model_engine=megatron, expected fewer")
    for low in ("min_lr", "lr_warmup_init"):
        if (optim.get(low) or 0.0) > optim.lr:
            found.append(f"{key}.{low}: {optim[low]} is above {key}.lr = {optim.lr}; swap them")
    return found


def _positive(value: Any) -> bool:
    return value > 0


def _as_written(value: Any) -> str:
    """In YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else show(value)


def _select(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node.get(part, _ABSENT) if isinstance(node, Mapping) else _ABSENT
    return node
