"""The trainer: one synchronous iteration is collect → advantages → update → publish.

A verl V1 trainer (``trainer.v1.trainer_mode: vla3``): verl's ``fit`` loop, worker groups, resource pools, loggers and
TransferQueue stay; what decodes tokens is replaced. Every stage is a method of its own, so that an asynchronous stage
can replace exactly one.
"""

import os
import time
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf, open_dict
from verl.checkpoint_engine import CheckpointEngineManager
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.workers.rollout.llm_server import LLMServerManager

import vla3_plugin.rollout.policy_worker  # noqa: F401  registers the replica type
from vla3_plugin.config import VLA3Config, parse
from vla3_plugin.learner import fields
from vla3_plugin.learner.objective import Objective
from vla3_plugin.placement.fit import check_cluster
from vla3_plugin.rollout import store
from vla3_plugin.rollout.plan import EpisodePlan, split_init_states
from vla3_plugin.telemetry.metrics import ENV_STEPS
from vla3_plugin.trainer import checkpoint, evaluate
from vla3_plugin.trainer.batch import Batch, advantages, put, write_padding
from vla3_plugin.trainer.record import RunRecord


class ParityError(RuntimeError):
    """Rollout and learner disagree about the likelihood of the rollout's own samples at equal weights."""


class PlanCursor:
    """Stands where verl keeps its dataloader: the only state of the episode plan."""

    def __init__(self) -> None:
        self.next_episode = 0

    def state_dict(self) -> dict[str, int]:
        return {"next_episode": self.next_episode}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_episode = state["next_episode"]


