"""The preflight compares memory with the one check there is, on both sides, and says which key to lower."""

import re

import pytest
from omegaconf import OmegaConf

from vla3_plugin.config import VLA3Config
from vla3_plugin.placement import memory
from vla3_plugin.trainer import preflight


def estimate(device="cpu"):
    return memory.estimate(parameters=10**9, env_workers=1, env_processes=2, device=device)


def free(monkeypatch, host, devices=None):
    monkeypatch.setattr(memory, "available_memory", lambda: memory.AvailableMemory(host, "machine"))
    found = None if devices is None else memory.AvailableMemory(devices, "1 device(s)")
    monkeypatch.setattr(memory, "available_device_memory", lambda: found)


def test_what_fits_is_accepted_in_silence(monkeypatch):
    free(monkeypatch, 10**12)
    result = estimate()
    assert preflight._fit(result, VLA3Config()) == []
    assert result["available"] == 10**12 and "warning" not in result


def test_what_fits_with_little_to_spare_is_warned_of(monkeypatch):
    result = estimate()
    free(monkeypatch, int(result["host"] * 1.05))
    assert preflight._fit(result, VLA3Config()) == []
    assert "little to spare" in result["warning"]


@pytest.mark.parametrize(
    ("device", "host", "devices", "message"),
    [
        (
            "cpu",
            10**9,
            None,
            r"^vla3\.env\.shards_per_worker: 2 simulator processes: host memory: about .* 1\.00 GB free",
        ),
        ("cuda", 10**12, 10**9, r"^actor_rollout_ref\.actor\.ppo_micro_batch_size_per_gpu: device memory: about"),
        ("cuda", 10**9, 10**9, "host memory"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(monkeypatch, device, host, devices, message):
    free(monkeypatch, host, devices)
    faults = preflight._fit(estimate(device), VLA3Config())
    assert len(faults) == (2 if host == devices else 1)
    assert re.search(message, faults[0]), faults[0]
    assert "it does not fit. Where it goes:" in faults[0]


def test_a_launcher_that_sees_no_device_leaves_the_device_side_to_the_nodes(monkeypatch):
    free(monkeypatch, 10**12, None)
    assert preflight._fit(estimate("cuda"), VLA3Config()) == []


@pytest.mark.parametrize(("fsdp_size", "copies"), [(-1, 1), (8, 1), (2, 2), (1, 4)])
def test_learner_ranks_that_do_not_share_parameters_have_a_copy_each(fsdp_size, copies):
    """Cells, and the quickstart's two ranks: they were counted as one copy in parts."""
    actor = {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 1, "fsdp_config": {"fsdp_size": fsdp_size}}
    rollout = {"n_gpus_per_node": 1, "nnodes": 1, "name": "vla3"}
    model = {"enable_gradient_checkpointing": False, "options": {}}
    config = OmegaConf.create(
        {
            "trainer": {"n_gpus_per_node": 4, "nnodes": 1, "device": "cpu", "test_freq": -1},
            "actor_rollout_ref": {"actor": actor, "rollout": rollout, "model": model},
        }
    )
    parts = preflight._memory(config, VLA3Config(), {"parameters": 1000})["parts"]
    found = [parts[name]["bytes"] for name in ("actor weights", "actor gradients", "adamw states")]
    assert found == [4000 * copies, 4000 * copies, 8000 * copies]
    assert ("in 4 copies" in parts["actor weights"]["how"]) == (copies == 4)
