"""The policy worker: one inference replica of the policy with an inference lane and a weight-receive lane.

It is verl's CheckpointEngineWorker (so every checkpoint-engine backend can feed it) and verl's rollout server in one
process: weights arrive in it, are verified as a whole, and are swapped in on the inference lane, between two batches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray.base import RayClassWithInitArgs
from verl.utils.device import get_device_id
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from vla3_plugin.learner import weights as _weights  # noqa: F401  registers the CPU weight plane in this process
from vla3_plugin.learner.weights import TRAINED_ONLY, Circle, WeightError
from vla3_plugin.policies.base import NoiseKey
from vla3_plugin.policies.serve import ServedPolicy
from vla3_plugin.rollout.batcher import BatcherStats
from vla3_plugin.rollout.hosting import EnvHost
from vla3_plugin.rollout.inference_lane import BatchedLane, DirectLane
from vla3_plugin.rollout.policy_client import NotServingError
from vla3_plugin.telemetry import traffic
from vla3_plugin.telemetry.timeline import Timeline

NAME = "vla3"
WEIGHTS = "weights"  # Ray's name for the group of calls that share a thread and an event loop
_RECEIVING = 64  # calls at once there; a publication that hangs on a dead peer is left behind


class PolicyServer(BaseRollout):
    """Owns the policy and the lane that runs it; one thread, so a weight swap can never fall inside a chain."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = -1) -> None:
        from vla3_plugin.policies.registry import load_policy

        super().__init__(config, model_config, device_mesh)
        self.replica_rank, self.is_leader_rank = replica_rank, True
        self.timeline = Timeline(f"policy{max(replica_rank, 0)}")
        policy = load_policy(model_config.path, **model_config.options)
        self.served = ServedPolicy(policy, get_device_id(), name=f"policy worker {replica_rank}")
        self.lane: DirectLane | BatchedLane = DirectLane(self.served, self.timeline)

    def configure(self, stage: dict[str, Any]) -> None:
        """Take requests as ``stage`` (``config.InteractionStage``) says. Again is the same as once: who lost an answer
        from this process takes it for a new one.
        """
        if stage["enabled"] and not isinstance(self.lane, BatchedLane):
            self.lane.close(RuntimeError("the policy worker was configured anew"))
            self.lane = BatchedLane(self.served, self.timeline, stage)

    async def resume(self, tags: list[str]) -> None:
        """The replica keeps its memory: nothing to resume."""

    async def release(self) -> None:
        """The replica keeps its memory: nothing to release."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        """Receive a publication, then swap it in as a whole.

        Raises:
            WeightError: names or shapes differ from the policy's, or it has only what trains and this replica holds
                nothing yet; the old version stays in place.
        """
        expected = self.served.policy.state_dict()
        with self.timeline.span("weights", "receive", version=global_steps):
            # copies: verl's engines hand out views of buffers that they fill again; where the module is: it may be kept
            # in host memory to leave the device to what samples
            state = {
                name: tensor.detach().to(expected[name].device if name in expected else "cpu", copy=True)
                async for name, tensor in ensure_async_iterator(weights)
            }
        traffic.count("learner_to_policy", state)
        partial = state.pop(TRAINED_ONLY, None) is not None
        if partial and self.served.version < 0:
            raise WeightError(f"version {global_steps} has only what trains, and this replica holds nothing yet")
        missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
        shapes = [n for n in state if n in expected and state[n].shape != expected[n].shape]
        if (missing and not partial) or unexpected or shapes:
            raise WeightError(
                f"version {global_steps} does not fit this replica's policy: missing {missing[:5]}, unexpected "
                f"{unexpected[:5]}, other shapes {shapes[:5]}; version {self.served.version} stays in place"
            )

        def swap() -> None:
            with self.timeline.span("weights", "swap", version=global_steps):
                self.served.policy.load_state_dict(state, strict=not partial)
                version = -1  # of no use should what samples not take them; while it does, this is no new process
                try:
                    self.served.policy.renewed()
                    version = -1 if global_steps is None else global_steps
                finally:
                    self.served.version = version

        await self.lane.between_batches(swap)


class PolicyWorker(CheckpointEngineWorker):
    """The Ray actor around a ``PolicyServer``. Control calls are verl's for rollout servers.

    What belongs to the weight plane has a thread of its own, so that no publication queues behind requests.
    """

    def __init__(self, rollout_config: Any, model_config: Any, replica_rank: int = 0) -> None:
        torch.set_num_threads(model_config.rollout_cpu_threads or model_config.cpu_threads)
        server = PolicyServer(rollout_config, model_config, replica_rank=replica_rank)
        super().__init__(rollout_config=rollout_config, model_config=model_config, server_adapter=server)
        self.server, self.env_host = server, EnvHost(server)

    @ray.method(concurrency_group=WEIGHTS)
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None) -> None:
        await super().update_weights(global_steps)

    @ray.method(concurrency_group=WEIGHTS)
    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    async def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return super().execute_checkpoint_engine(method, *args, **kwargs)

    @ray.method(concurrency_group=WEIGHTS)
    async def receive(self, version: int | None, source: Circle, relay: Circle | None) -> None:
        """A publication from ``source``, handed on to ``relay``: see ``weight_plane.GlooPlane``."""
        self.checkpoint_engine.init_process_group(source, relay)
        await super().update_weights(version)

    async def act(self, inputs: dict[str, np.ndarray], noise_keys: Sequence[NoiseKey], mode: str):
        """See ``interaction.Act``.

        Raises:
            NotServingError: nothing was published to this process yet; it was restarted.
        """
        if self.server.served.version < 0:
            raise NotServingError(f"policy worker {self.server.replica_rank} was restarted and waits for its weights")
        traffic.count("env_to_policy", inputs)
        return await self.server.lane.act(inputs, noise_keys, mode)

    async def host_env(
        self, rank: int, arguments: Sequence[Any], environ: Mapping[str, str], others: Sequence[Any]
    ) -> None:
        """An env worker is to live in this process: see ``hosting.EnvHost``."""
        await self.env_host.connect(rank, arguments, environ, others)

    async def call_env(self, rank: int, method: str, *arguments: Any) -> Any:
        return await self.env_host.call(rank, method, *arguments)

    async def configure(self, stage: dict[str, Any]) -> None:
        self.server.configure(stage)

    async def drain_timeline(self) -> tuple[list[Any], BatcherStats | None]:
        """Spans of this process and the batcher's figures since the last call."""
        return self.server.timeline.drain() + traffic.drain(self.server.timeline.role), self.server.lane.drain_stats()

    async def pin(self, version: int) -> None:
        """Answer evaluation with ``version``, the present one, until ``unpin``: see ``ServedPolicy.pin``.

        Raises:
            WeightError: another version is served.
        """

        def copy() -> None:
            if self.server.served.version != version:
                raise WeightError(f"version {version} is to be kept, {self.server.served.version} is served")
            self.server.served.pin()

        await self.server.lane.between_batches(copy)

    async def unpin(self) -> None:
        await self.server.lane.between_batches(self.server.served.unpin)

    async def weights_version(self) -> int:
        return self.server.served.version

    async def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        """Control calls that only language-model servers need."""

    wake_up = sleep = clear_kv_cache = start_profile = stop_profile = _nothing


class PolicyReplica(RolloutReplica):
    """verl's handle of a replica: here the worker and its server are one actor."""

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        model: Any = self.model_config
        if OmegaConf.is_config(model):
            # a node carries the whole tree it hangs in; arguments so large go to Ray's object store, where they do not
            # last, and an actor whose arguments are gone cannot be restarted
            model = OmegaConf.create(OmegaConf.to_container(model, resolve=True))
        return RayClassWithInitArgs(
            # restarts: the supervisor counts
            cls=ray.remote(max_restarts=-1, concurrency_groups={WEIGHTS: _RECEIVING})(PolicyWorker),
            rollout_config=self.config,
            model_config=model,
            replica_rank=self.replica_rank,
        )

    async def _nothing(self, **_: Any) -> None:
        """verl asks for it around a publication; a policy worker has nothing to do then, and need not be asked."""

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = _nothing

    async def launch_servers(self) -> None:
        self.servers = list(self.workers)
        self._server_handle, self._server_address = self.workers[0], f"{NAME}_{self.replica_rank}"


_ROLLOUT_REGISTRY[(NAME, "async")] = "vla3_plugin.rollout.policy_worker.PolicyServer"
RolloutReplicaRegistry.register(NAME, lambda: PolicyReplica)
