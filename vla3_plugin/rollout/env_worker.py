"""The env worker: a process that owns simulator children, asks its policy worker for chunks and stores trajectories.

``InteractionManager`` stands where verl's agent-loop manager stands (``rollout.agent.agent_loop_manager_class``): it
spreads assigned episodes over the env workers. Observations and trajectories never pass through the driver.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import ray
from omegaconf import OmegaConf

from vla3_plugin.contract import EnvSpec, Episode, Trajectory
from vla3_plugin.rollout.interaction import Arrays, LockstepInteraction, Mode


def summarise(trajectory: Trajectory) -> dict[str, Any]:
    """What the driver needs to know of a trajectory: scalars and the names of its samples."""
    return {
        "keys": trajectory.keys(),
        "episode": trajectory.episode.to_json(),
        "success": trajectory.success,
        "return": trajectory.episode_return,
        "control_steps": trajectory.control_steps,
        "version": int(trajectory.samples["version"].min()),
    }


@dataclass
class VideoRequest:
    """Which episodes to film, and where the run's videos go."""

    run_dir: str
    step: int
    episodes: list[int]


class EnvWorker:
    """``env``: name, shards_per_worker, envs_per_shard, python, timeout_s, options (see ``config.EnvConfig``)."""

    def __init__(self, rank: int, env: dict[str, Any], policy: dict[str, Any], policy_worker: Any, seed: int) -> None:
        import transfer_queue as tq

        from vla3_plugin.envs.registry import make_env
        from vla3_plugin.policies.prepare import check_env, load_preparer

        tq.init()
        self.policy_worker = policy_worker
        self.preparer = load_preparer(policy["path"], **policy["options"])
        self.envs = [
            make_env(
                env["name"],
                env["options"],
                num_slots=env["envs_per_shard"],
                python=env["python"],
                timeout_s=env["timeout_s"],
                name=f"{env['name']}/{rank}.{i}",
            )
            for i in range(env["shards_per_worker"])
        ]
        check_env(self.preparer, self.envs[0].spec)
        self.interaction = LockstepInteraction(self.envs, self._prepare, self._act, seed)
        self.policy_s = 0.0

    def spec(self) -> dict[str, Any]:
        return self.envs[0].spec.to_json()

    def _prepare(self, observations: Sequence[Any]) -> Arrays:
        return {name: tensor.numpy() for name, tensor in self.preparer.prepare(observations).items()}

    def _act(self, inputs: Arrays, keys: Sequence[Any], mode: Mode) -> Arrays:
        start = time.perf_counter()
        output = ray.get(self.policy_worker.act.remote(inputs, list(keys), mode))
        self.policy_s += time.perf_counter() - start
        return output

    def collect(
        self, episodes: list[dict[str, int]], mode: Mode, keep: bool, video: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Run the assigned episodes and ``keep`` their samples in the store; ``video``: see ``VideoRequest``."""
        start, self.policy_s = time.perf_counter(), 0.0
        plan = [Episode(**e) for e in episodes]
        request = VideoRequest(**video) if video else None
        summaries = []
        for trajectory in self.interaction.run(plan, mode, frozenset(request.episodes if request else ())):
            if keep:
                from vla3_plugin.rollout.store import put_trajectory

                put_trajectory(trajectory)
            summaries.append(summarise(trajectory))
            if request and trajectory.episode.episode_id in request.episodes:
                _write_video(request, trajectory, self.envs[0].spec)
        elapsed = time.perf_counter() - start
        return {"trajectories": summaries, "seconds": elapsed, "policy_seconds": self.policy_s}

    def close(self) -> None:
        self.interaction.close()


def _write_video(request: VideoRequest, trajectory: Trajectory, spec: EnvSpec) -> None:
    from vla3_plugin.telemetry.video import video_path, write_video

    episode = trajectory.episode
    task = spec.instructions[episode.task_id] if spec.instructions else f"task {episode.task_id}"
    path = video_path(request.run_dir, request.step, task, episode.episode_id, trajectory.success)
    write_video(path, np.stack(trajectory.frames), fps=spec.control_hz, success=trajectory.success)


class InteractionManager:
    """Spreads episodes over env workers and waits for them."""

    def __init__(self, workers: list[Any], deadline_s: float) -> None:
        self.workers, self.deadline_s = workers, deadline_s
        self.env_spec = EnvSpec.from_json(self._get([workers[0].spec.remote()], "start their simulators")[0])

    @classmethod
    def create(cls, config: Any, llm_client: list[Any], **_: Any) -> "InteractionManager":
        """verl's hook; ``llm_client`` is what ``VLA3Trainer.get_llm_client`` returned: the policy workers."""
        vla3: Any = OmegaConf.to_container(config.vla3, resolve=True)
        env = vla3["env"]
        model = config.actor_rollout_ref.model
        policy = {"path": model.path, "options": OmegaConf.to_container(model.options, resolve=True)}
        remote: Any = ray.remote(num_cpus=0)(EnvWorker)
        workers = [
            remote.remote(rank, env, policy, server, vla3["seed"])
            for rank, server in ((r, llm_client[r % len(llm_client)]) for r in range(env["workers"]))
        ]
        return cls(workers, env["deadline_s"])

    def _get(self, refs: list[Any], what: str) -> list[Any]:
        ready, pending = ray.wait(refs, num_returns=len(refs), timeout=self.deadline_s)
        if pending:
            late = [i for i, ref in enumerate(refs) if ref in set(pending)]
            raise TimeoutError(
                f"env workers {late} did not {what} within vla3.env.deadline_s = {self.deadline_s} s; "
                "raise it if the simulator is that slow, otherwise look at the workers' stderr"
            )
        return ray.get(refs)

    def collect(
        self, episodes: Sequence[Episode], mode: Mode, keep: bool, video: VideoRequest | None = None
    ) -> dict[str, Any]:
        """All trajectories of ``episodes``, in the plan's order, with the time the workers took."""
        count = len(self.workers)
        film = asdict(video) if video else None
        shares = [[e.to_json() for e in episodes[i::count]] for i in range(count)]
        refs = [w.collect.remote(s, mode, keep, film) for w, s in zip(self.workers, shares, strict=True) if s]
        replies = self._get(refs, f"finish {len(episodes)} episodes")
        trajectories = [t for reply in replies for t in reply["trajectories"]]
        trajectories.sort(key=lambda t: t["episode"]["episode_id"])
        return {
            "trajectories": trajectories,
            "seconds": max(r["seconds"] for r in replies),
            "policy_seconds": max(r["policy_seconds"] for r in replies),
        }

    def close(self) -> None:
        ray.get([w.close.remote() for w in self.workers], timeout=30)