@register_trainer("vla3")
class VLA3Trainer(PPOTrainer):
    """See the module. ``self.vla3`` is the typed config; ``self.global_steps`` is the policy version being trained."""

    _enable_hybrid_replicas = False  # replicas are policy workers of our own, not colocated language-model servers

    def __init__(self, config: Any) -> None:
        self.vla3: VLA3Config = parse(config.vla3)
        self.run_dir = Path(self.vla3.run_dir)
        super().__init__(config)
        self.record = RunRecord(self.run_dir)
        self.env_steps = 0
        self.checked_parity = False

    # ---- construction: what verl's _setup calls ----

    def _build_replay_buffer(self) -> None:
        """Synchronous training takes exactly what it asked for; there is nothing to sample from."""

    def _init_tokenizer(self) -> None:
        self.tokenizer = self.processor = None

    def _init_dataloader(self) -> None:
        self.train_dataloader, self.train_dataloader_it = PlanCursor(), None
        self.val_dataloader: list[Any] = []
        self.steps_per_epoch = self.total_training_steps = int(self.config.trainer.total_training_steps)
        with open_dict(self.config):  # verl counts the schedule in calls of update_actor, one a step
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def _init_resource_pool_mgr(self) -> None:
        check_cluster(self.config)
        super()._init_resource_pool_mgr()
        self.role_worker_mapping[Role.Actor] = ray.remote(DetachActorWorker)

    def _setup(self) -> None:
        super()._setup()
        self.actor_rollout_wg.set_loss_fn(Objective(self.vla3.algorithm))
        self.replicas = LLMServerManager.create(config=self.config, start_rank=0)
        self.weight_plane = CheckpointEngineManager(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=self.replicas.get_replicas(),
        )

    def get_llm_client(self) -> list[Any]:
        return self.replicas.server_handles

    # ---- the loop: hooks of verl's fit ----

    def on_init_end(self) -> None:
        self.publish()

    def fit(self, agent_loop_manager: Any) -> None:
        self.interaction = agent_loop_manager
        spec = agent_loop_manager.env_spec
        self.tasks = self.vla3.env.tasks if self.vla3.env.tasks is not None else list(range(spec.num_tasks))
        train_states, self.eval_states = split_init_states(spec, self.vla3.env.held_out_init_states)
        self.plan = EpisodePlan(self.vla3.seed, self.tasks, train_states, self.vla3.algorithm.group_size)
        resolved: Any = OmegaConf.to_container(self.config, resolve=True)
        self.record.start(resolved)
        completed = False
        try:
            super().fit(agent_loop_manager)
            completed = True
        finally:
            print(self.record.finish(completed), flush=True)
            agent_loop_manager.close()

    def prepare_step(self) -> dict:
        return {}

    def on_sample_end(self) -> None:
        """Nothing to do: rollout and training do not overlap."""

    def on_step_end(self) -> None:
        self._pending_sync_metrics = self.publish()

    def _start_profiling(self) -> None:
        if OmegaConf.select(self.config, "global_profiler.steps") is not None:
            super()._start_profiling()

    def _stop_profiling(self) -> None:
        if OmegaConf.select(self.config, "global_profiler.steps") is not None:
            super()._stop_profiling()

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> Any:
        with marked_timer("collect", timing_raw, color="red"):
            batch = self.collect(metrics)
        if not self.checked_parity:
            with marked_timer("parity", timing_raw, color="blue"):
                self.check_parity(batch, metrics)
        if self.use_reference_policy:
            with marked_timer("reference", timing_raw, color="olive"):
                self.reference_logprobs(batch)
        with marked_timer("advantages", timing_raw, color="brown"):
            trained = self.compute_advantages(batch, metrics)
        if trained:
            with marked_timer("update", timing_raw, color="red"):
                self.update(batch, metrics)
        return store.batch_of(batch.all_keys)

    # ---- the stages ----

    def publish(self) -> dict[str, float]:
        """Bring the learner's weights to every policy worker as version ``global_steps``."""
        start = time.perf_counter()
        metrics = dict(self.weight_plane.update_weights(self.global_steps) or {})
        return metrics | {"timing_s/publish": time.perf_counter() - start}

    def collect(self, metrics: dict) -> Batch:
        """One global batch of episodes, played with the current version."""
        count = int(self.config.data.train_batch_size)
        first = self.train_dataloader.next_episode
        episodes = self.plan.episodes(first, count)
        result = self.interaction.collect(episodes, "train", keep=True)
        self.train_dataloader.next_episode = first + count
        batch = Batch(result["trajectories"], divisor=self.dp_size * self.vla3.algorithm.num_mini_batches)
        write_padding(batch)
        self.env_steps += batch.control_steps
        metrics.update(batch.metrics(result["seconds"]))
        metrics["rollout/policy_time_share"] = result["policy_seconds"] / max(result["seconds"], 1e-9)
        metrics[ENV_STEPS] = self.env_steps
        return batch

    def _learner_outputs(self, worker_group: Any, method: str, batch: Batch, **extra: Any) -> dict[str, torch.Tensor]:
        request = store.batch_of(batch.all_keys, compute_loss=False, temperature=1.0, **extra)
        getattr(worker_group, method)(request)
        return store.get_fields(batch.keys, [fields.LEARNER_LOGPROB, fields.LEARNER_VALUE])

    @property
    def dp_size(self) -> int:
        return self.actor_rollout_wg.world_size

    def check_parity(self, batch: Batch, metrics: dict) -> None:
        """Equal weights, equal samples: the learner must find the rollout's log-probs.

        Raises:
            ParityError: they differ by more than ``vla3.parity_tolerance``.
        """
        learner = self._learner_outputs(self.actor_rollout_wg, "compute_log_prob", batch)
        rollout = store.get_fields(batch.keys, [fields.LOGPROB, fields.VALUE])
        gap = (learner[fields.LEARNER_LOGPROB] - rollout[fields.LOGPROB]).abs().max().item()
        metrics["rollout/logprob_diff_max"] = gap
        metrics["rollout/value_diff_max"] = (learner[fields.LEARNER_VALUE] - rollout[fields.VALUE]).abs().max().item()
        print(f"vla3: rollout and learner log-probs differ by at most {gap:.2e} over {len(batch.keys)} samples")
        if not gap <= self.vla3.parity_tolerance:
            raise ParityError(
                f"rollout and learner log-probs differ by {gap:.3e} at equal weights, vla3.parity_tolerance is "
                f"{self.vla3.parity_tolerance}: every likelihood ratio of this run would be wrong. In bf16 raise it to "
                "1e-2; in float32 look for dropout, another attention backend or another dtype on one side"
            )
        self.checked_parity = True

    def reference_logprobs(self, batch: Batch) -> None:
        if self.ref_in_actor:
            found = self._learner_outputs(self.actor_rollout_wg, "compute_log_prob", batch, no_lora_adapter=True)
        else:
            found = self._learner_outputs(self.ref_policy_wg, "compute_ref_log_prob", batch)
        put(batch, {fields.REF_LOGPROB: found[fields.LEARNER_LOGPROB]})

    def compute_advantages(self, batch: Batch, metrics: dict) -> bool:
        """Advantages, returns and masks into the store. False when no sample carries a gradient (all groups equal)."""
        data = store.get_fields(batch.keys, Batch.FIELDS)
        result, found = advantages(data, self.vla3.algorithm, self.interaction.env_spec.max_steps)
        metrics.update(found)
        put(batch, result)
        return bool(result[fields.POLICY_MASK].any())

    def update(self, batch: Batch, metrics: dict) -> None:
        """``update_epoch`` passes over the batch in ``num_mini_batches`` optimizer steps each."""
        algorithm = self.vla3.algorithm
        request = store.batch_of(
            batch.all_keys,
            num_mini_batch=algorithm.num_mini_batches,
            epochs=algorithm.update_epoch,
            seed=self.vla3.seed * 1_000_003 + self.global_steps,
            dataloader_kwargs={"shuffle": True},
            temperature=1.0,
        )
        output = self.actor_rollout_wg.update_actor(request)
        found = rename_dict(output["metrics"], "actor/")
        metrics.update(reduce_metrics(found))

    # ---- evaluation, metrics, checkpoints ----

    def _validate(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for evaluation in evaluate.run(self):
            self.record.evaluation(evaluation)
            metrics |= evaluate.metrics_of(evaluation)
        return metrics

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        metrics.update({f"timing_s/{name}": seconds for name, seconds in timing_raw.items()})
        metrics["training/global_step"] = global_steps
        self.record.step(global_steps, self.total_training_steps, metrics)

    def _log_rollout_data(self, *_args: Any, **_kwargs: Any) -> None:
        """Token dumps do not exist here; videos are written by evaluation."""

    def _save_checkpoint(self) -> None:
        state = {
            "global_steps": self.global_steps,
            "env_steps": self.env_steps,
            "plan": self.train_dataloader.state_dict(),
        }
        checkpoint.save(
            Path(self.config.trainer.default_local_dir),
            self.global_steps,
            lambda directory: self.actor_rollout_wg.save_checkpoint(os.fspath(directory / "actor")),
            state,
            keep=self.vla3.keep_checkpoints,
        )

    def _load_checkpoint(self) -> None:
        self.global_steps = 0
        found = checkpoint.find(self.config.trainer)
        if found is None:
            return
        state = checkpoint.read_state(found)
        self.actor_rollout_wg.load_checkpoint(os.fspath(found / "actor"))
        self.global_steps, self.env_steps = state["global_steps"], state["env_steps"]
        self.train_dataloader.load_state_dict(state["plan"])
        print(f"vla3: resumed from {found} at step {self.global_steps}")
