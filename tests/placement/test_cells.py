"""Two cells, each a Ray node with a learner rank, a policy worker and simulators of its own, against one."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from whole_runs import with_path

from vla3_plugin.placement.plan_costs import Sharding, bytes_sent
from vla3_plugin.telemetry import traffic

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

CELL = ["vla3.placement.mode=disaggregated", "+vla3.placement.ratio=\"rollout:actor = 1:1\"",
        "vla3.placement.ratio_per_node=true", "actor_rollout_ref.actor.fsdp_config.fsdp_size=1", "vla3.env.workers=2",
        "vla3.env.shards_per_worker=1", "trainer.total_training_steps=3", "trainer.save_freq=3",
        "trainer.val_before_train=false",
        # what makes a mini-batch the same one whatever the number of ranks
        "vla3.algorithm.advantage_statistics=previous", "vla3.algorithm.mini_batches=episodes",
        "vla3.algorithm.adv_type=grpo", "vla3.algorithm.loss_type=actor", "vla3.algorithm.group_size=4",
        "vla3.algorithm.update_epoch=1"]  # fmt: skip


@pytest.fixture
def heavy(gaussian, tmp_path):
    """The third-party policy with 256 kB more, or its gradients would be no larger than the counts sent beside them."""
    directory = shutil.copytree(gaussian, tmp_path / "heavy")
    file = directory / "model.safetensors"
    save_file(load_file(file) | {"ballast": torch.zeros(65536)}, file)
    return f"actor_rollout_ref.model.path={directory}"


@pytest.fixture
def two_nodes(third_party, monkeypatch):
    """The address of a Ray cluster of two nodes on this machine, with two logical GPUs each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", with_path(third_party))  # a joined cluster's workers inherit its own
    monkeypatch.setenv("RAY_worker_niceness", "0")  # ray's 15 has them wait for every other test
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 2})
    cluster.add_node(num_cpus=8, num_gpus=2)
    yield cluster.address
    cluster.shutdown()


def parameters(run):
    assert run.status == 0, run.output[-3000:]
    return run.directory / "checkpoints" / "global_step_3" / "policy" / "model.safetensors"


def test_two_cells_learn_what_one_learns_and_weights_and_gradients_cross_once(launch, line, heavy, two_nodes, tmp_path):
    cell = [*line, *CELL, heavy]
    one = launch(tmp_path / "one", *cell, "vla3.placement.node_gpus=[2]")
    two = launch(tmp_path / "two", *cell, "vla3.placement.node_gpus=[2,2]", f"+ray_kwargs.ray_init.address={two_nodes}")
    alone, together = (load_file(parameters(run)) for run in (one, two))
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-4, atol=1e-5)
    size = sum(tensor.nbytes for tensor in alone.values())
    for row in two.metrics:
        publications = round(row["traffic/weights/learner_to_policy"] / (2 * size))  # to two policy workers
        assert publications in (1, 2), "the first step's window has the first publication too"
        assert row["traffic/weights/between_nodes"] == pytest.approx(publications * size, rel=0.05)
        # both ranks together; a mini-batch of groups without spread is no update
        inside, across = (2 * sent for sent in bytes_sent(size / 4, size / 4, Sharding(ranks=2, per_cell=1)))
        updates = round(row["traffic/learner/ranks_between_nodes"] / across)
        assert updates in (1, 2)
        assert row["traffic/learner/ranks_between_nodes"] == pytest.approx(updates * across, rel=0.05)
        assert row["traffic/learner/ranks_within_node"] == inside == 0
        data = {hop: row[f"traffic/data/{hop}"] for hop in traffic.HOPS[traffic.DATA]}
        # the driver is on one of two nodes; the parity check's copies are made by one rank and computed by both
        expected = (data["store_to_driver"] + data["driver_to_store"]) / 2 + 2 * data["learner_to_store"]
        stored = ("env_to_store", "store_to_learner", "learner_to_store", "store_to_driver", "driver_to_store")
        anywhere = sum(data[hop] for hop in stored) / 2  # what would cross were rows spread over both nodes
        assert 0 < data["store_between_nodes"] <= 1.05 * expected < anywhere / 2
    for hop in ("weights/between_nodes", "learner/ranks_between_nodes", "learner/ranks_within_node",
                "data/store_between_nodes"):  # fmt: skip
        assert all(row[f"traffic/{hop}"] == 0 for row in one.metrics), hop
    assert list((two.directory / "tensorboard").iterdir()), "a joined cluster's workers inherit no environment of ours"
    assert '"node": 1' in (two.directory / "placement.json").read_text()
