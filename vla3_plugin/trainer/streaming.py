"""Streaming: the first epoch of a batch, micro-batch by micro-batch, as its groups arrive. Later epochs reuse it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ray

from vla3_plugin.learner.actor_worker import WEIGHT
from vla3_plugin.rollout import store
from vla3_plugin.rollout.stopping import Stopped
from vla3_plugin.rollout.store_nodes import by_node
from vla3_plugin.trainer import proximal
from vla3_plugin.trainer.admission import Group
from vla3_plugin.trainer.batch import Batch, combine, padding_rows, write_padding_rows
from vla3_plugin.trainer.parity import check_parity

if TYPE_CHECKING:
    from vla3_plugin.trainer.trainer import VLA3Trainer

Found = dict[str, list[tuple[float, float]]]  # each metric's values, with their weights
_AHEAD = 2  # micro-batches that may wait at the learner: one in work and one behind it leave no gap


class MicroBatches:
    """Cuts a mini-batch's samples into micro-batches as they come and sends them to the learner's ranks.

    The last one is held back until the mini-batch is complete, because the learner must know that it is the last: with
    it go the one reduction and the optimizer step. Samples that weigh nothing are not sent. ``moved``: an earlier
    mini-batch of the step has updated the learner.
    """

    def __init__(self, trainer: VLA3Trainer, end_of_update: bool, moved: bool) -> None:
        self.trainer, self.moved = trainer, moved
        self.end_of_update = end_of_update and trainer.vla3.algorithm.update_epoch == 1
        self.size = trainer.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu * trainer.dp_size
        self._pending: list[str] = []
        self._homes: dict[str, str] = {}
        self._refs: list[list[Any]] = []
        self._sent = 0
        self.padding: list[str] = []
        self.metrics: Found = {}

    def add(self, keys: list[str], homes: dict[str, str]) -> None:
        self._pending += keys
        self._homes |= homes
        while len(self._pending) > self.size:
            self._send(self._pending[: self.size], last=False)
            self._pending = self._pending[self.size :]

    @property
    def wanted(self) -> int:
        """Samples until the next micro-batch can go."""
        return self.size + 1 - len(self._pending)

    def finish(self) -> None:
        """Send the rest, and wait for the optimizer step."""
        self.trainer.publisher.learner_moves()
        if self._pending:
            self._send(self._pending, last=True)
        self.settle()

    def settle(self) -> None:
        """Wait for what was sent."""
        while self._refs:
            self._collect()

    def _send(self, keys: list[str], last: bool) -> None:
        padding = padding_rows(keys, self.trainer.dp_size, "micro")
        write_padding_rows(self.trainer.actor_rollout_wg, keys, padding)
        self.padding += padding
        request = store.batch_of(
            by_node(keys + padding, self._homes, self.trainer.rank_nodes),
            turn=next(self.trainer.turns),
            first=self._sent == 0,
            first_pass=True,
            moved=self.moved,
            last=last,
            end_of_update=last and self.end_of_update,
            keep=proximal.kept(self.trainer),
            learner_version=self.trainer.version,
            temperature=1.0,
        )
        while len(self._refs) >= _AHEAD:
            self._collect()
        self._refs.append(self.trainer.actor_rollout_wg.train_micro_batch(request))
        self._sent += 1

    def _collect(self) -> None:
        deadline_s = self.trainer.vla3.deadline_s
        try:
            answers = ray.get(self._refs.pop(0), timeout=deadline_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"the learner's {self.trainer.dp_size} ranks did not finish a micro-batch of {self.size} samples "
                f"within vla3.deadline_s = {deadline_s} s"
            ) from None
        for answer in answers:
            found = answer.extra_info["metrics"] if hasattr(answer, "extra_info") else answer["metrics"]
            values = dict(getattr(found, "data", found))
            weight = values.pop(WEIGHT)
            for name, value in values.items():
                self.metrics.setdefault(name, []).append((value, weight))


def limits(trainer: VLA3Trainer) -> list[int]:
    """How many groups of the step each mini-batch ends with."""
    parts = trainer.vla3.algorithm.num_mini_batches
    return [trainer.groups_per_step * part // parts for part in range(1, parts + 1)]


def train_arriving(trainer: VLA3Trainer, metrics: dict[str, Any]) -> Batch:
    """The first epoch of a global batch, a mini-batch after the other, each as its groups arrive."""
    batch = Batch([], divisor=trainer.dp_size * trainer.vla3.algorithm.num_mini_batches)
    found: Found = {}
    prepared: list[tuple[dict[str, float], int]] = []
    for done, limit in enumerate(limits(trainer)):
        stream = MicroBatches(trainer, end_of_update=limit == trainer.groups_per_step, moved=done > 0)
        groups: list[Group] = []
        while len(trainer.feeder.admission.taken) < limit:
            try:
                # no more than that at a time: the learner begins while the next ones' advantages are computed; but the
                # run's first parity check, which may refuse it, sees all there is
                groups += trainer.feeder.groups(limit, stream.wanted if trainer.checked_parity else math.inf)
            except Stopped:
                stream.settle()  # a checkpoint follows, and its collectives must not meet those of a gradient
                raise
            if normalised_together(trainer) and len(trainer.feeder.admission.taken) < limit:
                continue
            piece = Batch([t for g in groups for t in g.trajectories], divisor=trainer.dp_size, origin="piece")
            write_padding_rows(trainer.actor_rollout_wg, piece.keys, piece.padding)
            if not done:  # later the learner is no longer what it was before the step
                check_parity(trainer, piece, metrics)
            if trainer.use_reference_policy and not trainer.ref_in_actor and trainer.dp_size > 1:
                stream.settle()  # it computes in the learner's processes, beside the lane: collectives must not mix
            prepared.append((trainer.prepare(piece), len(piece.keys)))
            stream.add(piece.trained_keys, piece.homes)
            batch.join(piece)
            groups = []
        _finish(stream, batch, found)
    metrics.update(combine(prepared) | _means(found))
    batch.sort()
    if trainer.vla3.algorithm.update_epoch == 1:
        batch.padding = []  # no later epoch needs any
    return batch


def normalised_together(trainer: VLA3Trainer) -> bool:
    """Whether a mini-batch's advantages need all of it."""
    algorithm = trainer.vla3.algorithm
    return algorithm.adv_type == "gae" and algorithm.normalize_advantages and trainer.scale.statistics == "mini_batch"


