"""What every policy family promises, family by family in one table: a new one is added to ``SMALL``, and nowhere else.

The families' own test files have what is theirs: all forms of their likelihoods, their processing, their files.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from vla3_plugin.contract import Observation
from vla3_plugin.learner.engine_fsdp import VLAFSDPEngine
from vla3_plugin.policies.base import ActionChunk, VLAPolicy
from vla3_plugin.policies.gr00t_sizes import model_sizes
from vla3_plugin.policies.presets import PRESETS, _pi0_model
from vla3_plugin.policies.processing import Normalisation, Processing
from vla3_plugin.policies.registry import build_policy, load_policy

TOWER = dict(width=32, depth=1, heads=2, mlp=64, patch=16, image=32)
VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, patch_size=16,
              image_size=32)  # fmt: skip


def _paligemma(dropout: float) -> dict[str, Any]:
    model = _pi0_model(
        width=32, mlp=64, expert=32, expert_mlp=64, depth=2, heads=2, head_dim=16, vocabulary=512, vision=VISION,
        initializer_range=0.1, chunk_size=4, max_action_dim=3,
    )  # fmt: skip
    for config in (model["vlm_config"]["text_config"], model["dit_config"]):
        config["attention_dropout"] = dropout
    return model


def _gr00t(dropout: float) -> dict[str, Any]:
    return model_sizes(
        vision=VISION,
        text=dict(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, vocab_size=256, max_position_embeddings=256,
        ),
        layers=2, image_token=14, vl=(1, 2, 16), dit=(2, 2, 16), hidden=32, horizon=4, max_state_dim=2,
        max_action_dim=3, embodiments=1, future_tokens=2, max_positions=8, dropout=dropout, initializer_range=0.1,
    )  # fmt: skip


def _prismatic(dropout: float) -> dict[str, Any]:
    text = dict(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, attention_dropout=dropout,
    )  # fmt: skip
    return dict(dino=dict(TOWER, registers=1, layer_scale=True), siglip=TOWER, text=text)


# preset -> (sizes for an attention dropout, settings): the preset at a few thousand parameters
SMALL: dict[str, tuple[Callable[[float], dict[str, Any]], dict[str, Any]]] = {
    "pi0-nano": (_paligemma, dict(executed=4, num_steps=2)),
    "pi05-nano": (_paligemma, dict(executed=4, num_steps=2, method="flow_noise", sde_mode="joint")),
    "gr00t-n1.5-nano": (_gr00t, dict(executed=4, num_steps=2, sde_mode="joint")),
    "openvla-nano": (_prismatic, {}),
    "openvla-oft-nano": (_prismatic, dict(executed=4, predicted=4)),
}


def small(preset: str, *, dropout: float = 0.0, reach: float = 1.0, **settings: Any) -> Any:
    """For the toy environment: one camera, two states, three actions in [-``reach``, ``reach``]."""
    sizes, own = SMALL[preset]
    record = Processing(
        cameras=["top"],
        image_size=(32, 32),
        state_dim=2,
        action_dim=3,
        state=Normalisation("bounds", {"low": [-1.0] * 2, "high": [1.0] * 2}),
        action=Normalisation("bounds", {"low": [-reach] * 3, "high": [reach] * 3}),
        prompt=PRESETS[preset].prompt,
        max_tokens=40,
    )
    return build_policy(preset, record, model=sizes(dropout), **{"value_hidden": 32, **own, **settings})


def test_every_preset_that_trains_on_a_cpu_is_in_the_table():
    assert set(SMALL) == {name for name in PRESETS if name.endswith("-nano")}


@pytest.fixture(params=SMALL)
def preset(request) -> str:
    return request.param


def spread(policy: nn.Module) -> Any:
    """Far from the tame initial state, so that agreement means something."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


def observations(count: int) -> list[Observation]:
    rng = np.random.default_rng(7)
    tasks = ["press on the red dot", "press", "pick up the blue cube and place it on the plate"]
    return [
        Observation(
            {"top": rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)},
            rng.uniform(-1, 1, 2).astype(np.float32),
            tasks[i % 3],
        )
        for i in range(count)
    ]


def keys(count: int) -> list[tuple[int, int, int]]:
    return [(5, 100 + i, i % 3) for i in range(count)]


def rows(tensors: dict[str, Tensor], index: Any) -> dict[str, Tensor]:
    return {name: tensor[index] for name, tensor in tensors.items()}


def stored(inputs: dict[str, Tensor], chunk: ActionChunk) -> dict[str, Tensor]:
    return {**inputs, **{f"trace.{name}": tensor for name, tensor in chunk.trace.items()}}


