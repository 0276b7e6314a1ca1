"""What a value may be, and which values contradict one another: checks that the types of the schema do not make.

Every number of the schema has a range in ``RANGES`` (a test sees to it), so that no run starts with a NaN, an infinity
or a count that nothing could hold. Each function returns lines: key, value, what was expected, the fix.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vla3_plugin.algorithms.granularity import check_granularity, parse_level

if TYPE_CHECKING:
    from vla3_plugin.config import AlgorithmConfig, EnvConfig, VLA3Config


@dataclass(frozen=True)
class Range:
    """``low`` to ``high``; ``above``: more than ``low``."""

    low: float
    high: float
    above: bool = False

    def fault(self, key: str, value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            return f"{key}: {show(value)}, expected a number, {self.text}"
        if value < self.low or (self.above and value == self.low) or value > self.high:
            return f"{key}: {show(value)}, expected {self.text}"
        return None

    @property
    def text(self) -> str:
        """In words; the upper end is left out where it only keeps out what no machine could hold."""
        if self.high < _FAR:
            return f"{'more than ' if self.above else ''}{self.low:g} to {self.high:g}"
        low = f"more than {self.low:g}" if self.above else f"{self.low:g} or more"
        return f"{low} (and at most {self.high:g})" if self.low > -_FAR else f"a number within ±{self.high:g}"


_FAR = 2**31 - 1
COUNT, NATURAL = Range(0, _FAR, above=True), Range(0, _FAR)
POSITIVE, NOT_NEGATIVE, ANY = Range(0, 1e12, above=True), Range(0, 1e12), Range(-1e12, 1e12)
SECONDS = Range(0, 1e7, above=True)  # a wait that the system's clocks can count
UNIT = Range(0, 1)
_RATIO = Range(0, 1, above=True)

RANGES: dict[str, Range] = {
    "seed": Range(0, 2**32 - 1),
    "keep_checkpoints": COUNT,
    "deadline_s": SECONDS,
    "heartbeat_s": SECONDS,
    "worker_start_s": SECONDS,
    "max_worker_restarts": NATURAL,
    "max_restarts": NATURAL,
    "parity_tolerance": POSITIVE,
    "env.workers": COUNT,
    "env.shards_per_worker": COUNT,
    "env.envs_per_shard": COUNT,
    "env.nice": Range(0, 19),
    "env.pipeline_stage_num": COUNT,
    "env.timeout_s": SECONDS,
    "env.deadline_s": SECONDS,
    "env.max_attempts": COUNT,
    "env.max_failures": COUNT,
    "env.recycle_episodes": COUNT,
    "env.recycle_mb": POSITIVE,
    "env.held_out_init_states": NATURAL,
    "algorithm.group_size": COUNT,
    "algorithm.gamma": UNIT,
    "algorithm.gae_lambda": UNIT,
    "algorithm.clip_ratio_low": _RATIO,
    "algorithm.clip_ratio_high": POSITIVE,
    "algorithm.clip_ratio_c": Range(1, 1e12, above=True),
    "algorithm.clip_log_ratio_min": ANY,
    "algorithm.clip_log_ratio_max": ANY,
    "algorithm.value_coef": NOT_NEGATIVE,
    "algorithm.value_clip": POSITIVE,
    "algorithm.huber_delta": POSITIVE,
    "algorithm.entropy_bonus": NOT_NEGATIVE,
    "algorithm.kl_beta": NOT_NEGATIVE,
    "algorithm.rewards_lower_bound": ANY,
    "algorithm.rewards_upper_bound": ANY,
    "algorithm.update_epoch": COUNT,
    "algorithm.num_mini_batches": COUNT,
    "evaluation.episodes_per_task": Range(0, 10**6, above=True),
    "evaluation.videos": Range(0, 10**6),
    "placement.model_memory_gb": POSITIVE,
    "placement.simulator_memory_gb": POSITIVE,
    "stages.interaction.max_batch_size": COUNT,
    "stages.interaction.max_wait_ms": Range(0, 1e7),
    "stages.interaction.max_queue": COUNT,
    "stages.training.max_staleness": NATURAL,
    "stages.training.behave_weight_threshold": POSITIVE,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "profile": ("auto", "cpu", "gpu"),
    "env.host": ("own", "policy_worker"),
    "env.isolation": ("child", "none"),
    "algorithm.adv_type": ("gae", "grpo"),
    "algorithm.loss_type": ("actor", "actor_critic"),
    "algorithm.bootstrap_type": ("standard", "always"),
    "algorithm.kl_penalty": ("k1", "k2", "k3"),
    "algorithm.advantage_statistics": ("batch", "mini_batch", "previous"),
    "algorithm.mini_batches": ("samples", "episodes"),
    "evaluation.mode": ("ode", "both"),
    "publish": ("trained", "all"),
    "stages.interaction.batching": ("run_to_completion", "step_join"),
    "stages.training.correction": ("decoupled", "truncated", "none"),
    "stages.training.proximal": ("recompute", "interpolate"),
}
_NULL_MEANS = {
    "algorithm.clip_ratio_c": "no dual clip",
    "env.recycle_episodes": "never",
    "env.recycle_mb": "never",
    "placement.model_memory_gb": "no bound",
    "placement.simulator_memory_gb": "no bound",
    "stages.training.behave_weight_threshold": "no bound",
}


def show(value: Any, length: int = 60) -> str:
    """``value`` as a message quotes it: on one line, and not longer than a reader wants."""
    text = repr(value)
    return text if len(text) <= length else text[: length - 1] + "…"


def choice_fault(key: str, value: Any, choices: tuple[Any, ...]) -> str | None:
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return None
    near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    named = ", ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices)
    return f"{key}: {show(value)}, expected {'one of ' * (len(choices) > 1)}{named}{hint}"


def texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every text in ``node``, also as a mapping's key, with the key of where it stands."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, Mapping):
        for name, value in node.items():
            yield key, str(name)
            yield from texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for i, value in enumerate(node):
            yield from texts(value, f"{key}.{i}")


def text_faults(node: Any, key: str) -> list[str]:
    """Texts that no file name, environment variable or command line can hold."""
    return [
        f"{where}: {show(text)} holds a control character; remove it"
        for where, text in texts(node, key)
        if any(ord(c) < 32 and c not in "\t\n" for c in text)
    ]


def value_faults(config: VLA3Config) -> list[str]:
    """What is wrong with single values of a well-typed config."""
    faults = [choice_fault(f"vla3.{path}", _get(config, path), choices) for path, choices in CHOICES.items()]
    for path, allowed in RANGES.items():
        value = _get(config, path)
        found = allowed.fault(f"vla3.{path}", value) if value is not None else None
        faults.append(f"{found}, or null for {_NULL_MEANS[path]}" if found and path in _NULL_MEANS else found)
    tasks = config.env.tasks
    if tasks is not None and (not tasks or min(tasks) < 0 or len(set(tasks)) < len(tasks) or max(tasks) > _FAR):
        faults.append(f"vla3.env.tasks: {show(tasks)}, expected different numbers from 0 on, or null for all tasks")
    for path in ("env.name", "run_dir"):
        if not _get(config, path).strip():
            faults.append(f"vla3.{path}: {_get(config, path)!r}, expected a name")
    return [fault for fault in faults if fault] + text_faults(
        vars(config.env) | {"run_dir": config.run_dir}, "vla3.env"
    )


def _get(config: VLA3Config, path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        node = getattr(node, part)
    return node


def contradictions(config: VLA3Config) -> list[str]:
    """Values that are fine by themselves and not together."""
    stages, env = config.stages, config.env
    faults = _algorithm_faults(config.algorithm)
    if stages.interaction.max_queue < stages.interaction.max_batch_size:
        faults.append(
            f"vla3.stages.interaction.max_queue: {stages.interaction.max_queue}, expected at least max_batch_size = "
            f"{stages.interaction.max_batch_size}"
        )
    if env.pipeline_stage_num > env.shards_per_worker:
        faults.append(
            f"vla3.env.pipeline_stage_num: {env.pipeline_stage_num}, expected at most vla3.env.shards_per_worker = "
            f"{env.shards_per_worker}"
        )
    if env.isolation == "none":
        faults += _inline_faults(env)
    levels_known = not any("_type" in fault for fault in faults)
    return faults + (_streaming_faults(config.algorithm) if stages.streaming.enabled and levels_known else [])


def _inline_faults(env: EnvConfig) -> list[str]:
    """What a simulator in the env worker's own process cannot have."""
    key, faults = "vla3.env.isolation: 'none'", []
    if env.python is not None:
        faults.append(f"{key} with vla3.env.python: {env.python!r}, another interpreter; set isolation=child")
    if env.shards_per_worker > 1:
        faults.append(
            f"{key} with vla3.env.shards_per_worker: {env.shards_per_worker}, expected 1: simulators in one process "
            "share its interpreter lock, its threads and whatever they keep in globals; raise envs_per_shard or workers"
        )
    if env.nice and env.host == "policy_worker":
        faults.append(
            f"{key} with vla3.env.host: 'policy_worker' and vla3.env.nice: {env.nice}: the policy's process would have "
            "to stand back; set nice=0"
        )
    if env.recycle_mb is not None:
        faults.append(f"{key} with vla3.env.recycle_mb: {env.recycle_mb:g}, which is a child's; leave it null")
    return faults


