"""Every flow family on PaliGemma: what the rollout sampled is what the learner evaluates, for every form of likelihood.

``test_pi0.py`` has the rest of pi0; here is what does not depend on the network, on both networks.
"""

from __future__ import annotations

import copy
import logging
import math

import numpy as np
import policy_inputs
import pytest
import torch
from policy_inputs import keys, rows, stored

from vla3_plugin.policies.flow_policy import FlowPolicy, FlowSettings
from vla3_plugin.policies.pi0 import PI0Policy
from vla3_plugin.policies.pi05 import PI05Policy
from vla3_plugin.policies.pi05_prompt import STATE_PROMPT
from vla3_plugin.policies.presets import _pi0_model
from vla3_plugin.policies.processing import Processing

SMALL = _pi0_model(
    width=32, mlp=64, expert=32, expert_mlp=64, depth=2, heads=2, head_dim=16, vocabulary=512,
    vision=dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, patch_size=16, image_size=32,
    ),
    chunk_size=6, max_action_dim=9,
)  # fmt: skip
FAMILIES: dict[str, type] = {"pi0": PI0Policy, "pi05": PI05Policy}
FORMS = [
    dict(sde_mode="mixed"),
    dict(sde_mode="joint", value_source="expert"),
    dict(sde_mode="mixed", method="flow_noise", value_source="expert"),
    dict(sde_mode="joint", method="flow_noise"),
    dict(sde_mode="joint", method="flow_noise", joint_reduction="mean"),
]
families = pytest.mark.parametrize("family", FAMILIES)
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()))


def small(family: str, dropout: float = 0.0, **settings) -> FlowPolicy:
    """H = 6, C = 4, A = 7 of 9 padded, and far from its tame initial state, so that agreement means something."""
    rng = np.random.default_rng(7)
    record = Processing.from_demos(
        rng.normal(size=(50, 5)), rng.normal(size=(50, 7)) * 0.3, cameras=["a", "b"], image_size=(32, 32),
        max_tokens=20, **(dict(prompt=STATE_PROMPT, normalisation="quantiles") if family == "pi05" else {}),
    )  # fmt: skip
    model = copy.deepcopy(SMALL)
    for config in (model["vlm_config"]["text_config"], model["dit_config"]):
        config["attention_dropout"] = dropout
    policy = FAMILIES[family].build(
        f"{family}-nano", record, model=model, **{"executed": 4, "value_hidden": 16, "noise_hidden": 16, **settings}
    )
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


def prepared(policy: FlowPolicy, count: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(11)
    return policy.prepare(policy_inputs.observations(count, state=5, rng=rng))


def assert_evaluated(evaluate, batch, chunk, tolerance: float) -> None:
    """In any batch make-up the learner finds the rollout's numbers."""
    count = len(chunk.logprob)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    for part in (order, order[:1], order[1:4]):
        with torch.no_grad():
            output = evaluate(rows(batch, part), task="evaluate")
        assert output["logprob"].dtype == output["value"].dtype == torch.float32
        torch.testing.assert_close(output["logprob"], chunk.logprob[part], atol=tolerance, rtol=0)
        torch.testing.assert_close(output["value"], chunk.value[part], atol=tolerance, rtol=0)


# likelihoods of stored samples


@families
@forms
def test_learner_and_rollout_agree_in_any_batch(family, form):
    policy = small(family, **form)
    inputs = prepared(policy, 6)
    chunk = policy.act(inputs, keys(6), "train")
    assert chunk.actions.shape == chunk.logprob.shape == (6, 4, 7) and chunk.logprob.abs().sum() > 0
    assert_evaluated(policy, stored(inputs, chunk), chunk, 1e-4)


@families
@pytest.mark.parametrize("form", [FORMS[0], FORMS[3]], ids=["sde", "noise"])
def test_learner_and_rollout_agree_in_bfloat16(family, form):
    policy = small(family, **form).to(torch.bfloat16)
    inputs = prepared(policy, 6)
    chunk = policy.act(inputs, keys(6), "train")
    assert chunk.logprob.dtype == torch.float32
    assert_evaluated(policy, stored(inputs, chunk), chunk, 1e-2)


@families
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_on_in_cloning_and_off_in_likelihoods(family, checkpointing):
    policy = small(family, dropout=0.5)
    if checkpointing:
        policy.gradient_checkpointing_enable()
    inputs = prepared(policy, 3)
    batch = {**inputs, "actions": torch.rand(3, 6, 7), "sft.noise": torch.randn(3, 6, 9), "sft.time": torch.rand(3)}
    quiet = policy.eval()(batch, task="sft")["loss"]
    assert torch.equal(policy(batch, task="sft")["loss"], quiet)
    policy.train()
    torch.manual_seed(1)
    loss = policy(batch, task="sft")["loss"]
    assert not torch.allclose(loss, quiet, atol=1e-3)
    loss.sum().backward()
    dropped = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    chunk = policy.act(inputs, keys(3), "train")
    policy.train()
    assert_evaluated(policy, stored(inputs, chunk), chunk, 1e-4)
    policy.train()  # the evaluation between has not switched it off for good
    torch.manual_seed(1)
    policy.zero_grad()
    policy(batch, task="sft")["loss"].sum().backward()
    for name, gradient in dropped.items():
        torch.testing.assert_close(policy.get_parameter(name).grad, gradient, msg=name)


def test_checkpointed_cloning_draws_the_same_dropout_mask_again():
    policy = small("pi05", dropout=0.5).train()
    batch = {**prepared(policy, 3), "actions": torch.rand(3, 6, 7)}
    batch |= {"sft.noise": torch.randn(3, 6, 9), "sft.time": torch.rand(3)}
    found = []
    for _ in range(2):
        policy.zero_grad()
        torch.manual_seed(1)
        policy(batch, task="sft")["loss"].sum().backward()
        found.append({name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None})
        policy.gradient_checkpointing_enable()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-4, rtol=1e-4, msg=name)


