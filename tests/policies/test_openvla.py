"""OpenVLA and OpenVLA-OFT as policies: what the rollout sampled is what the learner evaluates, in whatever batch.

What both families promise is tested on both; ``test_openvla_oft`` holds what is parallel decoding's own.
"""

from __future__ import annotations

import numpy as np
import policy_inputs
import pytest
import torch
from policy_inputs import keys, rows, stored

from vla3_plugin.contract import Observation
from vla3_plugin.policies.checkpoints import CheckpointError
from vla3_plugin.policies.openvla import OpenVLAPolicy
from vla3_plugin.policies.openvla_config import LORA_TARGETS
from vla3_plugin.policies.openvla_oft import OpenVLAOFTPolicy
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.processing import Processing
from vla3_plugin.policies.registry import load_policy, load_processing

RNG = np.random.default_rng(7)
TOWER = dict(width=16, depth=1, heads=2, mlp=32, patch=16, image=32)
SMALL = dict(
    dino=dict(TOWER, registers=1, layer_scale=True),
    siglip=TOWER,
    text=dict(vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=2, max_position_embeddings=256),
)  # fmt: skip
FAMILIES = ["openvla-nano", "openvla-oft-nano"]


def processing(size: int = 32, **settings) -> Processing:
    return Processing.from_demos(
        RNG.normal(size=(50, 9)),
        RNG.normal(size=(50, 7)) * 0.3,
        **{
            "cameras": ["a", "b"],
            "image_size": (size, size),
            "max_tokens": 24,
            "normalisation": "quantiles",
            **settings,
        },
    )


def small(preset: str, *, spread: float = 0.1, **settings):
    """Far from its tame initial state, so that agreement means something. OFT: H = 3, C = 2."""
    family = OpenVLAPolicy if preset == "openvla-nano" else OpenVLAOFTPolicy
    sizes = {} if family is OpenVLAPolicy else {"executed": 2, "predicted": 3}
    policy = family.build(preset, processing(), model=SMALL, **{**sizes, "value_hidden": 16, **settings})
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.parameters():
            parameter += spread * torch.randn(parameter.shape, generator=generator)
    return policy.eval()


def observations(count: int, size: int = 40):
    return policy_inputs.observations(count, size, rng=RNG)


@pytest.fixture(params=FAMILIES)
def preset(request) -> str:
    return request.param


# rollout and learner


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_learner_and_rollout_agree_in_any_batch(preset, temperature):
    policy = small(preset, temperature=temperature, value_level="action")
    inputs = policy.prepare(observations(6))
    chunk = policy.act(inputs, keys(6), "train")
    executed = policy.policy.executed
    assert chunk.actions.shape == chunk.logprob.shape == chunk.trace["ids"].shape == (6, executed, 7)
    assert chunk.value.shape == (6, executed) and chunk.logprob.std() > 0.1
    batch = stored(inputs, chunk)
    for index in ([0, 1, 2, 3, 4, 5], [4], [5, 0, 2]):
        output = policy(rows(batch, index), task="evaluate")
        torch.testing.assert_close(output["logprob"], chunk.logprob[index], atol=1e-4, rtol=0)
        torch.testing.assert_close(output["value"], chunk.value[index], atol=1e-5, rtol=1e-5)


def test_padding_changes_no_result(preset):
    policy = small(preset)
    inputs = policy.prepare(observations(3))
    chunk = policy.act(inputs, keys(3), "train")
    wide = dict(inputs)
    for name in ("input_ids", "attention_mask"):
        wide[name] = torch.cat([inputs[name], torch.zeros(3, 9, dtype=torch.long)], dim=1)
    wide["input_ids"][wide["attention_mask"] == 0] = 77  # whatever stands there
    for row in range(3):
        length = int(inputs["attention_mask"][row].sum())
        tight = rows(inputs, [row])
        tight = {n: t[:, :length] if n in ("input_ids", "attention_mask") else t for n, t in tight.items()}
        for other, index in ((wide, [0, 1, 2]), (tight, [row])):
            again = policy.act(other, [keys(3)[i] for i in index], "train")
            assert torch.equal(again.trace["ids"], chunk.trace["ids"][index])
            torch.testing.assert_close(again.logprob, chunk.logprob[index], atol=1e-4, rtol=0)


