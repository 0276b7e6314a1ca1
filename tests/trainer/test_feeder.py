"""The driver's wait for groups: what ends it, besides groups."""

import threading
import time
from types import SimpleNamespace

import pytest

from vla3_plugin.config import TrainingStage
from vla3_plugin.rollout.plan import EpisodePlan
from vla3_plugin.telemetry.timeline import Timeline
from vla3_plugin.trainer import feeder as feeder_module
from vla3_plugin.trainer.admission import Admission
from vla3_plugin.trainer.feeder import Feeder, build_feeder


class Interaction:
    """Plays nothing by itself: the test finishes episodes."""

    def __init__(self):
        self.submitted, self.finished, self.done = [], [], None

    def on_failure(self, callback):
        self.failure = callback

    def submit(self, assignments, done):
        self.submitted += [a.episode.episode_id for a in assignments]
        self.done = done

    def finish_all(self, version):
        for episode in [e for e in self.submitted if e not in self.finished]:
            self.finish(episode, version)

    def finish(self, episode, version=0):
        self.finished.append(episode)
        self.done({"episode": {"episode_id": episode, "group_id": episode // 2}, "version": version, "keys": ["0"]})


def feeder(max_staleness, ahead=True, deadline_s=30.0, just_in_time=False):
    interaction = Interaction()
    admission = Admission(group_size=2, groups_per_step=2, max_staleness=max_staleness, just_in_time=just_in_time)
    plan = EpisodePlan(0, [0], [], group_size=2)
    found = Feeder(interaction, plan, admission, ahead, Timeline("driver"), lambda groups: None, deadline_s)
    admission.begin_step(0)
    return interaction, found


def test_groups_start_ahead_of_the_step_as_far_as_the_bound_allows():
    interaction, found = feeder(max_staleness=1)
    found.published(0)
    assert interaction.submitted == list(range(8)), "this step's two groups of two, and the next step's"
    found.begin_step(0)
    for episode in (0, 1, 3, 2):
        interaction.finish(episode)
    assert [g.index for g in found.groups(2)] == [0, 1]
    found.published(1)
    found.begin_step(1)
    assert interaction.submitted == list(range(12))


def test_a_learner_that_finds_groups_left_over_has_fewer_started_and_one_that_waits_more_at_once(monkeypatch):
    at = [0.0]
    monkeypatch.setattr(feeder_module, "time", SimpleNamespace(monotonic=lambda: at[0]))
    interaction, found = feeder(max_staleness=1, just_in_time=True)
    found.published(0)
    for now in range(4):
        found.begin_step(now)
        interaction.finish_all(now)
        found.groups(2)
        at[0] += 10.0
        found.account()
        found.published(now + 1)
    assert found.metrics()["rollout/lead"] == 3, "of four, two were left over; one is the reserve"
    found.begin_step(4)

    def late():
        at[0] += 4.0
        interaction.finish_all(4)

    threading.Timer(0.3, late).start()
    while len(found.admission.taken) < 2:
        found.groups(2)
    assert found.metrics()["rollout/lead"] == 4


@pytest.mark.parametrize(
    ("enabled", "bound", "just_in_time", "lead"),
    [(True, 2, True, 3), (True, 2, False, None), (True, 0, True, None), (False, 2, True, None)],
)
def test_a_run_starts_its_groups_as_its_config_says(enabled, bound, just_in_time, lead):
    """Just in time: those of a step and a quarter at first; otherwise all that the bound allows."""
    interaction = Interaction()
    stage = TrainingStage(enabled=enabled, max_staleness=bound, just_in_time=just_in_time)
    bound = bound if enabled else 0
    trainer = SimpleNamespace(
        vla3=SimpleNamespace(
            stages=SimpleNamespace(training=stage), algorithm=SimpleNamespace(group_size=2), seed=0, deadline_s=30.0
        ),
        admission_state={}, groups_per_step=2, max_staleness=bound, total_training_steps=9, global_steps=0,
        interaction=interaction, tasks=[0], timeline=Timeline("driver"), drop=lambda groups: None,
    )  # fmt: skip
    found = build_feeder(trainer, [])
    found.begin_step(0)
    assert found.metrics().get("rollout/lead") == lead
    assert len(interaction.submitted) == 2 * (lead or (bound + 1) * 2)


def test_without_decoupled_training_nothing_starts_outside_a_step():
    interaction, found = feeder(max_staleness=0, ahead=False)
    found.published(0)
    assert interaction.submitted == []
    found.begin_step(0)
    assert interaction.submitted == [0, 1, 2, 3]


def test_a_failed_publication_ends_the_wait_for_groups_that_it_held_back():
    """At lag 0 nothing can start before the new version is served; its failure would otherwise be read by nobody."""
    _, found = feeder(max_staleness=0)
    threading.Timer(0.2, found.fail, [RuntimeError("policy worker 1 died")]).start()
    found.begin_step(1)
    with pytest.raises(RuntimeError, match="policy worker 1 died"):
        found.groups(2)


def test_a_publication_that_never_comes_ends_the_wait_at_the_deadline_and_is_named():
    _, found = feeder(max_staleness=0, deadline_s=0.5)
    found.begin_step(5)
    found.published(4)
    start = time.monotonic()
    named = r"version 5 waits for 2 groups .* serve version 4, .* vla3\.deadline_s = 0\.5"
    with pytest.raises(TimeoutError, match=named):
        found.groups(2)
    assert time.monotonic() - start < 5
