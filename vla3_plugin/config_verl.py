"""verl's keys: the ones a run of ours depends on by name, the others by the shape that verl's own defaults have.

verl's config is not typed as a whole, and most of it is read in Ray workers, minutes into a run. So it is checked here:
interpolations resolve; what is a mapping, a text, a number or a switch in verl's defaults is one still; near misses of
known keys are typing errors; named keys are in range; and what verl will instantiate, it can instantiate.
"""

from __future__ import annotations

import difflib
import importlib
import os
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vla3_plugin import config_megatron
from vla3_plugin.config_checks import COUNT, NATURAL, NOT_NEGATIVE, POSITIVE, Range, choice_fault, show, text_faults
from vla3_plugin.profile import ENGINE

_NODES = Range(0, 10**5, above=True)
_PERIOD = Range(-1, 2**31 - 1)
WHOLE: dict[str, Range] = {
    "trainer.total_training_steps": COUNT,
    "trainer.total_epochs": COUNT,
    "trainer.nnodes": _NODES,
    "trainer.n_gpus_per_node": _NODES,
    "trainer.save_freq": _PERIOD,
    "trainer.test_freq": _PERIOD,
    "data.train_batch_size": COUNT,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": COUNT,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": COUNT,
    "actor_rollout_ref.rollout.nnodes": _NODES,
    "actor_rollout_ref.rollout.n_gpus_per_node": _NODES,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": COUNT,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": Range(0, 2**20, above=True),
    "actor_rollout_ref.model.cpu_threads": Range(0, 4096, above=True),
    "actor_rollout_ref.model.lora_rank": NATURAL,
    "actor_rollout_ref.model.lora.rank": NATURAL,
    "reward.num_workers": Range(0, 4096),
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": Range(0, 4096, above=True),
    "transfer_queue.backend.SimpleStorage.total_storage_size": COUNT,
}
NUMBERS: dict[str, Range] = {
    "actor_rollout_ref.actor.optim.lr": POSITIVE,
    "actor_rollout_ref.actor.optim.weight_decay": NOT_NEGATIVE,
    "actor_rollout_ref.actor.optim.clip_grad": POSITIVE,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": Range(0, 1),
    "actor_rollout_ref.model.lora_alpha": POSITIVE,
}
_FLOATS = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
ENGINES = ("dp", "megatron")  # verl's group model_engine; dp: FSDP
CHOICES: dict[str, tuple[Any, ...]] = {
    "model_engine": ENGINES,
    "trainer.device": ("cpu", "cuda", "npu"),
    "trainer.resume_mode": ("disable", "auto", "resume_path"),
    "trainer.use_v1": (True,),
    "trainer.v1.trainer_mode": ("vla3",),
    "critic.enable": (False,),
    "actor_rollout_ref.hybrid_engine": (False,),
    "actor_rollout_ref.actor.use_dynamic_bsz": (False,),
    "actor_rollout_ref.rollout.name": ("vla3",),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": (1,),  # a policy worker holds the whole policy
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module": ("vla3_plugin.learner.weights",),
    "transfer_queue.backend.storage_backend": ("SimpleStorage",),
}
_ROLLOUT_THREADS = "actor_rollout_ref.model.rollout_cpu_threads"  # null: as many as the learner
_DP_WHOLE = {"actor_rollout_ref.actor.fsdp_config.fsdp_size": Range(-1, 10**5)}
_DP_CHOICES: dict[str, tuple[Any, ...]] = {
    "actor_rollout_ref.actor.strategy": ("fsdp2", "fsdp"),
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": _FLOATS,
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype": _FLOATS,
    "actor_rollout_ref.actor.fsdp_config.model_dtype": _FLOATS,
}
_MEGATRON_CHOICES: dict[str, tuple[Any, ...]] = {
    "actor_rollout_ref.model.enable_activation_offload": (False,),
    "actor_rollout_ref.model.lora.merge": (True,),  # adapters are published merged
}
_FREE = ("ray_kwargs.ray_init", "actor_rollout_ref.model.options")  # anything may stand below
_BUILT = ("actor", "rollout", "model")  # below actor_rollout_ref: what verl turns into dataclasses
_LOGGERS = "trainer.logger"
_NEAR = 0.8  # keys as alike as this are one key and a typing error; others may be read by somebody


