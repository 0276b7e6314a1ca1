"""What a published pi0 checkpoint may look like: lerobot's, openpi's and transformers' names for the same network.

That the network computes what lerobot's does is ``vla3 parity``'s to say (``tests/parity``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vla3_plugin.parity import pi0 as parity
from vla3_plugin.parity.golden import read_golden
from vla3_plugin.policies.pi0 import PI0Policy
from vla3_plugin.policies.pi0_files import transformers_key
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.processing import Normalisation, Processing
from vla3_plugin.policies.prompts import word_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "pi0"
CLOSE = dict(atol=2e-5, rtol=1e-4)
golden = read_golden(GOLDEN)


@pytest.fixture(scope="module")
def policy() -> PI0Policy:
    return parity.load(golden, PI0Policy)


def read_again(directory: Path, **options: Any) -> PI0Policy:
    return PI0Policy.from_checkpoint(
        directory,
        processing=parity.processing(golden),
        tokenizer=GOLDEN / "fake_tokenizer",
        executed=golden.config["policy_config"]["chunk_size"],
        **options,
    )


def assert_same_weights(ours: PI0Policy, theirs: PI0Policy) -> None:
    for (name, a), (_, b) in zip(ours.network.state_dict().items(), theirs.network.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_act_takes_fewer_cameras_than_the_checkpoint_was_trained_with(policy: PI0Policy) -> None:
    """Two cameras given, the third left out. That the actions are those of the published pipeline, which pads it with a
    masked black image, is among the golden outputs (``policy.predict_action_chunk_K4``)."""
    assert set(policy.processing.cameras) < set(golden.config["cameras"])
    chunk = policy.act(policy.prepare(parity.observations(golden)), [(0, i, 0) for i in range(3)], "eval")
    assert chunk.actions.shape == (3, policy.policy.executed, policy.processing.action_dim)
    assert not chunk.logprob.any()


def test_lerobots_own_prefix_and_a_second_embedding_table_are_read(policy: PI0Policy, tmp_path: Path) -> None:
    """A fine-tune saved by lerobot: names behind ``model.``, and the trained embedding beside a stale ``lm_head``."""
    weights = {f"model.{name}": tensor for name, tensor in load_file(GOLDEN / "weights.safetensors").items()}
    stale = "model.paligemma_with_expert.paligemma.lm_head.weight"
    weights["model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"] = weights[stale].clone()
    weights[stale] = torch.zeros_like(weights[stale])
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**golden.config["policy_config"], "type": "pi0"}))
    sizes = policy.config.to_dict()
    again = read_again(tmp_path, model={key: sizes[key] for key in ("vlm_config", "dit_config")})
    assert_same_weights(policy, again)


def test_transformers_own_format_is_read(policy: PI0Policy, tmp_path: Path) -> None:
    from transformers import PI0ForConditionalGeneration

    model = PI0ForConditionalGeneration(policy.config)
    model.load_state_dict(policy.pi0.state_dict(), strict=False)
    model.save_pretrained(tmp_path)
    assert_same_weights(policy, read_again(tmp_path))


def test_the_published_key_map_is_ours() -> None:
    mapping = json.loads((GOLDEN / "key_map_lerobot_to_transformers_5.10.2.json").read_text())
    assert {name: transformers_key(name) for name in mapping} == mapping
    assert {name: transformers_key(f"model.{name}") for name in mapping} == mapping
    fine_tuned = json.loads((GOLDEN / "keys_lerobot_state_dict.json").read_text())
    assert {transformers_key(name) for name in fine_tuned} == set(mapping.values())


@pytest.mark.parametrize("case", ["t0", "tmix"])
def test_transformers_whole_forward_gives_the_same_velocity(policy: PI0Policy, case: str) -> None:
    """Our two-part use (prefix once, expert many times) is the network's own forward, placeholders and all."""
    x, time = golden.inputs[f"v.{case}.x_t"], golden.inputs[f"v.{case}.t"]
    given = golden.tensors("hf_inputs.safetensors")
    with torch.no_grad():
        v = policy.pi0(state=golden.inputs["state"], noise=x, timestep=time, **given)
    torch.testing.assert_close(v.logits, golden.outputs[f"v.{case}.v"], **CLOSE)


def test_full_size_preset_has_exactly_the_published_tensors() -> None:
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
