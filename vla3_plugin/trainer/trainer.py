"""The trainer: one iteration is collect → advantages → update → publish, on one clock or on three.

A verl V1 trainer (``trainer.v1.trainer_mode: vla3``): verl's ``fit`` loop, worker groups, resource pools, loggers and
TransferQueue stay; what decodes tokens is replaced. ``vla3.stages`` says which clocks run apart: interaction (the env
workers' loops), streaming (``train_arriving`` in place of collect and update), training (groups start ahead, within the
staleness bound, and weights are published in the background).
"""

import itertools
import time
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf, open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.rollout.llm_server import LLMServerManager

import vla3_plugin.rollout.policy_worker  # noqa: F401  registers the replica type
from vla3_plugin.config import VLA3Config, parse
from vla3_plugin.learner import fields
from vla3_plugin.learner.actor_worker import ActorWorker
from vla3_plugin.learner.objective import Objective
from vla3_plugin.placement import pools, resolve_ray
from vla3_plugin.placement.fit import check_cluster, whereabouts
from vla3_plugin.placement.resolve import placement_of
from vla3_plugin.pulse import Pulse
from vla3_plugin.rollout import store
from vla3_plugin.rollout.plan import split_init_states
from vla3_plugin.rollout.stopping import Stopped, StopRequest
from vla3_plugin.rollout.store_nodes import by_node
from vla3_plugin.telemetry.faults import FaultLog
from vla3_plugin.telemetry.ledger import Ledger
from vla3_plugin.telemetry.metrics import ENV_STEPS
from vla3_plugin.telemetry.timeline import Timeline
from vla3_plugin.telemetry.utilisation import staleness_metrics
from vla3_plugin.trainer import checkpoint_state, proximal, streaming
from vla3_plugin.trainer.admission import Group
from vla3_plugin.trainer.batch import (
    AdvantageScale,
    Batch,
    advantages,
    combine,
    put,
    write_padding_rows,
)
from vla3_plugin.trainer.evaluate import Evaluator
from vla3_plugin.trainer.feeder import Feeder, build_feeder
from vla3_plugin.trainer.parity import check_parity
from vla3_plugin.trainer.publisher import Publisher
from vla3_plugin.trainer.record import RunRecord
from vla3_plugin.trainer.supervisor import Supervisor
from vla3_plugin.trainer.swimlanes import Swimlanes
from vla3_plugin.trainer.weight_plane import weight_plane


