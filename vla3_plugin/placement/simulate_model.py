"""What a simulation is about: times of the work, sizes of the batches, layout, schedule, and costs of the host.

All durations are milliseconds here, as in the presets and profiles; the simulation's clock counts seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vla3_plugin.envs.latency import episode_length
from vla3_plugin.envs.latency_draw import Duration, parse_duration
from vla3_plugin.policies.latency import LatencySettings


@dataclass(frozen=True)
class EnvTimes:
    """A simulator process. ``per``: ``env``, every environment draws its own and the shard takes the longest; or
    ``shard``, one draw and ``per_env_ms`` for each environment in it. An episode that succeeds (``success``, a
    probability) ends by itself after ``low`` to ``high`` chunk steps where these differ; others are cut at ``high``.
    """

    chunk_ms: Duration
    per: str = "env"
    per_env_ms: float = 0.0
    reset_ms: Duration = Duration(0.0)
    low: int = 20
    high: int = 20
    success: float = 0.5

    @property
    def ends_itself(self) -> float:
        """Share of episodes that are not cut."""
        return self.success if self.low < self.high else 0.0

    @property
    def mean_chunks(self) -> float:
        return self.ends_itself * (self.low + self.high) / 2 + (1 - self.ends_itself) * self.high

    def shard_ms(self, slots: int) -> float:
        """Mean time of a shard's chunk step, without resets."""
        if self.per == "shard":
            return self.chunk_ms.mean_ms + self.per_env_ms * slots
        return self.chunk_ms.mean_of_max_ms(slots)


@dataclass(frozen=True)
class HostCosts:
    """What the machinery around the work takes. The default is a machine that costs nothing.

    ``request``: from an interaction loop to the policy worker and back, a call and each row of it. ``batch``: beside
    the network, in each inference batch. ``deliver``: an episode's samples into the store. ``report``: from there to
    the driver. ``assign``: an episode to its worker. ``prepare``: advantages, a call and each sample. ``parity``: the
    check of 32 samples, beside the forward pass itself (0: no check). ``update``: a call of the learner and each sample
    it fetches; ``micro``: beside the network, in each micro-batch; ``fetch``: a streamed micro-batch's way to the
    learner. ``publish``: until all replicas have a version; ``snapshot``: the copy that the learner waits for.
    ``step``: between two steps, metrics and records. ``reduce``: gradients between ranks and the optimizer, each
    optimizer step.
    ``switch``: offload and reload of a collocated device, at each change of phase.
    """

    request_ms: float = 0.0
    request_ms_per_row: float = 0.0
    batch_ms: float = 0.0
    deliver_ms: float = 0.0
    report_ms: float = 0.0
    assign_ms: float = 0.0
    prepare_ms: float = 0.0
    prepare_ms_per_sample: float = 0.0
    parity_ms: float = 0.0
    update_ms: float = 0.0
    update_ms_per_sample: float = 0.0
    micro_ms: float = 0.0
    fetch_ms: float = 0.0
    publish_ms: float = 0.0
    snapshot_ms: float = 0.0
    step_ms: float = 0.0
    reduce_ms: float = 0.0
    switch_ms: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not (isinstance(value, int | float) and 0 <= value < float("inf")):
                raise ValueError(f"host.{f.name}: {value!r}, expected a finite number of milliseconds, 0 or more")


@dataclass(frozen=True)
class Layout:
    """Who runs where. ``workers`` env workers of ``shards`` simulator processes of ``slots`` environments each.

    ``shared``: replica i and rank i are one device, which does one thing at a time. ``simulator_on_replica``: so do a
    replica and the simulators that ask it (a GPU simulator beside the policy).
    """

    workers: int = 1
    shards: int = 2
    slots: int = 1
    replicas: int = 1
    ranks: int = 1
    shared: bool = False
    simulator_on_replica: bool = False

    def __post_init__(self) -> None:
        for name in ("workers", "shards", "slots", "replicas", "ranks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"layout.{name}: {value!r}, expected a whole number, 1 or more")
        if self.shared and self.replicas != self.ranks:
            raise ValueError(
                f"layout.shared: {self.replicas} replicas on {self.ranks} ranks, expected as many of both: a shared "
                "device holds one of each"
            )

    @property
    def environments(self) -> int:
        return self.workers * self.shards * self.slots

    @property
    def devices(self) -> int:
        return self.ranks if self.shared else self.replicas + self.ranks


@dataclass(frozen=True)
class Schedule:
    """``vla3.stages`` and the sizes that go with them, under verl's and the plugin's names."""

    interaction: bool = False
    streaming: bool = False
    training: bool = False
    pipeline_stage_num: int = 1
    batching: str = "run_to_completion"
    max_batch_size: int = 32
    max_wait_ms: float = 0.0
    max_staleness: int = 1
    just_in_time: bool = True
    group_size: int = 1
    train_batch_size: int = 16  # episodes a step
    micro_batch: int = 32  # samples a rank
    epochs: int = 1
    mini_batches: int = 1
    whole_mini_batches: bool = False  # their advantages are normalised together, so that each must be complete
    recompute: bool = True  # decoupled: proximal log-probs by a pass of their own, where they are not in hand
    bootstrap: bool = True  # GAE: the value of the last observation of an episode that was cut

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "micro_batch", "epochs", "mini_batches", "group_size", "pipeline_stage_num"):
            if getattr(self, name) < 1:
                raise ValueError(f"schedule.{name}: {getattr(self, name)!r}, expected 1 or more")
        if self.train_batch_size % self.group_size:
            raise ValueError(
                f"schedule.train_batch_size: {self.train_batch_size}, expected a multiple of group_size "
                f"({self.group_size}): a step takes whole groups"
            )
        if self.batching not in ("run_to_completion", "step_join"):
            raise ValueError(f"schedule.batching: {self.batching!r}, expected run_to_completion or step_join")

    @property
    def groups_per_step(self) -> int:
        return self.train_batch_size // self.group_size

    @property
    def updates(self) -> int:
        """Optimizer steps of a step."""
        return self.epochs * self.mini_batches

    @property
    def staleness(self) -> int:
        return self.max_staleness if self.training else 0


