"""Chains that begin apart, join, leave and end apart sample what they would have sampled alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla3_plugin.contract import Observation
from vla3_plugin.policies.chains import Chains, DenoisingPolicy, run_chains
from vla3_plugin.policies.pi0 import PI0Policy
from vla3_plugin.policies.presets import _pi0_model
from vla3_plugin.policies.processing import Processing

SIZES = _pi0_model(
    width=32, mlp=64, expert=32, expert_mlp=64, depth=2, heads=2, head_dim=16, vocabulary=256,
    vision=dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, patch_size=16, image_size=32,
    ),
    chunk_size=6, max_action_dim=9,
)  # fmt: skip
FORMS = [
    dict(sde_mode="mixed"),
    dict(sde_mode="joint"),
    dict(sde_mode="joint", joint_reduction="mean"),
    dict(sde_mode="mixed", method="flow_cps"),
]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda f: "-".join(f.values()))


def small(**settings) -> PI0Policy:
    rng = np.random.default_rng(7)
    record = Processing.from_demos(
        rng.normal(size=(50, 9)), rng.normal(size=(50, 7)), cameras=["a"], image_size=(32, 32), max_tokens=8
    )
    policy = PI0Policy.build("pi0-nano", record, model=SIZES, **{"executed": 4, "value_hidden": 16, **settings})
    with torch.no_grad():  # far from its tame initial state, so that agreement means something
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


def prepared(policy: PI0Policy, count: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, so that the masks differ between the rows."""
    rng, tasks = np.random.default_rng(11), ["pick up the red cube", "stack", "push the bowl to the left"]
    shown = [
        Observation(
            {"a": rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)},
            rng.normal(size=9).astype(np.float32),
            tasks[i % 3],
        )
        for i in range(count)
    ]
    return policy.prepare(shown)


def keys(count: int) -> list[tuple[int, int, int]]:
    return [(5, 100 + i, i % 3) for i in range(count)]


def rows(inputs, index):
    return {name: tensor[index] for name, tensor in inputs.items()}


def begin(policy: PI0Policy, inputs, index: list[int], mode: str) -> Chains:
    return policy.begin(rows(inputs, index), [keys(9)[i] for i in index], mode)


def assert_rows(chunk, expected, index: list[int]) -> None:
    torch.testing.assert_close(chunk.actions, expected.actions[index], atol=1e-5, rtol=0)
    torch.testing.assert_close(chunk.value, expected.value[index], atol=1e-5, rtol=0)
    torch.testing.assert_close(chunk.logprob, expected.logprob[index], atol=1e-4, rtol=0)
    assert chunk.trace.keys() == expected.trace.keys()
    for name, tensor in chunk.trace.items():
        torch.testing.assert_close(tensor, expected.trace[name][index], atol=1e-5, rtol=0)


@forms
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_chain_that_joins_others_at_another_step_samples_what_it_samples_in_one_batch(form, mode):
    policy = small(**form)
    inputs = prepared(policy, 5)
    together = policy.act(inputs, keys(5), mode)
    chains = begin(policy, inputs, [0, 1], mode)
    policy.denoise(chains)
    chains = Chains.cat([chains, begin(policy, inputs, [2], mode)])  # steps 1, 1, 0
    policy.denoise(chains)
    policy.denoise(chains)
    chains = Chains.cat([begin(policy, inputs, [3, 4], mode), chains])  # steps 0, 0, 3, 3, 2
    policy.denoise(chains)
    assert chains.step.tolist() == [1, 1, 4, 4, 3]
    finished, running = chains.split(chains.complete)
    assert_rows(policy.finish(finished), together, [0, 1])
    policy.denoise(running)
    finished, running = running.split(running.complete)
    assert_rows(policy.finish(finished), together, [2])
    policy.denoise(running)
    policy.denoise(running)
    assert_rows(policy.finish(running), together, [3, 4])


@forms
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_chain_is_the_plain_loop_over_the_grid_with_its_own_noise(form, mode):
    policy = small(**form)
    inputs = prepared(policy, 6)
    chunk = policy.act(inputs, keys(6), mode)
    x, noise, sde_step = policy._draw(keys(6), mode)
    prefix, logprob, chain = policy.encode(inputs), torch.zeros(6, 4, 7), [x]
    joint = form["sde_mode"] == "joint"
    for k in range(4):
        v = policy.velocity(prefix, x, torch.full((6,), 1 - k / 4))
        mean, std = policy._transition(x, v, k, mode == "train" and (True if joint else sde_step == k))
        x = mean + std * noise[:, k if joint else 0]
        chain.append(x)
        if std.any():
            density = torch.distributions.Normal(mean, std.clamp_min(1e-12)).log_prob(x)
            logprob += torch.where(std > 0, density, 0.0)[:, :4, :7]
    if form.get("joint_reduction") == "mean":
        logprob /= 4
    torch.testing.assert_close(chunk.logprob, logprob, atol=1e-4, rtol=0)
    torch.testing.assert_close(chunk.actions, policy.processing.env_actions(x[:, :4, :7]), atol=1e-5, rtol=0)
    if mode == "train":
        torch.testing.assert_close(chunk.trace["chain"], torch.stack(chain, 1), atol=1e-5, rtol=0)


