"""The driver's side of the env workers: hands out assigned episodes, reports them as they finish, keeps the deadline.

``InteractionManager`` stands where verl's agent-loop manager stands (``rollout.agent.agent_loop_manager_class``).
Observations and trajectories never pass through it; summaries do. An env worker that dies or no longer answers is
restarted in place (a Ray actor keeps its handle), and the episodes it had are played again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from omegaconf import OmegaConf

from vla3_plugin.contract import EnvSpec, Episode
from vla3_plugin.rollout import store
from vla3_plugin.rollout.env_worker import EnvWorker
from vla3_plugin.rollout.episodes import Assignment, Mode
from vla3_plugin.rollout.hosting import HostedEnvWorker, actor_of, class_of
from vla3_plugin.rollout.replacing import end_starting, replace
from vla3_plugin.rollout.stopping import Stopped
from vla3_plugin.rollout.supervision import Event

Summary = dict[str, Any]
_POLL_S = 5.0  # how long a worker holds a call for finished episodes; it answers at once when there is one
_PAUSE_S = 1.0  # between two looks at a worker that is being restarted
_CLOSE_S = 5.0  # for a worker to end its simulators; a run that was told to stop has little time


class InteractionManager:
    """Spreads episodes over env workers on a thread of its own, so that they go on while the driver does other things.

    With asynchronous interaction an episode is handed out when a worker has room for it; otherwise each worker gets
    its share of a submission at once, and steps it in lock step.
    """

    def __init__(
        self,
        workers: list[Any],
        policy_workers: list[Any],
        slots: int,
        deadline_s: float,
        asynchronous: bool,
        heartbeat_s: float,
        start_s: float,
        nearest: Sequence[int] | None = None,
    ) -> None:
        """``nearest``: the policy worker that each env worker asks first; in turn unless given."""
        self.workers, self.slots, self.deadline_s, self.asynchronous = workers, slots, deadline_s, asynchronous
        self.policy_workers = list(policy_workers)
        self.nearest = nearest or [rank % len(policy_workers) for rank in range(len(workers))]
        self.heartbeat_s, self.start_s = heartbeat_s, start_s
        connected = [self._connect(rank) for rank in range(len(workers))]
        self._get(connected, "start their simulators and connect to the policy workers")
        self.env_spec = EnvSpec.from_json(self._get([workers[0].spec.remote()], "describe their simulators")[0])
        self._backlog: deque[Assignment] = deque()
        self._out: list[dict[int, Assignment]] = [{} for _ in workers]  # by episode id, per worker
        self._listening: list[float | None] = [None] * len(workers)  # since when each holds a call
        self._reviving: dict[int, float] = {}  # worker -> since when it is being restarted
        self._started: dict[int, float] = {}  # the same workers -> since when the newest process has had time
        self.stop: Callable[[], bool] = lambda: False
        self.on_event: Callable[[Event], None] = lambda event: None
        self._done: dict[int, Callable[[Summary], None]] = {}
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._error: BaseException | None = None
        self._failed: list[Callable[[BaseException], None]] = []
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._dispatch, name="dispatch", daemon=True)
        self._thread.start()

    @classmethod
    def create(cls, config: Any, llm_client: list[Any], **_: Any) -> InteractionManager:
        """verl's hook; ``llm_client`` is what ``VLA3Trainer.get_llm_client`` returned: the policy workers."""
        vla3: Any = OmegaConf.to_container(config.vla3, resolve=True)
        env, stage = vla3["env"], vla3["stages"]["interaction"]
        model = config.actor_rollout_ref.model
        policy = {"path": model.path, "options": OmegaConf.to_container(model.options, resolve=True)}
        ray.get([server.configure.remote(stage) for server in llm_client])
        from vla3_plugin.placement import resolve_ray, spec

        grid = resolve_ray.reserved
        close = spec.nearest(grid.placement) if grid is not None else None
        arguments = (
            env,
            policy,
            vla3["seed"],
            stage["enabled"],
            vla3["run_dir"],
            vla3["deadline_s"],
            vla3["algorithm"]["bootstrap_type"] == "always",
        )
        ranks = range(env["workers"])
        close = close or [rank % len(llm_client) for rank in ranks]
        options: list[Any] = [grid.env_options(rank) if grid is not None else {} for rank in ranks]
        workers: list[Any]
        if env["host"] == "policy_worker":
            environs = [option.get("runtime_env", {}).get("env_vars", {}) for option in options]
            workers = [HostedEnvWorker(llm_client[close[rank]], rank, arguments, environs[rank]) for rank in ranks]
        else:
            restarts = vla3["max_worker_restarts"]
            remote: Any = ray.remote(num_cpus=0, max_concurrency=4, max_restarts=restarts)(EnvWorker)
            workers = [remote.options(**options[rank]).remote(rank, *arguments) for rank in ranks]
        slots = env["shards_per_worker"] * env["envs_per_shard"]
        return cls(
            workers, llm_client, slots, env["deadline_s"], stage["enabled"], vla3["heartbeat_s"],
            vla3["worker_start_s"], close,
        )  # fmt: skip

    def _connect(self, worker: int) -> Any:
        first = self.nearest[worker]
        return self.workers[worker].connect.remote(self.policy_workers[first:] + self.policy_workers[:first])

    def _get(self, refs: list[Any], what: str) -> list[Any]:
        ready, pending = ray.wait(refs, num_returns=len(refs), timeout=self.deadline_s)
        if pending:
            late = [i for i, ref in enumerate(refs) if ref in set(pending)]
            raise TimeoutError(
                f"env workers {late} did not {what} within vla3.env.deadline_s = {self.deadline_s} s; "
                "raise it if the simulator is that slow, otherwise look at the workers' stderr"
            )
        return ray.get(refs)

    # ---- for the driver ----

    def submit(self, assignments: Sequence[Assignment], done: Callable[[Summary], None]) -> None:
        """Play these; ``done`` is called with each summary, on the dispatching thread."""
        if not assignments:
            return
        with self._lock:
            for assignment in assignments:
                self._done[assignment.episode.episode_id] = done
        self._events.put(("submit", list(assignments)))

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Call ``callback`` when no further episode can finish."""
        with self._lock:
            self._failed.append(callback)
            error = self._error
        if error is not None:
            callback(error)

    def fail(self, error: BaseException) -> None:
        """No further episode will finish: tell whoever waits for one."""
        with self._lock:
            self._error, callbacks = self._error or error, list(self._failed)
        for callback in callbacks:
            callback(error)

    def collect(
        self, episodes: Sequence[Episode], mode: Mode, keep: bool, film: frozenset[int] = frozenset()
    ) -> dict[str, Any]:
        """All trajectories of ``episodes``, in the plan's order, with the time they took.

        Episodes that were given up are not among them; ``quarantined`` counts those.
        """
        start, answers = time.perf_counter(), queue.SimpleQueue()  # type: ignore[var-annotated]
        self.on_failure(answers.put)
        try:
            self.submit([Assignment(e, mode, keep, e.episode_id in film) for e in episodes], answers.put)
            found: list[Summary] = []
            while len(found) < len(episodes):
                if self.stop():
                    raise Stopped
                try:
                    answer = answers.get(timeout=1.0)
                except queue.Empty:
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                found.append(answer)
        finally:
            with self._lock:
                self._failed = [f for f in self._failed if f != answers.put]
        played = [summary for summary in found if "quarantined" not in summary]
        played.sort(key=lambda t: t["episode"]["episode_id"])
        return {
            "trajectories": played,
            "quarantined": len(found) - len(played),
            "seconds": time.perf_counter() - start,
        }

    def drain_timeline(self) -> list[Any]:
        spans = []
        for call in [w.drain_timeline.remote() for w in self.workers]:
            try:
                spans += ray.get(call, timeout=self.heartbeat_s)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                continue  # it took its spans with it; whether it comes back is the dispatcher's business
        return spans

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._events.put(("close", None))
        self._thread.join(timeout=_CLOSE_S)
        calls = [w.close.remote() for w in self.workers]
        # one that is gone or hangs must not fail a run that is over
        ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_S)

    # ---- the dispatching thread ----

    def _dispatch(self) -> None:
        try:
            while True:
                try:
                    what, item = self._events.get(timeout=1.0)
                except queue.Empty:
                    what, item = "tick", None
                if what == "close":
                    return
                if what == "lost":
                    self._lost(*item)
                elif what == "revived":
                    self._revived(*item)
                elif what == "submit":
                    if not any(self._out):
                        self._last = time.monotonic()
                    self._accept(item)
                elif what == "finished":
                    self._report(*item)
                self._hand_out()
                for worker in range(len(self.workers)):
                    self._listen(worker)
                self._check_heartbeats()
                self._check_deadline()
        except BaseException as error:
            self.fail(error)

    def _accept(self, assignments: list[Assignment]) -> None:
        if not self.asynchronous:
            count = len(self.workers)
            for worker in range(count):
                self._assign(worker, assignments[worker::count])
            return
        evaluation = [a for a in assignments if a.mode == "eval"]
        self._backlog.extendleft(reversed(evaluation))
        self._backlog.extend(a for a in assignments if a.mode != "eval")

    def _hand_out(self) -> None:
        """To the worker with most room; a few more than it has slots, so that none waits for the driver."""
        room = self.slots + max(1, self.slots // 4)
        while self._backlog:
            worker = min(range(len(self.workers)), key=lambda w: (w in self._reviving, len(self._out[w])))
            if len(self._out[worker]) >= room or worker in self._reviving:
                return
            self._assign(worker, [self._backlog.popleft()])

    def _assign(self, worker: int, assignments: list[Assignment]) -> None:
        if not assignments:
            return
        self._out[worker].update({a.episode.episode_id: a for a in assignments})
        if worker in self._reviving:
            return  # it gets everything it should have once it is back
        sent = self.workers[worker].assign.remote([a.to_json() for a in assignments]).future()
        sent.add_done_callback(partial(self._assigned, worker))

    def _assigned(self, worker: int, future: Any) -> None:
        if future.exception() is not None:
            self._events.put(("lost", (worker, future.exception())))

    def _listen(self, worker: int) -> None:
        """Hold a call, idle or not: a worker that Ray restarts while nobody listens comes back unconnected."""
        if self._listening[worker] is None and worker not in self._reviving:
            self._listening[worker] = time.monotonic()
            future = self.workers[worker].finished.remote(_POLL_S).future()
            future.add_done_callback(lambda f: self._events.put(("finished", (worker, f))))

    def _report(self, worker: int, future: Any) -> None:
        self._listening[worker] = None
        if future.exception() is not None:
            self._lost(worker, future.exception())
            return
        for summary in future.result():
            if "event" in summary:
                self.on_event(summary["event"])
                continue
            index = summary["episode"]["episode_id"]
            if self._out[worker].pop(index, None) is None:
                continue  # told already, before the worker was restarted
            self._last = time.monotonic()
            if "quarantined" in summary:
                why, kind = summary["quarantined"], summary["kind"]
                self.on_event({"kind": kind, "where": f"env{worker}", "why": why, "episodes": [index]})
            with self._lock:
                done = self._done.pop(index)
            done(summary)

    # ---- a worker that dies ----

    def _lost(self, worker: int, error: BaseException) -> None:
        """A call of ``worker`` failed: its process is gone (Ray restarts it), or what it reports ends the run."""
        if not isinstance(error, ray.exceptions.RayActorError):
            raise error
        if worker in self._reviving:
            return
        self._reviving[worker] = self._started[worker] = time.monotonic()
        self.on_event({"kind": "env_worker_lost", "where": f"env{worker}", "why": str(error).strip(),
                       "episodes": sorted(self._out[worker])})  # fmt: skip
        self._revive(worker)

    def _revive(self, worker: int) -> None:
        call = self._connect(worker).future()
        call.add_done_callback(lambda f: self._events.put(("revived", (worker, f))))

    def _revived(self, worker: int, future: Any) -> None:
        error = future.exception()
        if error is not None:
            gone = isinstance(error, ray.exceptions.ActorDiedError) or not isinstance(
                error, ray.exceptions.RayActorError
            )
            if gone or time.monotonic() - self._reviving[worker] > self.deadline_s:
                raise error
            threading.Timer(_PAUSE_S, self._revive, [worker]).start()
            return
        lost = list(self._out[worker].values())
        # it may have stored a trajectory and died before it could say so
        store.clear_episodes([a.episode.episode_id for a in lost if a.keep])
        del self._reviving[worker]
        self._last = time.monotonic()
        self.on_event({"kind": "env_worker_restarted", "where": f"env{worker}", "why": "", "episodes": []})
        self._assign(worker, lost)

    def _check_heartbeats(self) -> None:
        """A worker answers a call for finished episodes within a few seconds, episodes or none; one that does not is
        hung, whatever it hangs in."""
        for worker, since in enumerate(self._listening):
            if since is not None and time.monotonic() - since > _POLL_S + self.heartbeat_s:
                self._listening[worker] = time.monotonic()
                replace(actor_of(self.workers[worker]))
        late = [w for w in self._reviving if time.monotonic() - self._started[w] > self.start_s]
        if late:  # the new process can hang too
            for worker in late:
                replace(actor_of(self.workers[worker]))
            end_starting(class_of(self.workers[late[0]]), self.start_s / 2)
            self._started = dict.fromkeys(self._reviving, time.monotonic())  # others may have been ended with them

    def _check_deadline(self) -> None:
        for worker, since in self._reviving.items():
            if time.monotonic() - since > self.deadline_s:
                raise TimeoutError(
                    f"env worker {worker} was lost and did not come back within vla3.env.deadline_s = "
                    f"{self.deadline_s} s; look at its stderr"
                )
        if any(self._out) and time.monotonic() - self._last > self.deadline_s:
            late = {w: sorted(out) for w, out in enumerate(self._out) if out}
            raise TimeoutError(
                f"no episode finished within vla3.env.deadline_s = {self.deadline_s} s; env workers and the episodes "
                f"they are at: {late}; raise it if the simulator is that slow, otherwise look at the workers' stderr"
            )