def parts(trainer: VLA3Trainer, batch: Batch) -> list[Batch]:
    """The mini-batches of the first epoch over a batch that is complete."""
    size, start, found = trainer.vla3.algorithm.group_size, 0, []
    for limit in limits(trainer):
        found.append(Batch(batch.trajectories[start * size : limit * size], divisor=1))
        start = limit
    return found


def prepare_parts(trainer: VLA3Trainer, batch: Batch) -> dict[str, float]:
    """``VLA3Trainer.prepare`` of a batch that is complete, each mini-batch as if it came alone where that matters."""
    if not normalised_together(trainer):
        return trainer.prepare(batch)
    pieces = parts(trainer, batch)
    if trainer.use_reference_policy:
        trainer.reference_logprobs(batch)
    found = [(trainer.compute_advantages(piece), len(piece.keys)) for piece in pieces]
    batch.trained_keys = [key for piece in pieces for key in piece.trained_keys]
    batch.values = [values for piece in pieces for values in piece.values]
    return combine(found)


def train_in_order(trainer: VLA3Trainer, batch: Batch, metrics: dict[str, Any]) -> None:
    """The same first epoch over a batch that is complete: what a streamed one is compared with."""
    found: Found = {}
    trained, pieces = set(batch.trained_keys), parts(trainer, batch)
    for done, part in enumerate(pieces):
        stream = MicroBatches(trainer, end_of_update=done == len(pieces) - 1, moved=done > 0)
        stream.add([key for key in part.keys if key in trained], batch.homes)
        _finish(stream, batch, found)
    metrics.update(_means(found))


def _finish(stream: MicroBatches, batch: Batch, found: Found) -> None:
    stream.finish()
    batch.leftovers += stream.padding
    for name, values in stream.metrics.items():
        found.setdefault(name, []).extend(values)


def _means(found: Found) -> dict[str, float]:
    """Means over a step, however it was cut into micro-batches; one of nothing but padding counts for nothing."""
    means = {}
    for name, values in found.items():
        if not any(weight for _, weight in values):
            values = [(value, 1.0) for value, _ in values]
        means[f"actor/{name}"] = sum(v * weight for v, weight in values) / sum(weight for _, weight in values)
    return means
