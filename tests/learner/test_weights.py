"""The weight plane: what arrives is what was published, or nothing is served."""

import asyncio
import copy
import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.learner.weights import (
    TRAINED_ONLY,
    Circle,
    GlooCheckpointEngine,
    WeightError,
    pack,
    topology,
    unpack,
)
from vla3_plugin.policies.base import VLAPolicy
from vla3_plugin.policies.serve import ServedPolicy
from vla3_plugin.rollout.inference_lane import DirectLane
from vla3_plugin.rollout.policy_worker import PolicyServer
from vla3_plugin.telemetry import traffic
from vla3_plugin.telemetry.timeline import Timeline


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


def connected(*nodes):
    """An engine for each process of these nodes, the first of them the learner's, ready to send and receive."""
    engines = [GlooCheckpointEngine(0, is_master=i == 0) for i in range(len(nodes))]
    metadata = [
        {"address": "127.0.0.1", "port": engine.listen("127.0.0.1"), "node": node}
        for engine, node in zip(engines, nodes, strict=True)
    ]
    actor, rollout = GlooCheckpointEngine.build_topology(1, len(nodes) - 1, metadata)
    circles = zip(actor["source"] + rollout["source"], actor["relay"] + rollout["relay"], strict=True)
    for engine, (source, relay) in zip(engines, circles, strict=True):
        engine.init_process_group(source, relay)
    return engines


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_who_will_send_can_be_connected_to_before_it_does_and_nobody_else_or_later():
    """A receiver that came before the sender listened used to wait for its next attempt, ten times the rest."""
    engine = GlooCheckpointEngine(0)
    port = engine.listen("127.0.0.1")
    engine.init_process_group(None, Circle(0, 2, "127.0.0.1", port))
    assert listens(port)
    engine.finalize()
    assert not listens(port)
    again = engine.listen("127.0.0.1")
    engine.init_process_group(Circle(1, 2, "127.0.0.1", 1), None)
    assert not listens(again), "it hands nothing on"


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12), st.sampled_from("abcd"))
def test_weights_cross_the_network_once_a_node_and_reach_every_receiver(nodes, home):
    receivers = [{"address": "host", "port": i, "node": node} for i, node in enumerate(nodes)]
    sources, relays = topology({"address": "host", "port": -1, "node": home}, receivers)
    assert all(source is not None for source in sources)
    assert sum(source.between_nodes for source in sources) == len(set(nodes) - {home})
    circles = {circle.port: circle for circle in relays if circle is not None}
    for port, circle in circles.items():
        ranks = sorted(source.rank for source in sources if source.port == port)
        assert ranks == list(range(1, circle.world_size)), "everybody that rank 0 waits for comes, and nobody else"
        sender = home if port == -1 else receivers[port]["node"]
        for receiver, source in zip(receivers, sources, strict=True):
            if source.port == port:
                assert (receiver["node"] != sender) == source.between_nodes
    assert -1 in circles and circles[-1].rank == 0


def test_a_relayed_publication_arrives_whole_on_two_nodes():
    """Five policy workers on two nodes, over real connections: two beside the learner, three that share one stream."""
    weights, engines = named(), connected("a", "a", "a", "b", "b", "b")

    async def receive(engine):
        return {name: tensor async for name, tensor in engine.receive_weights(3)}

    async def publish():
        sent, *received = await asyncio.gather(
            engines[0].send_weights(iter(weights.items()), 3), *(receive(engine) for engine in engines[1:])
        )
        return sent, received

    traffic.drain("before")
    sent, received = asyncio.run(asyncio.wait_for(publish(), 60))
    for state in received:
        assert state.keys() == weights.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    (counted,) = traffic.drain("policies")
    assert counted.args["between_nodes"] == sent["weights/bytes"], "once, not three times"


def test_who_relays_damaged_weights_refuses_them_like_those_who_get_them_from_it(monkeypatch):
    engines = connected("a", "b", "b")

    def damaged(weights, version):
        manifest, buffer = pack(weights, version)
        buffer[5] ^= 1
        return manifest, buffer

    monkeypatch.setattr("vla3_plugin.learner.weights.pack", damaged)

    async def receive(engine):
        return [pair async for pair in engine.receive_weights(3)]

    async def publish():
        calls = engines[0].send_weights(iter(named().items()), 3), *(receive(engine) for engine in engines[1:])
        return await asyncio.gather(*calls, return_exceptions=True)

    _, *answers = asyncio.run(asyncio.wait_for(publish(), 60))
    assert [type(answer) for answer in answers] == [WeightError, WeightError]


class Linear(VLAPolicy, torch.nn.Linear):
    pass


def served(version):
    server = PolicyServer.__new__(PolicyServer)
    server.served, server.timeline = ServedPolicy(Linear(2, 3), version=version), Timeline("policy0")
    server.lane = DirectLane(server.served, server.timeline)
    return server


async def arriving(state):
    for pair in state.items():
        yield pair


def test_what_trains_is_swapped_in_beside_what_does_not_and_refused_by_who_holds_nothing():
    part = {"bias": torch.full((3,), 7.0), TRAINED_ONLY: torch.ones(1)}
    server = served(version=7)
    weight = server.served.policy.weight.clone()
    asyncio.run(server.update_weights(arriving(part), global_steps=8))
    assert server.served.version == 8 and torch.equal(server.served.policy.bias, part["bias"])
    assert torch.equal(server.served.policy.weight, weight)
    fresh = served(version=-1)
    with pytest.raises(WeightError, match="holds nothing yet"):
        asyncio.run(fresh.update_weights(arriving(part), global_steps=8))
    with pytest.raises(WeightError, match="unexpected"):
        asyncio.run(server.update_weights(arriving({**part, "bais": torch.zeros(3)}), global_steps=9))
    assert fresh.served.version == -1 and server.served.version == 8


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_a_replica_keeps_its_version_when_the_parameters_do_not_fit(change):
    server = served(version=7)
    state = {k: v + 1 for k, v in server.served.policy.state_dict().items()}
    if change == "missing":
        del state["bias"]
    elif change == "unexpected":
        state["extra"] = torch.zeros(1)
    else:
        state["weight"] = torch.zeros(3, 4)
    before = {k: v.clone() for k, v in server.served.policy.state_dict().items()}

    with pytest.raises(WeightError, match="version 7 stays"):
        asyncio.run(server.update_weights(arriving(state), global_steps=8))
    assert server.served.version == 7
    assert all(torch.equal(v, before[k]) for k, v in server.served.policy.state_dict().items())


def test_an_attempt_that_another_has_overtaken_leaves_that_ones_port_alone():
    """It took the listener of the next one: the store refused a port that is not its own, and both attempts failed."""
    engine = GlooCheckpointEngine(0, is_master=True)
    first = engine.listen("127.0.0.1")
    second = engine.listen("127.0.0.1")
    engine.init_process_group(None, Circle(0, 2, "127.0.0.1", first))
    with pytest.raises(RuntimeError, match="another attempt"):
        asyncio.run(engine.send_weights(iter(named().items()), global_steps=1))
    assert engine.listener.getsockname()[1] == second
    engine.finalize()
