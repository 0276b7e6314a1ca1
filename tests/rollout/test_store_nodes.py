"""Samples stay on their node: rows in a storage unit near who made them, and at the learner's ranks of that node."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.rollout.store_nodes import by_node

A, B, C = "a", "b", "c"


@given(st.data())
def test_every_rank_gets_as_much_of_its_own_node_as_numbers_allow(data):
    ranks = data.draw(st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=6))
    room = data.draw(st.integers(0, 8))
    keys = [str(i) for i in range(room * len(ranks))]
    homes = {key: data.draw(st.sampled_from([A, B, C, "gone"])) for key in keys if data.draw(st.booleans())}
    found = by_node(keys, homes, ranks)
    assert Counter(found) == Counter(keys)
    parts = [found[i * room : (i + 1) * room] for i in range(len(ranks))]
    near = sum(homes.get(key) == there for there, part in zip(ranks, parts, strict=True) for key in part)
    if len(set(ranks)) == 1:
        assert found == keys, "on one node nothing moves"
    else:
        made, places = Counter(homes.values()), Counter(ranks)
        assert near == sum(min(made[there], room * count) for there, count in places.items())


def peer_class():
    """Made in a function: its actors get it by value, since they cannot import a test."""

    class Peer:
        def connect(self):
            import transfer_queue as tq
            from omegaconf import OmegaConf

            from vla3_plugin.rollout import store  # noqa: F401  as in an env worker, which does not import verl

            tq.init(
                OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1, "total_storage_size": 8}}})
            )

        def close(self):
            import transfer_queue as tq

            tq.close()

        def put(self, keys, columns):
            import torch

            from vla3_plugin.rollout import store

            store.put_fields(keys, {name: torch.tensor(rows) for name, rows in columns.items()})

        def get(self, keys, names):
            from vla3_plugin.rollout import store

            return {name: rows.tolist() for name, rows in store.get_fields(keys, names).items()}

        def clear(self, keys):
            from vla3_plugin.rollout import store

            store.clear(keys)

        def known(self):
            import transfer_queue as tq

            return sorted(tq.kv_list(partition_id="train").get("train", {}))

        def crossed(self):
            """Bytes between nodes since the last call, of this process."""
            from vla3_plugin.telemetry import traffic

            return int(traffic.traffic_metrics(traffic.drain("peer"))["traffic/data/store_between_nodes"])

    return Peer


@pytest.fixture(scope="module")
def peers():
    """An actor on each of two Ray nodes of this machine, with one queue, which gets a storage unit on either."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # ray's 15 has them wait for every other test
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})  # one for the controller
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes()]
    actor = ray.remote(num_cpus=0)(peer_class())
    found = [
        actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in nodes
    ]
    for peer in found:
        ray.get(peer.connect.remote())
    yield [lambda method, *args, p=peer: ray.get(getattr(p, method).remote(*args)) for peer in found]
    ray.get(found[0].close.remote())
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_a_row_stays_where_it_was_made_whoever_adds_to_it_and_crosses_only_to_who_is_elsewhere(peers):
    for here, there in (peers, peers[::-1]):
        keys, image = ["0_0", "0_1", "0_2"], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
        here("put", keys, {"image": image})
        assert here("get", keys, ["image"]) == {"image": image} and here("crossed") == 0
        there("put", keys, {"advantage": [[0.5], [0.25], [0.125]]})
        assert there("crossed") == 3 * 4, "what another node adds goes to the row"
        assert here("get", keys, ["advantage", "image"])["advantage"] == [[0.5], [0.25], [0.125]]
        assert here("crossed") == 0
        assert there("get", keys[:2], ["image"]) == {"image": image[:2]} and there("crossed") == 2 * 2 * 4
        there("clear", keys)
        assert here("known") == []


@pytest.mark.slow
def test_rows_of_both_nodes_in_one_request_and_fields_of_a_row_that_lie_apart(peers):
    here, there = peers
    here("put", ["0_0"], {"x": [[1.0]]})
    there("put", ["1_0"], {"x": [[2.0]]})
    # a row that is new beside one that is not: nobody can say where the old one is
    here("put", ["1_0", "2_0"], {"y": [[7.0], [8.0]]})
    here("crossed"), there("crossed")
    assert here("get", ["1_0", "0_0"], ["x"]) == {"x": [[2.0], [1.0]]} and here("crossed") == 4
    assert there("get", ["1_0"], ["x", "y"]) == {"x": [[2.0]], "y": [[7.0]]}
    there("clear", ["0_0", "1_0", "2_0"])
    here("put", ["1_0"], {"x": [[3.0]]})  # what was forgotten does not come back
    assert here("get", ["1_0"], ["x"]) == {"x": [[3.0]]}
    here("clear", ["1_0"])


@pytest.mark.slow
def test_a_node_whose_cpus_others_hold_is_named_where_its_unit_would_be_waited_for(peers):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from vla3_plugin.placement.fit import PlacementError
    from vla3_plugin.rollout.store_nodes import await_room

    await_room(2, "CPU", seconds=0)  # beside the units that are there

    @ray.remote(num_cpus=1)
    class Other:
        def ready(self):
            return ray.get_runtime_context().get_node_id()

    there = {node["NodeID"]: node["Resources"]["CPU"] for node in ray.nodes()}
    others = [Other.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n, soft=False)).remote() for n in there]
    ray.get([other.ready.remote() for other in others])
    with pytest.raises(PlacementError, match=r"1 wanted, 0 of 2 CPUs free.*required_node_resource=store"):
        await_room(2, "CPU", seconds=3)
    for other in others:
        ray.kill(other)
    await_room(2, "CPU", seconds=30)  # as soon as they are gone


@pytest.mark.slow
def test_one_node_may_hold_all_that_the_store_has_room_for(peers):
    here, _ = peers
    keys = [f"0_{i}" for i in range(8)]
    here("put", keys, {"x": [[float(i)] for i in range(8)]})
    assert here("get", keys, ["x"]) == {"x": [[float(i)] for i in range(8)]}
    here("clear", keys)
