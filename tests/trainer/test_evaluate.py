"""Evaluations beside training: which weights answer, what counts, when it is refused."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from vla3_plugin.config import VLA3Config
from vla3_plugin.config_cross import evaluation_overlaps, overlap_fault
from vla3_plugin.contract import Episode
from vla3_plugin.policies.base import ActionChunk, VLAPolicy
from vla3_plugin.policies.serve import ServedPolicy
from vla3_plugin.trainer.evaluate import Evaluator, play


class Constant(VLAPolicy):
    """A policy that answers with its one weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def act(self, inputs, keys, mode):
        actions = self.weight.expand(len(keys), 1, 1).clone()
        return ActionChunk(actions=actions, logprob=actions, value=actions[:, 0], trace={})


def answer(served, mode):
    found = served.act({}, [(0, 0, 0)], mode)
    return float(found["actions"][0, 0, 0]), int(found["version"][0])


def test_a_pinned_version_answers_evaluation_and_nothing_else_until_it_is_let_go():
    served = ServedPolicy(Constant(), version=3)
    served.pin()
    served.policy.load_state_dict({"weight": torch.ones(1)})
    served.version = 4
    assert answer(served, "eval") == (0.0, 3) and answer(served, "train") == (1.0, 4)
    served.unpin()
    assert answer(served, "eval") == (1.0, 4)


def test_an_episode_that_newer_weights_had_a_part_in_does_not_count():
    def trajectory(index, success, *versions):
        return {"episode": {"episode_id": index, "task_id": 0}, "success": success, "versions": list(versions)}

    played = [trajectory(0, True, 5, 5), trajectory(1, True, 5, 6), trajectory(2, False, 5), trajectory(3, True, 6)]
    interaction = SimpleNamespace(
        env_spec=SimpleNamespace(name="line", instructions=["go"]),
        collect=lambda *_args, **_kwargs: {"trajectories": played, "quarantined": 1},
    )
    episodes = [Episode(i, 0, 0, i, i) for i in range(5)]
    evaluation = play(interaction, episodes, "eval", 5)
    assert evaluation.table.total == (1, 2)
    assert evaluation.extra == {"quarantined": 1, "of_other_versions": 2}
    assert not evaluation.whole, "those that ended early are those that succeeded: no rate to choose by"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: None, None),
        (lambda c: setattr(c.stages.training, "enabled", False), "vla3.stages.training.enabled=true"),
        (lambda c: setattr(c.stages.interaction, "batching", "step_join"), "use run_to_completion"),
        (lambda c: setattr(c.evaluation, "mode", "both"), "use ode"),
    ],
)
def test_where_training_cannot_go_on_it_does_not_and_asking_for_it_is_refused(change, message):
    config = VLA3Config()
    config.stages.training.enabled = config.stages.interaction.enabled = True
    change(config)
    assert evaluation_overlaps(config) == (message is None)
    assert message is None or message in overlap_fault(config)
    config.evaluation.overlap = False
    assert not evaluation_overlaps(config)


def test_an_evaluation_that_failed_does_not_cost_the_checkpoint_of_a_run_that_is_stopped():
    notes = []
    trainer = SimpleNamespace(vla3=VLA3Config(), config=OmegaConf.create(), record=SimpleNamespace(note=notes.append))
    evaluator = Evaluator(trainer)
    evaluator.abandon()
    evaluator._under_way = Future()
    evaluator.abandon()
    assert notes == [], "nothing under way, or not ended yet"
    evaluator._under_way.set_exception(TimeoutError("no episode finished"))
    evaluator.abandon()
    assert len(notes) == 1 and "TimeoutError no episode finished" in notes[0]
