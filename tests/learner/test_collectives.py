"""Bytes between ranks of the learner: real processes, two cells of two ranks, held to the closed form."""

import itertools
import json
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vla3_plugin.learner import collectives, engine_common, engine_fsdp
from vla3_plugin.placement.plan_costs import Sharding, bytes_sent
from vla3_plugin.telemetry import traffic

CELLS = Sharding(ranks=4, per_cell=2)
MICRO_BATCHES, NO_SYNC = (1, 3), (True, False)
WIDTH, BLOCKS = 64, 4


def counted():
    spans = traffic.drain("rank")
    return [traffic.traffic_metrics(spans)[f"traffic/learner/{hop}"] for hop in traffic.HOPS[traffic.LEARNER]]


def learner(mesh):
    """The engine's own code around a small module, sharded as verl shards: gathered in bfloat16, reduced in float32."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)))
    module[1].requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*module, module):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    found = engine_fsdp.VLAFSDPEngine.__new__(engine_fsdp.VLAFSDPEngine)
    found.module, found.scaler, found._qat_enabled = module, None, False
    found.optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0)
    found.optimizer_config = types.SimpleNamespace(clip_grad=1.0)
    return found


def rank_of_two_cells(rank, directory):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", 4), rank=rank, world_size=4)
    engine = learner(dist.init_device_mesh("cpu", (CELLS.cells, CELLS.per_cell), mesh_dim_names=("ddp", "fsdp")))
    for _ in range(2):  # the second changes nothing
        collectives.install(["node 0", "node 0", "node 1", "node 1"])
    found = {}
    for micro_batches, no_sync in itertools.product(MICRO_BATCHES, NO_SYNC):
        engine.engine_config = types.SimpleNamespace(use_no_sync_for_gradient_accumulation=no_sync)
        counted()
        for i in range(micro_batches):
            with engine._gradient_sync_context(is_last_micro_batch=i == micro_batches - 1):
                engine.module(torch.randn(2, WIDTH)).sum().backward()
        found[f"update {micro_batches} {no_sync}"] = counted()
    for block in engine.module:
        block.compile(backend="aot_eager")
    engine.module(torch.randn(2, WIDTH)).sum().backward()
    found["compiled"] = counted()
    engine.optimizer_step()
    found["norm"] = counted()
    for parameter in engine.module.parameters():
        engine_common.full(parameter)
    found["weights"] = counted()
    ones = torch.ones(4)
    dist.all_reduce(ones)
    with dist._coalescing_manager():  # one call of the group for both
        dist.all_reduce(ones)
        dist.all_reduce(ones)
    dist.broadcast(ones, 0)
    dist.all_gather([torch.empty(4) for _ in range(4)], ones)
    dist.reduce_scatter(torch.empty(1), list(ones.split(1)))
    found["by hand"] = counted()
    with open(f"{directory}/{rank}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bytes_between_ranks_of_two_cells_are_the_closed_form(tmp_path):
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(CELLS.ranks)]
    try:
        assert [rank.wait(240) for rank in ranks] == [0] * CELLS.ranks
    finally:
        for rank in ranks:
            rank.kill()
    a_block = WIDTH * WIDTH + WIDTH
    parameters, trainable = BLOCKS * a_block, (BLOCKS - 1) * a_block
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for micro_batches, no_sync in itertools.product(MICRO_BATCHES, NO_SYNC):
            gathers, reductions = 2 * micro_batches, 1 if no_sync else micro_batches
            expected = bytes_sent(parameters, trainable, CELLS, gathers, reductions)
            assert found[f"update {micro_batches} {no_sync}"] == pytest.approx(expected, rel=0.01), "5 % are allowed"
        assert found["compiled"] == found["update 1 True"]
        # the squared norm, summed over the ranks of a cell and no further
        assert 0 < found["norm"][0] <= 100 and found["norm"][1] == 0
        assert found["weights"] == pytest.approx(bytes_sent(parameters, 0, CELLS, gathered=4))
        # of 16 bytes over four ranks: three all-reduces, a broadcast, an all-gather and a reduce-scatter
        assert found["by hand"] == [0, 3 * 24 + 12 + 48 + 12]


def test_a_group_on_several_nodes_sends_between_them():
    nodes = ["a", "a", "b", "b"]
    assert collectives.hop([0, 1], nodes) == collectives.hop([3, 2], nodes) == collectives.hop([1], nodes)
    assert collectives.hop([0, 1], nodes) == "ranks_within_node"
    for ranks in ([0, 2], [1, 3], [0, 1, 2, 3]):
        assert collectives.hop(ranks, nodes) == "ranks_between_nodes"


@pytest.mark.parametrize("sent, expected", [(collectives._gathered, 300), (collectives._scattered, 75),
                                            (collectives._all_reduced, 150)])  # fmt: skip
def test_what_a_ring_of_four_sends_of_100_bytes(sent, expected):
    assert sent(4, 100) == expected and sent(1, 100) == 0


def test_without_a_process_group_or_nodes_nothing_is_counted():
    counted()
    collectives.install([])
    if dist.is_initialized():
        pytest.fail("an earlier test kept its process group")
    with pytest.raises(ValueError):
        dist.all_reduce(torch.ones(1))
    assert counted() == [0, 0]


def test_compiled_code_with_collectives_is_what_it_was(mesh):
    collectives.install(["here"])

    def double(x):
        y = x.clone()
        dist.all_reduce(y)
        return 2 * y

    compiled = torch.compile(double, backend="aot_eager", fullgraph=True)
    counted()
    torch.testing.assert_close(compiled(torch.ones(3)), double(torch.ones(3)))
    assert counted() == [0, 0], "one rank sends nothing"
    collectives.install([])


if __name__ == "__main__":
    rank_of_two_cells(int(sys.argv[1]), sys.argv[2])
