"""pi0 as a policy: what the rollout sampled is what the learner evaluates, wherever, whenever and in whatever batch."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import policy_inputs
import pytest
import torch
from policy_inputs import keys, rows, stored

from vla3_plugin.contract import Observation
from vla3_plugin.policies.checkpoints import CheckpointError
from vla3_plugin.policies.pi0 import PI0Policy
from vla3_plugin.policies.pi0_paligemma import LORA_TARGETS
from vla3_plugin.policies.presets import PRESETS, _pi0_model
from vla3_plugin.policies.processing import Processing

RNG = np.random.default_rng(7)
SMALL = _pi0_model(
    width=32, mlp=64, expert=32, expert_mlp=64, depth=2, heads=2, head_dim=16, vocabulary=256,
    vision=dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, patch_size=16, image_size=32,
    ),
    chunk_size=6, max_action_dim=9,
)  # fmt: skip


def processing(size: int = 32) -> Processing:
    return Processing.from_demos(
        RNG.normal(size=(50, 9)),
        RNG.normal(size=(50, 7)) * 0.3,
        cameras=["a", "b"],
        image_size=(size, size),
        max_tokens=12,
    )


def small(**settings) -> PI0Policy:
    """H = 6, C = 4, A = 7 of 9 padded: executed, padded and model sizes all differ."""
    policy = PI0Policy.build("pi0-nano", processing(), model=SMALL, **{"executed": 4, "value_hidden": 16, **settings})
    with torch.no_grad():  # far from its tame initial state, so that agreement means something
        generator = torch.Generator().manual_seed(3)
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return policy


def observations(count: int, size: int = 32):
    return policy_inputs.observations(count, size, rng=RNG)


MODES = [
    dict(sde_mode="mixed"),
    dict(sde_mode="joint"),
    dict(sde_mode="joint", joint_reduction="mean"),
    dict(sde_mode="mixed", method="flow_cps"),
    dict(sde_mode="joint", method="flow_cps"),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m.values()))
@pytest.mark.parametrize("value_level", ["chunk", "action"])
def test_learner_and_rollout_agree_in_any_batch(mode, value_level):
    policy = small(value_level=value_level, **mode)
    inputs = policy.prepare(observations(7))
    chunk = policy.act(inputs, keys(7), "train")
    assert chunk.actions.shape == chunk.logprob.shape == (7, 4, 7)
    assert chunk.value.shape == (7, 4 if value_level == "action" else 1)
    batch, order = stored(inputs, chunk), torch.tensor([6, 2, 0, 5, 3, 1, 4])
    for part in (order, order[:1], order[2:5]):
        output = policy(rows(batch, part), task="evaluate")
        torch.testing.assert_close(output["logprob"], chunk.logprob[part], atol=1e-4, rtol=0)
        torch.testing.assert_close(output["value"], chunk.value[part], atol=1e-4, rtol=0)
        assert output["entropy"].shape == (len(part), 4, 7)


@pytest.mark.parametrize("mode", ["mixed", "joint"])
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_request_samples_the_same_in_any_batch(mode, kind):
    policy = small(sde_mode=mode)
    inputs = policy.prepare(observations(8))
    together = policy.act(inputs, keys(8), kind)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    shuffled = policy.act(rows(inputs, order), [keys(8)[i] for i in order], kind)
    alone = policy.act(rows(inputs, slice(3, 4)), keys(8)[3:4], kind)
    torch.testing.assert_close(shuffled.actions, together.actions[order], atol=1e-5, rtol=0)
    torch.testing.assert_close(alone.actions[0], together.actions[3], atol=1e-5, rtol=0)
    torch.testing.assert_close(alone.logprob[0], together.logprob[3], atol=1e-4, rtol=0)


def test_each_part_of_the_key_changes_the_sample_and_nothing_else_does():
    policy = small()
    inputs = policy.prepare(observations(1))
    torch.manual_seed(1)
    first = policy.act(inputs, [(1, 2, 3)], "train").actions
    torch.manual_seed(2)
    assert torch.equal(policy.act(inputs, [(1, 2, 3)], "train").actions, first)
    for key in [(2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)]:
        assert not torch.allclose(policy.act(inputs, [key], "train").actions, first)


def test_evaluation_is_the_ode_of_the_same_initial_noise():
    policy = small()
    inputs = policy.prepare(observations(2))
    noise, _, _ = policy._draw(keys(2), "train")
    assert torch.equal(noise, policy._draw(keys(2), "eval")[0])
    x, prefix = noise, policy.encode(inputs)
    for k in range(4):
        x = x - 0.25 * policy.velocity(prefix, x, torch.full((2,), 1 - k / 4))
    chunk = policy.act(inputs, keys(2), "eval")
    torch.testing.assert_close(chunk.actions, policy.processing.env_actions(x[:, :4, :7]), atol=1e-5, rtol=1e-5)
    assert not chunk.logprob.any() and chunk.trace == {}


def test_mixed_mode_draws_every_step_and_joint_mode_none():
    policy = small()
    _, _, steps = policy._draw([(0, i, 0) for i in range(200)], "train")
    counts = torch.bincount(steps, minlength=4)
    assert len(counts) == 4 and (counts > 25).all()
    _, noise, steps = small(sde_mode="joint")._draw(keys(3), "train")
    assert (steps == -1).all() and noise.shape == (3, 4, 6, 9)


def test_the_sampled_step_is_the_gaussian_of_the_paper():
    """sigma = a sqrt(t/(1-t)), mean = x - d [v + sigma^2/(2t) (x + (1-t) v)], std = sqrt(d) sigma, written out here."""
    policy = small(num_steps=4, noise_level=0.7)
    inputs = policy.prepare(observations(4))
    chunk = policy.act(inputs, keys(4), "train")
    prefix = policy.encode(inputs)
    for i in range(4):
        k = int(chunk.trace["sde_step"][i])
        t, d = 1 - k / 4, 0.25
        sigma = 0.7 * math.sqrt(t / (1 - (t if k else t - d)))
        x, x_next = chunk.trace["chain"][i, k], chunk.trace["chain"][i, k + 1]
        v = policy.velocity(prefix, chunk.trace["chain"][:, k], torch.full((4,), t))[i]
        mean, std = x - d * (v + sigma**2 / (2 * t) * (x + (1 - t) * v)), math.sqrt(d) * sigma
        expected = torch.distributions.Normal(mean, std).log_prob(x_next)[:4, :7]
        torch.testing.assert_close(chunk.logprob[i], expected, atol=1e-4, rtol=0)


def test_no_noise_is_refused_in_training_and_fine_in_evaluation():
    policy = small(noise_level=0.0)
    inputs = policy.prepare(observations(1))
    with pytest.raises(ValueError, match="noise_level is 0.0.*no likelihood to train on"):
        policy.act(inputs, keys(1), "train")
    assert policy.act(inputs, keys(1), "eval").actions.isfinite().all()


@pytest.mark.parametrize("mode", ["mixed", "joint"])
def test_likelihood_gradient_against_finite_differences(mode, monkeypatch):
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    def in_float64(self, x):  # transformers' own computes in float32, too coarse for differences
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)

    monkeypatch.setattr(GemmaRMSNorm, "forward", in_float64)
    policy = small(sde_mode=mode).double()
    inputs = policy.prepare(observations(3))
    batch = stored(inputs, policy.act(inputs, keys(3), "train"))
    batch["trace.chain"] = batch["trace.chain"].double()
    batch["state"] = batch["state"].double()
    weights = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0)).double()

    def objective() -> torch.Tensor:
        output = policy(batch, task="evaluate")
        return (output["logprob"] * weights).sum() + output["value"].sum()

    objective().backward()
    core = policy.pi0.model
    for parameter in (
        core.vlm.vision_tower.embeddings.patch_embedding.weight,
        core.vlm.language_model.layers[0].self_attn.k_proj.weight,
        core.dit.layers[1].mlp.down_proj.weight,
        policy.pi0.embed_action_time.state_proj.weight,
        policy.value_head.mlp[0].weight,
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


def test_a_cast_chain_is_refused():
    policy = small()
    inputs = policy.prepare(observations(1))
    batch = stored(inputs, policy.act(inputs, keys(1), "train"))
    batch["trace.chain"] = batch["trace.chain"].bfloat16()
    with pytest.raises(TypeError, match="trace.chain is torch.bfloat16.*cast_forward_inputs"):
        policy(batch, task="evaluate")


def test_bfloat16_weights_keep_float32_likelihoods():
    policy = small().to(torch.bfloat16)
    inputs = policy.prepare(observations(4))
    chunk = policy.act(inputs, keys(4), "train")
    output = policy(stored(inputs, chunk), task="evaluate")
    assert (
        chunk.actions.dtype == chunk.logprob.dtype == output["logprob"].dtype == output["value"].dtype == torch.float32
    )
    torch.testing.assert_close(output["logprob"], chunk.logprob, atol=1e-4, rtol=0)


def test_cloning_overfits_a_small_batch():
    policy = small()
    batch = policy.prepare(observations(4))
    batch["actions"] = torch.from_numpy(RNG.normal(size=(4, 6, 7)).astype(np.float32)) * 0.3
    batch["sft.noise"], batch["sft.time"] = torch.randn(4, 6, 9), torch.tensor([0.2, 0.4, 0.7, 0.95])
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = policy(batch, task="sft")["loss"]
        assert loss.shape == (4, 6, 7)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        losses.append(loss.mean().item())
    assert losses[-1] < 0.5 * losses[0]


def test_cloning_loss_is_the_flow_matching_error_in_normalised_units():
    policy = small()
    batch = policy.prepare(observations(2))
    batch["actions"] = torch.rand(2, 5, 7)  # shorter than the horizon of 6
    noise, time = torch.randn(2, 6, 9), torch.tensor([0.3, 0.9])
    target = torch.nn.functional.pad(policy.processing.action.forward(batch["actions"]), (0, 2))
    x = noise.clone()
    x[:, :5] = time[:, None, None] * noise[:, :5] + (1 - time[:, None, None]) * target
    v = policy.velocity(policy.encode(batch), x, time)
    expected = (noise[:, :5] - target - v[:, :5]).square()[..., :7]
    loss = policy({**batch, "sft.noise": noise, "sft.time": time}, task="sft")["loss"]
    torch.testing.assert_close(loss, expected)
    torch.manual_seed(0)
    drawn = policy(batch, task="sft")["loss"]
    torch.manual_seed(0)
    assert torch.equal(policy(batch, task="sft")["loss"], drawn) and not torch.equal(loss, drawn)


def test_gradient_checkpointing_changes_no_gradient():
    policy = small(sde_mode="joint")
    inputs = policy.prepare(observations(3))
    batch = stored(inputs, policy.act(inputs, keys(3), "train"))

    def gradients():
        policy.zero_grad()
        output = policy(batch, task="evaluate")
        (output["logprob"].sum() + output["value"].sum()).backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters()}

    plain = gradients()
    policy.gradient_checkpointing_enable()
    layer = policy.pi0.model.vlm.language_model.layers[0]
    calls = []
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed = gradients()
    assert len(calls) == 2  # once forward, once again in the backward pass
    policy.gradient_checkpointing_disable()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-5, rtol=1e-4)


def test_freezing_and_detaching():
    frozen = small(freeze_vlm=True)
    assert not any(p.requires_grad for p in frozen.pi0.model.vlm.parameters())
    assert all(p.requires_grad for p in frozen.value_head.parameters())
    detached = small(detach_value=True)
    for policy in (frozen, detached):
        inputs = policy.prepare(observations(2))
        policy(stored(inputs, policy.act(inputs, keys(2), "train")), task="evaluate")["value"].sum().backward()
        assert policy.value_head.mlp[0].weight.grad.abs().sum() > 0
        assert all(p.grad is None or not p.grad.any() for p in policy.pi0.parameters())


def test_the_value_sees_state_images_and_instruction():
    policy = small()
    shown = observations(1)[0]
    others = [
        Observation(shown.images, shown.state + 1, shown.instruction),
        Observation({**shown.images, "b": 255 - shown.images["b"]}, shown.state, shown.instruction),
        Observation(shown.images, shown.state, "open the drawer"),
    ]
    values = policy.act(policy.prepare([shown, *others]), [(0, 0, 0)] * 4, "eval").value[:, 0]
    assert ((values[1:] - values[0]).abs() > 1e-5).all()


def test_lora_adapts_and_still_agrees():
    from peft import LoraConfig, get_peft_model

    policy = small()
    inputs = policy.prepare(observations(3))
    chunk = policy.act(inputs, keys(3), "train")
    wrapped = get_peft_model(policy, LoraConfig(r=2, target_modules=LORA_TARGETS, modules_to_save=["value_head"]))
    before = wrapped(stored(inputs, chunk), task="evaluate")["logprob"]
    torch.testing.assert_close(before, chunk.logprob, atol=1e-4, rtol=0)  # B = 0: nothing changed yet
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad]
    assert {"vision_tower", "vlm.language_model", "dit"} <= {
        part
        for part in ("vision_tower", "vlm.language_model", "dit")
        if any(part in n and "lora_" in n for n in trained)
    }
    assert not any("base_layer" in name for name in trained)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(wrapped(stored(inputs, chunk), task="evaluate")["logprob"], before, atol=1e-2)
    chunk = wrapped.act(inputs, keys(3), "train")
    after = wrapped(stored(inputs, chunk), task="evaluate")["logprob"]
    torch.testing.assert_close(after, chunk.logprob, atol=1e-4, rtol=0)


# files


def test_a_saved_policy_comes_back_exactly(tmp_path):
    policy = small(value_level="action", noise_level=0.3)
    policy.save(tmp_path)
    loaded = PI0Policy.load(tmp_path)
    assert loaded.policy == policy.policy and loaded.processing == policy.processing and loaded.preset == "pi0-nano"
    shown = observations(3)
    one, two = (p.act(p.prepare(shown), keys(3), "train") for p in (policy, loaded))
    assert torch.equal(one.actions, two.actions) and torch.equal(one.value, two.value)


def test_given_states_and_half_precision_storage(tmp_path):
    policy = small()
    doubled = {name: tensor * 2 for name, tensor in policy.state_dict().items()}
    policy.save(tmp_path / "state", doubled)
    loaded = PI0Policy.load(tmp_path / "state")
    assert all(torch.equal(tensor, doubled[name]) for name, tensor in loaded.state_dict().items())
    policy.save(tmp_path / "half", dtype=torch.float16)
    sizes = [(tmp_path / kind / "model.safetensors").stat().st_size for kind in ("state", "half")]
    assert sizes[1] < 0.6 * sizes[0]
    half = PI0Policy.load(tmp_path / "half")
    for name, tensor in half.state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, policy.state_dict()[name], atol=1e-3, rtol=1e-3)


def test_overrides_and_a_value_head_that_no_longer_fits(tmp_path, caplog):
    policy = small()
    policy.save(tmp_path)
    loaded = PI0Policy.load(tmp_path, noise_level=0.9, sde_mode="joint", dtype="bfloat16")
    assert loaded.policy.noise_level == 0.9 and loaded.dtype == torch.bfloat16
    with caplog.at_level(logging.WARNING):
        changed = PI0Policy.load(tmp_path, value_level="action")
    assert "starts anew" in caplog.text and changed.value_head.mlp[-1].out_features == 4
    assert all(torch.equal(a, b) for a, b in zip(changed.pi0.parameters(), policy.pi0.parameters(), strict=True))
    with pytest.raises(ValueError, match="'noise_levle' is not a setting of pi0 \\(did you mean 'noise_level'"):
        PI0Policy.load(tmp_path, noise_levle=0.9)
    with pytest.raises(ValueError, match="policy.sde_mode is 'some', expected mixed or joint"):
        PI0Policy.load(tmp_path, sde_mode="some")
    with pytest.raises(ValueError, match="policy.executed is 9, expected 1 to 6"):
        PI0Policy.load(tmp_path, executed=9)


def _cut(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _garble(directory):
    (directory / "model.safetensors").write_bytes(b"not a header at all" * 10)


def _pickle(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _rename_tensors(directory):
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    tensors["pi0.extra.weight"] = tensors.pop("pi0.action_out_proj.weight")
    save_file(tensors, directory / "model.safetensors")


def _other_sizes(directory):
    config = json.loads((directory / "config.json").read_text())
    config["model"]["dit_config"]["intermediate_size"] = 48
    (directory / "config.json").write_text(json.dumps(config))


def _other_family(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "family": "gr00t"}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, ["model.safetensors", "damaged or cut short"]),
        (_garble, ["model.safetensors", "damaged or cut short"]),
        (_pickle, ["pytorch_model.bin", "convert them to safetensors"]),
        (_rename_tensors, ["1 missing: pi0.action_out_proj.weight", "1 unexpected: pi0.extra.weight"]),
        (_other_sizes, ["6 of another shape", "dit.layers.0.mlp", "[64, 32] instead of [48, 32]"]),
        (_other_family, ["family 'gr00t'", "expected 'pi0'"]),
        (lambda d: (d / "config.json").write_text("{"), ["config.json", "damaged"]),
        (lambda d: (d / "config.json").unlink(), ["config.json does not exist"]),
        (lambda d: (d / "model.safetensors").unlink(), ["no model.safetensors"]),
    ],
)
def test_damaged_checkpoints_say_what_is_wrong(tmp_path, damage, words):
    small().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError) as error:
        PI0Policy.load(tmp_path)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_another_architectures_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="describes a 'llama' model, expected 'pi0'"):
        PI0Policy.from_checkpoint(tmp_path, processing=processing())


def test_environments_that_do_not_fit_the_network_are_refused():
    record = Processing.from_demos(
        RNG.normal(size=(9, 9)), RNG.normal(size=(9, 10)), cameras=["a"], image_size=(32, 32)
    )
    with pytest.raises(ValueError, match="model.max_action_dim is 9, the environment has 10"):
        PI0Policy.build("pi0-nano", record, model=SMALL, executed=4)
    with pytest.raises(ValueError, match="image_size is \\[64, 64\\], the model looks at squares of 32"):
        PI0Policy.build("pi0-nano", processing(64), model=SMALL, executed=4)


# the nano preset


def test_nano_is_small_reproducible_and_reads_libero():
    record = processing(64)
    one, two, other = (PI0Policy.build("pi0-nano", record, seed=seed) for seed in (1, 1, 2))
    assert 1e6 < one.describe()["parameters"] < 3e6
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.pi0.action_out_proj.weight, other.pi0.action_out_proj.weight)
    words = PRESETS["pi0-nano"].words
    assert len(set(words)) + 5 <= 256
    ids, mask = two.processing.prompts.encode("put the white mug on the plate")
    assert 3 not in ids[: mask.sum()].tolist()  # no unknown word