@forms
def test_training_and_evaluation_share_a_step(form):
    policy = small(**form)
    inputs = prepared(policy, 4)
    chains = Chains.cat([begin(policy, inputs, [0, 1], "train"), begin(policy, inputs, [2, 3], "eval")])
    for _ in range(4):
        policy.denoise(chains)
    with pytest.raises(ValueError, match="both modes in one batch.*select the rows of each mode"):
        policy.finish(chains)
    train, evaluation = (policy.finish(chains.select(rows)) for rows in (chains.train, ~chains.train))
    assert_rows(train, policy.act(inputs, keys(4), "train"), [0, 1])
    assert_rows(evaluation, policy.act(inputs, keys(4), "eval"), [2, 3])


def test_the_prefix_is_encoded_once_whoever_joins_and_leaves(monkeypatch):
    policy = small()
    inputs = prepared(policy, 4)
    encoded = []
    encode = PI0Policy.encode
    monkeypatch.setattr(PI0Policy, "encode", lambda self, i: encoded.append(len(i["state"])) or encode(self, i))
    chains = begin(policy, inputs, [0, 1, 2], "train")
    policy.denoise(chains)
    chains = Chains.cat([chains.select(torch.tensor([2, 0])), begin(policy, inputs, [3], "train")])
    for _ in range(3):
        policy.denoise(chains)
    assert encoded == [3, 1] and chains.step.tolist() == [4, 4, 3]


def test_a_step_leaves_the_batch_it_was_copied_from_alone():
    policy = small()
    chains = begin(policy, prepared(policy, 2), [0, 1], "train")
    other = chains.select(torch.tensor([1]))
    before = chains.chain.clone()
    policy.denoise(other)
    assert torch.equal(chains.chain, before) and chains.step.tolist() == [0, 0] and not chains.logprob.any()


def test_who_leaves_takes_no_keys_and_values_along():
    policy = small()
    chains = begin(policy, prepared(policy, 3), [0, 1, 2], "train")
    left, stayed = chains.split(torch.tensor([False, True, False]))
    assert (len(left), len(stayed)) == (1, 2) and not left.prefix
    assert {len(tensor) for tensor in stayed.prefix.values()} == {2}
    assert chains.split(torch.tensor([True] * 3))[1] is None
    assert chains.prefix  # the batch itself is as it was


def test_a_complete_chain_is_stepped_no_further_and_an_incomplete_one_not_finished():
    policy = small(num_steps=2)
    chains = begin(policy, prepared(policy, 2), [0, 1], "train")
    policy.denoise(chains)
    with pytest.raises(ValueError, match="stand at steps \\[1, 1\\], expected 2"):
        policy.finish(chains)
    policy.denoise(chains)
    chain = chains.chain.clone()
    with pytest.raises(IndexError, match="steps \\[2, 2\\] of 2 denoising steps"):
        policy.denoise(chains)
    assert torch.equal(chains.chain, chain)


def test_chains_of_other_settings_do_not_mix():
    one, other = small(num_steps=2), small(num_steps=3)
    parts = [begin(policy, prepared(policy, 1), [0], "eval") for policy in (one, other)]
    with pytest.raises(ValueError, match="different shapes cannot share a batch"):
        Chains.cat(parts)


def test_act_is_the_three_parts_in_a_row():
    policy = small()
    assert isinstance(policy, DenoisingPolicy) and policy.num_denoising_steps == 4
    inputs = prepared(policy, 3)
    one, two = policy.act(inputs, keys(3), "train"), run_chains(policy, inputs, keys(3), "train")
    assert torch.equal(one.actions, two.actions) and torch.equal(one.logprob, two.logprob)


def test_evaluation_without_noise_needs_no_stochastic_step():
    policy = small(noise_level=0.0, sde_mode="joint", joint_reduction="mean")
    assert not policy.act(prepared(policy, 2), keys(2), "eval").logprob.any()