@families
@pytest.mark.parametrize("form", [FORMS[0], FORMS[4]], ids=["sde", "noise"])
def test_adapters_with_dropout_agree_while_training(family, form):
    from peft import LoraConfig, get_peft_model

    policy = small(family, **form)
    config = LoraConfig(
        r=2, lora_dropout=0.5, target_modules=policy.lora_targets, modules_to_save=policy.lora_whole
    )  # fmt: skip
    wrapped = get_peft_model(policy, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    trained = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name or "value_head" in name or "noise_head" in name for name in trained)
    assert any("noise_head" in name for name in trained) == (form.get("method") == "flow_noise")
    wrapped.train()
    inputs = prepared(policy, 5)
    chunk = policy.act(inputs, keys(5), "train")
    wrapped.train()
    assert_evaluated(wrapped, stored(inputs, chunk), chunk, 1e-4)


@families
@pytest.mark.parametrize(
    ("form", "expert_runs"),
    [
        (dict(sde_mode="mixed"), 1),
        (dict(sde_mode="joint"), 4),
        (dict(sde_mode="mixed", method="flow_noise"), 1),
        (dict(sde_mode="mixed", value_source="expert"), 2),
    ],
    ids=lambda x: "-".join(x.values()) if isinstance(x, dict) else str(x),
)
def test_the_prefix_is_computed_once_and_the_expert_as_often_as_there_are_steps(family, form, expert_runs):
    policy = small(family, **form)
    inputs, calls = prepared(policy, 3), []
    policy.vlm.language_model.register_forward_pre_hook(lambda *_: calls.append("vlm"))
    policy.vlm.vision_tower.register_forward_pre_hook(lambda *_: calls.append("vision"))
    policy.expert.register_forward_pre_hook(lambda *_: calls.append("expert"))
    chunk = policy.act(inputs, keys(3), "train")
    value_runs = int(form.get("value_source") == "expert")
    counts = {name: calls.count(name) for name in ("vlm", "vision", "expert")}
    assert counts == {"vlm": 1, "vision": 1, "expert": 4 + value_runs}
    calls.clear()
    policy(stored(inputs, chunk), task="evaluate")
    counts = {name: calls.count(name) for name in ("vlm", "vision", "expert")}
    assert counts == {"vlm": 1, "vision": 1, "expert": expert_runs}


