"""pi0.5: published vectors, published layouts, the state in the prompt, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vla3_plugin.contract import Observation
from vla3_plugin.parity import pi0 as parity
from vla3_plugin.parity.golden import read_golden
from vla3_plugin.parity.report import check
from vla3_plugin.policies.checkpoints import CheckpointError
from vla3_plugin.policies.pi0 import PI0Policy
from vla3_plugin.policies.pi0_files import published_targets
from vla3_plugin.policies.pi05 import PI05Policy
from vla3_plugin.policies.pi05_modules import AdaptiveRMSNorm
from vla3_plugin.policies.pi05_prompt import STATE_PROMPT
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.processing import Normalisation, Processing, ProcessingError
from vla3_plugin.policies.prompts import state_words, word_tokenizer
from vla3_plugin.policies.registry import build_policy, load_policy

DIRECTORIES = Path(__file__).parents[1] / "golden"
GOLDEN = DIRECTORIES / "pi05"
FAMILIES = {"pi0": PI0Policy, "pi05": PI05Policy}
EMBEDDING = "paligemma_with_expert.paligemma.lm_head.weight"


@pytest.fixture(scope="module")
def golden():
    return read_golden(GOLDEN)


@pytest.fixture(scope="module")
def policy(golden) -> PI05Policy:
    return parity.load(golden, PI05Policy, prompt=STATE_PROMPT)


def nano_record(**fields) -> Processing:
    rng = np.random.default_rng(0)
    return Processing.from_demos(
        rng.normal(size=(50, 9)), rng.normal(size=(50, 7)), cameras=["a", "b"], image_size=(64, 64),
        **{"max_tokens": 64, "normalisation": "quantiles", "prompt": STATE_PROMPT, **fields},
    )  # fmt: skip


# the published vectors


def test_every_golden_tensor_is_reproduced():
    report = check(GOLDEN)
    assert report.ok, report.failed
    assert set(report.not_computed) == {"pre.image.2", "pre.image_mask.2"} and len(report.tensors) > 40


def test_prompts_are_the_published_ones(golden, policy):
    states = policy.processing.state.forward(golden.inputs["pre.raw_state"])
    prompts = policy.processing.prompts
    texts = [prompts.text(t, s) for t, s in zip(golden.config["tasks"], state_words(states), strict=True)]
    assert texts == golden.config["prompts_after_processing"]


def test_states_beyond_the_statistics_are_neither_clipped_nor_padded():
    edge = 1.0 - 1.0 / 128
    states = torch.tensor([[-7.0, -1.0, -1e-9, 0.0, edge - 1e-6, edge, 1.0, 9.0]])
    assert state_words(states) == ["-1 0 127 128 254 255 255 255"]


# layouts


def written(directory: Path, weights: dict[str, torch.Tensor], config: dict) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def reload(golden, directory: Path, family=PI05Policy, **options):
    """``directory`` with the sizes and the processing of the golden one."""
    reference = parity.load(golden, PI05Policy, prompt=STATE_PROMPT)
    model = {key: value for key, value in reference.config.to_dict().items() if key in ("vlm_config", "dit_config")}
    return family.from_checkpoint(directory, processing=reference.processing, model=model, executed=6, **options)


def same(one: PI05Policy, other: PI05Policy) -> bool:
    theirs = other.network.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.network.state_dict().items())


def test_a_fine_tune_saved_by_lerobot_is_read(golden, policy, tmp_path):
    """Names behind ``model.``, and the trained embedding beside a stale ``lm_head``."""
    weights = {f"model.{name}": tensor for name, tensor in load_file(GOLDEN / "weights.safetensors").items()}
    stale = f"model.{EMBEDDING}"
    weights["model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"] = weights[stale].clone()
    weights[stale] = torch.zeros_like(weights[stale])
    listed = json.loads((GOLDEN / "keys_lerobot_state_dict.json").read_text())
    assert set(listed) <= set(weights)
    directory = written(tmp_path, weights, {**golden.config["policy_config"], "type": "pi05"})
    assert same(reload(golden, directory), policy)


@pytest.mark.parametrize("family", FAMILIES)
def test_openpis_conversion_names_no_architecture_and_is_recognised_by_its_tensors(family, tmp_path):
    source = read_golden(DIRECTORIES / family)
    settings = dict(prompt=STATE_PROMPT) if family == "pi05" else {}
    reference = parity.load(source, FAMILIES[family], **settings)
    config = {"action_dim": 32, "action_horizon": 6, "paligemma_variant": "gemma_2b", "precision": "bfloat16"}
    directory = written(tmp_path, load_file(DIRECTORIES / family / "weights.safetensors"), config)
    model = {key: value for key, value in reference.config.to_dict().items() if key in ("vlm_config", "dit_config")}
    loaded = load_policy(directory, processing=reference.processing, model=model, executed=6)
    assert type(loaded) is FAMILIES[family] and loaded.horizon == 6
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.network.parameters(), reference.network.parameters(), strict=True)
    )


@pytest.mark.parametrize("prefix", ["", "model."], ids=["published", "saved-by-lerobot"])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_size_checkpoints_hold_exactly_what_the_preset_wants(family, prefix, tmp_path):
    """Names and shapes of the full-size model in a file without contents, through the loader on the meta device."""
    published = json.loads((DIRECTORIES / family / "full_size_keys.json").read_text())["keys"]
    sparse(tmp_path / "model.safetensors", {prefix + name: shape for name, (_, shape) in published.items()})
    (tmp_path / "config.json").write_text(json.dumps({"type": family, "chunk_size": 50}))
    record = Processing(
        cameras=["base"], image_size=(224, 224), state_dim=8, action_dim=7,
        state=Normalisation("identity"), action=Normalisation("identity"),
        **(dict(prompt=STATE_PROMPT) if family == "pi05" else {}),
    ).with_tokenizer(word_tokenizer(["a"]))  # fmt: skip
    with torch.device("meta"):
        loaded = FAMILIES[family].from_checkpoint(tmp_path, processing=record)
    ours = {f"{loaded.network_name}.{name}": list(t.shape) for name, t in loaded.network.state_dict().items()}
    names = {prefix + name: shape for name, (_, shape) in published.items()}
    assert {key: names[name] for name, key in published_targets(FAMILIES[family], names).items()} == ours
    assert 3.2e9 < loaded.describe()["parameters"] < 3.7e9


def sparse(file: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of bfloat16 zeros that takes no room on the disk."""
    header, start = {}, 0
    for name, shape in shapes.items():
        stop = start + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + start)


