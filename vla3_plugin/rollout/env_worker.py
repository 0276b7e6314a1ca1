"""The env worker: it owns simulators, asks its policy worker for chunks and stores trajectories.

A Ray actor of its own, its simulators in child interpreters; or in its policy worker's process (``rollout.hosting``).

Its interaction loops draw from one queue of assigned episodes. With asynchronous interaction there is a loop a shard
and none waits for another; otherwise one loop steps all of the worker's environments together, or
``pipeline_stage_num`` loops their parts.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from vla3_plugin.contract import EnvSpec, Trajectory
from vla3_plugin.envs.base import ChunkEnv
from vla3_plugin.rollout.episodes import Assignment, EpisodeQueue
from vla3_plugin.rollout.interaction import Arrays, Finished, Interaction, Quarantined
from vla3_plugin.rollout.policy_client import PolicyClient
from vla3_plugin.rollout.supervision import Limits, SupervisedEnv
from vla3_plugin.telemetry import traffic
from vla3_plugin.telemetry.timeline import Timeline


def summarise(trajectory: Trajectory) -> dict[str, Any]:
    """What the driver needs to know of a trajectory: scalars and the names of its samples."""
    versions = trajectory.samples["version"].flatten().tolist()
    return {
        "keys": trajectory.keys(),
        "episode": trajectory.episode.to_json(),
        "success": trajectory.success,
        "return": trajectory.episode_return,
        "control_steps": trajectory.control_steps,
        "version": min(versions),
        "versions": versions,  # of each chunk step: weights may change within an episode
    }


class EnvWorker:
    """``env``: what ``config.EnvConfig`` holds. ``connect`` comes before the first ``assign``.

    ``asynchronous``: whether shards run on their own. What happens here that the driver should know of (a simulator was
    replaced, an episode given up) goes the way of the finished episodes, as an entry with the key ``event``.
    """

    def __init__(
        self,
        rank: int,
        env: dict[str, Any],
        policy: dict[str, Any],
        seed: int,
        asynchronous: bool,
        run_dir: str,
        deadline_s: float,
        bootstrap_terminated: bool,
    ) -> None:
        from vla3_plugin.policies.prepare import check_env, load_preparer
        from vla3_plugin.rollout import store

        store.connect()
        if env["host"] == "own":  # simulators inherit it; in the policy's process only they stand back
            os.nice(env["nice"])
        self.run_dir = run_dir
        self.done: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()
        self.policy = PolicyClient([], deadline_s)
        self.preparer = load_preparer(policy["path"], **policy["options"])
        limits = Limits(env["max_attempts"], env["max_failures"], env["recycle_episodes"], env["recycle_mb"])
        self.envs = [
            SupervisedEnv(partial(_simulator, env, f"{env['name']}/{rank}.{i}"), limits, self._tell)
            for i in range(env["shards_per_worker"])
        ]
        check_env(self.preparer, self.envs[0].spec)
        self.timeline = Timeline(f"env{rank}")
        self.source = EpisodeQueue()
        count = len(self.envs) if asynchronous else env["pipeline_stage_num"]
        parts = [self.envs[i::count] for i in range(count)]
        self.loops = [
            Interaction(
                part,
                self._prepare,
                self.policy.act,
                seed,
                self.timeline,
                f"shard {i}",
                bootstrap_terminated,
                limits.attempts,
            )
            for i, part in enumerate(parts)
        ]
        for i, loop in enumerate(self.loops):
            threading.Thread(target=self._play, args=(loop,), name=f"shard {i}", daemon=True).start()

    def connect(self, policy_workers: list[Any]) -> None:
        """The policy workers to ask (see ``PolicyClient``), its own first.

        Not the constructor's: Ray restarts an actor only while the constructor's arguments last, and handles do not.

        Who connects a second time holds this process for lost, because a message from it was, and will have its
        episodes played again: so that nothing is played by both, it ends, and Ray starts another.
        """
        if self.policy.workers:
            os._exit(1)
        self.policy.workers = list(policy_workers)

    def spec(self) -> dict[str, Any]:
        return self.envs[0].spec.to_json()

    def _prepare(self, observations: Sequence[Any]) -> Arrays:
        return {name: tensor.numpy() for name, tensor in self.preparer.prepare(observations).items()}

    def _tell(self, event: dict[str, Any]) -> None:
        self.done.put({"event": event})

    def _play(self, loop: Interaction) -> None:
        try:
            for finished in loop.run(self.source):
                self.done.put(self._deliver(finished))
        except BaseException as error:  # told to whoever waits for this worker
            self.done.put(error)

    def _deliver(self, finished: Finished | Quarantined) -> dict[str, Any]:
        if isinstance(finished, Quarantined):
            kind = "skipped" if finished.skipped else "quarantined"
            episode = finished.assignment.episode.to_json()
            return {"keys": [], "episode": episode, "quarantined": finished.why, "kind": f"episode_{kind}"}
        assignment, trajectory = finished
        stored = {}
        if assignment.keep:
            from vla3_plugin.rollout import store, store_nodes

            store.put_trajectory(trajectory)
            stored = {"node": store_nodes.node()}
        if assignment.record:
            try:
                _write_video(self.run_dir, trajectory, self.envs[0].spec)
            except (OSError, RuntimeError) as error:  # VideoError is one; a film is no reason to end a run
                self._tell({"kind": "video_failed", "where": self.timeline.role, "why": str(error),
                            "episodes": [assignment.episode.episode_id]})  # fmt: skip
        return summarise(trajectory) | stored

    def assign(self, assignments: list[dict[str, Any]]) -> None:
        self.source.put(Assignment.from_json(a) for a in assignments)

    def finished(self, timeout_s: float) -> list[dict[str, Any]]:
        """Summaries of what has finished since the last call; waits up to ``timeout_s`` for the first."""
        summaries: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while not summaries or not self.done.empty():
            try:
                item = self.done.get(timeout=max(0.0, deadline - time.monotonic()) if not summaries else 0.0)
            except queue.Empty:
                break
            if isinstance(item, BaseException):
                raise item
            summaries.append(item)
        return summaries

    def drain_timeline(self) -> list[Any]:
        return self.timeline.drain() + traffic.drain(self.timeline.role)

    def close(self) -> None:
        self.source.close(drop=True)
        for loop in self.loops:
            loop.close()


def _simulator(env: dict[str, Any], name: str) -> ChunkEnv:
    from vla3_plugin.envs.registry import make_env, make_inline_env

    if env["isolation"] == "none":
        return make_inline_env(env["name"], env["options"], num_slots=env["envs_per_shard"], name=name)
    return make_env(
        env["name"], env["options"], num_slots=env["envs_per_shard"], python=env["python"], timeout_s=env["timeout_s"],
        name=name, nice=env["nice"] if env["host"] == "policy_worker" else 0, borrow=True,
    )  # fmt: skip


def _write_video(run_dir: str, trajectory: Trajectory, spec: EnvSpec) -> None:
    from vla3_plugin.telemetry.video import video_path, write_video

    episode = trajectory.episode
    task = spec.instructions[episode.task_id] if spec.instructions else f"task {episode.task_id}"
    version = int(trajectory.samples["version"].max())
    path = video_path(run_dir, version, task, episode.episode_id, trajectory.success)
    write_video(path, np.stack(trajectory.frames), fps=spec.control_hz, success=trajectory.success)
