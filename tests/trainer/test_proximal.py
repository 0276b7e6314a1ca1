"""What samples of older versions are given of the learner: the critic that learns from them must not learn from itself
of several versions ago."""

import types

import pytest
import torch

from vla3_plugin.config import AlgorithmConfig, TrainingStage
from vla3_plugin.learner import fields
from vla3_plugin.rollout import store
from vla3_plugin.trainer import proximal
from vla3_plugin.trainer.batch import AdvantageScale, Batch
from vla3_plugin.trainer.trainer import VLA3Trainer

LENGTH, GAMMA = 5, 0.98


class Rows:
    """A store in this process: key -> field -> row. Like the real one it hands out only what all rows have."""

    def __init__(self, monkeypatch):
        self.rows = {}
        monkeypatch.setattr(store, "get_fields", self.get)
        monkeypatch.setattr(store, "put_fields", self.put)

    def get(self, keys, names):
        return {name: torch.stack([self.rows[key][name] for key in keys]) for name in names}

    def put(self, keys, found):
        for name, values in found.items():
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value


def trainer(version, **stage):
    """A trainer's own methods and nothing of its processes."""
    found = VLA3Trainer.__new__(VLA3Trainer)
    algorithm = AlgorithmConfig(gamma=GAMMA, gae_lambda=0.9, update_epoch=2, advantage_statistics="previous")
    stages = types.SimpleNamespace(training=TrainingStage(enabled=True, **stage))
    found.vla3 = types.SimpleNamespace(algorithm=algorithm, stages=stages)
    found.version_now = version
    found.interaction = types.SimpleNamespace(env_spec=types.SimpleNamespace(max_steps=LENGTH))
    found.scale = AdvantageScale("previous", previous=[0.0, 1.0])
    return found


@pytest.fixture(autouse=True)
def version(monkeypatch):
    monkeypatch.setattr(VLA3Trainer, "version", property(lambda self: self.version_now), raising=False)


def episode(rows, number, versions, value, cut=False, bootstrap_version=None):
    """Chunk steps of one control step each; the last one succeeds, or is ``cut`` and pays for itself."""
    keys = [f"{number}_{i}" for i in range(LENGTH)]
    last = torch.arange(LENGTH)[:, None] == LENGTH - 1
    rows.put(
        keys,
        {
            "rewards": last.float(),
            "terminated": last & (not cut),
            "truncated": last & cut,
            fields.STEP_MASK: torch.ones_like(last),
            fields.VALUE: torch.as_tensor(value, dtype=torch.float32).expand(LENGTH, 1).clone(),
            fields.BOOTSTRAP: last.float() * value * cut,
            fields.BOOTSTRAP_VERSION: torch.full(
                (LENGTH, 1), versions[-1] if bootstrap_version is None else bootstrap_version
            ),
            "episode_id": torch.full((LENGTH, 1), number),
            "group_id": torch.full((LENGTH, 1), number),
            "chunk_index": torch.arange(LENGTH)[:, None],
            fields.LOGPROB: torch.randn(LENGTH, 1, 2),
        },
    )
    return {"keys": keys, "versions": versions, "episode": {"episode_id": number}}


def test_later_epochs_learn_from_the_learners_values_where_a_sample_is_older(monkeypatch):
    rows, now = Rows(monkeypatch), trainer(version=4)
    batch = Batch([episode(rows, 0, [3, 3, 3, 4, 4], 0.1), episode(rows, 1, [4] * LENGTH, 0.1)], divisor=1)
    now.compute_advantages(batch)
    seen = now.scale._seen.count
    rows.put(batch.keys, {fields.LEARNER_VALUE: torch.full((10, 1), 0.7), fields.PROXIMAL: torch.zeros(10, 1, 2)})
    fresh = rows.get(batch.keys[5:], [fields.VALUE, fields.RETURNS, fields.ADVANTAGES])
    proximal.carry_over(now, batch)
    values = torch.tensor([0.7, 0.7, 0.7, 0.1, 0.1])
    torch.testing.assert_close(rows.get(batch.keys[:5], [fields.VALUE])[fields.VALUE].flatten(), values)
    delta = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]) + GAMMA * torch.cat([values[1:], torch.zeros(1)]) - values
    expected = torch.zeros(LENGTH)
    for i in reversed(range(LENGTH)):
        expected[i] = delta[i] + (GAMMA * 0.9 * expected[i + 1] if i + 1 < LENGTH else 0)
    found = rows.get(batch.keys, [fields.RETURNS, fields.ADVANTAGES])
    torch.testing.assert_close(found[fields.RETURNS][:5].flatten(), expected + values)
    for name in (fields.VALUE, fields.RETURNS):
        torch.testing.assert_close(rows.get(batch.keys[5:], [name])[name], fresh[name])
    # the whole batch is there by now, and is normalised by itself
    everything = torch.cat([expected, fresh[fields.RETURNS].flatten() - 0.1])
    whitened = (everything - everything.mean()) / everything.std()
    torch.testing.assert_close(found[fields.ADVANTAGES].flatten(), whitened, rtol=1e-4, atol=1e-4)
    assert now.scale._seen.count == seen, "advantages that are computed twice count once"


