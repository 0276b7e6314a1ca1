"""The typed config tree under the key ``vla3``, validated once, before any Ray process starts.

verl's own keys stay verl's (optimizer, micro-batch, engine, loggers); recipes tie the few that must agree. Algorithm
keys keep the names that users of RLinf know.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vla3_plugin.algorithms.granularity import check_granularity, parse_level


class ConfigError(ValueError):
    """Everything that is wrong with a config, one line a fault: key, value, what was expected, the fix."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


@dataclass
class EnvConfig:
    name: str = "maniskill"
    options: dict[str, Any] = field(default_factory=dict)  # passed to the environment's constructor
    tasks: list[int] | None = None  # None: all tasks of the environment
    workers: int = 1  # env workers (Ray actors)
    shards_per_worker: int = 2  # simulator processes of one worker; each steps on its own
    envs_per_shard: int = 1  # environments in one simulator process; they step together
    pipeline_stage_num: int = 1  # parts of a worker's shards that take turns with the policy (synchronous interaction)
    python: str | None = None  # another interpreter for the simulator
    timeout_s: float = 120.0  # one reset or one chunk step
    deadline_s: float = 1800.0  # from one finished episode to the next
    held_out_init_states: int = 0  # initial states never trained on


@dataclass
class AlgorithmConfig:
    adv_type: str = "gae"  # gae | grpo
    loss_type: str = "actor_critic"  # actor | actor_critic
    reward_type: str = "chunk"
    logprob_type: str = "chunk"
    entropy_type: str = "chunk"
    group_size: int = 1
    gamma: float = 0.99
    gae_lambda: float = 0.95
    bootstrap_type: str = "standard"  # standard: on truncation only | always
    normalize_advantages: bool = True
    advantage_statistics: str = "batch"  # batch | previous: mean and deviation of the global batch before this one
    norm_adv_by_std_in_grpo: bool = True
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0
    clip_log_ratio_min: float | None = None
    clip_log_ratio_max: float | None = None
    value_coef: float = 0.5
    value_clip: float | None = 0.2
    huber_delta: float | None = 10.0
    entropy_bonus: float = 0.0
    kl_beta: float = 0.0
    kl_penalty: str = "k3"
    length_normalization: bool = False
    filter_rewards: bool = False
    rewards_lower_bound: float = 0.1
    rewards_upper_bound: float = 0.9
    update_epoch: int = 1
    num_mini_batches: int = 1  # optimizer steps an epoch
    mini_batches: str = "samples"  # samples: shuffled chunk steps | episodes: the first epoch takes episodes in order


@dataclass
class EvaluationConfig:
    episodes_per_task: int = 20
    mode: str = "ode"  # ode: noise-free policy | both: the noisy policy as well
    videos: int = 2


@dataclass
class InteractionStage:
    """Shards that never wait for one another, behind a dynamic batcher."""

    enabled: bool = False
    max_batch_size: int = 32
    max_wait_ms: float = 2.0  # from the arrival of the oldest waiting request
    batching: str = "run_to_completion"  # run_to_completion | step_join
    max_queue: int = 4096  # requests a policy worker lets wait before it holds back the senders


@dataclass
class StreamingStage:
    """Micro-batches are trained on as they become complete."""

    enabled: bool = False


@dataclass
class TrainingStage:
    """Rollout goes on while the learner trains and publishes."""

    enabled: bool = False
    max_staleness: int = 1  # versions between what made a sample and what trains on it
    correction: str = "decoupled"  # decoupled | truncated | none
    proximal: str = "recompute"  # recompute | interpolate
    behave_weight_threshold: float | None = 2.0  # decoupled: drops, truncated: cuts, what is further from the behaviour


@dataclass
class StagesConfig:
    interaction: InteractionStage = field(default_factory=InteractionStage)
    streaming: StreamingStage = field(default_factory=StreamingStage)
    training: TrainingStage = field(default_factory=TrainingStage)


