"""The weight plane as the driver holds it: one publication, from the learner to every policy worker.

verl's manager asks each policy worker eight things in turn, half of them for language-model servers. A busy one lets
every question wait, and a publication takes longer for the questions than for the weights.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass

from vla3_plugin.learner.weights import BACKEND


class GlooPlane(CheckpointEngineManager):
    """Two questions: where would you listen, and, with the answers of all, the publication itself."""

    def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        ranks = self.actor_wg.world_size
        policies = [worker for replica in self.replicas for worker in replica.workers]
        where = ray.get(
            self.actor_wg.execute_checkpoint_engine(["prepare"] * ranks)
            + [policy.execute_checkpoint_engine.remote("prepare") for policy in policies]
        )
        learner, rollout = self.backend_cls.build_topology(ranks, len(policies), where)
        circles = zip(policies, rollout["source"], rollout["relay"], strict=True)
        sent = ray.get(
            self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend, circle=learner["relay"][0])
            + [policy.receive.remote(global_steps, source, relay) for policy, source, relay in circles]
        )
        return {name: value for found in sent[:ranks] for name, value in (found or {}).items()}


def weight_plane(config: Any, learner: Any, replicas: list[Any]) -> CheckpointEngineManager:
    """``config``: ``actor_rollout_ref.rollout.checkpoint_engine``. Over another backend: verl's manager."""
    kind = GlooPlane if config.backend == BACKEND else CheckpointEngineManager
    return kind(config=omega_conf_to_dataclass(config), actor_wg=learner, replicas=replicas)
