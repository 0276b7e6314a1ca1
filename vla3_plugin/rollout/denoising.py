"""How the inference lane turns waiting requests into answers: a batch a whole chain, or a batch a denoising step.

``RunToCompletion`` takes a batch and keeps it until all its chains are done; who comes a moment later waits for all of
them. ``StepJoin`` lets requests join and leave between two denoising steps, each at its own step, so who comes late
waits for a step or a few; the encoded prefix of a request is computed once, when it joins. Both give the same answer
to the same request.

A ticket's payload is ``(inputs of one row, noise key)`` and its kind the mode. Its future receives one row of what
``ServedPolicy.act`` returns, or the error of the batch that it was in; an error never ends the lane. One thread runs a
runner. Weights may be swapped when nothing is ``running``: between two calls, after ``drain``.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from vla3_plugin.policies.base import NoiseKey
from vla3_plugin.policies.chains import Chains
from vla3_plugin.policies.serve import Arrays, ServedPolicy
from vla3_plugin.rollout.batcher import Batcher, Ticket, worth_joining
from vla3_plugin.rows import stack_rows
from vla3_plugin.telemetry import clock
from vla3_plugin.telemetry.timeline import Timeline

LANE = "inference"


class Runner(Protocol):
    """``steps`` counts the batches that went through the network, ``rows`` their requests; rows / steps is the mean
    occupancy. In ``StepJoin`` such a batch is one denoising step, else a whole chain."""

    steps: int
    rows: int

    def run_once(self, timeout: float | None = None) -> int:
        """Wait for work (``timeout`` seconds at most; None: for ever) and do one batch of it.

        Returns:
            How many requests were answered, with a result or an error.
        """
        ...

    @property
    def running(self) -> int:
        """Requests that were taken from the batcher and have no answer yet."""
        ...

    def drain(self) -> int:
        """Answer what is running and admit nothing; returns how many."""
        ...


def make_runner(
    batching: str, served: ServedPolicy, batcher: Batcher, max_batch_size: int, timeline: Timeline | None = None
) -> Runner:
    """``batching``: the value of ``vla3.stages.interaction.batching``."""
    if batching == "run_to_completion":
        return RunToCompletion(served, batcher, timeline)
    if batching == "step_join":
        return StepJoin(served, batcher, max_batch_size, timeline=timeline)
    raise ValueError(f"vla3.stages.interaction.batching: {batching!r}, expected one of run_to_completion, step_join")


class RunToCompletion:
    """A batch stays together from its first denoising step to its last; any policy will do."""

    def __init__(self, served: ServedPolicy, batcher: Batcher, timeline: Timeline | None = None) -> None:
        self.served, self.batcher, self.timeline = served, batcher, timeline or Timeline("policy")
        self.steps = self.rows = 0

    def run_once(self, timeout: float | None = None) -> int:
        tickets = _take(self.batcher, timeout, self.timeline)
        if not tickets:
            return 0
        try:
            with self.timeline.span(LANE, "batch", size=len(tickets), version=self.served.version):
                inputs, keys = _stacked(tickets)
                arrays = self.served.act(inputs, keys, str(tickets[0].kind))
        except Exception as error:
            return _fail(tickets, error)
        self.steps += 1
        self.rows += len(tickets)
        return _answer(tickets, arrays)

    @property
    def running(self) -> int:
        return 0

    def drain(self) -> int:
        return 0


class StepJoin:
    """At most ``max_batch_size`` chains share each denoising step; both modes may be among them.

    Encoding a prefix has a cost that hardly depends on how many join, and all who run wait for it. So requests join
    when they are at least ``join_share`` of those who run, and, when more wait than there is room for, when as many can
    join as run on (half a full batch at a time): then the lane is busy anyway and only what a chunk costs matters.
    Meanwhile those who run become fewer, so the first in line is held back for one chain at most.

    Raises:
        ValueError: the policy has no denoising steps to share.
    """

    def __init__(
        self,
        served: ServedPolicy,
        batcher: Batcher,
        max_batch_size: int,
        join_share: float = 0.25,
        timeline: Timeline | None = None,
    ) -> None:
        if not served.shares_steps:
            raise ValueError(
                f"vla3.stages.interaction.batching: 'step_join' with policy {type(served.policy).__name__}, expected a "
                "flow policy (begin, denoise, finish; see policies.chains); set batching=run_to_completion"
            )
        self.served, self.batcher, self.timeline = served, batcher, timeline or Timeline("policy")
        self.max_batch_size, self.join_share = max_batch_size, join_share
        self.steps = self.rows = 0
        self._tickets: list[Ticket] = []  # ticket i runs as row i of the chains
        self._chains: Chains | None = None
        self._version = served.version  # of the running chains

    @property
    def running(self) -> int:
        return len(self._tickets)

    def run_once(self, timeout: float | None = None) -> int:
        answered = self._admit(timeout)
        return answered + self._step()

    def drain(self) -> int:
        answered = 0
        while self._tickets:
            answered += self._step()
        return answered

    def fail(self, error: Exception) -> int:
        """Answer what is running with ``error``; returns how many."""
        tickets, self._tickets, self._chains = self._tickets, [], None
        return _fail(tickets, error)

    def _admit(self, timeout: float | None) -> int:
        """Begin what waits, up to the free room; wait only if nothing runs. Returns how many failed to begin."""
        failed = 0
        waiting = self.batcher.depth
        if self._tickets and not worth_joining(waiting, self._room, self.running, self.join_share):
            return failed
        tickets = self.batcher.take_now(self._room) if self._tickets else _take(self.batcher, timeout, self.timeline)
        while tickets:
            failed += self._begin(tickets)
            tickets = self.batcher.take_now(self._room)  # of the other mode, or room that a failure left
        return failed

    @property
    def _room(self) -> int:
        return self.max_batch_size - len(self._tickets)

    def _begin(self, tickets: list[Ticket]) -> int:
        try:
            with self.timeline.span(LANE, "prefix", size=len(tickets)):
                inputs, keys = _stacked(tickets)
                fresh = self.served.begin(inputs, keys, str(tickets[0].kind))
            chains = fresh if self._chains is None else Chains.cat([self._chains, fresh])
        except Exception as error:
            return _fail(tickets, error)
        if not self._tickets:
            self._version = self.served.version
        self._tickets, self._chains = [*self._tickets, *tickets], chains
        return 0

    def _step(self) -> int:
        """One denoising step of all that run, and the answers of those for whom it was the last."""
        if self._chains is None:
            return 0
        if self.served.version != self._version:
            return self.fail(
                RuntimeError(
                    f"{self.served.name}: weights of version {self.served.version} were swapped in while "
                    f"{self.running} chains of version {self._version} were running; drain() before a swap"
                )
            )
        try:
            with self.timeline.span(LANE, "denoise", size=len(self._tickets), version=self._version):
                self.served.denoise(self._chains)
        except Exception as error:
            return self.fail(error)
        self.steps += 1
        self.rows += len(self._tickets)
        complete = self._chains.complete
        return self._leave(complete) if bool(complete.any()) else 0

    def _leave(self, complete: torch.Tensor) -> int:
        assert self._chains is not None
        finished, self._chains = self._chains.split(complete)
        leaving = [ticket for ticket, done in zip(self._tickets, complete.tolist(), strict=True) if done]
        self._tickets = [ticket for ticket, done in zip(self._tickets, complete.tolist(), strict=True) if not done]
        for kind in dict.fromkeys(ticket.kind for ticket in leaving):
            tickets = [ticket for ticket in leaving if ticket.kind == kind]
            rows = torch.tensor([ticket.kind == kind for ticket in leaving])
            try:
                chains = finished if len(tickets) == len(leaving) else finished.select(rows)
                arrays = self.served.finish(chains, [ticket.payload[1] for ticket in tickets])
            except Exception as error:
                _fail(tickets, error)
            else:
                _answer(tickets, arrays)
        return len(leaving)


def _take(batcher: Batcher, timeout: float | None, timeline: Timeline) -> list[Ticket]:
    """The next batch; the wait for the first request and the wait for company are two things in the swimlanes."""
    start = clock.now()
    tickets = batcher.take(timeout)
    end = clock.now()
    waited = time.monotonic() - tickets[0].arrival if tickets else 0.0
    arrived = min(max(start, end - waited), end)
    timeline.add(LANE, "wait:env", start, arrived)
    timeline.add(LANE, "wait:batch", arrived, end)
    return tickets


def _stacked(tickets: Sequence[Ticket]) -> tuple[Arrays, list[NoiseKey]]:
    """Inputs [B, ...] and noise keys of a batch."""
    inputs, keys = zip(*(ticket.payload for ticket in tickets), strict=True)
    return {name: stack_rows([row[name] for row in inputs]) for name in inputs[0]}, list(keys)


def _answer(tickets: Sequence[Ticket], arrays: Arrays) -> int:
    for i, ticket in enumerate(tickets):
        ticket.future.set_result({name: array[i] for name, array in arrays.items()})
    return len(tickets)


def _fail(tickets: Sequence[Ticket], error: Exception) -> int:
    for ticket in tickets:
        ticket.future.set_exception(error)
    return len(tickets)