@families
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[2], FORMS[3]], ids=lambda form: "-".join(form.values()))
def test_likelihood_gradient_against_finite_differences(family, form, monkeypatch):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    def in_float64(self, x):  # transformers' own computes in float32, too coarse for differences
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)

    monkeypatch.setattr(GemmaRMSNorm, "forward", in_float64)
    policy = small(family, **form).double()
    inputs = prepared(policy, 2)
    inputs["state"] = inputs["state"].double()
    batch = stored(inputs, policy.act(inputs, keys(2), "train"))
    assert batch["trace.chain"].dtype == torch.float64
    weights = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0)).double()

    def objective() -> torch.Tensor:
        output = policy(batch, task="evaluate")
        return (output["logprob"] * weights).sum() + output["entropy"].sum() + output["value"].sum()

    objective().backward()
    network, vlm, expert = policy.network, policy.vlm, policy.expert
    checked = [
        vlm.vision_tower.embeddings.patch_embedding.weight,
        vlm.language_model.layers[0].self_attn.k_proj.weight,
        expert.layers[1].mlp.down_proj.weight,
        network.action_out_proj.bias,
        policy.value_head.mlp[0].weight,
    ]
    if family == "pi05":
        checked += [expert.layers[0].input_layernorm.dense.weight, network.time_mlp_in.weight]
    if policy.noise_head is not None:
        checked += [policy.noise_head.mlp[1].weight, policy.noise_head.mlp[3].bias]
    for parameter in checked:
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
        with torch.no_grad():
            parameter += 1e-6 * direction
            up = objective()
            parameter -= 2e-6 * direction
            down = objective()
            parameter += 1e-6 * direction
        numeric, exact = ((up - down) / 2e-6).item(), (parameter.grad * direction).sum().item()
        assert exact != 0.0 and numeric == pytest.approx(exact, rel=1e-4, abs=1e-6)


@families
def test_gradient_checkpointing_changes_no_gradient_and_runs_every_layer_again(family):
    policy = small(family, sde_mode="mixed", method="flow_noise", value_source="expert")
    inputs = prepared(policy, 2)
    batch = stored(inputs, policy.act(inputs, keys(2), "train"))

    def gradients():
        policy.zero_grad()
        output = policy(batch, task="evaluate")
        (output["logprob"].sum() + output["value"].sum()).backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}

    plain, calls = gradients(), []
    for layer in (
        policy.vlm.language_model.layers[0],
        policy.expert.layers[0],
        policy.vlm.vision_tower.encoder.layers[0],
    ):
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    policy.gradient_checkpointing_enable()
    checkpointed = gradients()
    assert len(calls) == 2 * (1 + 2 + 1)  # the expert once for the step and once for the value
    policy.gradient_checkpointing_disable()
    calls.clear()
    gradients()
    assert len(calls) == 1 + 2 + 1
    assert checkpointed.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    with pytest.raises(ValueError, match=f"checkpointing of {family} needs use_reentrant: false"):
        policy.gradient_checkpointing_enable({"use_reentrant": True})


# Flow-Noise


