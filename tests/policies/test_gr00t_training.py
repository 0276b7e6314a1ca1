"""How GR00T N1.5 is trained: cloning, checkpointing, freezing, adapters."""

from __future__ import annotations

import numpy as np
import policy_inputs
import pytest
import torch
import torch.nn.functional as F
from policy_inputs import keys, stored
from small_gr00t import observations, small


def test_cloning_loss_is_the_flow_matching_error_and_pads_by_repeating_the_last_action():
    policy = small().eval()
    batch = policy.prepare(observations(2))
    batch["actions"] = torch.rand(2, 4, 7)
    noise, time = torch.randn(2, 6, 9), torch.tensor([0.3, 0.9])
    whole = torch.cat([batch["actions"], batch["actions"][:, -1:].expand(-1, 2, -1)], dim=1)
    target = F.pad(policy.processing.action.forward(whole), (0, 2))
    share = time[:, None, None]
    v = policy.velocity(policy.encode(batch), (1 - share) * noise + share * target, time)
    expected = (v - (target - noise)).square()[:, :4, :7]
    loss = policy({**batch, "sft.noise": noise, "sft.time": time}, task="sft")["loss"]
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
    times = policy.sample_time(4000)
    assert 0.0 <= times.min() and times.max() < 1.0 and times.mean().item() == pytest.approx(0.4, abs=0.02)


def test_cloning_overfits_a_small_batch():
    """Of its own random numbers: whatever ran before used to decide how far thirty steps got."""
    torch.manual_seed(0)
    policy, rng = small(), np.random.default_rng(0)
    batch = policy.prepare(policy_inputs.observations(4, rng=rng))
    actions = rng.normal(size=(4, 6, 7))
    batch["actions"] = torch.from_numpy(actions.astype(np.float32)) * 0.3
    batch["sft.noise"], batch["sft.time"] = torch.randn(4, 6, 9), torch.tensor([0.1, 0.4, 0.7, 0.9])
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = policy(batch, task="sft")["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_gradient_checkpointing_changes_no_gradient():
    policy = small(sde_mode="joint")
    inputs = policy.prepare(observations(3))
    batch = stored(inputs, policy.act(inputs, keys(3), "train"))

    def gradients():
        policy.zero_grad()
        output = policy(batch, task="evaluate")
        (output["logprob"].sum() + output["value"].sum()).backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}

    plain = gradients()
    assert len(plain) == len(list(policy.parameters()))  # everything is used, and so trained
    policy.gradient_checkpointing_enable()
    calls = []
    block = policy.gr00t.action_head.model.transformer_blocks[0]
    block.ff.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed = gradients()
    assert len(calls) == 8  # K = 4 steps forward, and once again each in the backward pass
    policy.gradient_checkpointing_disable()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-4, rtol=1e-3)


def test_freezing_and_detaching():
    frozen, detached = small(freeze_vlm=True), small(detach_value=True)
    assert not any(p.requires_grad for p in frozen.gr00t.backbone.parameters())
    assert all(p.requires_grad for p in frozen.gr00t.action_head.parameters())
    for policy in (frozen, detached):
        inputs = policy.prepare(observations(2))
        policy(stored(inputs, policy.act(inputs, keys(2), "train")), task="evaluate")["value"].sum().backward()
        assert policy.value_head.mlp[0].weight.grad.abs().sum() > 0
        assert all(p.grad is None or not p.grad.any() for p in policy.gr00t.backbone.parameters())


def test_lora_adapts_every_part_and_still_agrees():
    from peft import LoraConfig, get_peft_model

    policy = small()
    inputs = policy.prepare(observations(3))
    chunk = policy.act(inputs, keys(3), "train")
    config = LoraConfig(
        r=2, target_modules=policy.lora_targets, modules_to_save=policy.lora_whole, lora_dropout=0.2,
    )  # fmt: skip
    wrapped = get_peft_model(policy, config)
    before = wrapped(stored(inputs, chunk), task="evaluate")["logprob"]
    torch.testing.assert_close(before, chunk.logprob, atol=1e-4, rtol=0)  # B = 0: nothing changed yet
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    for part in ("vision_model", "language_model", "vl_self_attention", "action_head.model"):
        assert any(part in name and "lora_" in name for name in trained), part
    assert any("state_encoder.modules_to_save" in name for name in trained)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(wrapped(stored(inputs, chunk), task="evaluate")["logprob"], before, atol=1e-2)
    wrapped.train()
    chunk = wrapped.act(inputs, keys(3), "train")
    after = wrapped(stored(inputs, chunk), task="evaluate")["logprob"]
    torch.testing.assert_close(after, chunk.logprob, atol=1e-4, rtol=0)
