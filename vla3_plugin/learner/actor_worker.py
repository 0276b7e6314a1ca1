"""The actor worker: one rank of verl's learner. Its gradient lane takes streamed micro-batches; its publication lane
sends a snapshot while gradients go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import ray
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu

from vla3_plugin.learner import collectives, fields
from vla3_plugin.learner.objective import kept_logprobs
from vla3_plugin.learner.weights import TRAINED_ONLY, Circle
from vla3_plugin.rollout import store
from vla3_plugin.telemetry import clock, traffic
from vla3_plugin.telemetry.timeline import Timeline

# verl's split over the data-parallel ranks; the answers stay futures, for the driver to pick up when it likes
_STREAMED = {
    "dispatch_fn": make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")["dispatch_fn"],
    "collect_fn": lambda _group, output: output,
}
GRADIENT, PUBLICATION = "gradient", "publication"
WEIGHT = "weight"  # among a micro-batch's metrics: what its means count for, the elements that the policy's loss weighs


class ActorWorker(DetachActorWorker):
    """See verl's class for everything synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeline = Timeline(f"actor{self.rank}")
        self._snapshot: tuple[int, dict[str, torch.Tensor]] | None = None
        self._trained: set[str] = set()  # names of what the newest snapshot copied anew
        self._all_next = True
        self._copying = ThreadPoolExecutor(1, "copies")
        self._idle_since = 0.0
        self._expected = 0  # the turn that comes next
        self._turn = asyncio.Condition()
        self._gradients: ThreadPoolExecutor | None = None
        self._since: float | None = None  # when what the gradient lane computes now began (monotonic)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        nodes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
        collectives.install(nodes)  # after the model was built and broadcast: that is no traffic of a step

    async def _compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """On the gradient lane's thread: this process answers meanwhile, fetches the next samples and publishes."""
        if self._gradients is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else None

            def on_our_device() -> None:  # it is a thread's own
                if device is not None:
                    torch.cuda.set_device(device)

            self._gradients = ThreadPoolExecutor(1, GRADIENT, initializer=on_our_device)

        def timed() -> Any:
            self._since = time.monotonic()
            try:
                return function(*args)
            finally:
                self._since = None

        return await asyncio.get_running_loop().run_in_executor(self._gradients, timed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def busy_s(self) -> float:
        """Seconds that the gradient lane has been at what it computes now; 0 when it is idle."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    @register(dispatch_mode=_STREAMED, blocking=False)
    async def train_micro_batch(self, data: TensorDict) -> TensorDict:
        """One streamed micro-batch. Extra information: its ``turn`` on the gradient lane; whether it is the ``first``
        and the ``last`` of its mini-batch; ``end_of_update``: the learning rate's schedule moves on after it;
        ``keep``: store the log-probs and values it was computed with, for later epochs. Every rank gets a call for
        every micro-batch, so none waits for another in a reduction. Samples are fetched while earlier ones compute.
        """
        traffic.count("store_to_learner", _tensors(data))
        turn, first, last = (tu.pop(data, key=key) for key in ("turn", "first", "last"))
        return await self._in_turn(turn, self._micro_batch, data, first, last)

    async def _in_turn(self, turn: int, function: Callable[..., Any], *args: Any) -> Any:
        """The driver numbers what it sends to the gradient lane: samples arrive in another order on each rank, and
        ranks that also computed in another order would wait for one another in different collectives."""
        async with self._turn:
            await self._turn.wait_for(lambda: turn == self._expected)
        try:
            return await self._compute(function, *args)
        finally:
            async with self._turn:
                self._expected = turn + 1
                self._turn.notify_all()

    def _micro_batch(self, data: TensorDict, first: bool, last: bool) -> TensorDict:
        end_of_update, keep = tu.pop(data, key="end_of_update"), tu.pop(data, key="keep")
        engine: Any = self.actor.engine
        weight = float(data[fields.POLICY_MASK].sum())
        if self._idle_since and not first:
            self.timeline.add(GRADIENT, "wait:data", self._idle_since, clock.now())
        with self.timeline.span(GRADIENT, "micro_batch", samples=len(data), last=last):
            output = engine.accumulate(data, self.actor.loss_fn, first=first, last=last)
        metrics = output["metrics"] | {WEIGHT: weight}
        if last and end_of_update:
            metrics["lr"] = engine.lr_scheduler_step()
        self._idle_since = 0.0 if last else clock.now()
        kept = {}
        if keep:
            found = {
                name: output["model_output"][name].cpu() for name in (fields.LEARNER_LOGPROB, fields.LEARNER_VALUE)
            }
            kept[fields.PROXIMAL] = kept_logprobs(data, found[fields.LEARNER_LOGPROB])
            kept[fields.LEARNER_VALUE] = found[fields.LEARNER_VALUE]
        return tu.get_tensordict(tensor_dict=kept, non_tensor_dict={"metrics": metrics})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    async def update_actor(self, data: TensorDict) -> TensorDict:
        traffic.count("store_to_learner", _tensors(data))

        def update() -> TensorDict:
            with self.timeline.span(GRADIENT, "update", samples=len(data)):
                return self.actor.train_mini_batch(data=data)

        output = await self._compute(update)
        return output.cpu() if output is not None else None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    async def compute_log_prob(self, data: TensorDict) -> TensorDict:
        """On the gradient lane too, in its ``turn``: a network has one user at a time, and micro-batches may be under
        way. The engine counts what a pass without gradients fetches.
        """
        turn = tu.pop(data, key="turn")

        def infer() -> TensorDict:
            with self.timeline.span(GRADIENT, "log_probs", samples=len(data)):
                return self.actor.infer_batch(data)

        output = await self._in_turn(turn, infer)
        return output.cpu() if output is not None else None

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def copy_samples(self, source: list[str], copies: list[str]) -> None:
        """See ``store.copy_samples``. Done here, because samples hold images, which do not pass through the driver."""
        # on a thread of its own: publications that hang may hold all of the loop's
        await asyncio.get_running_loop().run_in_executor(self._copying, store.copy_samples, source, copies)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot(self, version: int) -> None:
        """Copy the weights that ``update_weights`` sends from now on, so that training may go on meanwhile.

        The copy stays until the next one: a policy worker that is restarted needs the same version again.
        """
        with self.timeline.span(GRADIENT, "snapshot", version=version):
            engine: Any = self.actor.engine
            before = self._snapshot[1] if self._snapshot is not None else None
            # what does not train is copied once
            weights = engine.get_per_tensor_param()[0] if before is None else engine.trained_tensors()
            sends = getattr(self.checkpoint_engine, "is_master", True)
            # every rank drains the generator, which runs the all-gathers, and knows sizes: verl's nccl engine has ranks
            # beside the sender count its buckets with it
            copies = {n: t.detach().clone() if sends else torch.empty_like(t, device="meta") for n, t in weights}
            self._trained = set(copies)
            self._snapshot = (version, (before or {}) | copies)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_all(self) -> None:
        """The next publication has all weights: somebody who receives it may hold none."""
        self._all_next = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(
        self, global_steps: int | None = None, mode: str = "auto", circle: Circle | None = None
    ) -> dict[str, Any]:
        """Send all weights the first time and after ``publish_all``, otherwise those that training changes.

        ``circle``: who takes part, where that was not said before (``weight_plane.GlooPlane``); rank 0 sends.
        """
        if circle is not None:
            self.checkpoint_engine.init_process_group(None, circle if self.checkpoint_engine.is_master else None)
        start = clock.now()
        everything, self._all_next = self._all_next, False
        weights: Iterable[tuple[str, torch.Tensor]]
        try:
            if self._snapshot is not None:
                version, kept = self._snapshot
                if version != global_steps:
                    raise RuntimeError(f"version {global_steps} was to be sent, the snapshot is of version {version}")
                weights = ((name, t) for name, t in kept.items() if everything or name in self._trained)
            elif everything:
                return await super().update_weights(global_steps=global_steps, mode=mode)
            else:
                engine: Any = self.actor.engine
                weights = engine.trained_tensors()
            if not everything:
                weights = chain(weights, [(TRAINED_ONLY, torch.ones(1))])
            return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}
        except BaseException:
            self._all_next |= everything  # nobody got it
            raise
        finally:
            self.timeline.add(PUBLICATION, "send", start, clock.now(), version=global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drain_timeline(self) -> tuple[list[Any], int]:
        """Spans since the last call, and how many updates were skipped since then (their gradient was not finite)."""
        engine: Any = self.actor.engine
        skipped, engine.skipped_updates = engine.skipped_updates, 0
        return self.timeline.drain() + traffic.drain(self.timeline.role), skipped


def _tensors(data: TensorDict) -> Iterator[torch.Tensor]:
    return (value for value in data.values() if isinstance(value, torch.Tensor))
