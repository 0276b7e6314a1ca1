"""Evaluation of a checkpoint without Ray: the same environments, interaction loop and episode plan as in training."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vla3_plugin.envs.registry import make_env
from vla3_plugin.policies.prepare import check_env
from vla3_plugin.policies.registry import load_policy
from vla3_plugin.policies.serve import ServedPolicy
from vla3_plugin.profile import has_gpu
from vla3_plugin.rollout.env_worker import summarise
from vla3_plugin.rollout.episodes import Assignment, EpisodeQueue, Mode
from vla3_plugin.rollout.interaction import Interaction, Quarantined
from vla3_plugin.rollout.plan import evaluation_episodes, split_init_states
from vla3_plugin.rollout.supervision import Event, Limits, SupervisedEnv
from vla3_plugin.telemetry import clock
from vla3_plugin.telemetry.metrics import Evaluation, MetricsWriter
from vla3_plugin.telemetry.video import video_path, write_video
from vla3_plugin.trainer.evaluate import filmed, table_of


def evaluate_checkpoint(
    policy: str,
    env: str,
    env_options: dict[str, Any],
    policy_options: dict[str, Any],
    *,
    tasks: Sequence[int] | None = None,
    episodes: int = 20,
    held_out: int = 0,
    mode: Literal["ode", "sde"] = "ode",
    processes: int = 2,
    slots: int = 1,
    python: str | None = None,
    seed: int = 0,
    videos: int = 0,
    out: Path | None = None,
) -> Evaluation:
    """``episodes`` per task on assigned initial states and seeds; written to ``out`` (record, videos) where given."""
    served = ServedPolicy(load_policy(policy, **policy_options), "cuda" if has_gpu() else "cpu")
    envs = [
        SupervisedEnv(
            partial(make_env, env, env_options, num_slots=slots, python=python, name=f"{env} {i}"), Limits(), _warn
        )
        for i in range(processes)
    ]
    spec = envs[0].spec
    chosen = list(tasks) if tasks is not None else list(range(spec.num_tasks))
    plan = evaluation_episodes(chosen, split_init_states(spec, held_out)[1], episodes, seed)

    def prepare(observations: Sequence[Any]) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in served.policy.prepare(observations).items()}

    interaction = Interaction(envs, prepare, served.act, seed)
    started, summaries = clock.now(), []
    given_up: list[int] = []
    kinds: dict[str, Mode] = {"ode": "eval", "sde": "train"}
    try:
        check_env(served.policy, spec)
        ids = frozenset(filmed(plan, videos)) if videos and out is not None else frozenset()
        source = EpisodeQueue([Assignment(e, kinds[mode], False, e.episode_id in ids) for e in plan], closed=True)
        for finished in interaction.run(source):
            if isinstance(finished, Quarantined):
                given_up.append(finished.assignment.episode.episode_id)
                continue
            trajectory = finished.trajectory
            summaries.append(summarise(trajectory))
            episode = trajectory.episode
            if out is not None and episode.episode_id in ids:
                task = spec.instructions[episode.task_id] if spec.instructions else f"task {episode.task_id}"
                path = video_path(out, 0, task, episode.episode_id, trajectory.success)
                write_video(path, np.stack(trajectory.frames), fps=spec.control_hz, success=trajectory.success)
    finally:
        interaction.close()
    evaluation = Evaluation(0, spec.name, mode, table_of(spec, summaries), started, clock.now(), {"policy": policy})
    if given_up:
        evaluation.extra["quarantined"] = len(given_up)
    if out is not None:
        writer = MetricsWriter(out)
        writer.log_evaluation(evaluation)
        writer.close()
    return evaluation


def _warn(event: Event) -> None:
    print(f"vla3: {event['kind'].replace('_', ' ')}, {event['where']}: {event['why']}", file=sys.stderr)
