"""What a policy worker receives of a policy with adapters."""

import types

import pytest
import torch
from torch import nn

from vla3_plugin.learner.engine_fsdp import VLAFSDPEngine
from vla3_plugin.policies.registry import load_policy


@pytest.fixture(scope="module")
def engine():
    found = VLAFSDPEngine.__new__(VLAFSDPEngine)
    found.model_config = types.SimpleNamespace(
        lora_rank=4, lora_alpha=8, target_modules="all-linear", exclude_modules=None, model_type="vla_policy"
    )
    found.module = found._build_lora_module(load_policy("pi0-nano-maniskill"))
    torch.manual_seed(0)
    for name, parameter in found.module.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.05)
    return found


def test_only_adapters_and_the_value_head_train(engine):
    trained = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name or "value_head.modules_to_save" in name for name in trained)


def test_of_a_policy_with_adapters_only_what_they_change_is_published_again(engine):
    everything, again = dict(engine._merged_lora_per_tensor_param()), dict(engine.trained_tensors())
    assert 0 < len(again) < len(everything)
    assert all(torch.equal(tensor, everything[name]) for name, tensor in again.items())
    plain = load_policy("pi0-nano-maniskill").state_dict()
    changed = {name for name in everything if not torch.equal(everything[name], plain[name])}
    assert changed <= again.keys()


def test_of_a_frozen_backbone_nothing_is_published_again():
    found = VLAFSDPEngine.__new__(VLAFSDPEngine)
    found.module = load_policy("pi0-nano-maniskill", freeze_vlm=True)
    again = dict(found.trained_tensors())
    kept = found.module.state_dict()
    train = {name for name, p in found.module.named_parameters() if p.requires_grad}
    buffers = {name for name in kept if name not in dict(found.module.named_parameters(remove_duplicate=False))}
    assert train <= again.keys() and again.keys() - train <= buffers and len(again) < len(kept)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in again.items())


def test_a_tensor_with_two_names_is_published_under_both():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight

    found = VLAFSDPEngine.__new__(VLAFSDPEngine)
    found.module = Tied()
    assert dict(found.trained_tensors()).keys() == {"one.weight", "two.weight"}


def test_merged_weights_are_the_policy_that_the_learner_evaluates(engine):
    """In float32, under the names that a policy without adapters has: log-probs on both sides then agree."""
    merged = dict(engine._merged_lora_per_tensor_param())
    plain = load_policy("pi0-nano-maniskill")
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    assert merged.keys() == before.keys()
    assert all(merged[name].dtype == before[name].dtype for name in before)
    changed = [name for name in before if not torch.equal(before[name], merged[name])]
    assert any("q_proj" in name for name in changed) and any("value_head" in name for name in changed)
    plain.load_state_dict(merged)
    processing = plain.processing
    size = processing.image_size
    inputs = {
        "pixels": torch.randint(0, 255, (3, len(processing.cameras), *size, 3), dtype=torch.uint8),
        "state": torch.randn(3, processing.state_dim),
        "input_ids": torch.ones(3, 6, dtype=torch.int64),
        "attention_mask": torch.ones(3, 6, dtype=torch.int64),
    }
    chunk = plain.eval().act(inputs, [(0, i, 0) for i in range(3)], "train")
    batch = inputs | {f"trace.{name}": tensor for name, tensor in chunk.trace.items()}
    with torch.no_grad():
        learner = engine.module.eval()(batch, task="evaluate")
    assert (learner["logprob"] - chunk.logprob).abs().max() < 1e-4
    assert (learner["value"] - chunk.value).abs().max() < 1e-4