@dataclass
class VLA3Config:
    profile: str = "auto"
    seed: int = 0
    run_dir: str = "runs/vla3"
    env: EnvConfig = field(default_factory=EnvConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    keep_checkpoints: int = 2
    deadline_s: float = 1800.0  # one answer of a policy worker, one micro-batch of the learner, one publication
    parity_tolerance: float = 1e-4  # rollout against learner log-probs at the start of a run


_CHOICES = {
    "profile": ("auto", "cpu", "gpu"),
    "algorithm.adv_type": ("gae", "grpo"),
    "algorithm.loss_type": ("actor", "actor_critic"),
    "algorithm.bootstrap_type": ("standard", "always"),
    "algorithm.kl_penalty": ("k1", "k2", "k3"),
    "algorithm.advantage_statistics": ("batch", "previous"),
    "algorithm.mini_batches": ("samples", "episodes"),
    "evaluation.mode": ("ode", "both"),
    "stages.interaction.batching": ("run_to_completion", "step_join"),
    "stages.training.correction": ("decoupled", "truncated", "none"),
    "stages.training.proximal": ("recompute", "interpolate"),
}
_POSITIVE = (
    "env.workers",
    "env.shards_per_worker",
    "env.envs_per_shard",
    "env.pipeline_stage_num",
    "env.timeout_s",
    "env.deadline_s",
    "algorithm.group_size",
    "algorithm.update_epoch",
    "algorithm.num_mini_batches",
    "evaluation.episodes_per_task",
    "stages.interaction.max_batch_size",
    "stages.interaction.max_queue",
    "keep_checkpoints",
    "deadline_s",
    "parity_tolerance",
)
_UNIT = ("algorithm.gamma", "algorithm.gae_lambda")


def known_keys(cls: type = VLA3Config, prefix: str = "vla3") -> list[str]:
    keys = []
    for f in dataclasses.fields(cls):
        name = f"{prefix}.{f.name}"
        keys.append(name)
        if dataclasses.is_dataclass(f.default_factory):
            keys += known_keys(f.default_factory, name)  # type: ignore[arg-type]
    return keys


def _unknown(node: Any, cls: type, prefix: str) -> list[str]:
    faults = []
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in node:
        name = f"{prefix}.{key}"
        if key not in fields:
            near = difflib.get_close_matches(name, known_keys(), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(fields)}"
            faults.append(f"{name}: unknown key; {hint}")
        elif dataclasses.is_dataclass(fields[key].default_factory) and isinstance(node[key], DictConfig):
            faults += _unknown(node[key], fields[key].default_factory, name)  # type: ignore[arg-type]
    return faults


def parse(node: DictConfig) -> VLA3Config:
    """The typed tree of ``config.vla3``.

    Raises:
        ConfigError: unknown keys (with the nearest known one), ill-typed values, values out of range, keys that
            contradict one another; all of them at once.
    """
    faults = _unknown(node, VLA3Config, "vla3")
    known = OmegaConf.create({k: v for k, v in node.items() if k in {f.name for f in dataclasses.fields(VLA3Config)}})
    schema = OmegaConf.structured(VLA3Config)
    for key in list(known):
        try:
            OmegaConf.merge(schema, {key: known[key]})
        except OmegaConfBaseException as error:
            if f"vla3.{getattr(error, 'full_key', '')}" not in " ".join(faults):
                faults.append(f"vla3.{error.full_key or key}: {str(error).splitlines()[0]}")
    if faults:
        raise ConfigError(faults)
    config: VLA3Config = OmegaConf.to_object(OmegaConf.merge(schema, known))  # type: ignore[assignment]
    faults = _range_faults(config) + _algorithm_faults(config.algorithm)
    faults += [] if faults else _stage_faults(config)
    if faults:
        raise ConfigError(faults)
    return config


def _get(config: VLA3Config, path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        node = getattr(node, part)
    return node


def _range_faults(config: VLA3Config) -> list[str]:
    faults = []
    for path, choices in _CHOICES.items():
        if _get(config, path) not in choices:
            near = difflib.get_close_matches(str(_get(config, path)), choices, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            faults.append(f"vla3.{path}: {_get(config, path)!r}, expected one of {', '.join(choices)}{hint}")
    faults += [f"vla3.{p}: {_get(config, p)}, expected more than 0" for p in _POSITIVE if not _get(config, p) > 0]
    faults += [f"vla3.{p}: {_get(config, p)}, expected 0 to 1" for p in _UNIT if not 0 <= _get(config, p) <= 1]
    return faults


def _stage_faults(config: VLA3Config) -> list[str]:
    faults = []
    stages, algorithm, env = config.stages, config.algorithm, config.env
    if stages.interaction.max_wait_ms < 0:
        faults.append(f"vla3.stages.interaction.max_wait_ms: {stages.interaction.max_wait_ms}, expected 0 or more")
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
    if stages.training.max_staleness < 0:
        faults.append(f"vla3.stages.training.max_staleness: {stages.training.max_staleness}, expected 0 or more")
    if stages.training.behave_weight_threshold is not None and stages.training.behave_weight_threshold <= 0:
        faults.append(
            f"vla3.stages.training.behave_weight_threshold: {stages.training.behave_weight_threshold}, expected more "
            "than 0, or null for no bound"
        )
    return faults + (_streaming_faults(algorithm) if stages.streaming.enabled else [])


def _streaming_faults(a: AlgorithmConfig) -> list[str]:
    """What would need the whole batch before its first micro-batch."""
    faults = []
    if a.adv_type == "gae" and a.normalize_advantages and a.advantage_statistics == "batch":
        faults.append(
            "vla3.algorithm.advantage_statistics: 'batch' with vla3.stages.streaming.enabled, expected 'previous': the "
            "mean and deviation of a batch are not known while it arrives"
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
    if algorithm.adv_type == "grpo" and algorithm.group_size < 2:
        faults.append(
            f"vla3.algorithm.group_size: {algorithm.group_size}, expected at least 2 with adv_type grpo: a group of "
            "one has no spread to compare with; set group_size=8"
        )
    if algorithm.adv_type == "grpo" and algorithm.loss_type == "actor_critic":
        faults.append("vla3.algorithm.loss_type: 'actor_critic' with adv_type grpo, expected 'actor': it has no critic")
    if algorithm.adv_type == "gae" and algorithm.loss_type == "actor":
        faults.append("vla3.algorithm.loss_type: 'actor' with adv_type gae, expected 'actor_critic': GAE needs values")
    if algorithm.filter_rewards and algorithm.rewards_lower_bound > algorithm.rewards_upper_bound:
        faults.append(
            f"vla3.algorithm.rewards_lower_bound: {algorithm.rewards_lower_bound} is above rewards_upper_bound "
            f"{algorithm.rewards_upper_bound}; swap them"
        )
    for name in ("clip_ratio_low", "clip_ratio_high"):
        if not 0 < getattr(algorithm, name) < (1 if name == "clip_ratio_low" else float("inf")):
            faults.append(f"vla3.algorithm.{name}: {getattr(algorithm, name)}, expected more than 0 (low: below 1)")
    return faults