def test_a_request_samples_the_same_in_any_batch(preset):
    policy = small(preset)
    inputs = policy.prepare(observations(5))
    together = policy.act(inputs, keys(5), "train")
    for index in ([3], [4, 1]):
        apart = policy.act(rows(inputs, index), [keys(5)[i] for i in index], "train")
        assert torch.equal(apart.trace["ids"], together.trace["ids"][index])


def test_each_part_of_the_key_changes_the_sample(preset):
    policy = small(preset, temperature=4.0)
    inputs = policy.prepare(observations(1))
    base = policy.act(inputs, [(1, 2, 3)], "train").trace["ids"]
    assert torch.equal(policy.act(inputs, [(1, 2, 3)], "train").trace["ids"], base)
    for key in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert not torch.equal(policy.act(inputs, [key], "train").trace["ids"], base)


def test_evaluation_is_greedy_whatever_the_key_and_the_temperature(preset):
    policy = small(preset)
    inputs = policy.prepare(observations(3))
    first = policy.act(inputs, keys(3), "eval")
    policy.policy.temperature = 3.0
    other = policy.act(inputs, [(9, 9, 9)] * 3, "eval")
    assert torch.equal(first.actions, other.actions)
    assert not first.logprob.any() and not first.trace


def test_likelihood_and_entropy_are_those_of_a_categorical_distribution(preset):
    """The whole vocabulary's logits, cut to the action tokens and divided by the temperature."""
    policy = small(preset, temperature=1.6)
    inputs = policy.prepare(observations(3))
    batch = stored(inputs, policy.act(inputs, keys(3), "train"))
    ids = batch["trace.ids"].flatten(1)
    hidden, _ = policy._evaluated(batch, ids)
    logits = policy.network.language_model.lm_head(hidden)[..., policy.network.action_rows]
    reference = torch.distributions.Categorical(logits=logits / 1.6)
    output = policy(batch, task="evaluate")
    torch.testing.assert_close(
        output["logprob"].flatten(1), reference.log_prob(ids - policy.network.sizes.first_token), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(output["entropy"].flatten(1), reference.entropy(), atol=1e-5, rtol=1e-5)


def test_likelihood_gradient_against_finite_differences(preset, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def in_float64(self, x):  # transformers' own computes in float32, too coarse for differences
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", in_float64)
    policy = small(preset).double()
    inputs = policy.prepare(observations(3))
    batch = stored(inputs, policy.act(inputs, keys(3), "train"))
    weights = torch.randn(batch["trace.ids"].shape, generator=torch.Generator().manual_seed(0)).double()

    def objective() -> torch.Tensor:
        output = policy(batch, task="evaluate")
        return ((output["logprob"] + 0.3 * output["entropy"]) * weights).sum() + output["value"].sum()

    objective().backward()
    network = policy.network
    for parameter in (
        network.vision_backbone.featurizer.patch_embed.proj.weight,
        network.vision_backbone.fused_featurizer.blocks[0].attn.qkv.weight,
        network.projector.fc2.weight,
        network.language_model.model.layers[0].self_attn.k_proj.weight,
        network.language_model.model.embed_tokens.weight,
        network.language_model.lm_head.weight,
        policy.value_head.mlp[1].weight,
    ):
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
        with torch.no_grad():
            parameter += 1e-6 * direction
            up = objective()
            parameter -= 2e-6 * direction
            down = objective()
            parameter += 1e-6 * direction
        numeric, exact = ((up - down) / 2e-6).item(), (parameter.grad * direction).sum().item()
        assert numeric == pytest.approx(exact, rel=1e-4, abs=1e-6)


def test_bfloat16_weights_keep_float32_likelihoods(preset):
    policy = small(preset).to(torch.bfloat16)
    rotary = policy.network.language_model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32  # rounded frequencies would move every position
    inputs = policy.prepare(observations(4))
    chunk = policy.act(inputs, keys(4), "train")
    output = policy(stored(inputs, chunk), task="evaluate")
    assert {t.dtype for t in (chunk.actions, chunk.logprob, chunk.value, *output.values())} == {torch.float32}
    torch.testing.assert_close(output["logprob"], chunk.logprob, atol=1e-2, rtol=0)


def test_a_trace_of_another_shape_is_refused(preset):
    policy = small(preset)
    inputs = policy.prepare(observations(1))
    with pytest.raises(ValueError, match="trace.ids has shape"):
        policy({**inputs, "trace.ids": torch.zeros(1, 5, 7, dtype=torch.long)}, task="evaluate")


def test_lora_adapts_and_still_agrees(preset):
    from peft import LoraConfig, get_peft_model

    policy = small(preset)
    inputs = policy.prepare(observations(3))
    chunk = policy.act(inputs, keys(3), "train")
    wrapped = get_peft_model(policy, LoraConfig(r=2, target_modules=LORA_TARGETS, modules_to_save=["value_head"]))
    before = wrapped(stored(inputs, chunk), task="evaluate")["logprob"]
    torch.testing.assert_close(before, chunk.logprob, atol=1e-4, rtol=0)  # B = 0: nothing changed yet
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    for part in (
        ".featurizer.",
        "fused_featurizer.",
        "projector.fc1",
        "projector.fc3",
        "self_attn.q_proj",
        "down_proj",
    ):
        assert any(part in name and "lora_" in name for name in trained), part
    assert not any("base_layer" in name or "patch_embed" in name or "lm_head" in name for name in trained)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(wrapped(stored(inputs, chunk), task="evaluate")["logprob"], before, atol=1e-2)
    chunk = wrapped.act(inputs, keys(3), "train")
    after = wrapped(stored(inputs, chunk), task="evaluate")["logprob"]
    torch.testing.assert_close(after, chunk.logprob, atol=1e-4, rtol=0)


# learning


def test_cloning_overfits_a_small_batch(preset):
    policy = small(preset, spread=0.0).train()
    inputs = policy.prepare(observations(3))
    low, width = policy.processing._range()
    generator = torch.Generator().manual_seed(0)
    actions = (low + width * torch.rand(3, policy.policy.executed, 7, generator=generator)).float()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(40 if preset == "openvla-nano" else 80):  # empty places learn to differ from each other first
        optimizer.zero_grad()
        loss = policy({**inputs, "actions": actions}, task="sft")["loss"]
        loss.mean().backward()
        optimizer.step()
    assert loss.shape == actions.shape and loss.mean() < 0.3
    got = policy.eval().act(inputs, keys(3), "eval").actions
    assert ((got - actions).abs() <= width / 255 + 1e-6).float().mean() > 0.9


def test_cloning_loss_is_the_cross_entropy_of_the_actions_bins(preset):
    policy = small(preset)
    inputs = policy.prepare(observations(2))
    chunk = policy.act(inputs, keys(2), "train")
    loss = policy({**inputs, "actions": chunk.actions}, task="sft")["loss"]
    torch.testing.assert_close(loss, -chunk.logprob, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="actions has shape"):
        policy({**inputs, "actions": torch.zeros(2, 9, 7)}, task="sft")


def test_gradient_checkpointing_changes_no_gradient(preset):
    policy = small(preset).train()
    inputs = policy.prepare(observations(3))
    batch = stored(inputs, policy.act(inputs, keys(3), "train"))

    def gradients():
        policy.zero_grad()
        output = policy(batch, task="evaluate")
        (output["logprob"].sum() + output["value"].sum()).backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters()}

    plain = gradients()
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    policy.network.language_model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append("text"))
    policy.network.vision_backbone.featurizer.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append("vision"))
    recomputed = gradients()
    assert sorted(calls) == ["text", "text", "vision", "vision"]  # once forward, once in the backward pass
    policy.gradient_checkpointing_disable()
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="use_reentrant: false"):
        policy.gradient_checkpointing_enable({"use_reentrant": True})