@register_trainer("vla3")
class VLA3Trainer(PPOTrainer):
    """See the module. ``self.vla3`` is the typed config; ``self.global_steps`` is the policy version being trained."""

    _enable_hybrid_replicas = False  # replicas are policy workers of our own, not colocated language-model servers

    def __init__(self, config: Any) -> None:
        self.vla3: VLA3Config = parse(config.vla3)
        self.run_dir = Path(self.vla3.run_dir)
        self.pulse = Pulse(self.run_dir, "trainer")
        self.timeline = Timeline("driver")
        self.admission_state: dict[str, Any] = {}  # of the checkpoint that is resumed; see checkpoint_groups
        self.architecture: dict[str, list[int]] = {}  # of the policy; set when a checkpoint is looked for
        self.scale = AdvantageScale(self.vla3.algorithm.advantage_statistics)
        self.stop = StopRequest(self.run_dir)
        self.ledger = Ledger(self.run_dir)
        self.trained_steps = self.saved_step = 0  # the last one that was published, and that is in a checkpoint
        self.feeder: Feeder = None  # type: ignore[assignment]  # there is none before fit
        self.grid: resolve_ray.Grid | None = None  # where the config says which process runs where
        self.rank_nodes: list[str] = []  # the node of each of the learner's ranks
        super().__init__(config)
        self.record = RunRecord(self.run_dir)
        self.env_steps = 0
        self.evaluator = Evaluator(self)
        self.row: dict[str, Any] = {}  # metrics of the newest step, once this process has made one
        self.checked_parity = False
        self.turns = itertools.count()  # on the learner's gradient lane; see ActorWorker

    # ---- construction: what verl's _setup calls ----

    def _build_replay_buffer(self) -> None:
        """Synchronous training takes exactly what it asked for; there is nothing to sample from."""

    def _init_tokenizer(self) -> None:
        self.tokenizer = self.processor = None

    def _init_dataloader(self) -> None:
        self.train_dataloader = self.train_dataloader_it = None  # the episode plan stands in its place
        self.val_dataloader: list[Any] = []
        self.steps_per_epoch = self.total_training_steps = int(self.config.trainer.total_training_steps)
        with open_dict(self.config):  # verl counts the schedule in calls of update_actor, one a step
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def _init_resource_pool_mgr(self) -> None:
        check_cluster(self.config)
        super()._init_resource_pool_mgr()
        self.role_worker_mapping[Role.Actor] = ray.remote(ActorWorker)
        if (placement := placement_of(self.config)) is not None:
            self.grid = resolve_ray.reserve(placement, self.config.trainer.device != "cpu")
            verls: Any = self.resource_pool_manager  # type: ignore[has-type]
            self.resource_pool_manager = self.grid.learner_pools(verls)

    def _setup(self) -> None:
        super()._setup()
        found = ray.get([worker.__ray_call__.remote(whereabouts) for worker in self.actor_rollout_wg.workers])
        self.rank_nodes = [where["node_id"] for where in found]
        self.actor_rollout_wg.set_loss_fn(Objective(self.vla3.algorithm, self.vla3.stages.training))
        servers = LLMServerManager if self.grid is None else resolve_ray.PlacedServers
        self.replicas = servers.create(config=self.config, start_rank=0)
        transport = self.config.actor_rollout_ref.rollout.checkpoint_engine
        self.weight_plane = weight_plane(transport, self.actor_rollout_wg, self.replicas.get_replicas())
        self.publisher = Publisher(
            self.weight_plane,
            self.actor_rollout_wg,
            self._published,
            self._publication_failed,
            self.vla3.stages.training.enabled,
            self.vla3.stages.streaming.enabled,
            self.timeline,
            self.vla3.deadline_s,
            self.vla3.publish == "trained",
        )

    def get_llm_client(self) -> list[Any]:
        return self.replicas.server_handles

    @property
    def version(self) -> int:
        """The version that the current step trains at; the step publishes the next one."""
        return self.global_steps - 1

    @property
    def groups_per_step(self) -> int:
        return int(self.config.data.train_batch_size) // self.vla3.algorithm.group_size

    # ---- the loop: hooks of verl's fit ----

    def on_init_end(self) -> None:
        self.publisher.publish(self.global_steps)
        self.publisher.wait()

    def fit(self, agent_loop_manager: Any) -> None:
        self.interaction = agent_loop_manager
        if self.grid is not None:
            actors = {"actor": self.actor_rollout_wg.workers, "rollout": self.get_llm_client()}
            for line in self.grid.landed(self.run_dir, **actors, env=agent_loop_manager.workers):
                print(f"vla3: {line}", flush=True)
        spec = agent_loop_manager.env_spec
        self.tasks = self.vla3.env.tasks if self.vla3.env.tasks is not None else list(range(spec.num_tasks))
        train_states, self.eval_states = split_init_states(spec, self.vla3.env.held_out_init_states)
        self.feeder = build_feeder(self, train_states)
        self.swimlanes = Swimlanes(self)
        resolved: Any = OmegaConf.to_container(self.config, resolve=True)
        self.record.start(resolved)
        self.faults = FaultLog(self.run_dir)
        agent_loop_manager.on_event, agent_loop_manager.stop = self.faults, self.stop
        self.trained_steps = self.saved_step = self.global_steps
        supervisor, completed = self._supervisor(), False
        self.stop.listen()
        try:
            super().fit(agent_loop_manager)
            self.publisher.wait()
            completed = True
        except Stopped:
            self.evaluator.abandon()
            self._stop()
        finally:
            supervisor.close()
            self.swimlanes.close()
            agent_loop_manager.close()
            print(self.record.finish(completed), flush=True)
            self.pulse.close()

    def _supervisor(self) -> Supervisor:
        stage: Any = OmegaConf.to_container(self.config.vla3.stages.interaction, resolve=True)
        return Supervisor(
            self.get_llm_client(),
            self.actor_rollout_wg,
            self.publisher,
            stage,
            heartbeat_s=self.vla3.heartbeat_s,
            start_s=self.vla3.worker_start_s,
            deadline_s=self.vla3.deadline_s,
            max_restarts=self.vla3.max_worker_restarts,
            on_event=self.faults,
            failed=self.interaction.fail,
        )

    def _published(self, version: int) -> None:
        if self.feeder is not None:
            self.feeder.published(version)

    def _publication_failed(self, error: BaseException) -> None:
        if self.feeder is not None:
            self.feeder.fail(error)

    def drop(self, groups: list[Group]) -> None:
        store.clear([key for group in groups for t in group.trajectories for key in t["keys"]])

    def _stop(self) -> None:
        """Save the last step that was trained, unless that was done: the learner has not moved since."""
        self.publisher.wait()
        self.global_steps = self.trained_steps
        self.feeder.give_back()
        if self.global_steps > 0 and self.global_steps != self.saved_step:
            self._save_checkpoint()
        print(f"vla3: stopped as asked after step {self.global_steps}; trainer.resume_mode=auto goes on", flush=True)

    def prepare_step(self) -> dict:
        return {}

    def on_sample_end(self) -> None:
        """Nothing to do: whether rollout and training overlap is the feeder's business."""

    def on_step_end(self) -> None:
        self._pending_sync_metrics = self.publisher.publish(self.global_steps)
        self.trained_steps = self.global_steps

    def on_validate_begin(self) -> None:
        self.publisher.wait()

    def _start_profiling(self) -> None:
        if OmegaConf.select(self.config, "global_profiler.steps") is not None:
            super()._start_profiling()

    def _stop_profiling(self) -> None:
        if OmegaConf.select(self.config, "global_profiler.steps") is not None:
            super()._stop_profiling()

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> Any:
        if self.stop():
            raise Stopped
        start = time.perf_counter()
        self.feeder.begin_step(self.version)
        if self.vla3.stages.streaming.enabled and not self._waits_for_whole_batch:
            with marked_timer("stream", timing_raw, color="red"):
                batch = streaming.train_arriving(self, metrics)
            if self.vla3.algorithm.update_epoch > 1 and batch.trained_keys:
                with marked_timer("update", timing_raw, color="red"):
                    write_padding_rows(self.actor_rollout_wg, batch.keys, batch.padding)
                    proximal.carry_over(self, batch)
                    self.update(batch, metrics, self.vla3.algorithm.update_epoch - 1)
        else:
            with marked_timer("collect", timing_raw, color="red"):
                batch = self.collect()
            self.publisher.learner_moves()  # from here its network is in use: nobody is sent the same version again
            with marked_timer("parity", timing_raw, color="blue"):
                check_parity(self, batch, metrics)
            with marked_timer("prepare", timing_raw, color="brown"):
                if self.vla3.algorithm.adv_type == "gae" and not self._in_order:
                    proximal.evaluate(self, batch)  # first, because advantages need its values
                metrics.update(streaming.prepare_parts(self, batch) if self._in_order else self.prepare(batch))
            if batch.trained_keys:
                with marked_timer("update", timing_raw, color="red"), self.timeline.span("step", "update"):
                    self.train_whole_batch(batch, metrics)
        self.scale.end_of_batch()
        self.env_steps += batch.control_steps
        metrics.update(batch.metrics(timing_raw.get("collect", time.perf_counter() - start)))
        metrics.update(staleness_metrics([self.version - v for v in batch.versions], self.max_staleness))
        metrics.update(self.feeder.metrics())
        metrics.update(self.faults.metrics())
        self.ledger.write(self.global_steps, *self.feeder.account())
        metrics[ENV_STEPS] = self.env_steps
        self.row = metrics
        return store.batch_of(batch.all_keys + batch.leftovers)

    # ---- the stages ----

    @property
    def max_staleness(self) -> int:
        return self.vla3.stages.training.max_staleness if self.vla3.stages.training.enabled else 0

    @property
    def _waits_for_whole_batch(self) -> bool:
        algorithm = self.vla3.algorithm
        return algorithm.adv_type == "gae" and algorithm.normalize_advantages and self.scale.needs_whole_batch

    def collect(self) -> Batch:
        """One global batch of groups, complete before training starts."""
        groups: list[Group] = []
        while len(groups) < self.groups_per_step:
            groups += self.feeder.groups(self.groups_per_step)
        divisor = self.dp_size * self.vla3.algorithm.num_mini_batches
        batch = Batch([t for g in groups for t in g.trajectories], divisor=divisor)
        write_padding_rows(self.actor_rollout_wg, batch.keys, batch.padding)
        return batch

    def prepare(self, batch: Batch) -> dict[str, float]:
        """What stands between rollout and update: reference log-probs, advantages and weights of whole groups."""
        if self.use_reference_policy:
            self.reference_logprobs(batch)
        with self.timeline.span("step", "advantages"):
            return self.compute_advantages(batch)

    @property
    def _in_order(self) -> bool:
        """The first epoch as if it were streamed: mini-batch by mini-batch."""
        return self.vla3.algorithm.mini_batches == "episodes" and self.vla3.algorithm.num_mini_batches > 1

    def train_whole_batch(self, batch: Batch, metrics: dict) -> None:
        epochs = self.vla3.algorithm.update_epoch
        if self._in_order:
            streaming.train_in_order(self, batch, metrics)
            epochs -= 1
            if epochs:
                proximal.carry_over(self, batch)
        elif self.vla3.algorithm.adv_type != "gae":
            proximal.evaluate(self, batch)
        if epochs:
            self.update(batch, metrics, epochs)

    def learner_outputs(self, worker_group: Any, method: str, keys: list[str], **extra: Any) -> None:
        if worker_group is self.actor_rollout_wg:
            extra["turn"] = next(self.turns)
        getattr(worker_group, method)(store.batch_of(keys, compute_loss=False, temperature=1.0, **extra))

    @property
    def dp_size(self) -> int:
        return self.actor_rollout_wg.world_size

    def per_rank(self, batch: Batch) -> list[str]:
        """All rows of a batch, of which the learner's ranks get equal parts, as near to each as can be."""
        return by_node(batch.all_keys, batch.homes, self.rank_nodes)

    def reference_logprobs(self, batch: Batch) -> None:
        worker, method, extra = self.ref_policy_wg, "compute_ref_log_prob", {}
        if self.ref_in_actor:
            worker, method, extra = self.actor_rollout_wg, "compute_log_prob", {"no_lora_adapter": True}
        self.learner_outputs(worker, method, self.per_rank(batch), **extra)
        found = store.get_fields(batch.keys, [fields.LEARNER_LOGPROB])
        put(batch, {fields.REF_LOGPROB: found[fields.LEARNER_LOGPROB]})

    def compute_advantages(self, batch: Batch, again: bool = False) -> dict[str, float]:
        """Advantages, returns and weights into the store; ``batch.trained_keys`` are the samples that weigh something.

        None does when all groups are equal. ``again``: of samples whose advantages were counted for the scale before.
        """
        data = store.get_fields(batch.keys, Batch.FIELDS)
        scale = self.scale.again if again else self.scale
        result, found = advantages(data, self.vla3.algorithm, self.interaction.env_spec.max_steps, scale)
        put(batch, result)
        if self.vla3.algorithm.loss_type == "actor_critic":
            batch.values = [(data[fields.VALUE], result[fields.RETURNS], result[fields.VALUE_MASK])]
        weighs = (result[fields.POLICY_MASK] > 0).flatten(1).any(1).tolist()
        batch.trained_keys = [key for key, yes in zip(batch.keys, weighs, strict=True) if yes]
        return found

    def update(self, batch: Batch, metrics: dict, epochs: int) -> None:
        """``epochs`` passes over the batch in ``num_mini_batches`` optimizer steps each."""
        request = store.batch_of(
            # at lag 0 mini-batches are the synchronous run's, and must not depend on which node was quicker
            self.per_rank(batch) if self.max_staleness else batch.all_keys,
            num_mini_batch=self.vla3.algorithm.num_mini_batches,
            epochs=epochs,
            seed=self.vla3.seed * 1_000_003 + self.global_steps,
            dataloader_kwargs={"shuffle": True},
            learner_version=self.version,
            temperature=1.0,
        )
        output = self.actor_rollout_wg.update_actor(request)
        found = reduce_metrics(rename_dict(output["metrics"], "actor/"))
        earlier = self.vla3.algorithm.update_epoch - epochs  # streamed epochs, whose figures are there already
        metrics.update(combine([(metrics, earlier), (found, epochs)] if earlier else [(found, 1)]))

    # ---- evaluation, metrics, checkpoints ----

    def _validate(self) -> dict[str, float]:
        return self.evaluator.evaluate()

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        metrics.update({f"timing_s/{name}": seconds for name, seconds in timing_raw.items()})
        metrics["training/global_step"] = global_steps
        metrics.update(self.evaluator.finished(wait=False))
        metrics.update(self.swimlanes.drain())
        if self.grid is not None and self.grid.accelerated:
            budgets = self.vla3.placement
            memory = {pools.MODEL: budgets.model_memory_gb, pools.SIMULATOR: budgets.simulator_memory_gb}
            metrics.update(pools.collect(self.get_llm_client(), memory))
        self.record.step(global_steps, self.total_training_steps, metrics)

    def _log_rollout_data(self, *_args: Any, **_kwargs: Any) -> None:
        """Token dumps do not exist here; videos are written by evaluation."""

    def _save_checkpoint(self) -> None:
        checkpoint_state.save(self)

    def _load_checkpoint(self) -> None:
        checkpoint_state.load(self)
