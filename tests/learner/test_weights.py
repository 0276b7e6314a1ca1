"""The weight plane: what arrives is what was published, or nothing is served."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.learner.weights import WeightError, pack, unpack


def named(**extra):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(12),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        **extra,
    }
    return tensors


def test_a_publication_round_trips_every_dtype_and_shape():
    weights = named(transposed=torch.arange(6.0).reshape(2, 3).T)
    manifest, buffer = pack(iter(weights.items()), version=4)
    for name, tensor in unpack(manifest, buffer, 4):
        assert tensor.dtype == weights[name].dtype and torch.equal(tensor, weights[name])
    assert manifest["count"] == len(weights)


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(place, bit):
    manifest, buffer = pack(iter(named().items()), version=1)
    buffer[place % len(buffer)] ^= 1 << bit
    with pytest.raises(WeightError, match="checksum"):
        unpack(manifest, buffer, 1)


def test_weights_of_another_version_are_refused():
    manifest, buffer = pack(iter(named().items()), version=1)
    with pytest.raises(WeightError, match="version 1 arrived, version 2 was announced"):
        unpack(manifest, buffer, 2)


def test_a_partial_publication_is_refused():
    manifest, buffer = pack(iter(named().items()), version=1)
    with pytest.raises(WeightError, match="bytes arrived"):
        unpack(manifest, buffer[:-1], 1)
    fewer = copy.deepcopy(manifest)
    fewer["entries"].pop()
    with pytest.raises(WeightError, match="tensors"):
        unpack(fewer, buffer, 1)


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_a_replica_keeps_its_version_when_the_parameters_do_not_fit(change):
    import asyncio

    from vla3_plugin.policies.serve import ServedPolicy
    from vla3_plugin.rollout.inference_lane import DirectLane
    from vla3_plugin.rollout.policy_worker import PolicyServer
    from vla3_plugin.telemetry.timeline import Timeline

    server = PolicyServer.__new__(PolicyServer)
    server.served, server.timeline = ServedPolicy(torch.nn.Linear(2, 3), version=7), Timeline("policy0")
    server.lane = DirectLane(server.served, server.timeline)
    state = {k: v + 1 for k, v in server.served.policy.state_dict().items()}
    if change == "missing":
        del state["bias"]
    elif change == "unexpected":
        state["extra"] = torch.zeros(1)
    else:
        state["weight"] = torch.zeros(3, 4)
    before = {k: v.clone() for k, v in server.served.policy.state_dict().items()}

    async def arriving():
        for pair in state.items():
            yield pair

    with pytest.raises(WeightError, match="version 7 stays"):
        asyncio.run(server.update_weights(arriving(), global_steps=8))
    assert server.served.version == 7
    assert all(torch.equal(v, before[k]) for k, v in server.served.policy.state_dict().items())