def test_freezing_and_detaching(preset):
    policy = small(preset, freeze_vision=True, detach_value=True)
    inputs = policy.prepare(observations(2))
    output = policy(stored(inputs, policy.act(inputs, keys(2), "train")), task="evaluate")
    output["value"].sum().backward()
    assert {name.split(".")[0] for name, p in policy.named_parameters() if p.grad is not None} == {"value_head"}
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    assert frozen and all("vision_backbone" in name for name in frozen)


def test_the_value_sees_images_and_instruction(preset):
    policy = small(preset)
    (shown,) = observations(1)
    black = Observation({c: image * 0 for c, image in shown.images.items()}, shown.state, shown.instruction)
    told = Observation(shown.images, shown.state, "open the top drawer of the cabinet")
    values = policy.act(policy.prepare([shown, black, told]), keys(3), "eval").value[:, 0]
    assert len({round(v, 5) for v in values.tolist()}) == 3


# files


def test_a_saved_policy_comes_back_exactly(preset, tmp_path):
    policy = small(preset, temperature=1.6)
    policy.save(tmp_path)
    loaded = load_policy(tmp_path).eval()
    assert type(loaded) is type(policy) and loaded.policy == policy.policy and loaded.processing == policy.processing
    shown = observations(2)
    inputs = load_processing(tmp_path).prepare(shown)  # what an env worker reads, without the network
    assert all(torch.equal(inputs[name], tensor) for name, tensor in policy.prepare(shown).items())
    ours, theirs = policy.act(inputs, keys(2), "train"), loaded.act(inputs, keys(2), "train")
    assert torch.equal(ours.actions, theirs.actions) and torch.equal(ours.logprob, theirs.logprob)


