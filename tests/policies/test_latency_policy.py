"""The latency emulator's policy: a real likelihood with real gradients, and time instead of work."""

from __future__ import annotations

import copy
import math
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from vla3_plugin.contract import EnvSpec, Episode
from vla3_plugin.envs.latency import LatencyEnv
from vla3_plugin.policies import latency
from vla3_plugin.policies.chains import Chains, DenoisingPolicy
from vla3_plugin.policies.latency import LatencyPolicy, LatencySettings
from vla3_plugin.policies.prepare import check_env, load_preparer
from vla3_plugin.policies.registry import load_policy, policy_summary

KEYS = [(0, 10 + i, i) for i in range(5)]


@pytest.fixture(scope="module")
def policy() -> LatencyPolicy:
    return load_policy("latency", seed=3)


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    env = LatencyEnv(num_slots=5, chunk_ms=0, cameras=2)
    return load_preparer("latency").prepare([env.reset(i, Episode(i, 0, 0, i, i)) for i in range(5)])


@pytest.fixture
def slept(monkeypatch):
    """Durations in ms instead of sleep."""
    durations: list[float] = []
    monkeypatch.setattr(latency, "_sleep_until", lambda start, ms: durations.append(ms))
    return durations


def rows(inputs, index):
    return {name: tensor[index] for name, tensor in inputs.items()}


# likelihood


def test_learner_and_rollout_find_the_gaussian_density(policy, inputs):
    chunk = policy.act(inputs, KEYS, "train")
    output = policy({**inputs, "trace.action": chunk.trace["action"]}, task="evaluate")
    torch.testing.assert_close(output["logprob"], chunk.logprob)
    torch.testing.assert_close(output["value"], chunk.value)
    mean = policy.mean(inputs["state"]).unflatten(1, (8, 7))
    by_hand = -0.5 * ((chunk.trace["action"] - mean) / 0.3) ** 2 - math.log(0.3) - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(output["logprob"], by_hand)
    assert output["entropy"].shape == chunk.logprob.shape == (5, 8, 7) and chunk.value.shape == (5, 1)


def test_actions_are_spread_as_the_density_says(policy, inputs):
    many = {name: tensor[:1].expand(2000, *tensor.shape[1:]) for name, tensor in inputs.items()}
    chunk = policy.act(many, [(1, i, 0) for i in range(2000)], "train")
    mean = policy.mean(inputs["state"][:1]).unflatten(1, (8, 7))
    torch.testing.assert_close(chunk.actions.mean(0), mean[0], atol=0.05, rtol=0)
    assert chunk.actions.std(0).mean().item() == pytest.approx(0.3, rel=0.02)


def test_neither_order_nor_company_changes_a_sample(policy, inputs):
    together = policy.act(inputs, KEYS, "train")
    turned = policy.act(rows(inputs, [4, 2, 0]), [KEYS[i] for i in (4, 2, 0)], "train")
    torch.testing.assert_close(turned.actions, together.actions[[4, 2, 0]])
    torch.testing.assert_close(turned.logprob, together.logprob[[4, 2, 0]])


def test_evaluation_takes_the_mean_and_leaves_no_trace(policy, inputs):
    chunk = policy.act(inputs, KEYS, "eval")
    torch.testing.assert_close(chunk.actions, policy.mean(inputs["state"]).unflatten(1, (8, 7)))
    assert chunk.trace == {} and not chunk.logprob.any()


def test_requests_that_join_a_running_batch_get_what_they_would_get_alone(policy, inputs):
    assert isinstance(policy, DenoisingPolicy)
    expected = policy.act(inputs, KEYS, "train")
    running = policy.begin(rows(inputs, [0, 1]), KEYS[:2], "train")
    policy.denoise(running)
    running = Chains.cat([running, policy.begin(rows(inputs, [2, 3, 4]), KEYS[2:], "train")])
    for _ in range(3):
        policy.denoise(running)
    first, running = running.split(running.complete)
    policy.denoise(running)
    for part, index in ((first, [0, 1]), (running, [2, 3, 4])):
        chunk = policy.finish(part)
        torch.testing.assert_close(chunk.actions, expected.actions[index])
        torch.testing.assert_close(chunk.logprob, expected.logprob[index])
        torch.testing.assert_close(chunk.trace["action"], expected.trace["action"][index])


def test_a_chain_can_neither_end_early_nor_run_on(policy, inputs):
    chains = policy.begin(inputs, KEYS, "train")
    with pytest.raises(ValueError, match="not all complete"):
        policy.finish(chains)
    for _ in range(policy.num_denoising_steps):
        policy.denoise(chains)
    with pytest.raises(IndexError, match="complete already"):
        policy.denoise(chains)