def faults(config: DictConfig) -> list[str]:
    """What is wrong with everything outside ``vla3``: one line a fault, all of them."""
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, RecursionError, ValueError):
        return list(_unresolved(config))
    plain.pop("vla3", None)
    engine = "megatron" if plain.get("model_engine") == "megatron" else "dp"  # another is a fault of its own
    found = _shape_faults(plain, defaults(engine))
    wrong = {line.split(":", 1)[0] for line in found}
    found += [line for line in _value_faults(plain) if line.split(":", 1)[0] not in wrong]
    found += text_faults({k: v for k, v in plain.items() if k != "hydra"}, "")
    return found or _build_faults(config)


@cache
def defaults(engine: str = "dp") -> dict[str, Any]:
    """verl's defaults with a recipe of ours over them: which keys there are, and what kind of value each has.

    Args:
        engine: the choice of verl's group ``model_engine``.
    """
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    chosen = os.environ.get(ENGINE)
    os.environ[ENGINE] = engine
    running = GlobalHydra.instance()
    before, running.hydra = running.hydra, None  # this may be called from inside a program that Hydra has started
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=["+recipe=vla3_latency", f"model_engine={engine}"])
    finally:
        running.hydra = before
        os.environ.pop(ENGINE)
        if chosen is not None:
            os.environ[ENGINE] = chosen
    plain: Any = OmegaConf.to_container(config, resolve=True)
    del plain["vla3"]
    return plain


def select(plain: Any, key: str) -> Any:
    """The value of a dotted key in nested mappings; None where there is none."""
    for part in key.split("."):
        plain = plain.get(part) if isinstance(plain, dict) else None
    return plain


def _unresolved(node: Any, prefix: str = "") -> Iterator[str]:
    """A line for each interpolation that does not lead to a value."""
    keys = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
    for key in keys:
        name = f"{prefix}.{key}" if prefix else str(key)
        try:
            value = node[key] if not OmegaConf.is_missing(node, key) else None
            if OmegaConf.is_interpolation(node, key):
                OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            elif isinstance(value, (DictConfig, ListConfig)) and not value._is_none():
                yield from _unresolved(value, name)
        except (OmegaConfBaseException, RecursionError, ValueError) as error:
            why = "it refers to itself" if isinstance(error, RecursionError) else str(error).splitlines()[0]
            yield f"{name}: {show(OmegaConf.to_container(node, resolve=False)[key])} cannot be resolved: {why}"  # type: ignore[index,call-overload]


