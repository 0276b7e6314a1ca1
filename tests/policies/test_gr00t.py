"""GR00T N1.5 as a policy: what the rollout sampled is what the learner evaluates, in whatever batch and mode."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from policy_inputs import keys, rows, stored
from small_gr00t import observations, small

from vla3_plugin.policies.chains import Chains
from vla3_plugin.policies.gr00t_modules import ActionEncoder, TimestepEncoder
from vla3_plugin.policies.gr00t_network import expand_images

MODES = [
    dict(sde_mode="mixed"),
    dict(sde_mode="joint"),
    dict(sde_mode="joint", joint_reduction="mean"),
    dict(sde_mode="mixed", method="flow_cps"),
    dict(sde_mode="joint", method="flow_noise"),
    dict(sde_mode="mixed", method="flow_noise", value_source="expert"),
]


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m.values()))
def test_learner_and_rollout_agree_in_any_batch_dropout_or_not(mode):
    policy = small(value_level="action", **mode)
    inputs = policy.prepare(observations(7))
    chunk = policy.act(inputs, keys(7), "train")
    assert chunk.actions.shape == chunk.logprob.shape == (7, 4, 7)
    assert chunk.value.shape == (7, 4)
    policy.train()
    batch, order = stored(inputs, chunk), torch.tensor([6, 2, 0, 5, 3, 1, 4])
    for part in (order, order[:1], order[2:5]):
        output = policy(rows(batch, part), task="evaluate")
        torch.testing.assert_close(output["logprob"], chunk.logprob[part], atol=1e-4, rtol=0)
        torch.testing.assert_close(output["value"], chunk.value[part], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_request_samples_the_same_alone_and_beside_longer_prompts(kind):
    policy = small()
    inputs = policy.prepare(observations(8))
    together = policy.act(inputs, keys(8), kind)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    shuffled = policy.act(rows(inputs, order), [keys(8)[i] for i in order], kind)
    torch.testing.assert_close(shuffled.actions, together.actions[order], atol=1e-5, rtol=0)
    for i in (2, 3):
        alone = policy.act(rows(inputs, slice(i, i + 1)), keys(8)[i : i + 1], kind)
        torch.testing.assert_close(alone.actions[0], together.actions[i], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.logprob[0], together.logprob[i], atol=1e-4, rtol=0)


def test_padding_changes_nothing():
    """The velocity of a padded prompt is the one of the same prompt cut to its length, where nothing is masked."""
    policy = small().double()
    inputs = policy.prepare(observations(1))
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    length = int(inputs["attention_mask"].sum())
    assert length < inputs["attention_mask"].shape[1]
    cut = {**inputs, **{name: inputs[name][:, :length] for name in ("input_ids", "attention_mask")}}
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, length:] = 77  # what stands in the padding does not matter
    x, time = torch.randn(1, 6, 9, dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
    velocities = [policy.velocity(policy.encode(given), x, time) for given in (inputs, cut, other)]
    for v in velocities[1:]:
        assert v.dtype == torch.float64
        torch.testing.assert_close(v, velocities[0], atol=1e-9, rtol=0)


@pytest.mark.parametrize("mode", ["mixed", "joint"])
def test_chains_that_join_at_different_steps_end_as_if_alone(mode):
    policy = small(sde_mode=mode)
    inputs = policy.prepare(observations(4))
    expected = policy.act(inputs, keys(4), "train")
    early = policy.begin(rows(inputs, slice(0, 2)), keys(4)[:2], "train")
    policy.denoise(early)
    middle = Chains.cat([early, policy.begin(rows(inputs, slice(2, 3)), keys(4)[2:3], "train")])
    policy.denoise(middle)
    running = Chains.cat([middle, policy.begin(rows(inputs, slice(3, 4)), keys(4)[3:], "train")])
    assert running.step.tolist() == [2, 2, 1, 0]
    done = {}
    order = torch.arange(4)
    while running is not None:
        policy.denoise(running)
        leaving, staying = running.complete, order[~running.complete]
        if leaving.any():
            gone, running = running.split(leaving)
            chunk = policy.finish(gone)
            for row, i in enumerate(order[leaving].tolist()):
                done[i] = (chunk.actions[row], chunk.logprob[row], chunk.value[row])
            order = staying
    for i in range(4):
        torch.testing.assert_close(done[i][0], expected.actions[i], atol=1e-5, rtol=0)
        torch.testing.assert_close(done[i][1], expected.logprob[i], atol=1e-4, rtol=0)
        torch.testing.assert_close(done[i][2], expected.value[i], atol=1e-5, rtol=0)


def test_the_sampled_step_is_the_gaussian_of_this_convention():
    """sigma = a sqrt((1-t)/t), mean = x + d [v - sigma^2/(2(1-t)) (x - t v)], std = sqrt(d) sigma, written out here."""
    policy = small(num_steps=4, noise_level=0.7)
    inputs = policy.prepare(observations(6))
    chunk = policy.act(inputs, keys(6), "train")
    prefix = policy.encode(inputs)
    assert len(set(chunk.trace["sde_step"].tolist())) > 1
    for i in range(6):
        k = int(chunk.trace["sde_step"][i])
        t, d = k / 4, 0.25
        sigma = 0.7 * math.sqrt((1 - t) / (t if k else t + d))
        x, x_next = chunk.trace["chain"][i, k], chunk.trace["chain"][i, k + 1]
        v = policy.velocity(prefix, chunk.trace["chain"][:, k], torch.full((6,), t, dtype=torch.float64))[i]
        mean, std = x + d * (v - sigma**2 / (2 * (1 - t)) * (x - t * v)), math.sqrt(d) * sigma
        expected = torch.distributions.Normal(mean, std).log_prob(x_next)[:4, :7]
        torch.testing.assert_close(chunk.logprob[i], expected, atol=1e-4, rtol=0)


def test_evaluation_is_the_ode_from_noise_at_0_to_actions_at_1():
    policy = small()
    inputs = policy.prepare(observations(2))
    x, prefix = policy._draw(keys(2), "train")[0], policy.encode(inputs)
    for k in range(4):
        x = x + 0.25 * policy.velocity(prefix, x, torch.full((2,), k / 4, dtype=torch.float64))
    chunk = policy.act(inputs, keys(2), "eval")
    torch.testing.assert_close(chunk.actions, policy.processing.env_actions(x[:, :4, :7]), atol=1e-5, rtol=1e-5)
    assert not chunk.logprob.any() and chunk.trace == {}


@pytest.mark.parametrize("steps", [3, 7, 10, 100])
def test_grid_times_fall_into_the_buckets_that_double_precision_counts(steps):
    policy = small(num_steps=steps)
    seen = []
    model = policy.gr00t.action_head.model
    model.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    prefix, x = policy.encode(policy.prepare(observations(1))), torch.zeros(1, 6, 9)
    for k in range(steps):
        policy.velocity(prefix, x, policy._time(k, 1, x.device))
    assert [int(bucket) for bucket in seen] == [int(k / float(steps) * 1000) for k in range(steps)]


@pytest.mark.parametrize("width", [48, 60, 1536])
def test_the_times_sines_round_as_the_published_ones(width: int) -> None:
    """An ulp of a frequency moves the angle of bucket 999 by 6e-5, more than golden vectors allow."""
    buckets = torch.tensor([1, 500, 999])

    def angles(exponent: torch.Tensor) -> torch.Tensor:
        return buckets.float()[:, None] * exponent.exp()

    # diffusers' Timesteps, cosines first: minus the logarithm, times the index, over the count less one
    angle = angles(-math.log(10000.0) * torch.arange(128, dtype=torch.float32) / 127)
    encoder = TimestepEncoder(8)
    seen = captured(encoder.timestep_embedder, lambda: encoder(buckets))
    assert torch.equal(seen, torch.cat([angle.cos(), angle.sin()], dim=-1))

    # the action encoder's, sines first: the index, times the logarithm over the count, in float32
    step = torch.log(torch.tensor(10000.0)) / (width // 2)
    angle = angles(-torch.arange(width // 2, dtype=torch.float32) * step)
    actions = ActionEncoder(1, 4, width)
    first = torch.zeros(3, dtype=torch.long)
    seen = captured(actions.W2, lambda: actions(torch.zeros(3, 2, 4), buckets, first))
    assert torch.equal(seen[:, 1, width:], torch.cat([angle.sin(), angle.cos()], dim=-1))


def captured(module: torch.nn.Module, run: Callable[[], object]) -> torch.Tensor:
    """The first argument that ``module`` is called with in ``run``."""
    seen: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    run()
    hook.remove()
    return seen[0]


def test_likelihood_gradient_against_finite_differences(monkeypatch):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def in_float64(self, x):  # transformers' own computes in float32, too coarse for differences
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", in_float64)
    for settings in (dict(sde_mode="mixed"), dict(sde_mode="joint", method="flow_noise")):
        policy = small(**settings).double()
        inputs = policy.prepare(observations(3))
        batch = stored(inputs, policy.act(inputs, keys(3), "train"))
        batch["trace.chain"], batch["state"] = batch["trace.chain"].double(), batch["state"].double()
        weights = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0)).double()

        def objective(policy=policy, batch=batch, weights=weights) -> torch.Tensor:
            output = policy(batch, task="evaluate")
            return (output["logprob"] * weights).sum() + output["value"].sum()

        objective().backward()
        backbone, head = policy.gr00t.backbone, policy.gr00t.action_head
        for parameter in (
            backbone.vision_model.embeddings.patch_embedding.weight,
            backbone.mlp1[0].weight,
            backbone.language_model.layers[0].self_attn.k_proj.weight,
            head.vl_self_attention.transformer_blocks[0].ff.net[2].weight,
            head.model.transformer_blocks[2].attn1.to_k.weight,
            head.model.transformer_blocks[1].norm1.linear.weight,
            head.state_encoder.layer1.W,
            head.action_encoder.W2.W,
            head.future_tokens.weight,
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


def test_bfloat16_weights_keep_float32_likelihoods():
    policy = small().to(torch.bfloat16)
    inputs = policy.prepare(observations(4))
    chunk = policy.act(inputs, keys(4), "train")
    output = policy(rows(stored(inputs, chunk), torch.tensor([2, 0])), task="evaluate")
    assert chunk.actions.dtype == chunk.logprob.dtype == output["logprob"].dtype == torch.float32
    torch.testing.assert_close(output["logprob"], chunk.logprob[[2, 0]], atol=1e-2, rtol=0)


def test_the_network_is_one_of_its_embodiment_alone():
    policy = small()
    inputs = policy.prepare(observations(2))
    first = policy.act(inputs, keys(2), "eval").actions
    with torch.no_grad():
        policy.gr00t.action_head.action_decoder.layer2.b[1:] += 1.0
    assert torch.equal(policy.act(inputs, keys(2), "eval").actions, first)
    policy.processing.embodiment = 2
    assert not torch.allclose(policy.act(inputs, keys(2), "eval").actions, first, atol=1e-2)


def test_a_denoising_step_is_one_graph():
    policy = small()
    inputs = policy.prepare(observations(2))
    tensors = policy.prefix_tensors(policy.encode(inputs))

    def step(tensors, x, time):
        return policy.velocity(policy.prefix_from(tensors), x, time)

    x, time = torch.randn(2, 6, 9), torch.tensor([0.0, 0.5], dtype=torch.float64)
    compiled = torch.compile(step, fullgraph=True, backend="eager")  # fullgraph: a graph break is an error
    with torch.no_grad():
        torch.testing.assert_close(compiled(tensors, x, time), step(tensors, x, time))


def test_the_prefix_is_not_computed_again_between_steps():
    policy = small()
    calls = {"backbone": 0, "vl": 0, "to_k": 0}
    head = policy.gr00t.action_head

    def count(name):
        return lambda *_: calls.__setitem__(name, calls[name] + 1)

    policy.gr00t.backbone.register_forward_pre_hook(count("backbone"))
    head.vl_self_attention.register_forward_pre_hook(count("vl"))
    head.model.transformer_blocks[0].attn1.to_k.register_forward_pre_hook(count("to_k"))
    policy.act(policy.prepare(observations(2)), keys(2), "train")
    assert calls == {"backbone": 1, "vl": 1, "to_k": 1}


def test_stored_inputs_are_compact_and_a_wrong_number_of_image_tokens_is_an_error():
    policy = small()
    inputs = policy.prepare(observations(3))
    assert {name: (tensor.dtype, list(tensor.shape)) for name, tensor in inputs.items()} == {
        "pixels": (torch.uint8, [3, 2, 32, 32, 3]),
        "state": (torch.float32, [3, 9]),
        "input_ids": (torch.int64, [3, 32]),
        "attention_mask": (torch.int64, [3, 32]),
    }
    ids, mask = torch.tensor([[3, 14, 5, 14, 0]]), torch.tensor([[1, 1, 1, 1, 0]])
    wide, long = expand_images(ids, mask, 14, 2, 3)
    assert wide.tolist() == [[3, 14, 14, 14, 5, 14, 14, 14, 0]] and long.sum() == 8
    with pytest.raises(ValueError, match=r"hold \[2\] image tokens, expected 3, one a camera"):
        expand_images(ids, mask, 14, 3, 3)
