"""GR00T N1.5 below verl's FSDP2 wrapping: the same numbers and gradients as the bare module.

A block of the DiT is entered twice, once for the keys and values of the prefix and once a step: FSDP must gather its
parameters both times, and again in the backward pass.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from vla3_plugin.contract import Observation
from vla3_plugin.policies.gr00t import GR00TPolicy
from vla3_plugin.policies.gr00t_sizes import model_sizes
from vla3_plugin.policies.processing import Processing

MODEL = model_sizes(
    vision=dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, patch_size=16, image_size=32,
    ),
    text=dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=256, max_position_embeddings=256,
    ),
    layers=2, image_token=14, vl=(1, 2, 16), dit=(2, 2, 16), hidden=20, horizon=4, max_state_dim=9, max_action_dim=7,
    embodiments=1, future_tokens=2, max_positions=8, dropout=0.0, initializer_range=0.2,
)  # fmt: skip


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
def test_sharding_changes_no_number(mesh, task, names, checkpointing):
    rng = np.random.default_rng(0)
    record = Processing.from_demos(
        rng.normal(size=(50, 9)), rng.normal(size=(50, 7)), cameras=["a"], image_size=(32, 32), max_tokens=16
    )
    policy = GR00TPolicy.build("gr00t-n1.5-nano", record, model=MODEL, executed=4, sde_mode="joint")
    with torch.no_grad():  # modulations start at zero, where half of the DiT has no gradient
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    shown = [
        Observation({"a": rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)}, rng.normal(size=9).astype("f4"), "push")
        for _ in range(3)
    ]
    inputs = policy.prepare(shown)
    chunk = policy.act(inputs, [(0, i, 0) for i in range(3)], "train")
    batch = {
        **inputs,
        **{f"trace.{name}": tensor for name, tensor in chunk.trace.items()},
        "actions": torch.rand(3, 4, 7),
        "sft.noise": torch.randn(3, 4, 7),
        "sft.time": torch.tensor([0.2, 0.5, 0.9]),
    }
    wrapped = copy.deepcopy(policy)
    found = [module for module in wrapped.modules() if type(module).__name__ in wrapped._no_split_modules]
    assert {type(module).__name__ for module in found} == set(wrapped._no_split_modules)
    for module in found:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    wrapped = fully_shard(wrapped, mesh=mesh, reshard_after_forward=True)
    if checkpointing:
        wrapped.gradient_checkpointing_enable()
    expected, plain = gradients(policy, batch, task, names)
    output, grads = gradients(wrapped, batch, task, names)
    for name in names:
        torch.testing.assert_close(output[name], expected[name])
    assert set(grads) >= set(plain)
    for name, gradient in plain.items():
        torch.testing.assert_close(grads[name], gradient, atol=1e-5, rtol=1e-4)
