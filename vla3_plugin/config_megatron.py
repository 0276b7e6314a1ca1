"""verl's keys for ``model_engine=megatron``: what the engine of a policy cannot do is refused, before Ray starts.

The engine asks the same question of what it is built from, so that other ways to it get the same answer.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from typing import Any

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
    "optim.use_precision_aware_optimizer": ((False,), _ADAM),
}
_DDP = "override_ddp_config"
_DDP_KEYS = ("bucket_size", "grad_reduce_in_fp32", "overlap_grad_reduce", "pad_buckets_for_high_nccl_busbw")
_OPTIM_KEYS = ("adam_eps",)  # betas are optim.betas
_ABSENT = object()


def missing() -> str | None:
    """What to install, where megatron-core is not; None: it is there."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is not None:
        return None
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
    for key, known in ((f"megatron.{_DDP}", _DDP_KEYS), ("optim.override_optimizer_config", _OPTIM_KEYS)):
        given = _select(actor, key)
        for name in given if isinstance(given, Mapping) else ():
            if name not in known:
                found.append(f"{prefix}.{key}.{name}: this engine has only {', '.join(known)}; leave it out")
    return found


def _as_written(value: Any) -> str:
    """In YAML."""
    return json.dumps(value) if value is None or isinstance(value, bool) else show(value)


def _select(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node.get(part, _ABSENT) if isinstance(node, Mapping) else _ABSENT
    return node