def _streaming_faults(a: AlgorithmConfig) -> list[str]:
    """What would need the whole batch before its first micro-batch."""
    faults = []
    normalises = a.adv_type == "gae" and a.normalize_advantages
    if normalises and a.advantage_statistics == "batch":
        faults.append(
            "vla3.algorithm.advantage_statistics: 'batch' with vla3.stages.streaming.enabled, expected 'mini_batch' or "
            "'previous': the mean and deviation of a batch are not known while it arrives"
        )
    if normalises and a.advantage_statistics == "mini_batch" and a.num_mini_batches == 1:
        faults.append(
            "vla3.algorithm.advantage_statistics: 'mini_batch' with vla3.stages.streaming.enabled and "
            "num_mini_batches = 1: training would wait for the whole batch; raise that, or use 'previous'"
        )
    if a.num_mini_batches > 1 and a.mini_batches == "samples":
        faults.append(
            "vla3.algorithm.mini_batches: 'samples' with vla3.stages.streaming.enabled and num_mini_batches = "
            f"{a.num_mini_batches}, expected 'episodes': samples that have not arrived cannot be shuffled"
        )
    levels = {parse_level(a.logprob_type, key="logprob_type")}
    if a.loss_type == "actor_critic":
        levels.add(parse_level(a.reward_type, key="reward_type"))
    if a.entropy_bonus != 0:
        levels.add(parse_level(a.entropy_type, key="entropy_type"))
    if "chunk" in levels and len(levels) > 1:  # tokens and actions stand in a fixed ratio
        faults.append(
            f"vla3.algorithm.logprob_type: {a.logprob_type!r} with reward_type {a.reward_type!r} and entropy_type "
            f"{a.entropy_type!r} and vla3.stages.streaming.enabled: the terms of the loss would be divided by counts "
            "whose ratio is known only at the end; give them one level, or turn streaming off"
        )
    other = "loss_type 'actor_critic'" if a.loss_type == "actor_critic" else "an entropy_bonus" * (a.entropy_bonus != 0)
    if other and (a.length_normalization or (a.filter_rewards and a.loss_type == "actor_critic")):
        key = "length_normalization" if a.length_normalization else "filter_rewards"
        faults.append(
            f"vla3.algorithm.{key}: true with {other} and vla3.stages.streaming.enabled: the terms of the loss would "
            "be divided by counts whose ratio is known only at the end; turn one of them off"
        )
    return faults


