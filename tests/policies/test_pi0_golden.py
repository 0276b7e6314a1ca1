"""Our pi0 against vectors of a published implementation, from its checkpoint layout to environment actions.

The vectors come from lerobot's pi0 with small random weights; ``tests/golden/pi0/README.md`` says how.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vla3_plugin.contract import Observation
from vla3_plugin.policies.pi0 import PI0Policy
from vla3_plugin.policies.pi0_files import transformers_key
from vla3_plugin.policies.presets import PRESETS, _pi0_model
from vla3_plugin.policies.processing import Normalisation, Processing
from vla3_plugin.policies.prompts import word_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "pi0"
CLOSE = dict(atol=2e-5, rtol=1e-4)
CONFIG = json.loads((GOLDEN / "config.json").read_text())
TINY = CONFIG["tiny"]
SIZES = _pi0_model(
    width=TINY["vlm_w"], mlp=TINY["vlm_mlp"], expert=TINY["exp_w"], expert_mlp=TINY["exp_mlp"], depth=TINY["depth"],
    heads=TINY["heads"], head_dim=TINY["hd"], vocabulary=TINY["vocab"],
    vision=dict(
        hidden_size=TINY["vis_w"], intermediate_size=TINY["vis_mlp"], num_hidden_layers=TINY["vis_depth"],
        num_attention_heads=TINY["vis_heads"], patch_size=TINY["patch"], image_size=TINY["img"],
    ),
)  # fmt: skip


def processing() -> Processing:
    stats = CONFIG["dataset_stats"]
    state, action = (
        Normalisation("mean_std", {key: stats[name][key] for key in ("mean", "std")})
        for name in ("observation.state", "action")
    )
    return Processing(
        cameras=["base", "wrist"], image_size=(28, 28), state_dim=8, action_dim=7, state=state, action=action
    )


def published_directory(directory: Path, prefix: str = "") -> Path:
    """The vectors' weights as lerobot would publish them."""
    from safetensors.torch import save_file

    weights = load_file(GOLDEN / "weights.safetensors")
    save_file({prefix + name: tensor for name, tensor in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**CONFIG["policy_config"], "type": "pi0"}))
    return directory


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> PI0Policy:
    directory = published_directory(tmp_path_factory.mktemp("published"))
    return PI0Policy.from_checkpoint(
        directory, processing=processing(), tokenizer=GOLDEN / "fake_tokenizer", model=SIZES, executed=6
    ).eval()


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "inputs.safetensors")


@pytest.fixture(scope="module")
def outputs() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "outputs.safetensors")


@pytest.fixture(scope="module")
def prefix(policy, inputs):
    images = torch.stack([inputs[f"image.{i}"] for i in range(3)], 1)
    mask = torch.stack([inputs[f"image_mask.{i}"] for i in range(3)], 1)
    with torch.no_grad():
        return policy.encode_normalised(images, mask, inputs["tokens"], inputs["token_mask"].long(), inputs["state"])


def observations(inputs) -> list[Observation]:
    return [
        Observation(
            {"base": inputs["pre.raw_image_u8.0"][i].numpy(), "wrist": inputs["pre.raw_image_u8.1"][i].numpy()},
            inputs["pre.raw_state"][i].numpy(),
            CONFIG["tasks"][i],
        )
        for i in range(3)
    ]


def test_preprocessing(policy, inputs, outputs):
    prepared = policy.prepare(observations(inputs))
    images = policy.processing.model_images(prepared["pixels"])
    for camera in range(2):
        torch.testing.assert_close(images[:, camera], outputs[f"pre.image.{camera}"], **CLOSE)
    assert torch.equal(prepared["input_ids"], outputs["pre.tokens"])
    assert torch.equal(prepared["attention_mask"].bool(), outputs["pre.token_mask"])
    state = policy.processing.model_state(prepared["state"], 32)
    torch.testing.assert_close(state, outputs["pre.padded_state"], **CLOSE)
    actions = policy.processing.model_actions(inputs["pre.raw_action"], 32)
    torch.testing.assert_close(actions, outputs["pre.padded_action"], **CLOSE)


def test_prefix_hidden_states_and_keys_and_values(prefix, outputs):
    real = outputs["prefix.pad_mask"]
    assert torch.equal(prefix.mask.bool(), real)
    torch.testing.assert_close(prefix.hidden[real], outputs["prefix.last_hidden"][real], **CLOSE)
    for i, layer in enumerate(prefix.cache.layers):
        for name, got in (("k", layer.keys), ("v", layer.values)):
            expected = outputs[f"prefix.kv.{i}.{name}"]
            torch.testing.assert_close(got.transpose(1, 2)[real], expected.transpose(1, 2)[real], **CLOSE)


@pytest.mark.parametrize("case", ["t0", "t1", "t2", "tmix"])
def test_velocities(policy, prefix, inputs, outputs, case):
    with torch.no_grad():
        v = policy.velocity(prefix, inputs[f"v.{case}.x_t"], inputs[f"v.{case}.t"])
    torch.testing.assert_close(v, outputs[f"v.{case}.v"], **CLOSE)