def _shape_faults(node: Any, default: Any, key: str = "") -> list[str]:
    """Where the kind of a value is not what it is in verl's defaults, and keys that are nearly a known one."""
    if isinstance(default, dict):
        if not isinstance(node, dict):
            return [f"{key}: {show(node)}, expected a mapping, as verl's defaults have it; override the keys below it"]
        if key in _FREE:
            return []
        found = []
        for name, value in node.items():
            inner = f"{key}.{name}" if key else str(name)
            if name in default:
                found += _shape_faults(value, default[name], inner)
            elif default and (near := difflib.get_close_matches(str(name), map(str, default), n=1, cutoff=_NEAR)):
                found.append(f"{inner}: unknown key; did you mean {key}.{near[0]}?")
        gone = [f"{key}.{name}" if key else name for name in default if name not in node]
        return found + [f"{name}: it is missing, and verl reads it; do not delete it" for name in gone]
    expected = _kind(default)
    if default is None or (expected == "a list" and key == _LOGGERS and isinstance(node, str)):
        return []
    if key.endswith("_target_") and node != default:
        return [f"{key}: {show(node)}, expected {default}: no other class is built from a config"]
    if _kind(node) != expected or (isinstance(node, float) and not -1e308 < node < 1e308):
        return [f"{key}: {show(node)}, expected {expected}, such as {show(default)}"]
    return []


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    names = {str: "a text", list: "a list", dict: "a mapping", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _value_faults(plain: dict[str, Any]) -> list[str]:
    found: list[str | None] = []
    dp = plain.get("model_engine") != "megatron"
    wholes = WHOLE | _DP_WHOLE if dp else dict(WHOLE)
    if select(plain, _ROLLOUT_THREADS) is not None:
        wholes[_ROLLOUT_THREADS] = WHOLE["actor_rollout_ref.model.cpu_threads"]
    for key, allowed in wholes.items():
        value = select(plain, key)
        whole = isinstance(value, int) and not isinstance(value, bool)
        fault = allowed.fault(key, value) if whole else f"{key}: {show(value)}, expected a whole number, {allowed.text}"
        found.append(fault)
    found += [allowed.fault(key, select(plain, key)) for key, allowed in NUMBERS.items()]
    choices_now = CHOICES | (_DP_CHOICES if dp else _MEGATRON_CHOICES)
    found += [choice_fault(key, select(plain, key), choices) for key, choices in choices_now.items()]
    if not dp:
        actor, ref = (f"actor_rollout_ref.{role}" for role in ("actor", "ref"))  # the second follows the first
        refused = config_megatron.faults(select(plain, actor), actor) or config_megatron.faults(select(plain, ref), ref)
        found += [config_megatron.missing(), *refused]
    value_lr = select(plain, "actor_rollout_ref.model.value_lr")
    if value_lr is not None:
        found.append(POSITIVE.fault("actor_rollout_ref.model.value_lr", value_lr))
    trainer = plain["trainer"] if isinstance(plain.get("trainer"), dict) else {}
    found += _resume_faults(trainer) + _logger_faults(trainer.get("logger"))
    if not str(select(plain, "actor_rollout_ref.model.path") or "").strip():
        found.append("actor_rollout_ref.model.path: expected a preset, a checkpoint directory or a hub id")
    cpus = select(plain, "ray_kwargs.ray_init.num_cpus")
    if cpus is not None:
        found.append(Range(0, 10**6).fault("ray_kwargs.ray_init.num_cpus", cpus))
    return [fault for fault in found if fault]


def _resume_faults(trainer: dict[str, Any]) -> list[str]:
    if trainer.get("resume_mode") != "resume_path":
        return []
    path = trainer.get("resume_from_path")
    if not isinstance(path, str) or not path or "\0" in path or not Path(path).expanduser().is_dir():
        wanted = "an existing checkpoint directory (…/checkpoints/global_step_N), for resume_mode=resume_path"
        return [f"trainer.resume_from_path: {show(path)}, expected {wanted}"]
    return []


def _logger_faults(loggers: Any) -> list[str | None]:
    from verl.utils.tracking import Tracking

    named = [loggers] if isinstance(loggers, str) else loggers
    if not isinstance(named, list):
        return []  # the shape says so already
    return [choice_fault(_LOGGERS, name, tuple(Tracking.supported_backend)) for name in named]


def _build_faults(config: DictConfig) -> list[str]:
    """What verl's dataclasses say when they are built, here instead of in a worker."""
    from verl.utils.config import omega_conf_to_dataclass

    found = []
    for name in _BUILT:
        key = f"actor_rollout_ref.{name}"
        try:
            importlib.import_module(select(defaults(config.model_engine), f"{key}._target_").rpartition(".")[0])
            omega_conf_to_dataclass(OmegaConf.select(config, key))
        except Exception as error:  # whatever a constructor raises
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            frames = traceback.extract_tb(cause.__traceback__)  # of a bare assert only its line says what it wanted
            why = str(cause).strip() or f"verl expects: {frames[-1].line if frames else type(cause).__name__}"
            found.append(f"{key}: {why.splitlines()[0]}")
    return found
