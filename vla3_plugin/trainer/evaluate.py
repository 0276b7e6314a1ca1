"""Evaluation of the current version on assigned, held-out episodes, with Wilson intervals and videos."""

from collections.abc import Sequence
from typing import Any

from vla3_plugin.contract import EnvSpec, Episode
from vla3_plugin.rollout.episodes import Mode
from vla3_plugin.rollout.manager import InteractionManager
from vla3_plugin.rollout.plan import evaluation_episodes
from vla3_plugin.telemetry import clock
from vla3_plugin.telemetry.metrics import Evaluation, SuccessTable


def table_of(spec: EnvSpec, trajectories: Sequence[dict[str, Any]]) -> SuccessTable:
    table = SuccessTable()
    for trajectory in trajectories:
        task = trajectory["episode"]["task_id"]
        table.add(spec.instructions[task] if spec.instructions else f"task {task}", trajectory["success"])
    return table


def filmed(episodes: Sequence[Episode], count: int) -> list[int]:
    """``count`` episodes spread over the plan, so that videos show different tasks."""
    stride = max(1, len(episodes) // max(count, 1))
    return [e.episode_id for e in episodes[::stride]][:count]


def play(
    interaction: InteractionManager, episodes: Sequence[Episode], mode: Mode, step: int, film: Sequence[int] = ()
) -> Evaluation:
    """One evaluation in ``mode``: ``eval`` is the noise-free (ode) policy, ``train`` the noisy (sde) one."""
    started = clock.now()
    result = interaction.collect(episodes, mode, keep=False, film=frozenset(film))
    spec = interaction.env_spec
    name = {"eval": "ode", "train": "sde"}[mode]
    evaluation = Evaluation(step, spec.name, name, table_of(spec, result["trajectories"]), started, clock.now())
    if result["quarantined"]:
        evaluation.extra["quarantined"] = result["quarantined"]
    return evaluation


def run(trainer: Any) -> list[Evaluation]:
    """The evaluations that ``vla3.evaluation`` asks for, of the version the policy workers hold now."""
    config = trainer.vla3.evaluation
    episodes = evaluation_episodes(trainer.tasks, trainer.eval_states, config.episodes_per_task, trainer.vla3.seed)
    modes: list[Mode] = ["eval", "train"] if config.mode == "both" else ["eval"]
    evaluations = []
    for mode in modes:
        ids = filmed(episodes, config.videos) if mode == "eval" else []
        evaluation = play(trainer.interaction, episodes, mode, trainer.global_steps, ids)
        evaluation.extra["env_steps"] = trainer.env_steps
        evaluations.append(evaluation)
    return evaluations


def metrics_of(evaluation: Evaluation) -> dict[str, float]:
    """The evaluation in verl's metric names, for its loggers."""
    low, high = evaluation.table.interval()
    prefix = f"val/{evaluation.env}/{evaluation.mode}"
    found = {f"{prefix}/success_rate": evaluation.table.rate, f"{prefix}/low": low, f"{prefix}/high": high}
    return found | {f"{prefix}/episodes": float(evaluation.table.total[1])}