def test_policy_gradients_lead_to_the_goal():
    """What the environment pays for can be learned: REINFORCE on its reward, goals being the state's first numbers."""
    policy = load_policy("latency", chunk=2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for step in range(30):
        state = 2 * torch.rand(512, 42, generator=generator) - 1
        chunk = policy.act({"state": state}, [(step, i, 0) for i in range(512)], "train")
        reward = -(chunk.actions - state[:, None, :7]).square().mean((1, 2))
        output = policy({"state": state, "trace.action": chunk.trace["action"]}, task="evaluate")
        advantage = (reward - reward.mean()) / reward.std()
        loss = -(output["logprob"].sum((1, 2)) * advantage).mean() + (output["value"][:, 0] - reward).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(reward.mean().item())
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.08


# time


def test_inference_is_affine_in_the_batch_and_in_the_steps(inputs, slept):
    times = dict(prefix_ms_base=20, prefix_ms_per_sample=2, step_ms_base=5, step_ms_per_sample=0.5)
    policy = load_policy("latency", denoising_steps=3, **times)
    policy.act(inputs, KEYS, "train")
    assert slept == [30.0, 7.5, 7.5, 7.5]
    assert policy.settings.inference_ms(5) == 52.5


def test_training_takes_the_whole_time_and_a_pass_without_gradients_its_share(policy, inputs, slept):
    policy = load_policy("latency", train_ms_base=3, train_ms_per_sample=9, forward_share=0.25)
    batch = {**inputs, "trace.action": torch.zeros(5, 8, 7)}
    policy(batch, task="evaluate")
    with torch.no_grad():
        policy(batch, task="evaluate")
    assert slept == [48.0, 12.0]


def test_taking_in_a_version_takes_its_time_and_reading_a_file_does_not(slept, tmp_path):
    policy = load_policy("latency", sync_ms=50)
    policy.save(tmp_path)
    load_policy(tmp_path)
    assert slept == []
    policy.load_state_dict(policy.state_dict())
    assert slept == [50]


def test_the_time_passes_for_real_and_without_the_processor(inputs):
    policy = load_policy("latency", prefix_ms_base=60, step_ms_base=10)
    policy.act(inputs, KEYS, "train")
    wall, processor = time.perf_counter(), time.process_time()
    policy.act(inputs, KEYS, "train")
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    assert wall >= 0.1 and processor < 0.05


# what surrounds it


def test_a_saved_policy_comes_back_with_its_settings_and_overrides(policy, tmp_path):
    policy.save(tmp_path)
    again = load_policy(tmp_path, step_ms_base=7)
    assert again.settings == LatencySettings(seed=3, step_ms_base=7)
    for name, tensor in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert isinstance(load_preparer(tmp_path), LatencyPolicy)


def test_the_same_seed_gives_the_same_weights_and_the_summary_needs_none(policy):
    assert torch.equal(load_policy("latency", seed=3).mean.weight, policy.mean.weight)
    assert not torch.equal(load_policy("latency", seed=4).mean.weight, policy.mean.weight)
    assert policy_summary("latency", seed=3) == policy.describe()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inference_ms": 3}, "'inference_ms' is not a setting of latency; known: .*prefix_ms_base"),
        ({"denoising_steps": 0}, "denoising_steps: 0, expected a whole number"),
        ({"step_ms_base": -1}, "step_ms_base: -1, expected a finite number"),
        ({"train_ms_per_sample": float("inf")}, "train_ms_per_sample: inf"),
        ({"std": 0}, "std: 0, expected more than 0"),
    ],
)
def test_a_bad_setting_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        load_policy("latency", **options)


def test_an_environment_of_other_sizes_is_refused():
    spec: EnvSpec = LatencyEnv(state_dim=20).spec
    with pytest.raises(ValueError, match="model.options.state_dim: 42, the environment has 20"):
        check_env(load_preparer("latency"), spec)
    check_env(load_preparer("latency", state_dim=20), spec)


def test_sharding_changes_no_number(policy, inputs):
    """Below FSDP2 as verl's engine wraps it, on one rank: outputs and gradients of the bare module."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        wrapped = copy.deepcopy(policy)
        for module in list(wrapped.modules()):
            if type(module).__name__ in wrapped._no_split_modules:
                fully_shard(module, mesh=mesh)
        fully_shard(wrapped, mesh=mesh)
        batch = {**inputs, "trace.action": torch.randn(5, 8, 7, generator=torch.Generator().manual_seed(0))}
        found = []
        for module in (policy, wrapped):
            module.zero_grad()
            output = module(batch, task="evaluate")
            (output["logprob"].sum() + output["value"].sum()).backward()
            grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
            found.append((output["logprob"], output["value"], *grads))
        for bare, sharded in zip(*found, strict=True):
            torch.testing.assert_close(sharded, bare)
    finally:
        dist.destroy_process_group()
