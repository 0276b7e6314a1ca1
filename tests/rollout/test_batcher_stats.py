"""What a batcher says of itself."""

import pytest
from batching import Clock

from vla3_plugin.rollout import batcher as module
from vla3_plugin.rollout.batcher import Batcher, BatcherStats


def test_statistics_say_sizes_waits_and_depth_since_the_last_drain():
    clock = Clock()
    batcher = Batcher(3, 10.0, clock=clock)
    batcher.submit("abcd", "train")
    clock.now += 0.002
    assert len(batcher.take()) == 3
    stats = batcher.drain_stats()
    assert (stats.batch_sizes, stats.submitted, stats.taken, stats.max_depth) == ([3], 4, 3, 4)
    assert stats.waits_ms == pytest.approx([2.0] * 3)
    assert len(batcher.take_now(3)) == 1
    stats = batcher.drain_stats()
    assert (stats.batch_sizes, stats.submitted, stats.taken, stats.joined, stats.max_depth) == ([], 0, 1, 1, 1)


def test_metrics_are_plain_numbers_under_the_prefix():
    metrics = BatcherStats([1, 3, 8], [0.5, 1.0, 30.0], max_depth=9, submitted=12, taken=12).metrics("batcher")
    assert metrics["batcher/batch_size/mean"] == 4.0 and metrics["batcher/batch_size/p50"] == 3.0
    assert metrics["batcher/wait_ms/max"] == 30.0 and metrics["batcher/wait_ms/p95"] == pytest.approx(27.1)
    assert metrics["batcher/max_depth"] == 9.0 and metrics["batcher/taken"] == 12.0
    assert all(type(value) is float for value in metrics.values())
    assert not any("wait_ms" in name for name in BatcherStats().metrics("b")), "nothing waited: no made-up zero"


def test_histograms_have_fixed_edges_and_lose_no_value():
    stats = BatcherStats([1, 3, 4, 4, 32, 1000], [0.0, 0.7, 3.0, 5000.0])
    histograms = stats.histograms("batcher")
    assert histograms["batcher/batch_size/hist/3_to_5"] == 3.0
    assert histograms["batcher/wait_ms/hist/from_1000"] == 1.0
    assert sum(v for k, v in histograms.items() if "batch_size" in k) == 6
    assert sum(v for k, v in histograms.items() if "wait_ms" in k) == 4
    assert histograms.keys() == BatcherStats().histograms("batcher").keys()


def test_statistics_of_several_policy_workers_add_up():
    parts = [BatcherStats([2], [1.0, 2.0], 5, 2, 2, overtaken=1), BatcherStats([1], [3.0], 7, 1, 1, held_back=4)]
    merged = BatcherStats.merged(parts)
    assert merged == BatcherStats([2, 1], [1.0, 2.0, 3.0], 7, 3, 3, overtaken=1, held_back=4)
    assert parts[0].batch_sizes == [2] and BatcherStats.merged([]) == BatcherStats()


def test_statistics_that_nobody_drains_do_not_grow(monkeypatch):
    monkeypatch.setattr(module, "KEPT", 10)
    batcher = Batcher(1, 0)
    for i in range(50):
        batcher.submit([i], "train")
        batcher.take()
    stats = batcher.drain_stats()
    assert len(stats.batch_sizes) == len(stats.waits_ms) == 10 and stats.taken == stats.submitted == 50