@pytest.mark.parametrize("stage", [{}, {"proximal": "interpolate"}, {"correction": "none"}])
def test_a_batch_of_the_learners_own_version_is_left_as_it_is(monkeypatch, stage):
    """At lag 0 the run is the synchronous one, bit for bit; who asks for no recomputation gets none at any lag."""
    rows, now = Rows(monkeypatch), trainer(version=4, **stage)
    batch = Batch([episode(rows, 0, [4 if not stage else 3] * LENGTH, 0.1)], divisor=1)
    now.compute_advantages(batch)
    rows.put(batch.keys, {fields.LEARNER_VALUE: torch.full((5, 1), 0.7), fields.PROXIMAL: torch.zeros(5, 1, 2)})
    before = {key: dict(row) for key, row in rows.rows.items()}
    proximal.carry_over(now, batch)
    assert rows.rows == before


def test_samples_that_weigh_nothing_keep_their_own_values_and_complete_the_store(monkeypatch):
    rows, now = Rows(monkeypatch), trainer(version=4)
    batch = Batch([episode(rows, 0, [3] * LENGTH, 0.1), episode(rows, 1, [3] * LENGTH, 0.2)], divisor=1)
    now.compute_advantages(batch)
    batch.trained_keys = batch.keys[:5]
    rows.put(batch.trained_keys, {fields.LEARNER_VALUE: torch.full((5, 1), 0.7), fields.PROXIMAL: torch.ones(5, 1, 2)})
    proximal.carry_over(now, batch)
    found = rows.get(batch.keys, [fields.VALUE, fields.PROXIMAL])
    assert found[fields.VALUE].flatten().tolist() == pytest.approx([0.7] * 5 + [0.2] * 5)
    own = rows.get(batch.keys[5:], [fields.LOGPROB])[fields.LOGPROB]
    torch.testing.assert_close(found[fields.PROXIMAL][5:], own)


def test_the_value_of_a_final_observation_moves_with_the_one_before_it(monkeypatch):
    """Or the advantage of an episode's last step holds the whole way that the critic went, in cut episodes alone."""
    rows, now = Rows(monkeypatch), trainer(version=4)
    old, newer = [3] * LENGTH, dict(cut=True, bootstrap_version=4)
    batch = Batch([episode(rows, 0, old, 0.1, cut=True), episode(rows, 1, old, 0.1, **newer)], divisor=1)
    now.compute_advantages(batch)
    rows.put(batch.keys, {fields.LEARNER_VALUE: torch.full((10, 1), 0.7), fields.PROXIMAL: torch.zeros(10, 1, 2)})
    proximal.carry_over(now, batch)
    found = rows.get(["0_4", "1_4"], [fields.BOOTSTRAP, fields.RETURNS])
    assert found[fields.BOOTSTRAP].flatten().tolist() == pytest.approx([0.7, 0.1])
    assert found[fields.RETURNS].flatten().tolist() == pytest.approx([1 + GAMMA * 0.7, 1 + GAMMA * 0.1])


def critics(monkeypatch, lag, carried, cut):
    """Values step by step of a critic that learns, twice a step, exactly what it is told, from samples ``lag`` old."""
    history, found = [0.0] * (lag + 1), []
    for step in range(24):
        rows, now = Rows(monkeypatch), trainer(version=step + lag)
        batch = Batch([episode(rows, 0, [step] * LENGTH, history[-1 - lag], cut=cut)], divisor=1)
        now.compute_advantages(batch)
        told = rows.get(batch.keys, [fields.RETURNS])[fields.RETURNS].mean().item()
        if carried:
            rows.put(
                batch.keys, {fields.LEARNER_VALUE: torch.full((5, 1), told), fields.PROXIMAL: torch.zeros(5, 1, 2)}
            )
            proximal.carry_over(now, batch)
            told = rows.get(batch.keys, [fields.RETURNS])[fields.RETURNS].mean().item()
        history.append(told)
        found.append(told)
    return found


@pytest.mark.parametrize("cut", [False, True])
def test_a_critic_of_older_samples_learns_as_fast_as_one_of_fresh_ones(monkeypatch, cut):
    """It fell behind and swung: each of two critics, of the even and the odd versions, taught itself alone."""
    goal = critics(monkeypatch, 0, carried=False, cut=cut)[7]
    reached = {
        name: next(step for step, value in enumerate(values) if value > 0.9 * goal)
        for name, values in {
            "fresh": critics(monkeypatch, 0, carried=False, cut=cut),
            "old": critics(monkeypatch, 1, carried=False, cut=cut),
            "carried": critics(monkeypatch, 1, carried=True, cut=cut),
        }.items()
    }
    assert reached["carried"] <= reached["fresh"] < reached["old"]
