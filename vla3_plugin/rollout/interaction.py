"""The interaction loop: the environments of one shard (or, in lock step, of one worker) and the policy.

Per round every free slot gets its next episode, all running slots are answered by the policy, and all simulators
execute their chunks at the same time. Noise is keyed by episode and chunk, so neither the number of slots nor the order
in which episodes end changes what an episode samples. Synchronous interaction is one loop over all environments of a
worker; asynchronous interaction is the same loop once a shard, each on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from vla3_plugin.contract import ChunkResult, Observation, Trajectory
from vla3_plugin.envs.base import ChunkEnv
from vla3_plugin.policies.base import NoiseKey
from vla3_plugin.rollout.episodes import Assignment, EpisodeQueue, Mode
from vla3_plugin.rollout.supervision import EnvReplaced, SupervisedEnv
from vla3_plugin.telemetry.timeline import Timeline

Arrays = dict[str, np.ndarray]
Slot = tuple[int, int]  # (environment process, slot in it)
_NOT_BEGUN = Observation({}, np.zeros(0, np.float32), "")
Prepare = Callable[[Sequence[Observation]], Arrays]
# (inputs, noise keys, mode) -> actions [B, C, A], logprob [B, C, D], value [B, 1 or C], trace.*, version [B]
Act = Callable[[Arrays, Sequence[NoiseKey], Mode], Arrays]


class Finished(NamedTuple):
    assignment: Assignment
    trajectory: Trajectory


class Quarantined(NamedTuple):
    """An episode that was given up: ``why`` is the failure of the last simulator that it took down.

    ``skipped``: another one of its training group did that, and this one was not played (again).
    """

    assignment: Assignment
    why: str
    skipped: bool = False


@dataclass
class _Running:
    assignment: Assignment
    observation: Observation
    chunks: list[Arrays] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)
    success: bool = False

    def key(self, seed: int) -> NoiseKey:
        return (seed, self.assignment.episode.episode_id, len(self.chunks))


class Interaction:
    """Plays assigned episodes over ``envs``; one thread an environment process, so that they step at the same time.

    Training episodes that were truncated get the value of their final observation; ``bootstrap_terminated``: those that
    ended by themselves too (``vla3.algorithm.bootstrap_type: always``). Episodes that were running in a simulator that
    failed are played again from their start, at most ``attempts`` times. Observations need to keep their values only as
    an ``EnvProcess`` that lends them promises.
    """

    def __init__(
        self,
        envs: Sequence[ChunkEnv],
        prepare: Prepare,
        act: Act,
        seed: int,
        timeline: Timeline | None = None,
        lane: str = "shard 0",
        bootstrap_terminated: bool = False,
        attempts: int = 3,
    ) -> None:
        self.attempts = attempts
        self.quarantined: list[Quarantined] = []  # not reported yet
        self.why: dict[int, str] = {}  # the last failure of each simulator
        self.hopeless: dict[int, str] = {}  # training groups that lost an episode, and so will be dropped whole: why
        self.envs, self.prepare, self.act, self.seed = envs, prepare, act, seed
        self.bootstrap_terminated = bootstrap_terminated
        self.timeline, self.lane = timeline or Timeline("env"), lane
        self.slots = [(e, s) for s in range(max(env.num_slots for env in envs)) for e in range(len(envs))]
        self.slots = [(e, s) for e, s in self.slots if s < envs[e].num_slots]
        self.threads = ThreadPoolExecutor(max_workers=len(envs), thread_name_prefix="env") if len(envs) > 1 else None

    def run(self, source: EpisodeQueue) -> Iterator[Finished | Quarantined]:
        """Yield episodes as they finish or are given up, until ``source`` is closed and empty."""
        running: dict[Slot, _Running] = {}
        ended: list[tuple[_Running, Observation]] = []
        while True:
            self._start(source, running, wait=not (running or ended))
            yield from self._given_up()
            if not running and not ended:
                if source.finished:
                    return
                continue
            order = [slot for slot in self.slots if slot in running]
            rows = [running[slot] for slot in order]
            answers = self._ask(rows, ended)
            for (run, _), answer in zip(ended, answers[len(rows) :], strict=True):
                run.chunks[-1] |= {"bootstrap": answer["value"].copy(), "bootstrap_version": answer["version"].copy()}
                yield _finish(run)
            ended = []
            results = self._step(order, rows, answers)
            for env in {env for env, _ in set(order) - set(results)}:
                self._lost(env, running, source, culprits=None)
            yield from self._given_up()
            for slot, run, answer in zip(order, rows, answers, strict=False):
                if slot not in results:
                    continue
                result = results[slot]
                run.chunks.append(_sample(answer, result))
                run.observation, run.success = result.observation, run.success or result.success
                if result.frames is not None:
                    run.frames.extend(result.frames)
                if not result.done:
                    continue
                del running[slot]
                if run.assignment.mode == "train" and (self.bootstrap_terminated or result.truncated.any()):
                    assert result.final_observation is not None
                    ended.append((run, result.final_observation))
                else:
                    yield _finish(run)

    def _start(self, source: EpisodeQueue, running: dict[Slot, _Running], wait: bool) -> None:
        starts: dict[int, list[tuple[int, Assignment]]] = {}
        draining = self._recycle(running)
        for env, slot in self.slots:
            if (env, slot) in running or env in draining:
                continue
            there = [running[key].assignment for key in running if key[0] == env] + [a for _, a in starts.get(env, ())]
            if any(a.suspect for a in there):
                continue
            if wait and not starts and not self.quarantined:  # those are to be reported first: somebody waits for them
                with self.timeline.span(self.lane, "wait:data"):
                    assignment = source.take(wait=True)
            else:
                assignment = source.take(wait=False, alone=not there)
            if assignment is None:
                continue
            if assignment.keep and (why := self.hopeless.get(assignment.episode.group_id)) is not None:
                # its siblings share what took the simulator down; playing them could look like a broken simulator
                self.quarantined.append(Quarantined(assignment, why, skipped=True))
                continue
            starts.setdefault(env, []).append((slot, assignment))

        def reset(env: int) -> tuple[int, dict[Slot, _Running], Assignment | None]:
            begun: dict[Slot, _Running] = {}
            for slot, assignment in starts[env]:
                try:
                    begun[env, slot] = _Running(assignment, self.envs[env].reset(slot, assignment.episode))
                except EnvReplaced as error:
                    self.why[env] = str(error)
                    return env, begun, assignment
            return env, begun, None

        if not starts:
            return
        with self.timeline.span(self.lane, "reset", episodes=sum(map(len, starts.values()))):
            for env, begun, culprit in self._map(reset, starts):
                if culprit is not None:
                    for slot, assignment in starts[env]:  # those that had not begun go back as well
                        running[env, slot] = begun.get((env, slot)) or _Running(assignment, _NOT_BEGUN)
                    self._lost(env, running, source, {culprit.episode.episode_id})
                    continue
                running.update(begun)
                for run in begun.values():
                    if run.assignment.record:
                        run.frames.append(next(iter(run.observation.images.values())).copy())

    def _recycle(self, running: dict[Slot, _Running]) -> set[int]:
        """Replace the simulators that are due and have nothing running; the others that are due start nothing new."""
        due = {e: env for e, env in enumerate(self.envs) if isinstance(env, SupervisedEnv) and env.due is not None}
        busy = {env for env, _ in running}
        idle = {e: env for e, env in due.items() if e not in busy}
        list(self._map(lambda e: due[e].recycle(), idle))
        return set(due) & busy

    def _lost(self, env: int, running: dict[Slot, _Running], source: EpisodeQueue, culprits: set[int] | None) -> None:
        """Everything that ran in ``env`` goes back to be played again, or is given up. None: any may be the culprit."""
        again = []
        there = sorted(key for key in running if key[0] == env)
        for key in there:
            assignment = running.pop(key).assignment
            suspected = culprits is None or assignment.episode.episode_id in culprits
            if suspected:
                assignment = replace(assignment, failures=assignment.failures + 1)
            sure = culprits is not None or len(there) == 1  # with few attempts it has not been alone before
            if suspected and sure and assignment.failures >= self.attempts:
                self.quarantined.append(Quarantined(assignment, self.why[env]))
                if assignment.keep:
                    self.hopeless[assignment.episode.group_id] = self.why[env]
            else:
                again.append(assignment)
        source.put_back(again)

    def _given_up(self) -> Iterator[Quarantined]:
        while self.quarantined:
            yield self.quarantined.pop(0)

    def _ask(self, rows: list[_Running], ended: list[tuple[_Running, Observation]]) -> list[Arrays]:
        """The policy's answer to every row, then to the final observation of every episode that ended (for its value).

        Inputs are part of an answer, as ``in.*``: they are what the learner will evaluate.
        """
        asked = [(r, r.observation) for r in rows] + ended
        answers: list[Arrays] = [{} for _ in asked]
        for mode in sorted({run.assignment.mode for run, _ in asked}):
            chosen = [i for i, (run, _) in enumerate(asked) if run.assignment.mode == mode]
            inputs = self.prepare([asked[i][1] for i in chosen])
            keys = [asked[i][0].key(self.seed) for i in chosen]
            with self.timeline.span(self.lane, "wait:batch", requests=len(chosen)):
                output = self.act(inputs, keys, mode)
            for row, i in enumerate(chosen):
                # kept with the episode; what the policy saw may be memory that the simulator is about to write to
                answers[i] = {f"in.{name}": value[row].copy() for name, value in inputs.items()}
                answers[i] |= {name: value[row] for name, value in output.items()}
        return answers

    def _step(self, order: list[Slot], rows: list[_Running], answers: list[Arrays]) -> dict[Slot, ChunkResult]:
        by_env: dict[int, list[int]] = {}
        for i, (env, _) in enumerate(order):
            by_env.setdefault(env, []).append(i)

        def step(env: int) -> list[tuple[Slot, ChunkResult]]:
            mine = by_env[env]
            actions = np.stack([answers[i]["actions"] for i in mine])
            wanted = any(rows[i].assignment.record for i in mine)
            try:
                results = self.envs[env].chunk_step([order[i][1] for i in mine], actions, record=wanted)
            except EnvReplaced as error:
                self.why[env] = str(error)
                return []
            return [(order[i], r) for i, r in zip(mine, results, strict=True)]

        if not order:
            return {}
        with self.timeline.span(self.lane, "chunk_step", envs=len(order)):
            return dict(pair for pairs in self._map(step, by_env) for pair in pairs)

    def _map(self, function: Callable, items: dict) -> Iterator:
        return self.threads.map(function, items) if self.threads else map(function, items)

    def close(self) -> None:
        if self.threads:
            self.threads.shutdown(wait=False, cancel_futures=True)
        for env in self.envs:
            env.close()


def _sample(answer: Arrays, result: ChunkResult) -> Arrays:
    sample = {name: value for name, value in answer.items() if name != "actions"}
    sample |= {n: getattr(result, n) for n in ("rewards", "terminated", "truncated", "valid")}
    sample |= {"bootstrap": np.zeros_like(answer["value"]), "bootstrap_version": answer["version"]}
    return sample


def _finish(run: _Running) -> Finished:
    samples = {name: np.stack([chunk[name] for chunk in run.chunks]) for name in run.chunks[0]}
    return Finished(run.assignment, Trajectory(run.assignment.episode, samples, run.success, run.frames))
