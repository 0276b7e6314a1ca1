"""The memory estimate against what torch really allocates, and the limits against made-up control groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vla3_plugin.placement.memory import (
    ENV_COSTS,
    GB,
    PROCESS_BYTES,
    AvailableMemory,
    MemoryFitError,
    Tower,
    activation_bytes,
    available_memory,
    cgroup_headroom,
    check_fit,
    dtype_bytes,
    estimate,
    format_estimate,
)


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_weights_gradients_and_optimizer_states_are_those_of_torch():
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    model[0].requires_grad_(False)
    learnt = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learnt)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    states = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.numel() > 1]

    parameters, trainable = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in learnt)
    parts = estimate(parameters=parameters, trainable=trainable)["parts"]
    assert parts["actor weights"]["bytes"] == _bytes(model.parameters())
    assert parts["actor gradients"]["bytes"] == _bytes(p.grad for p in learnt)
    assert parts["adamw states"]["bytes"] == _bytes(states)


@pytest.mark.parametrize("layers, hidden, heads, tokens, batch", [(2, 64, 4, 32, 3), (3, 96, 2, 128, 2)])
def test_activations_are_within_a_third_of_what_autograd_keeps(layers, hidden, heads, tokens, batch):
    class Block(nn.Module):
        """The layer that the formula counts: explicit softmax attention, GELU, four times wider inside, dropout."""

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, s, h = x.shape
            q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, heads, h // heads).permute(2, 0, 3, 1, 4)
            weights = nn.functional.dropout((q @ k.mT).softmax(-1), 0.1)
            x = x + nn.functional.dropout(self.out((weights @ v).transpose(1, 2).reshape(b, s, h)), 0.1)
            return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norms[1](x)))), 0.1)

    model, kept = nn.Sequential(*(Block() for _ in range(layers))), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(torch.randn(batch, tokens, hidden, requires_grad=True)).sum()
    predicted = activation_bytes([Tower(layers, hidden, heads, tokens)], batch)
    assert loss.requires_grad
    assert 2 / 3 < predicted / sum(kept.values()) < 3 / 2


def test_checkpointing_keeps_inputs_and_one_layer():
    tower = Tower(layers=18, hidden=2048, heads=8, tokens=816)
    whole, less = activation_bytes([tower], 4, "bfloat16"), activation_bytes([tower], 4, "bfloat16", checkpointing=True)
    one = activation_bytes([Tower(1, 2048, 8, 816)], 4, "bfloat16")
    assert less == pytest.approx(18 * 816 * 4 * 2048 * 2 + one, rel=1e-6)
    assert less < whole / 5
    assert activation_bytes([tower], 4, "float32") == 2 * whole


def test_simulators_cost_what_was_measured():
    libero = estimate(parameters=1, env="libero", env_workers=2, env_processes=3)["parts"]["simulators"]
    assert libero["bytes"] == 6 * ENV_COSTS["libero"].process == 12 * GB
    slots = estimate(parameters=1, env="maniskill", env_workers=1, env_processes=2, slots_per_process=5)["parts"]
    assert slots["simulators"]["bytes"] == 2 * (800 + 4 * 4) * 10**6
    unknown = estimate(parameters=1, env="mine", env_workers=1)["parts"]["simulators"]
    assert "mine is not in the table" in unknown["how"]
    assert "simulators" not in estimate(parameters=1, env_workers=0)["parts"]


def test_processes_are_counted_once_each():
    parts = estimate(parameters=1, actor_workers=2, policy_workers=3, env_workers=4, other_processes=5)["parts"]
    assert parts["processes"]["bytes"] == 14 * PROCESS_BYTES


def test_half_precision_adds_a_compute_copy_and_a_reference_is_a_copy():
    plain = estimate(parameters=10**6, dtype="float32")["parts"]
    half = estimate(parameters=10**6, dtype="bfloat16", reference=True, actor_workers=2)["parts"]
    assert "actor gathered layers" not in plain and "reference weights" not in plain
    assert half["actor gathered layers"]["bytes"] == 2 * 2 * 10**6
    assert half["reference weights"]["bytes"] == 2 * 10**6
    assert half["actor weights"]["bytes"] == 4 * 10**6, "master weights stay float32"


def test_on_a_gpu_tensors_leave_host_memory_and_simulators_stay():
    cpu = estimate(parameters=10**8, env="libero", env_workers=1)
    gpu = estimate(parameters=10**8, env="libero", env_workers=1, device="cuda")
    assert cpu["device"] == 0 and gpu["total"] == cpu["total"]
    assert gpu["device"] == sum(p["bytes"] for n, p in cpu["parts"].items() if n not in ("simulators", "processes"))
    assert gpu["host"] == cpu["parts"]["simulators"]["bytes"] + cpu["parts"]["processes"]["bytes"]


def test_with_vllm_the_module_and_what_arrives_stay_in_host_memory():
    parts = estimate(parameters=1000, policy_workers=2, device="cuda", through_vllm=True)["parts"]
    assert [parts[name]["where"] for name in ("policy weights", "policy receive buffer", "vllm")] == [
        "host", "host", "device"
    ]  # fmt: skip
    assert parts["vllm"]["bytes"] == 8000
    assert "vllm" not in estimate(parameters=1000, policy_workers=2, device="cuda")["parts"]


@given(
    st.integers(1, 10**10),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 4),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["cpu", "cuda"]),
)
def test_parts_add_up_and_more_of_anything_never_needs_less(parameters, actors, policies, workers, dtype, device):
    def total(**more) -> dict:
        base = dict(parameters=parameters, actor_workers=actors, policy_workers=policies, env_workers=workers)
        return estimate(**{**base, "dtype": dtype, "device": device, **more})

    result = total()
    assert result["total"] == sum(p["bytes"] for p in result["parts"].values()) == result["host"] + result["device"]
    for more in ({"parameters": 2 * parameters}, {"policy_workers": policies + 1}, {"env_workers": workers + 1}):
        assert total(**more)["total"] > result["total"]
    assert total(trainable=0)["total"] < result["total"]


def test_an_estimate_without_towers_says_that_activations_are_left_out():
    assert "not counted" in estimate(parameters=1)["parts"]["actor activations"]["how"]
    counted = estimate(parameters=1, towers=[Tower(2, 64, 4, 100)], micro_batch=8)["parts"]["actor activations"]
    assert counted["bytes"] == activation_bytes([Tower(2, 64, 4, 100)], 8)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"dtype": "int8"}, "dtype: 'int8', expected one of"),
        ({"optimizer": "lion"}, "optimizer: 'lion'"),
        ({"trainable": 11}, "trainable: 11, expected 0 to parameters=10"),
        ({"policy_workers": 0}, "policy_workers: 0, expected at least 1"),
    ],
)
def test_bad_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        estimate(**{"parameters": 10, **wrong})


def test_dtypes_of_torch_are_understood():
    assert dtype_bytes(str(torch.bfloat16)) == 2 and dtype_bytes("float32") == 4


def test_a_fit_is_silent_a_tight_one_warns_and_none_is_refused_with_the_arithmetic():
    result = estimate(parameters=10**6, env="libero", env_workers=1, env_processes=2)
    need = result["host"]
    assert check_fit(result, 2 * need) is None
    warning = check_fit(result, int(1.05 * need), "machine")
    assert warning is not None and "little to spare" in warning and "(machine)" in warning
    with pytest.raises(MemoryFitError) as error:
        check_fit(result, need - 1, "control group /x")
    process = "2 process(es) of 1 slot(s) x 2.00 GB"
    for piece in ("host memory", "control group /x", process, "vla3.env.shards_per_worker"):
        assert piece in str(error.value), piece


def test_a_guess_at_an_unknown_simulator_warns_and_refuses_nothing():
    """A run of small simulators of a third party was refused for memory that it would never have taken."""
    unknown, known = (estimate(parameters=10**6, env=name, env_workers=4) for name in ("mine", "libero"))
    assert unknown["host"] == known["host"]
    warning = check_fit(unknown, unknown["host"] - 1)
    assert warning is not None and "may not fit" in warning and "mine is not in the table" in warning
    with pytest.raises(MemoryFitError):
        check_fit(known, known["host"] - 1)
    rest = unknown["host"] - unknown["parts"]["simulators"]["bytes"]
    with pytest.raises(MemoryFitError):
        check_fit(unknown, rest - 1)


def test_the_gpu_side_is_checked_by_itself():
    result = estimate(parameters=3 * 10**9, device="cuda")
    assert check_fit(result, 4 * 10**9) is None
    with pytest.raises(MemoryFitError, match="device memory"):
        check_fit(result, 24 * 10**9, where="device")


def test_the_estimate_prints_its_largest_part_first():
    lines = format_estimate(estimate(parameters=10**6, env="libero", env_workers=1)).splitlines()
    assert lines[0].startswith(("simulators", "processes")) and lines[-1].startswith("total")


# ---------------------------------------------------------------- control groups


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_takes_the_tightest_group_and_counts_reclaimable_cache_as_free(tmp_path):
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job\n",
            "sys/fs/cgroup/slurm/job/memory.max": "max\n",
            "sys/fs/cgroup/slurm/job/memory.current": "500\n",
            "sys/fs/cgroup/slurm/job/memory.stat": "anon 400\ninactive_file 100\n",
            "sys/fs/cgroup/slurm/memory.max": "3000\n",
            "sys/fs/cgroup/slurm/memory.current": "1000\n",
            "sys/fs/cgroup/slurm/memory.stat": "anon 700\ninactive_file 250\n",
        },
    )
    assert cgroup_headroom(root) == [AvailableMemory(2250, "control group /sys/fs/cgroup/slurm")]
    assert available_memory(root) == AvailableMemory(2250, "control group /sys/fs/cgroup/slurm")


def test_a_container_that_sees_its_group_as_the_root_is_limited_too(tmp_path):
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "12:cpu,memory:/docker/0123\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "8000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "9000",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 500\n",
        },
    )
    assert cgroup_headroom(root) == [AvailableMemory(0, "control group /sys/fs/cgroup/memory")], "never negative"


def test_version_1_without_a_limit_and_a_machine_without_groups_leave_the_machine(tmp_path):
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "9000",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 500\n",
        },
    )
    assert cgroup_headroom(root) == []
    assert available_memory(root).source == "machine"
    assert cgroup_headroom(tmp_path / "absent") == []


def test_this_machine_has_memory():
    assert 10**8 < available_memory().bytes < 10**14
