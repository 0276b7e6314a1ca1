"""Bytes by plane and hop."""

import numpy as np
import torch

from vla3_plugin.telemetry import traffic
from vla3_plugin.telemetry.timeline import Span
from vla3_plugin.telemetry.utilisation import carry_over, lane_shares


def test_bytes_are_summed_over_processes_and_every_hop_is_named():
    traffic.drain("before")
    traffic.count("env_to_policy", {"in.image": np.zeros((2, 3), np.float32), "name": "no array"})
    traffic.count("env_to_policy", [torch.zeros(5, dtype=torch.bfloat16)])
    traffic.add("ranks_between_nodes", 7)
    here = traffic.drain("env0")
    there = [Span("policy0", "traffic", "bytes", 0.0, 0.0, {"env_to_policy": 6, "learner_to_policy": 7})]
    metrics = traffic.traffic_metrics([*here, *there, Span("env0", "shard 0", "reset", 0.0, 1.0)])
    assert metrics["traffic/data/env_to_policy"] == 24 + 10 + 6 and metrics["traffic/weights/learner_to_policy"] == 7
    assert metrics["traffic/learner/ranks_between_nodes"] == 7
    assert set(metrics) == {f"traffic/{plane}/{hop}" for plane, hops in traffic.HOPS.items() for hop in hops}
    assert traffic.drain("env0") == [], "once drained, forgotten"


def test_counting_is_neither_work_nor_idleness():
    spans = [Span("env0", "traffic", "bytes", 5.0, 5.0, {"env_to_policy": 1}), Span("env0", "s", "reset", 0.0, 9.0)]
    assert list(lane_shares(spans, 0.0, 4.0)) == [("env0", "s")]
    assert [span.lane for span in carry_over(spans, 4.0)] == ["s"], "or it would be counted twice"
