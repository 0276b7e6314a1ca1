"""Evaluation of the current version on assigned, held-out episodes, with Wilson intervals and videos."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import ray

from vla3_plugin.config_cross import evaluation_overlaps, samples_through_vllm
from vla3_plugin.contract import EnvSpec, Episode
from vla3_plugin.learner.weights import WeightError
from vla3_plugin.rollout.episodes import Mode
from vla3_plugin.rollout.manager import InteractionManager
from vla3_plugin.rollout.plan import evaluation_episodes
from vla3_plugin.telemetry import clock
from vla3_plugin.telemetry.metrics import Evaluation, SuccessTable

if TYPE_CHECKING:
    from vla3_plugin.trainer.trainer import VLA3Trainer


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
    """One evaluation in ``mode``: ``eval`` is the noise-free (ode) policy, ``train`` the noisy (sde) one.

    An episode that weights of another step had a part in does not count (its policy worker was restarted meanwhile).
    """
    started = clock.now()
    result = interaction.collect(episodes, mode, keep=False, film=frozenset(film))
    spec = interaction.env_spec
    name = {"eval": "ode", "train": "sde"}[mode]
    counted = [t for t in result["trajectories"] if set(t["versions"]) == {step}]
    evaluation = Evaluation(step, spec.name, name, table_of(spec, counted), started, clock.now())
    for why, count in (
        ("quarantined", result["quarantined"]),
        ("of_other_versions", len(result["trajectories"]) - len(counted)),
    ):
        if count:
            evaluation.extra[why] = count
    return evaluation


def run(trainer: VLA3Trainer, step: int, env_steps: int) -> list[Evaluation]:
    """The evaluations that ``vla3.evaluation`` asks for, of the weights of ``step``, which the policy workers hold."""
    config = trainer.vla3.evaluation
    episodes = evaluation_episodes(trainer.tasks, trainer.eval_states, config.episodes_per_task, trainer.vla3.seed)
    modes: list[Mode] = ["eval", "train"] if config.mode == "both" else ["eval"]
    evaluations = []
    for mode in modes:
        ids = filmed(episodes, config.videos) if mode == "eval" else []
        evaluation = play(trainer.interaction, episodes, mode, step, ids)
        evaluation.extra["env_steps"] = env_steps
        evaluations.append(evaluation)
    return evaluations


class Evaluator:
    """The trainer's evaluations. Before training and after the last step they are waited for. Between, where they may
    overlap, one at a time runs on a thread of its own, with weights that the policy workers keep a copy of meanwhile.
    """

    def __init__(self, trainer: VLA3Trainer) -> None:
        self.trainer = trainer
        self.overlaps = evaluation_overlaps(trainer.vla3, samples_through_vllm(trainer.config))
        self._under_way: Future[list[Evaluation]] | None = None
        self.step: int | None = None  # whose evaluation is under way

    def evaluate(self) -> dict[str, float]:
        """Evaluate the version that is served everywhere now; metrics of the evaluations that have ended."""
        trainer, metrics = self.trainer, self.finished(wait=True)
        between = trainer.row and trainer.global_steps < trainer.total_training_steps
        if self.overlaps and between:
            self._start(trainer.global_steps, trainer.env_steps)
            return metrics
        if self.overlaps:
            self._ask_all("unpin")  # who could not be reached when the last one ended
        return metrics | self._told(run(trainer, trainer.global_steps, trainer.env_steps))

    def finished(self, wait: bool) -> dict[str, float]:
        """Metrics of the one under way, if it has ended; raises what went wrong with it."""
        if self._under_way is None or not (wait or self._under_way.done()):
            return {}
        done, self._under_way, self.step = self._under_way, None, None
        return self._told(done.result())

    def abandon(self) -> None:
        """Take the one under way if it has ended. It may have been stopped too, or have failed: a checkpoint that is to
        be saved now must not be lost for it."""
        try:
            self.finished(wait=False)
        except Exception as error:
            self.trainer.record.note(f"the evaluation that was under way is lost: {type(error).__name__} {error}")

    def _told(self, evaluations: list[Evaluation]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for evaluation in evaluations:
            self.trainer.record.evaluation(evaluation)
            metrics |= metrics_of(evaluation) | {"val/step": float(evaluation.step)}
        return metrics

    def _start(self, step: int, env_steps: int) -> None:
        self._ask_all("pin", step)
        done: Future[list[Evaluation]] = Future()
        self._under_way, self.step = done, step
        threading.Thread(target=self._run, args=(done, step, env_steps), name="evaluation", daemon=True).start()

    def _run(self, done: Future[list[Evaluation]], step: int, env_steps: int) -> None:
        try:
            with self.trainer.timeline.span("evaluation", "evaluate", version=step):
                found = run(self.trainer, step, env_steps)
            self._ask_all("unpin")
            done.set_result(found)
        except BaseException as error:
            done.set_exception(error)

    def _ask_all(self, what: str, *args: Any) -> None:
        """A policy worker that is being restarted, or has just been and holds nothing yet, keeps nothing: what it
        answers with a later version does not count."""
        for call in [getattr(server, what).remote(*args) for server in self.trainer.get_llm_client()]:
            with contextlib.suppress(ray.exceptions.RayActorError, WeightError):
                ray.get(call, timeout=self.trainer.vla3.deadline_s)


def metrics_of(evaluation: Evaluation) -> dict[str, float]:
    """The evaluation in verl's metric names, for its loggers."""
    low, high = evaluation.table.interval()
    prefix = f"val/{evaluation.env}/{evaluation.mode}"
    found = {f"{prefix}/success_rate": evaluation.table.rate, f"{prefix}/low": low, f"{prefix}/high": high}
    return found | {f"{prefix}/episodes": float(evaluation.table.total[1])}