@pytest.mark.parametrize("steps", [4, 10])
def test_ode_chains_and_unnormalised_actions(policy, prefix, inputs, outputs, steps, monkeypatch):
    monkeypatch.setattr(policy.policy, "num_steps", steps)
    x = inputs["noise"]
    for k in range(steps):
        with torch.no_grad():
            v = policy.velocity(prefix, x, policy._time(k, 3, x.device))
        torch.testing.assert_close(v, outputs[f"ode.K{steps}.v"][k], **CLOSE)
        x, std = policy._transition(x, v, k, False)
        assert not std.any()
        torch.testing.assert_close(x, outputs[f"ode.K{steps}.x"][k + 1], **CLOSE)
    torch.testing.assert_close(policy.processing.env_actions(x), outputs[f"ode.K{steps}.actions_unnormalized"], **CLOSE)


def test_act_in_evaluation_from_raw_observations(policy, inputs, outputs, monkeypatch):
    """Two cameras given, the third left out: the published pipeline pads it with a masked black image."""
    zeros, steps = torch.zeros(3, 1, 6, 32), torch.full((3,), -1)
    monkeypatch.setattr(policy, "_draw", lambda keys, mode: (inputs["noise"], zeros, steps))
    chunk = policy.act(policy.prepare(observations(inputs)), [(0, i, 0) for i in range(3)], "eval")
    expected = policy.processing.action.inverse(outputs["policy.predict_action_chunk_K4"])
    torch.testing.assert_close(chunk.actions, expected, **CLOSE)
    assert not chunk.logprob.any()


def test_flow_matching_loss(policy, prefix, inputs, outputs):
    noise, time, target = inputs["noise"], inputs["loss.time"], inputs["actions_norm_padded"]
    x = time[:, None, None] * noise + (1 - time[:, None, None]) * target
    with torch.no_grad():
        loss = (noise - target - policy.velocity(prefix, x, time)).square()
    torch.testing.assert_close(loss, outputs["loss.per_element"], **CLOSE)


def test_lerobots_own_prefix_and_a_second_embedding_table_are_read(policy, tmp_path):
    """A fine-tune saved by lerobot: names behind ``model.``, and the trained embedding beside a stale ``lm_head``."""
    from safetensors.torch import save_file

    published_directory(tmp_path, prefix="model.")
    weights = load_file(tmp_path / "model.safetensors")
    stale = "model.paligemma_with_expert.paligemma.lm_head.weight"
    weights["model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"] = weights[stale].clone()
    weights[stale] = torch.zeros_like(weights[stale])
    save_file(weights, tmp_path / "model.safetensors")
    again = PI0Policy.from_checkpoint(
        tmp_path, processing=processing(), tokenizer=GOLDEN / "fake_tokenizer", model=SIZES, executed=6
    )
    for (name, a), (_, b) in zip(policy.pi0.state_dict().items(), again.pi0.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_transformers_own_format_is_read(policy, tmp_path):
    from transformers import PI0ForConditionalGeneration

    model = PI0ForConditionalGeneration(policy.config)
    model.load_state_dict(policy.pi0.state_dict(), strict=False)
    model.save_pretrained(tmp_path)
    again = PI0Policy.from_checkpoint(
        tmp_path, processing=processing(), tokenizer=GOLDEN / "fake_tokenizer", executed=6
    )
    for (name, a), (_, b) in zip(policy.pi0.state_dict().items(), again.pi0.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_the_published_key_map_is_ours():
    mapping = json.loads((GOLDEN / "key_map_lerobot_to_transformers_5.10.2.json").read_text())
    assert {name: transformers_key(name) for name in mapping} == mapping
    assert {name: transformers_key(f"model.{name}") for name in mapping} == mapping
    fine_tuned = json.loads((GOLDEN / "keys_lerobot_state_dict.json").read_text())
    assert {transformers_key(name) for name in fine_tuned} == set(mapping.values())


@pytest.mark.parametrize("case", ["t0", "tmix"])
def test_transformers_whole_forward_gives_the_same_velocity(policy, inputs, outputs, case):
    """Our two-part use (prefix once, expert many times) is the network's own forward, placeholders and all."""
    given = load_file(GOLDEN / "hf_inputs.safetensors")
    with torch.no_grad():
        v = policy.pi0(state=inputs["state"], noise=inputs[f"v.{case}.x_t"], timestep=inputs[f"v.{case}.t"], **given)
    torch.testing.assert_close(v.logits, outputs[f"v.{case}.v"], **CLOSE)


def test_full_size_preset_has_exactly_the_published_tensors():
    published = json.loads((GOLDEN / "full_size_keys.json").read_text())["keys"]
    record = Processing(
        cameras=["base"], image_size=(224, 224), state_dim=8, action_dim=7,
        state=Normalisation("identity"), action=Normalisation("identity"),
    )  # fmt: skip
    with torch.device("meta"):
        full = PI0Policy.build("pi0", record.with_tokenizer(word_tokenizer(["a"])))
    ours = {name: list(tensor.shape) for name, tensor in full.pi0.state_dict().items()}
    theirs = {transformers_key(name): shape for name, (_, shape) in published.items()}
    assert theirs.pop("model.dit.embed_tokens.weight") == [257152, 1024]  # carried by checkpoints, read by nobody
    assert ours == theirs
    assert PRESETS["pi0"].model["chunk_size"] == 50
