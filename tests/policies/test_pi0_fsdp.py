"""pi0 and pi0.5 below verl's FSDP2 wrapping: the same numbers and gradients as the bare module."""

from __future__ import annotations

import copy
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vla3_plugin.contract import Observation
from vla3_plugin.policies.flow_policy import FlowPolicy
from vla3_plugin.policies.pi0 import PI0Policy
from vla3_plugin.policies.pi05 import PI05Policy
from vla3_plugin.policies.pi05_prompt import STATE_PROMPT
from vla3_plugin.policies.presets import _pi0_model
from vla3_plugin.policies.processing import Processing

MODEL = _pi0_model(
    width=32, mlp=64, expert=32, expert_mlp=64, depth=2, heads=2, head_dim=16, vocabulary=512,
    vision=dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, patch_size=16, image_size=32,
    ),
    initializer_range=0.1, chunk_size=4, max_action_dim=7,
)  # fmt: skip


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def policy(request) -> FlowPolicy:
    rng, pi05 = np.random.default_rng(0), request.param == "pi05"
    record = Processing.from_demos(
        rng.normal(size=(50, 9)), rng.normal(size=(50, 7)), cameras=["a"], image_size=(32, 32), max_tokens=20,
        prompt=STATE_PROMPT if pi05 else "{task}\n",
    )  # fmt: skip
    settings = dict(executed=4, sde_mode="joint")
    if not pi05:
        return PI0Policy.build("pi0-nano", record, model=MODEL, **settings)
    return PI05Policy.build("pi05-nano", record, model=MODEL, method="flow_noise", value_source="expert", **settings)


@pytest.fixture(scope="module")
def batch(policy) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(1)
    shown = [
        Observation(
            {"a": rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)}, rng.normal(size=9).astype("f4"), "push it"
        )
        for _ in range(3)
    ]
    inputs = policy.prepare(shown)
    chunk = policy.act(inputs, [(0, i, 0) for i in range(3)], "train")
    cloning = {
        "actions": torch.rand(3, 4, 7),
        "sft.noise": torch.randn(3, 4, 7),
        "sft.time": torch.tensor([0.2, 0.5, 0.9]),
    }
    return {**inputs, **cloning, **{f"trace.{name}": tensor for name, tensor in chunk.trace.items()}}


def sharded(policy, mesh, **options):
    wrapped = copy.deepcopy(policy)
    for module in list(wrapped.modules()):
        if type(module).__name__ in wrapped._no_split_modules:
            fully_shard(module, mesh=mesh, reshard_after_forward=True, **options)
    return fully_shard(wrapped, mesh=mesh, reshard_after_forward=True, **options)


def gradients(module, batch, task, names):
    module.zero_grad()
    output = module(batch, task=task)
    sum(output[name].sum() for name in names).backward()
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return output, {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("task", "names"), [("evaluate", ["logprob", "value"]), ("evaluate", ["logprob"]), ("sft", ["loss"])]
)
def test_sharding_changes_no_number(policy, mesh, batch, task, names, checkpointing):
    """Also where nothing reads the prefix's last layer but its keys and values (no value loss; cloning)."""
    wrapped = sharded(policy, mesh)
    if checkpointing:
        wrapped.gradient_checkpointing_enable()
    expected, plain = gradients(policy, batch, task, names)
    output, grads = gradients(wrapped, batch, task, names)
    for name in names:
        torch.testing.assert_close(output[name], expected[name])
    for name, gradient in plain.items():
        torch.testing.assert_close(grads[name], gradient, atol=1e-6, rtol=1e-4)


def test_mixed_precision_must_not_cast_the_stored_chain(policy, mesh, batch):
    """verl's mixed precision casts what dicts hold; a mapping that is no dict passes as it is."""
    wrapped = sharded(
        policy, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    )
    with pytest.raises(TypeError, match="trace.chain is torch.bfloat16"):
        wrapped(batch, task="evaluate")
    output = wrapped(UserDict(batch), task="evaluate")
    rollout = copy.deepcopy(policy).to(torch.bfloat16)(batch, task="evaluate")
    assert output["logprob"].dtype == torch.float32
    torch.testing.assert_close(output["logprob"], rollout["logprob"], atol=1e-4, rtol=0)
