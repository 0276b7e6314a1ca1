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

from vla3_plugin.config_checks import contradictions, show, value_faults


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
    workers: int = 1  # env workers
    host: str = "own"  # process of an env worker: own (a Ray actor) | policy_worker (that of the policy that it asks)
    isolation: str = "child"  # simulators: child (interpreters of their own) | none (in the env worker's process)
    shards_per_worker: int = 2  # simulator processes of one worker; each steps on its own
    envs_per_shard: int = 1  # environments in one simulator process; they step together
    nice: int = 0  # how far env workers and simulators stand back where cores are scarce; 0 to 19, as in nice(1)
    pipeline_stage_num: int = 1  # parts of a worker's shards that take turns with the policy (synchronous interaction)
    python: str | None = None  # another interpreter for the simulator
    timeout_s: float = 120.0  # one reset or one chunk step
    deadline_s: float = 1800.0  # from one finished episode to the next
    max_attempts: int = 3  # simulators an episode may take down before it is given up
    max_failures: int = 10  # of one simulator in a row, no episode finished between them, before the run ends
    recycle_episodes: int | None = None  # a simulator that has played so many is replaced
    recycle_mb: float | None = None  # and one whose process holds more memory
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
    advantage_statistics: str = "batch"  # mean and deviation of the batch | mini_batch | previous batch
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
    overlap: bool | None = None  # training goes on meanwhile; null: where it can (config_cross.overlap_fault)
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
    just_in_time: bool = True  # start groups no earlier than the learner needs; false: as early as the bound allows
    correction: str = "decoupled"  # decoupled | truncated | none
    proximal: str = "recompute"  # recompute | interpolate
    behave_weight_threshold: float | None = 2.0  # decoupled: drops, truncated: cuts, what is further from the behaviour

    @property
    def recomputes(self) -> bool:
        """Whether samples of older versions are given what the learner says of them."""
        return self.enabled and self.correction != "none" and self.proximal == "recompute"


@dataclass
class StagesConfig:
    interaction: InteractionStage = field(default_factory=InteractionStage)
    streaming: StreamingStage = field(default_factory=StreamingStage)
    training: TrainingStage = field(default_factory=TrainingStage)


@dataclass
class PlacementConfig:
    """Which process runs on which device. With none of this, verl's keys and ``vla3.env.workers`` say how many."""

    mode: str | None = None  # collocated | disaggregated | hybrid | auto; null: what component_placement comes to
    component_placement: dict[str, Any] = field(default_factory=dict)  # as RLinf has it: {actor: 0-7, env: 8-15}
    node_groups: list[Any] = field(default_factory=list)  # as RLinf has them
    ratio: str | None = None  # rollout:actor = 3:1, of the devices that component_placement leaves
    ratio_per_node: bool = False  # the ratio holds on every node: rollout and learner of a node are a cell
    node_gpus: list[int] | None = None  # accelerators of each node; null: this machine's
    profile: str | None = None  # file of ``vla3 profile``, by which mode auto chooses
    model_memory_gb: float | None = None  # of a learner rank or policy worker on a GPU that hosts simulators too
    simulator_memory_gb: float | None = None  # of all simulators on such a GPU


@dataclass
class VLA3Config:
    profile: str = "auto"
    seed: int = 0
    run_dir: str = "runs/vla3"
    env: EnvConfig = field(default_factory=EnvConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    keep_checkpoints: int = 2
    publish: str = "trained"  # trained: what training changes, to who has the rest already | all: all each time
    deadline_s: float = 1800.0  # one answer of a policy worker, one micro-batch of the learner, one publication
    heartbeat_s: float = 60.0  # a worker that shows no sign of life for so long is killed and restarted
    worker_start_s: float = 300.0  # one that is being restarted has so long, simulators and all
    max_worker_restarts: int = 3  # of each env worker and each policy worker
    max_restarts: int = 0  # of the whole run, from its newest checkpoint, when it ends with an error
    parity_tolerance: float = 1e-4  # rollout against learner log-probs at the start of a run


def known_keys(cls: type = VLA3Config, prefix: str = "vla3") -> list[str]:
    keys = []
    for f in dataclasses.fields(cls):
        name = f"{prefix}.{f.name}"
        keys.append(name)
        if dataclasses.is_dataclass(f.default_factory):
            keys += known_keys(f.default_factory, name)  # type: ignore[arg-type]
    return keys


def unknown_key(name: str) -> str | None:
    """The fault of a key below ``vla3`` that the schema does not have, with the nearest one that it has."""
    known = known_keys()
    free = ("vla3.env.options.", "vla3.placement.component_placement.")
    if name in known or name.startswith(free):
        return None
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    beside = [key.rsplit(".", 1)[1] for key in known if key.rsplit(".", 1)[0] == name.rsplit(".", 1)[0]]
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(beside) or ', '.join(known)}"
    return f"{name}: unknown key; {hint}"


def parse(node: Any) -> VLA3Config:
    """The typed tree of ``config.vla3``.

    Raises:
        ConfigError: unknown keys (with the nearest known one), ill-typed values, values out of range, keys that
            contradict one another; all of them at once.
    """
    if not isinstance(node, DictConfig):
        raise ConfigError([f"vla3: {show(node)}, expected a mapping with the keys of the schema; remove the override"])
    try:
        data: Any = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([f"vla3.{error.full_key or ''}: {str(error).splitlines()[0]}"]) from None
    typed = OmegaConf.structured(VLA3Config)
    faults = _fill(typed, data, VLA3Config, "vla3")
    config: VLA3Config = OmegaConf.to_object(typed)  # type: ignore[assignment]  # defaults stand where a type was wrong
    faults += value_faults(config)
    faults += [] if faults else contradictions(config)
    if faults:
        raise ConfigError(faults)
    return config


def _fill(typed: Any, data: dict[Any, Any], cls: type, prefix: str) -> list[str]:
    """Put ``data`` into ``typed`` (a structured ``cls``), value by value; the faults of those that do not fit."""
    faults: list[str | None] = []
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key, value in data.items():
        name = f"{prefix}.{key}"
        inner = fields[key].default_factory if key in fields else None
        if key not in fields:
            faults.append(unknown_key(name))
        elif dataclasses.is_dataclass(inner):
            if isinstance(value, dict):
                faults += _fill(typed[key], value, inner, name)  # type: ignore[arg-type]
            else:
                keys = ", ".join(f.name for f in dataclasses.fields(inner))
                faults.append(f"{name}: {show(value)}, expected a mapping with the keys {keys}")
        else:
            try:
                typed[key] = value
            except (OmegaConfBaseException, ValueError, OverflowError) as error:
                expected = (
                    str(fields[key].type).removeprefix("<class '").removesuffix("'>").replace(" | None", " or null")
                )
                why = str(error).splitlines()[0]
                faults.append(f"{name}: {why[:100] if show(value) in why else show(value)}, expected {expected}")
    return [fault for fault in faults if fault]