@dataclass(frozen=True)
class Workload:
    """``policy``: its times; everything else of it is ignored. ``seed`` draws the simulators' times."""

    env: EnvTimes
    policy: LatencySettings
    layout: Layout = field(default_factory=Layout)
    schedule: Schedule = field(default_factory=Schedule)
    host: HostCosts = field(default_factory=HostCosts)
    name: str = "workload"
    seed: int = 0

    def but(self, **changes: Any) -> Workload:
        """The same with other values of ``layout``, ``schedule`` or ``host``, each by its own name."""
        parts: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            for part in ("layout", "schedule", "host"):
                if key in {f.name for f in fields(getattr(self, part))}:
                    parts.setdefault(part, {})[key] = value
                    break
            else:
                raise ValueError(f"{key!r} is no field of Layout, Schedule or HostCosts")
        return replace(self, **{part: replace(getattr(self, part), **values) for part, values in parts.items()})


def workload_of(config: Mapping[str, Any], host: HostCosts | None = None, name: str = "config") -> Workload:
    """The workload of a run's resolved config whose environment and policy are the latency emulator's.

    Raises:
        ValueError: another environment or policy; a number out of range.
    """
    vla3, roles, trainer = config["vla3"], config["actor_rollout_ref"], config["trainer"]
    env, stages, algorithm = vla3["env"], vla3["stages"], vla3["algorithm"]
    if env["name"] != "latency" or roles["model"]["path"] != "latency":
        raise ValueError(
            f"vla3.env.name: {env['name']!r} with policy {roles['model']['path']!r}, expected latency for both: the "
            "times of any other come from a profile (vla3 profile)"
        )
    options = env["options"]
    low, high = episode_length(options.get("episode_chunks", 20), "vla3.env.options.episode_chunks")
    interaction, training = stages["interaction"], stages["training"]
    return Workload(
        env=EnvTimes(
            parse_duration(options.get("chunk_ms", 100.0), "vla3.env.options.chunk_ms"),
            options.get("per", "env"),
            float(options.get("chunk_ms_per_env", 0.0)),
            parse_duration(options.get("reset_ms", 0.0), "vla3.env.options.reset_ms"),
            low,
            high,
            float(options.get("success", 0.5)),
        ),
        policy=LatencySettings.of(roles["model"]["options"]),
        layout=Layout(
            workers=env["workers"],
            shards=env["shards_per_worker"],
            slots=env["envs_per_shard"],
            replicas=roles["rollout"]["n_gpus_per_node"] * roles["rollout"]["nnodes"],
            ranks=trainer["n_gpus_per_node"] * trainer["nnodes"],
        ),
        schedule=Schedule(
            interaction=interaction["enabled"],
            streaming=stages["streaming"]["enabled"],
            training=training["enabled"],
            pipeline_stage_num=env["pipeline_stage_num"],
            batching=interaction["batching"],
            max_batch_size=interaction["max_batch_size"],
            max_wait_ms=interaction["max_wait_ms"],
            max_staleness=training["max_staleness"],
            just_in_time=training.get("just_in_time", False),  # a measured run from before there was that key
            group_size=algorithm["group_size"],
            train_batch_size=config["data"]["train_batch_size"],
            micro_batch=roles["actor"]["ppo_micro_batch_size_per_gpu"],
            epochs=algorithm["update_epoch"],
            mini_batches=algorithm["num_mini_batches"],
            whole_mini_batches=algorithm["adv_type"] == "gae"
            and algorithm["normalize_advantages"]
            and algorithm["advantage_statistics"] == "mini_batch",
            recompute=training["correction"] != "none" and training["proximal"] == "recompute",
            bootstrap=algorithm["adv_type"] == "gae",
        ),
        host=host or HostCosts(),
        name=name,
        seed=int(vla3.get("seed", 0)),
    )