def test_overrides_and_a_value_head_that_no_longer_fits(preset, tmp_path, caplog):
    small(preset).save(tmp_path)
    loaded = load_policy(tmp_path, value_hidden=8, temperature=2.0)
    assert "the value head" in caplog.text and loaded.policy.temperature == 2.0
    with pytest.raises(ValueError, match="'temprature' is not a setting of .*did you mean 'temperature'"):
        load_policy(tmp_path, temprature=2.0)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-9]), "cut short"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "convert them to safetensors"),
        (lambda d: (d / "config.json").write_text("[1"), "config.json is damaged"),
        (lambda d: (d / "processing.json").unlink(), "processing.json does not exist"),
    ],
)
def test_damaged_directories_say_what_is_wrong(preset, tmp_path, damage, words):
    policy = small(preset)
    policy.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=words):
        type(policy).load(tmp_path)


def test_another_familys_directory_is_refused(tmp_path):
    small("openvla-nano").save(tmp_path)
    with pytest.raises(CheckpointError, match="family 'openvla', .* expected 'openvla_oft'"):
        OpenVLAOFTPolicy.load(tmp_path)
    with pytest.raises(ValueError, match="family is 'openvla_oft', .* is of family 'openvla'"):
        load_policy(tmp_path, family="openvla_oft")


# settings and presets


def test_another_image_size_is_refused(preset):
    family = OpenVLAPolicy if preset == "openvla-nano" else OpenVLAOFTPolicy
    with pytest.raises(ValueError, match=r"image_size is \[64, 64\], the model looks at squares of 32"):
        family.build(preset, processing(64), model=SMALL)


def test_nano_is_small_reproducible_and_reads_libero(preset):
    record = processing(64, max_tokens=PRESETS[preset].max_tokens, prompt=PRESETS[preset].prompt)
    policy = load_policy(preset, processing=record, seed=4)
    again = load_policy(preset, processing=record, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))
    assert 1e6 < policy.describe()["parameters"] < 4e6
    sentence = "put the white mug on the left plate and put the yellow and white mug on the right plate"
    ids, mask = policy.processing.prompts([sentence])
    unknown = policy.processing.prompts.tokenizer.token_to_id("<unk>")
    assert unknown not in ids[mask.bool()].tolist()
    assert ids.max() < policy.network.sizes.first_token
