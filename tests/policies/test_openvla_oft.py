"""What is parallel decoding's own: one forward, attention in both directions, the stop token, independent tokens."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from vla3_plugin.contract import Observation
from vla3_plugin.policies.openvla import OpenVLAPolicy
from vla3_plugin.policies.openvla_oft import OpenVLAOFTPolicy
from vla3_plugin.policies.processing import Processing

TOWER = dict(width=16, depth=1, heads=2, mlp=32, patch=16, image=32)
SMALL = dict(
    dino=dict(TOWER, registers=1, layer_scale=True),
    siglip=TOWER,
    text=dict(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=2, max_position_embeddings=256),
)  # fmt: skip


def build(family=OpenVLAOFTPolicy, preset="openvla-oft-nano", **settings):
    rng = np.random.default_rng(0)
    record = Processing.from_demos(
        rng.normal(size=(50, 9)), rng.normal(size=(50, 7)), cameras=["a"], image_size=(32, 32), max_tokens=20,
        normalisation="bounds",
    )  # fmt: skip
    policy = family.build(preset, record, model=SMALL, value_hidden=16, **settings)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy.eval()


def inputs_of(policy, count: int = 3):
    rng = np.random.default_rng(1)
    return policy.prepare(
        [
            Observation({"a": rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)}, rng.normal(size=9).astype("f4"), task)
            for task in ["push it", "pick up the cube", "open the top drawer of the cabinet"][:count]
        ]
    )


def stored(policy, inputs):
    chunk = policy.act(inputs, [(0, i, 0) for i in range(len(inputs["input_ids"]))], "train")
    return {**inputs, "trace.ids": chunk.trace["ids"]}, chunk


def hidden(policy, inputs) -> torch.Tensor:
    with torch.no_grad():
        return policy.predict(inputs)


def test_sampling_takes_one_forward_of_the_language_model_and_openvla_one_a_token():
    for policy, calls in ((build(), 1), (build(OpenVLAPolicy, "openvla-nano"), 7)):
        seen = []
        policy.network.language_model.model.layers[0].register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        batch, _ = stored(policy, inputs_of(policy))
        assert len(seen) == calls
        seen.clear()
        policy(batch, task="evaluate")
        assert len(seen) == 1


def test_attention_and_stop_token_matter_where_they_should():
    """The stop token is seen only where attention runs both ways; so is the number of empty places."""
    base = build(predicted=3, executed=2)
    inputs = inputs_of(base)
    reference = hidden(base, inputs)
    base.policy.attention = "causal"
    causal = hidden(base, inputs)
    assert (reference - causal).abs().max() > 1e-2
    base.policy.stop_token = False
    torch.testing.assert_close(hidden(base, inputs), causal, atol=1e-5, rtol=1e-5)
    base.policy.attention = "bidirectional"
    assert (reference - hidden(base, inputs)).abs().max() > 1e-3


def test_a_causal_prediction_does_not_depend_on_the_actions_after_it():
    short, long = (build(predicted=n, executed=2, attention="causal") for n in (2, 5))
    inputs = inputs_of(short)
    torch.testing.assert_close(hidden(short, inputs), hidden(long, inputs)[:, :14], atol=1e-5, rtol=1e-5)


def test_tokens_are_independent_given_the_observation():
    policy = build(predicted=3, executed=2)
    batch, chunk = stored(policy, inputs_of(policy))
    changed = {**batch, "trace.ids": batch["trace.ids"].clone()}
    changed["trace.ids"][:, 0, 0] = policy.network.sizes.first_token
    before, after = (policy(b, task="evaluate")["logprob"] for b in (batch, changed))
    torch.testing.assert_close(before.flatten(1)[:, 1:], after.flatten(1)[:, 1:], atol=1e-6, rtol=0)
    assert not torch.allclose(before[:, 0, 0], after[:, 0, 0])


def test_each_openvla_token_depends_on_those_before_it():
    policy = build(OpenVLAPolicy, "openvla-nano")
    batch, _ = stored(policy, inputs_of(policy))
    changed = {**batch, "trace.ids": batch["trace.ids"].clone()}
    changed["trace.ids"][:, 0, 2] = policy.network.sizes.first_token + 7
    before, after = (policy(b, task="evaluate")["logprob"][:, 0] for b in (batch, changed))
    torch.testing.assert_close(before[:, :2], after[:, :2], atol=1e-6, rtol=0)
    assert ((before - after)[:, 3:].abs() > 1e-4).any(1).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention": "full"}, "policy.attention is 'full'"),
        ({"predicted": 0}, "policy.predicted is 0"),
        ({"predicted": 4, "executed": 5}, "policy.executed is 5, expected 1 to 4"),
        ({"attention_backend": "eager"}, "silently run causally"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        build(**settings)


@pytest.mark.parametrize(
    ("family", "preset"), [(OpenVLAOFTPolicy, "openvla-oft-nano"), (OpenVLAPolicy, "openvla-nano")]
)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0.0}, "policy.temperature is 0.0"),
        ({"value_level": "token"}, "policy.value_level is 'token'"),
        ({"executed": 9}, "policy.executed is 9"),
        ({"rollout_backend": "sglang"}, "policy.rollout_backend is 'sglang'"),
        ({"rollout_backend": "vllm"}, "policy.rollout_backend is 'vllm'.*in_process"),
    ],
)
def test_settings_of_both_families_that_make_no_sense_are_refused(family, preset, settings, words):
    with pytest.raises(ValueError, match=words):
        build(family, preset, **settings)


# below FSDP2, wrapped as verl wraps it


def sharded(policy, mesh):
    from verl.utils.fsdp_utils import _select_fsdp2_wrap_targets

    wrapped = copy.deepcopy(policy)
    targets = _select_fsdp2_wrap_targets(wrapped, wrapped._no_split_modules)
    assert {type(t).__name__ for t in targets} == {"LlamaDecoderLayer", "VisionBlock", "Embedding", "OutputHead"}
    for module in targets:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return fully_shard(wrapped, mesh=mesh, reshard_after_forward=True)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "preset"), [(OpenVLAOFTPolicy, "openvla-oft-nano"), (OpenVLAPolicy, "openvla-nano")]
)
@pytest.mark.parametrize("task", ["evaluate", "sft"])
def test_sharding_changes_no_number(mesh, family, preset, task, checkpointing):
    policy = build(family, preset).train()
    batch, chunk = stored(policy, inputs_of(policy))
    batch["actions"] = chunk.actions
    names = ["logprob", "value"] if task == "evaluate" else ["loss"]

    def gradients(module):
        module.zero_grad()
        output = module(batch, task=task)
        sum(output[name].sum() for name in names).backward()
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return output, {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}

    wrapped = sharded(policy, mesh)
    if checkpointing:
        wrapped.gradient_checkpointing_enable()
    expected, plain = gradients(policy)
    output, grads = gradients(wrapped)
    for name in names:
        torch.testing.assert_close(output[name], expected[name])
    assert set(grads) == set(plain)
    for name, gradient in plain.items():
        torch.testing.assert_close(grads[name], gradient, atol=1e-6, rtol=1e-4)