@families
@pytest.mark.parametrize("sde_mode", ["mixed", "joint"])
def test_flow_noise_steps_are_gaussians_around_the_ode_with_the_heads_std(family, sde_mode):
    policy = small(family, method="flow_noise", sde_mode=sde_mode, noise_std_min=0.1, noise_std_max=0.4)
    inputs = prepared(policy, 3)
    chunk = policy.act(inputs, keys(3), "train")
    prefix, chain, expected = policy.encode(inputs), chunk.trace["chain"], torch.zeros(3, 4, 7)
    for k in range(4):
        x, time = chain[:, k], torch.full((3,), 1 - k / 4)
        mean = x - 0.25 * policy.velocity(prefix, x, time)
        std = policy.noise_head(policy.features(prefix, x, time))
        assert std.shape == (3, 6, 9) and std.min() > 0.1 and std.max() < 0.4
        density = torch.distributions.Normal(mean, std).log_prob(chain[:, k + 1])[:, :4, :7]
        here = torch.ones(3, dtype=torch.bool) if sde_mode == "joint" else chunk.trace["sde_step"] == k
        expected += torch.where(here[:, None, None], density, 0.0)
        if not here.all():
            torch.testing.assert_close(chain[~here, k + 1], mean[~here], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(chunk.logprob, expected, atol=1e-4, rtol=0)


def test_flow_noise_starts_in_the_middle_of_its_bounds_and_learns_both_likelihood_and_entropy():
    policy = FAMILIES["pi0"].build("pi0-nano", small("pi0").processing, model=SMALL, executed=4, method="flow_noise")
    inputs = prepared(policy, 4)
    prefix = policy.encode(inputs)
    std = policy.noise_head(policy.features(prefix, torch.randn(4, 6, 9), torch.ones(4)))
    torch.testing.assert_close(std, torch.full_like(std, math.sqrt(0.08 * 0.16)), atol=0.01, rtol=0)
    output = policy(stored(inputs, policy.act(inputs, keys(4), "train")), task="evaluate")
    for name in ("logprob", "entropy"):
        policy.zero_grad()
        output[name].sum().backward(retain_graph=True)
        assert policy.noise_head.mlp[-1].bias.grad.abs().sum() > 0, name


def test_flow_noise_evaluates_without_noise():
    policy = small("pi05", method="flow_noise")
    inputs = prepared(policy, 2)
    chunk = policy.act(inputs, keys(2), "eval")
    assert not chunk.logprob.any() and chunk.trace == {}
    other = small("pi05", method="flow_sde")
    torch.testing.assert_close(other.act(inputs, keys(2), "eval").actions, chunk.actions)


# the value and what is trained


@families
def test_an_expert_value_needs_no_sample_and_reaches_the_expert(family):
    policy = small(family, value_source="expert")
    inputs = prepared(policy, 3)
    values = [policy.act(inputs, [(seed, 0, 0)] * 3, mode).value for seed, mode in ((1, "train"), (2, "eval"))]
    assert torch.equal(*values) and len(values[0].unique()) == 3
    batch = stored(inputs, policy.act(inputs, keys(3), "train"))
    policy(batch, task="evaluate")["value"].sum().backward()
    assert policy.expert.layers[1].mlp.down_proj.weight.grad.abs().sum() > 0
    detached = small(family, value_source="expert", detach_value=True)
    detached(batch, task="evaluate")["value"].sum().backward()
    assert {name.split(".")[0] for name, p in detached.named_parameters() if p.grad is not None and p.grad.any()} == {
        "value_head"
    }


@families
def test_a_frozen_vlm_leaves_expert_and_heads_to_train(family):
    from peft import LoraConfig, get_peft_model

    policy = small(family, freeze_vlm=True, method="flow_noise", value_source="expert")
    inputs = prepared(policy, 2)
    output = policy(stored(inputs, policy.act(inputs, keys(2), "train")), task="evaluate")
    (output["logprob"].sum() + output["value"].sum()).backward()
    assert not any(p.requires_grad or p.grad is not None for p in policy.vlm.parameters())
    for module in (policy.expert, policy.value_head, policy.noise_head, policy.network.action_out_proj):
        assert all(p.grad is not None for p in module.parameters())
    wrapped = get_peft_model(policy, LoraConfig(r=2, target_modules=policy.lora_targets))
    adapted = {name for name, _ in wrapped.named_parameters() if "lora_" in name}
    assert adapted and not any("vlm" in name for name in adapted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(executed=7), "policy.executed is 7, expected 1 to 6"),
        (dict(num_steps=0), "policy.num_steps is 0, expected at least 1"),
        (dict(noise_level=-1.0), "policy.noise_level is -1.0, expected at least 0"),
        (dict(method="flow_ode"), "policy.method is 'flow_ode', expected flow_sde, flow_cps or flow_noise"),
        (dict(value_source="both"), "policy.value_source is 'both', expected vlm or expert"),
        (dict(noise_std_min=0.5), "policy.noise_std_min is 0.5, expected above 0 and at most noise_std_max, 0.16"),
        (dict(noise_hidden=0), "policy.noise_hidden is 0, expected at least 1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FlowSettings(**{"executed": 4, **settings}).check(6)


# files


@families
def test_a_saved_policy_with_a_noise_head_is_the_same_policy(family, tmp_path):
    policy = small(family, method="flow_noise", value_source="expert")
    policy.save(tmp_path)
    loaded = FAMILIES[family].load(tmp_path)
    assert loaded.policy == policy.policy and loaded.processing == policy.processing
    inputs = prepared(policy, 2)
    one, two = (p.act(inputs, keys(2), "train") for p in (policy, loaded))
    assert torch.equal(one.actions, two.actions) and torch.equal(one.logprob, two.logprob)


@families
def test_another_method_starts_the_head_it_needs_and_drops_the_one_it_does_not(family, tmp_path, caplog):
    policy = small(family)
    policy.save(tmp_path / "sde")
    with caplog.at_level(logging.WARNING):
        loaded = FAMILIES[family].load(tmp_path / "sde", method="flow_noise")
    assert caplog.text.count("starts anew") == 1 and "the noise head of" in caplog.text
    assert torch.equal(loaded.value_head.norm.weight, policy.value_head.norm.weight)
    loaded.save(tmp_path / "noise")
    caplog.clear()
    back = FAMILIES[family].load(tmp_path / "noise", method="flow_sde")
    assert not caplog.text and back.noise_head is None
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), policy.parameters(), strict=True))


def test_directories_from_before_these_settings_load(tmp_path):
    import json

    policy = small("pi0")
    policy.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("value_source", "noise_hidden", "noise_std_min", "noise_std_max"):
        del config["policy"][key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = PI0Policy.load(tmp_path)
    assert loaded.policy.value_source == "vlm" and loaded.policy.noise_std_max == 0.16
