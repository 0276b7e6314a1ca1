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