def _algorithm_faults(algorithm: AlgorithmConfig) -> list[str]:
    faults = []
    try:
        check_granularity(reward_type=algorithm.reward_type, logprob_type=algorithm.logprob_type)
        parse_level(algorithm.entropy_type, key="entropy_type")
    except ValueError as error:
        faults.append(f"vla3.algorithm.{error}")
    a = algorithm
    normalises = a.adv_type == "gae" and a.normalize_advantages
    if normalises and a.advantage_statistics == "mini_batch" and a.mini_batches == "samples" and a.num_mini_batches > 1:
        faults.append(
            "vla3.algorithm.advantage_statistics: 'mini_batch' with mini_batches: 'samples', expected 'episodes': "
            "advantages are known of whole episodes, before samples are shuffled; or use 'batch'"
        )
    if algorithm.adv_type == "grpo" and algorithm.group_size < 2:
        faults.append(
            f"vla3.algorithm.group_size: {algorithm.group_size}, expected at least 2 with adv_type grpo: a group of "
            "one has no spread to compare with; set group_size=8"
        )
    if algorithm.adv_type == "grpo" and algorithm.loss_type == "actor_critic":
        faults.append("vla3.algorithm.loss_type: 'actor_critic' with adv_type grpo, expected 'actor': it has no critic")
    if algorithm.adv_type == "gae" and algorithm.loss_type == "actor":
        faults.append("vla3.algorithm.loss_type: 'actor' with adv_type gae, expected 'actor_critic': GAE needs values")
    for low, high in (("rewards_lower_bound", "rewards_upper_bound"), ("clip_log_ratio_min", "clip_log_ratio_max")):
        first, last = getattr(algorithm, low), getattr(algorithm, high)
        if first is not None and last is not None and first > last and (algorithm.filter_rewards or "clip" in low):
            faults.append(f"vla3.algorithm.{low}: {first} is above {high} {last}; swap them")
    return faults
