"""The driver's side of a publication."""

import types

import pytest

from vla3_plugin.learner.weights import BACKEND, GlooCheckpointEngine
from vla3_plugin.trainer import weight_plane
from vla3_plugin.trainer.weight_plane import GlooPlane


class Answers:
    """An actor or a worker group: notes what it is asked."""

    def __init__(self, name, ranks=None):
        self.asked, self.name, self.world_size = [], name, ranks

    def __getattr__(self, method):
        def ask(*args, **kwargs):
            self.asked.append((method, args, kwargs))
            where = {"address": "10.0.0.1", "port": 7, "node": self.name}
            answer = where if method == "execute_checkpoint_engine" else {"weights/bytes": 8.0}
            return answer if self.world_size is None else [answer] * self.world_size

        if self.world_size is None:
            return types.SimpleNamespace(remote=ask)
        return ask


@pytest.fixture
def plane(monkeypatch):
    monkeypatch.setattr(weight_plane.ray, "get", lambda refs: refs)
    found = GlooPlane.__new__(GlooPlane)
    found.backend, found.backend_cls, found.actor_wg = BACKEND, GlooCheckpointEngine, Answers("a", ranks=2)
    found.replicas = [types.SimpleNamespace(workers=[Answers(node)]) for node in ("a", "b", "b")]
    return found


def test_a_publication_asks_every_worker_twice_and_tells_it_whose_it_is(plane):
    """verl's manager asks eight times, one after the other; a policy worker that is busy lets each wait."""
    assert plane.update_weights(global_steps=5) == {"weights/bytes": 8.0}
    (_, prepared, _), (name, _, sent) = plane.actor_wg.asked
    assert prepared == (["prepare", "prepare"],) and name == "update_weights"
    assert sent["global_steps"] == 5 and sent["circle"].rank == 0 and sent["circle"].world_size == 3
    first, second, third = (replica.workers[0].asked for replica in plane.replicas)
    for asked in (first, second, third):
        assert [entry[0] for entry in asked] == ["execute_checkpoint_engine", "receive"] and asked[1][1][0] == 5
    (_, source, relay), (_, onward, nothing) = second[1][1], third[1][1]
    assert source.between_nodes and relay.world_size == 2 and onward.rank == 1 and nothing is None
