"""The actor worker: one rank of verl's learner. Its gradient lane takes streamed micro-batches; its publication lane
sends a snapshot while gradients go on.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from tensordict import TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu

from vla3_plugin.learner import fields
from vla3_plugin.telemetry.timeline import Timeline

# verl's split over the data-parallel ranks; the answers stay futures, for the driver to pick up when it likes
_STREAMED = {
    "dispatch_fn": make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")["dispatch_fn"],
    "collect_fn": lambda _group, output: output,
}
GRADIENT, PUBLICATION = "gradient", "publication"


class ActorWorker(DetachActorWorker):
    """See verl's class for everything synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeline = Timeline(f"actor{self.rank}")
        self._snapshot: tuple[int, list[tuple[str, torch.Tensor]]] | None = None
        self._idle_since = 0.0
        self._expected = 0

    @register(dispatch_mode=_STREAMED, blocking=False)
    def train_micro_batch(self, data: TensorDict) -> TensorDict:
        """One streamed micro-batch. Extra information: ``sequence`` in its mini-batch and whether it is the ``last``;
        ``end_of_update``: the learning rate's schedule moves on after it; ``keep_logprobs``: store the log-probs it was
        computed with, for later epochs. Every rank gets a call for every micro-batch, so none waits for another in a
        reduction.

        Raises:
            RuntimeError: it came out of order; the gradient would be divided, or taken, too early.
        """
        sequence, last = tu.pop(data, key="sequence"), tu.pop(data, key="last")
        if sequence not in (0, self._expected):
            raise RuntimeError(f"micro-batch {sequence} came where {self._expected} was expected (rank {self.rank})")
        self._expected, first = 0 if last else sequence + 1, sequence == 0
        end_of_update, keep = tu.pop(data, key="end_of_update"), tu.pop(data, key="keep_logprobs")
        engine: Any = self.actor.engine
        if self._idle_since and not first:
            self.timeline.add(GRADIENT, "wait:data", self._idle_since, time.time())
        with self.timeline.span(GRADIENT, "micro_batch", samples=len(data), last=last):
            output = engine.accumulate(data, self.actor.loss_fn, first=first, last=last)
        metrics = {name: [value] for name, value in output["metrics"].items()}
        if last and end_of_update:
            metrics["lr"] = [engine.lr_scheduler_step()]
        self._idle_since = 0.0 if last else time.time()
        kept = {fields.PROXIMAL: output["model_output"][fields.LEARNER_LOGPROB].cpu()} if keep else {}
        return tu.get_tensordict(tensor_dict=kept, non_tensor_dict={"metrics": metrics})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        with self.timeline.span(GRADIENT, "update", samples=len(data)):
            output = self.actor.train_mini_batch(data=data)
        return output.cpu() if output is not None else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot(self, version: int) -> None:
        """Copy the weights that the next ``update_weights`` sends, so that training may go on meanwhile."""
        with self.timeline.span(GRADIENT, "snapshot", version=version):
            weights, _ = self.actor.engine.get_per_tensor_param()
            # every rank drains the generator: it runs the all-gathers
            copies = [(name, tensor.detach().clone()) for name, tensor in weights]
            self._snapshot = (version, copies)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, Any]:
        start = time.time()
        try:
            if self._snapshot is None:
                return await super().update_weights(global_steps=global_steps, mode=mode)
            version, weights = self._snapshot
            self._snapshot = None
            if version != global_steps:
                raise RuntimeError(f"version {global_steps} was to be sent, the snapshot is of version {version}")
            return await self.checkpoint_engine.send_weights(iter(weights), global_steps=version) or {}
        finally:
            self.timeline.add(PUBLICATION, "send", start, time.time(), version=global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drain_timeline(self) -> list[Any]:
        return self.timeline.drain()