def with_adapters(policy: VLAPolicy) -> VLAFSDPEngine:
    """The learner's engine around ``policy`` with LoRA as a recipe asks for it, after some training."""
    engine = VLAFSDPEngine.__new__(VLAFSDPEngine)
    engine.model_config = types.SimpleNamespace(
        lora_rank=4, lora_alpha=8, target_modules="all-linear", exclude_modules=None, model_type="vla_policy"
    )
    engine.module = engine._build_lora_module(policy)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return engine


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)], ids=["f32", "bf16"])
def test_the_learner_finds_the_rollouts_likelihoods_whatever_is_in_the_batch(preset, dtype, tolerance, adapters):
    """The learner is in training mode with dropout, as it always is; the rollout is not."""
    policy = spread(small(preset, dropout=0.5)).to(dtype)
    learner = with_adapters(policy).module.to(dtype) if adapters else policy
    inputs = policy.prepare(observations(7))
    learner.eval()
    chunk = policy.act(inputs, keys(7), "train")
    assert chunk.logprob.std() > 0.05 and chunk.logprob.dtype == torch.float32
    batch = stored(inputs, chunk)
    learner.train()
    order = torch.tensor([6, 2, 0, 5, 3, 1, 4])
    for part in (order, order[:1], order[1:4], order[4:], torch.cat([order[:2], order[5:].repeat(4)])):
        output = learner(rows(batch, part), task="evaluate")
        torch.testing.assert_close(output["logprob"], chunk.logprob[part], atol=tolerance, rtol=0)
        torch.testing.assert_close(output["value"], chunk.value[part], atol=tolerance, rtol=tolerance)
    again = policy.act(rows(inputs, order), [keys(7)[i] for i in order], "train")
    torch.testing.assert_close(again.logprob, chunk.logprob[order], atol=tolerance, rtol=0)


def test_a_learner_that_recomputes_activations_acts_the_same(preset):
    policy = spread(small(preset, dropout=0.5)).eval()
    inputs = policy.prepare(observations(3))
    expected = policy.act(inputs, keys(3), "train")
    policy.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = policy.act(inputs, keys(3), "train")
    assert torch.equal(found.actions, expected.actions) and torch.equal(found.logprob, expected.logprob)


def test_cloning_in_training_mode_has_its_dropout(preset):
    policy = spread(small(preset, dropout=0.5))
    batch = {**policy.prepare(observations(3)), "actions": torch.zeros(3, policy.horizon, 3)}
    if hasattr(policy, "width"):
        batch |= {"sft.noise": torch.ones(3, policy.horizon, policy.width), "sft.time": torch.full((3,), 0.5)}
    policy.train()(stored(batch, policy.act(batch, keys(3), "train")), task="evaluate")  # switches nothing off for good
    noisy = policy(batch, task="sft")["loss"]
    quiet = policy.eval()(batch, task="sft")["loss"]
    assert not torch.allclose(noisy, quiet, atol=1e-3)


def test_merged_adapters_are_the_policy_that_the_learner_evaluates(preset):
    policy = spread(small(preset))
    plain = copy.deepcopy(policy).eval()
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    engine = with_adapters(policy)
    trained = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name or ".modules_to_save." in name for name in trained)
    merged = dict(engine._merged_lora_per_tensor_param())
    assert merged.keys() == before.keys()
    assert all(merged[name].dtype == before[name].dtype for name in before)
    assert any(not torch.equal(merged[name], before[name]) for name in before if "value_head" not in name)
    plain.load_state_dict(merged)
    inputs = plain.prepare(observations(4))
    chunk = plain.act(inputs, keys(4), "train")
    output = engine.module.train()(stored(inputs, chunk), task="evaluate")
    torch.testing.assert_close(output["logprob"], chunk.logprob, atol=1e-4, rtol=0)
    torch.testing.assert_close(output["value"], chunk.value, atol=1e-4, rtol=0)


def test_a_saved_policy_acts_as_before(preset, tmp_path):
    policy = spread(small(preset)).eval()
    policy.save(tmp_path)
    loaded = load_policy(tmp_path).eval()
    for mode in ("train", "eval"):
        one, two = (p.act(p.prepare(observations(3)), keys(3), mode) for p in (policy, loaded))
        assert torch.equal(one.actions, two.actions) and torch.equal(one.logprob, two.logprob)
        assert torch.equal(one.value, two.value) and one.trace.keys() == two.trace.keys()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
def test_sharding_changes_no_gradient(mesh, preset, adapters, checkpointing):
    """As verl shards: what its wrap policy finds, then the root."""
    from verl.utils.fsdp_utils import _select_fsdp2_wrap_targets

    policy = spread(small(preset)).eval()
    inputs = policy.prepare(observations(3))
    batch = stored(inputs, policy.act(inputs, keys(3), "train"))
    bare = with_adapters(policy).module if adapters else policy
    wrapped = copy.deepcopy(bare)
    if checkpointing:
        inner = wrapped.get_base_model() if adapters else wrapped
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = _select_fsdp2_wrap_targets(wrapped, policy._no_split_modules)
    assert {type(module).__name__ for module in found} >= set(policy._no_split_modules)
    for module in found:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    wrapped = fully_shard(wrapped, mesh=mesh, reshard_after_forward=True)

    def gradients(module: nn.Module) -> dict[str, Tensor]:
        output = module.train()(batch, task="evaluate")
        (output["logprob"].sum() + output["value"].sum() + 0.1 * output["entropy"].sum()).backward()
        found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}

    plain, sharded = gradients(bare), gradients(wrapped)
    assert plain and sharded.keys() >= plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(sharded[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
