"""The policy worker's side of a publication."""

import asyncio
import types

import pytest
import torch

from vla3_plugin.rollout.inference_lane import DirectLane
from vla3_plugin.rollout.policy_worker import PolicyServer
from vla3_plugin.telemetry.timeline import Timeline


class Policy:
    """Notes the version that is served while it takes in new weights, as one that reloads an engine of its own does."""

    def __init__(self, served, error=None):
        self.served, self.error, self.seen = served, error, []

    def state_dict(self):
        return {"w": torch.zeros(2)}

    def load_state_dict(self, state, strict):
        self.state = dict(state)

    def renewed(self):
        self.seen.append(self.served.version)
        if self.error:
            raise self.error


def server(version, error=None):
    found = PolicyServer.__new__(PolicyServer)
    found.timeline, found.served = Timeline("policy0"), types.SimpleNamespace(version=version)
    found.served.policy = Policy(found.served, error)
    found.lane = DirectLane(found.served, found.timeline)
    return found


def publish(to, version):
    async def weights():
        yield "w", torch.ones(2)

    asyncio.run(to.update_weights(weights(), global_steps=version))
    to.lane.thread.shutdown()


def test_a_worker_that_takes_in_weights_is_not_taken_for_a_new_process():
    """vLLM needs seconds for it. It said -1 meanwhile, which counted as a lost worker."""
    worker = server(version=3)
    publish(worker, 4)
    assert worker.served.policy.seen == [3] and worker.served.version == 4


def test_weights_that_what_samples_did_not_take_are_not_served():
    worker = server(version=3, error=RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        publish(worker, 4)
    assert worker.served.version == -1