def _cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _without(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["time_mlp_extra.weight"] = weights.pop("time_mlp_in.weight")
    save_file(weights, directory / "model.safetensors")


def _reshaped(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    weights["action_in_proj.weight"] = torch.zeros(32, 7)
    save_file(weights, directory / "model.safetensors")


def _index(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _labelled(kind: str):
    return lambda directory: (directory / "config.json").write_text(json.dumps({"type": kind}))


@pytest.mark.parametrize(
    ("damage", "family", "words"),
    [
        (_cut, "pi05", ["model.safetensors", "damaged or cut short"]),
        (_without, "pi05", ["1 missing: pi05.time_mlp_in.weight", "1 unexpected: time_mlp_extra.weight"]),
        (_reshaped, "pi05", ["1 of another shape: action_in_proj.weight [32, 7] instead of [32, 32]"]),
        (_index, "pi05", ["index.json names b.safetensors, which do not exist"]),
        (_labelled("pi0"), "pi0", ["is labelled 'pi0' and holds the tensors of 'pi05'", "config.json"]),
        (_labelled("pi0"), "pi05", ["describes a 'pi0' model, expected 'pi05'"]),
        (_labelled("smolvla"), "pi05", ["describes a 'smolvla' model, expected 'pi05'"]),
        (lambda d: (d / "config.json").write_text("[]"), "pi05", ["config.json is damaged: expected an object"]),
        (lambda d: (d / "model.safetensors").rename(d / "model.pt"), "pi05", ["model.pt", "pickles can run code"]),
    ],
    ids=["cut", "renamed", "reshaped", "index", "mislabelled", "other", "foreign", "config", "pickle"],
)
def test_damaged_mislabelled_and_foreign_checkpoints_say_what_is_wrong(golden, tmp_path, damage, family, words):
    config = {**golden.config["policy_config"], "type": "pi05"}
    directory = written(tmp_path, load_file(GOLDEN / "weights.safetensors"), config)
    damage(directory)
    with pytest.raises(CheckpointError) as error:
        reload(golden, directory, FAMILIES[family])
    assert all(word in str(error.value) for word in words), str(error.value)


# the policy


def test_a_record_whose_prompt_leaves_the_state_out_is_refused():
    with pytest.raises(ProcessingError, match="would not know where the arm is; expected 'Task: {task}, State"):
        build_policy("pi05-nano", nano_record(prompt="{task}\n"))


def test_a_prompt_that_does_not_fit_says_how_long_it_is():
    policy = build_policy("pi05-nano", nano_record(max_tokens=12))
    shown = Observation({c: np.zeros((64, 64, 3), np.uint8) for c in "ab"}, np.zeros(9, np.float32), "stack")
    with pytest.raises(ValueError, match="'stack' with a state of 9 numbers takes 15 tokens, .* made for 12"):
        policy.prepare([shown])


def test_the_same_instruction_in_another_state_is_another_prompt():
    policy = build_policy("pi05-nano", nano_record())
    image = {c: np.zeros((64, 64, 3), np.uint8) for c in "ab"}
    states = np.zeros((2, 9), np.float32)
    states[1, 4] = 0.5
    inputs = policy.prepare([Observation(image, state, "stack") for state in states])
    assert (inputs["input_ids"][0] != inputs["input_ids"][1]).sum() == 1
    assert torch.equal(inputs["attention_mask"][0], inputs["attention_mask"][1])
    one, other = policy.act(inputs, [(0, 0, 0)] * 2, "eval").actions
    assert not torch.equal(one, other)


def test_adaptive_norm_is_the_formula():
    norm, x, condition = AdaptiveRMSNorm(6, 4, 1e-6), torch.randn(2, 3, 6), torch.randn(2, 4)
    got, gate = norm(x, condition)
    scale, shift, expected_gate = (condition @ norm.dense.weight.T + norm.dense.bias).split(6, dim=1)
    for b in range(2):
        for t in range(3):
            normed = x[b, t] / (x[b, t].square().mean() + 1e-6).sqrt()
            torch.testing.assert_close(got[b, t], normed * (1 + scale[b]) + shift[b])
    torch.testing.assert_close(gate[:, 0], expected_gate)
    assert norm(x.bfloat16(), condition.bfloat16().to(norm.dense.weight.dtype))[0].dtype == torch.bfloat16


# the nano preset


def test_nano_is_small_reproducible_and_reads_its_prompt_without_an_unknown_word():
    one, two, other = (build_policy("pi05-nano", nano_record(), seed=seed) for seed in (1, 1, 2))
    assert 1e6 < one.describe()["parameters"] < 4e6
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.network.action_out_proj.weight, other.network.action_out_proj.weight)
    assert len(set(PRESETS["pi05-nano"].words)) + 5 <= 512
    ids, mask = two.processing.prompts.encode("put the white mug on the plate", "-1 0 17 255")
    assert mask.sum() == 1 + 1 + 7 + 1 + 4 + 1 + 1 and 3 not in ids[: mask.sum()].tolist()
    number = two.processing.prompts.tokenizer.token_to_id
    table = two.vlm.get_input_embeddings().weight
    near, far = ((table[number("100")] - table[number(n)]).norm() for n in ("101", "200"))
    assert near < 0.5 * far


def test_a_saved_nano_is_loaded_by_name_of_its_family(tmp_path):
    policy = build_policy("pi05-nano", nano_record())
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert type(loaded) is PI05Policy and loaded.processing == policy.processing
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), policy.parameters(), strict=True))


def test_cloning_overfits_a_small_batch():
    rng = np.random.default_rng(1)
    policy = build_policy("pi05-nano", nano_record())
    shown = [
        Observation(
            {c: rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for c in "ab"},
            rng.normal(size=9).astype(np.float32),
            "stack",
        )
        for _ in range(2)
    ]
    batch = {**policy.prepare(shown), "actions": torch.from_numpy(rng.normal(size=(2, 8, 7)).astype(np.float32))}
    noise = torch.from_numpy(rng.normal(size=(2, 8, 7)).astype(np.float32))
    batch |= {"sft.noise": noise, "sft.time": torch.tensor([0.2, 0.9])}
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = policy(batch, task="sft")["loss"].mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
