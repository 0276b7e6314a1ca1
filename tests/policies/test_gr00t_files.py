"""GR00T N1.5 on disk: published layouts and what they ship, our own directories, and what is wrong with bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vla3_plugin.contract import Observation
from vla3_plugin.parity.gr00t_n1_5 import _placeholder_tokenizer
from vla3_plugin.parity.report import check
from vla3_plugin.policies.checkpoints import CheckpointError
from vla3_plugin.policies.gr00t import GR00TPolicy
from vla3_plugin.policies.gr00t_config import GR00TConfig
from vla3_plugin.policies.gr00t_files import published_targets
from vla3_plugin.policies.gr00t_network import GR00T
from vla3_plugin.policies.gr00t_processing import GR00TProcessing, MinMax
from vla3_plugin.policies.gr00t_prompts import eagle_word_tokenizer
from vla3_plugin.policies.gr00t_statistics import LEROBOT, NVIDIA
from vla3_plugin.policies.prepare import load_preparer
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.processing import Normalisation, Processing, ProcessingError
from vla3_plugin.policies.registry import load_policy, load_processing

RNG = np.random.default_rng(7)
GOLDEN = Path(__file__).parents[1] / "golden" / "gr00t_n1_5"
CONFIG = json.loads((GOLDEN / "config.json").read_text())
TINY = CONFIG["tiny"]
SECTIONS = {key: CONFIG[key] for key in ("action_head_cfg", "backbone_cfg", "eagle_config")}
STATS = CONFIG["dataset_stats"]


def record(**changes) -> GR00TProcessing:
    state, action = (MinMax(stats=dict(STATS[name])) for name in ("observation.state", "action"))
    values = dict(
        cameras=["a", "b"], image_size=(28, 28), state_dim=8, action_dim=7, state=state, action=action, max_tokens=150
    )
    return GR00TProcessing(**{**values, **changes})


def processing(size: int = 64) -> Processing:
    """Of another family: what demonstrations give."""
    return Processing.from_demos(
        RNG.normal(size=(50, 9)), RNG.normal(size=(50, 7)), cameras=["a", "b"], image_size=(size, size), max_tokens=32
    )


def small(**settings) -> GR00TPolicy:
    """The nano preset with smaller layers."""
    nano = PRESETS["gr00t-n1.5-nano"].model
    text = {**nano["eagle_config"]["text_config"], "intermediate_size": 32}
    model = dict(nano, eagle_config={**nano["eagle_config"], "text_config": text})
    return GR00TPolicy.build("gr00t-n1.5-nano", processing(), model=model, **settings).eval()


def observations(count: int) -> list[Observation]:
    return [
        Observation(
            {c: RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8) for c in ("a", "b")},
            RNG.normal(size=9).astype(np.float32),
            "push the bowl",
        )
        for _ in range(count)
    ]


def published(directory: Path, config: dict, rename=lambda name: name) -> Path:
    weights = load_file(GOLDEN / "weights.safetensors")
    save_file({rename(name): tensor for name, tensor in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def from_checkpoint(directory: Path, **options) -> GR00TPolicy:
    tokenizer = _placeholder_tokenizer(CONFIG["eagle_config"]["image_token_index"])
    return GR00TPolicy.from_checkpoint(directory, **{"processing": record(), "tokenizer": tokenizer, **options})


NVIDIA_CONFIG = {"model_type": "gr00t_n1_5", **SECTIONS}


# published layouts


def test_the_golden_vectors_are_reproduced():
    report = check(GOLDEN)
    assert report.ok, report.failed
    assert len(report.tensors) > 80


@pytest.mark.parametrize("table", ["embed_tokens", "lm_head", "both"])
@pytest.mark.parametrize("prefix", ["", "_groot_model."])
def test_every_spelling_of_the_published_keys_is_read(tmp_path, table, prefix):
    expected = from_checkpoint(published(tmp_path, NVIDIA_CONFIG)).gr00t.state_dict()
    published(tmp_path, NVIDIA_CONFIG, lambda name: prefix + name)
    weights = load_file(tmp_path / "model.safetensors")
    embed = f"{prefix}backbone.eagle_model.language_model.model.embed_tokens.weight"
    head = f"{prefix}backbone.eagle_model.language_model.lm_head.weight"
    if table == "lm_head":
        weights[head] = weights.pop(embed)
    elif table == "both":
        weights[head] = torch.zeros_like(weights[embed])  # stale: fine-tuning trains the other one
    for name in [name for name in weights if "vision_model.head." in name][:: 1 if prefix else 2]:
        del weights[name]  # optional, all or some
    save_file(weights, tmp_path / "model.safetensors")
    found = from_checkpoint(tmp_path).gr00t.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_sizes_that_the_config_does_not_state_are_read_off_the_weights(tmp_path):
    """lerobot's config.json states no sizes; what shapes cannot tell is given, the rest is not."""
    published(tmp_path, {"type": "groot"}, lambda name: f"_groot_model.{name}")
    untold = dict(
        action_head_cfg=dict(
            diffusion_model_cfg=dict(attention_head_dim=12), vl_self_attention_cfg=dict(attention_head_dim=10)
        ),
        eagle_config=dict(vision_config=dict(num_attention_heads=2), image_token_index=190),
    )
    policy = from_checkpoint(tmp_path, model=untold)
    head, eagle = policy.config.action_head_cfg, policy.config.eagle_config
    assert head["diffusion_model_cfg"]["num_attention_heads"] == TINY["dit_heads"]
    assert head["vl_self_attention_cfg"]["num_attention_heads"] == TINY["vl_heads"]
    text = eagle["text_config"]
    assert [text[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")] == [4, 2, 16]
    assert eagle["vision_config"]["image_size"] == TINY["img"] and head["max_seq_len"] == TINY["maxseq"]
    assert policy.config.backbone_cfg["select_layer"] == TINY["select_layer"]
    stated = from_checkpoint(published(tmp_path, NVIDIA_CONFIG))
    assert all(torch.equal(a, b) for a, b in zip(policy.gr00t.parameters(), stated.gr00t.parameters(), strict=True))
    given = load_file(GOLDEN / "inputs.safetensors")
    one, two = (
        p.eval().gr00t.backbone(given["pixel_values"], given["input_ids"], given["attention_mask"])
        for p in (policy, stated)
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize("prefix", ["", "_groot_model."])
def test_full_size_has_exactly_the_published_tensors(prefix):
    published = json.loads((GOLDEN / "full_size_keys.json").read_text())
    config = GR00TConfig(**{key: published[key] for key in SECTIONS})
    with torch.device("meta"):
        stated, preset = GR00T(config), GR00T(GR00TConfig(**PRESETS["gr00t-n1.5"].model))
    targets = published_targets(prefix + name for name in published["keys"])
    theirs = {key: published["keys"][name.removeprefix(prefix)][1] for name, key in targets.items()}
    for network in (stated, preset):
        assert {f"gr00t.{name}": list(tensor.shape) for name, tensor in network.state_dict().items()} == theirs
    unread = {name.removeprefix(prefix) for name in published["keys"]} - {n.removeprefix(prefix) for n in targets}
    assert all("vision_model.head." in name or name.endswith("lm_head.weight") for name in unread)
    assert config.action_head_cfg["action_horizon"] == 16 and config.backbone_cfg["select_layer"] == 12


def test_a_published_checkpoint_and_the_registry(tmp_path):
    published(tmp_path, NVIDIA_CONFIG)
    tokenizer = _placeholder_tokenizer(190)
    policy = load_policy(tmp_path, processing=record(), tokenizer=tokenizer, executed=5, num_steps=2)
    assert isinstance(policy, GR00TPolicy) and policy.policy.executed == 5
    with torch.device("meta"):
        assert load_policy(tmp_path, processing=record(), tokenizer=tokenizer).describe()["horizon"] == 16


# statistics that checkpoints ship


def lerobot(directory: Path, **step) -> Path:
    published(
        directory,
        {"type": "groot", "input_features": {"observation.images.wrist": {}, "observation.images.base": {}}},
        lambda name: f"_groot_model.{name}",
    )
    settings = {"embodiment_tag": "so100", "embodiment_mapping": {"so100": 2}, "normalize_min_max": True, **step}
    state_file = "policy_preprocessor_step_2_groot_pack_inputs_v3.safetensors"
    steps = [
        {"registry_name": "x"},
        {"registry_name": "groot_pack_inputs_v3", "config": settings, "state_file": state_file},
    ]
    (directory / LEROBOT).write_text(json.dumps({"steps": steps}))
    tensors = {
        f"{name}.{kind}": torch.tensor(values) for name, stats in STATS.items() for kind, values in stats.items()
    }
    save_file(tensors, directory / state_file)
    return directory


SIZES = dict(
    action_head_cfg=SECTIONS["action_head_cfg"], eagle_config=dict(SECTIONS["eagle_config"], image_token_index=103)
)


def test_lerobots_pipeline_is_read(tmp_path):
    lerobot(tmp_path)
    options = dict(tokenizer=GOLDEN / "fake_tokenizer_eagle", model=SIZES, record=dict(max_tokens=150))
    policy = load_policy(tmp_path, **options)
    found = policy.processing
    assert found.cameras == ["base", "wrist"] and found.embodiment_id == 2 and not found.formalize
    assert found.state.stats["min"] == STATS["observation.state"]["min"] and found.action_dim == 7
    alone = load_processing(
        tmp_path, tokenizer=GOLDEN / "fake_tokenizer_eagle", model=SIZES, record=dict(max_tokens=150)
    )
    shown = [
        Observation({c: np.zeros((28, 28, 3), np.uint8) for c in ("base", "wrist")}, np.zeros(8, np.float32), "go")
    ]
    for name, tensor in policy.prepare(shown).items():
        assert torch.equal(alone.prepare(shown)[name], tensor)


def test_what_is_missing_of_lerobots_pipeline_is_said(tmp_path):
    options = dict(tokenizer=GOLDEN / "fake_tokenizer_eagle", model=SIZES)
    lerobot(tmp_path, normalize_min_max=False)
    with pytest.raises(ProcessingError, match="normalize_min_max is false"):
        load_policy(tmp_path, **options)
    lerobot(tmp_path)
    next(tmp_path.glob("*pack_inputs_v3.safetensors")).unlink()
    with pytest.raises(ProcessingError, match="names .*pack_inputs_v3.safetensors.* which does not exist"):
        load_policy(tmp_path, **options)
    (tmp_path / LEROBOT).unlink()
    with pytest.raises(ProcessingError, match="has no processing.json, .*actions in normalised units"):
        load_policy(tmp_path, **options)


def test_nvidias_metadata_needs_the_order_of_its_parts(tmp_path):
    published(tmp_path, NVIDIA_CONFIG | {"eagle_config": SIZES["eagle_config"]})
    parts = {
        "arm": {"min": [-1.0, -2.0], "max": [1.0, 2.0]},
        "gripper": {"min": [0.0], "max": [0.04]},
    }
    (tmp_path / NVIDIA).parent.mkdir()
    (tmp_path / NVIDIA).write_text(json.dumps({"new_embodiment": {"statistics": {"state": parts, "action": parts}}}))
    options = dict(tokenizer=GOLDEN / "fake_tokenizer_eagle")
    with pytest.raises(ProcessingError, match=r"state parts \['arm', 'gripper'\], state_parts is None: give all"):
        load_policy(tmp_path, **options)
    given = dict(state_parts=["gripper", "arm"], action_parts=["arm", "gripper"], max_tokens=150)
    with pytest.raises(ProcessingError, match="names no cameras"):
        load_policy(tmp_path, **options, record=given)
    found = load_policy(tmp_path, **options, record={**given, "cameras": ["x"]}).processing
    assert found.state.stats == {"min": [0.0, -1.0, -2.0], "max": [0.04, 1.0, 2.0]}
    assert found.action.stats["max"] == [1.0, 2.0, 0.04] and found.embodiment_id == 31 and found.formalize


# processing


def test_other_families_records_are_taken_over_without_their_prompt(tmp_path):
    processing(64).save(tmp_path)
    found = GR00TProcessing.load(tmp_path)
    assert "{images}" in found.prompt and found.cameras == ["a", "b"] and found.prompts is None


def test_env_workers_prepare_what_the_policy_would(tmp_path):
    from_preset = load_preparer("gr00t-n1.5-nano", processing=processing(64))
    policy = GR00TPolicy.build("gr00t-n1.5-nano", processing(64))
    policy.save(tmp_path)
    shown = observations(3)
    for preparer in (from_preset, load_preparer(tmp_path)):
        prepared = preparer.prepare(shown)
        for name, tensor in policy.prepare(shown).items():
            assert torch.equal(prepared[name], tensor)
    unknown = policy.processing.prompts.tokenizer.token_to_id("<unk>")
    ids, mask = policy.processing.prompts.encode("put the white mug on the plate")
    assert unknown not in ids[: mask.sum()].tolist()


# our own directories


def test_a_saved_policy_comes_back_exactly(tmp_path):
    policy = small(value_level="action", noise_level=0.3, method="flow_noise")
    policy.save(tmp_path)
    loaded = load_policy(tmp_path).eval()
    assert loaded.policy == policy.policy and loaded.processing == policy.processing and loaded.preset == policy.preset
    shown = observations(3)
    keys = [(0, i, 0) for i in range(3)]
    one, two = (p.act(p.prepare(shown), keys, "train") for p in (policy, loaded))
    assert torch.equal(one.actions, two.actions) and torch.equal(one.value, two.value)
    half = load_policy(tmp_path, dtype="bfloat16", num_steps=2)
    assert half.dtype == torch.bfloat16 and half.policy.num_steps == 2


def _change(directory, file, change):
    data = json.loads((directory / file).read_text())
    change(data)
    (directory / file).write_text(json.dumps(data))


def _rename_tensors(directory):
    tensors = load_file(directory / "model.safetensors")
    tensors["gr00t.extra"] = tensors.pop("gr00t.action_head.vlln.weight")
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
            ["model.safetensors", "damaged or cut short"],
        ),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), ["convert them to safetensors"]),
        (_rename_tensors, ["1 missing: gr00t.action_head.vlln.weight", "1 unexpected: gr00t.extra"]),
        (
            lambda d: _change(
                d, "config.json", lambda c: c["model"]["action_head_cfg"].update(num_target_vision_tokens=7)
            ),
            ["1 of another shape: gr00t.action_head.future_tokens.weight [4, 128] instead of [7, 128]"],
        ),
        (lambda d: _change(d, "config.json", lambda c: c.update(family="pi0")), ["family 'pi0'"]),
    ],
)
def test_damaged_directories_say_what_is_wrong(tmp_path, damage, words):
    small().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError) as error:
        GR00TPolicy.load(tmp_path)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama"}, "describes a 'llama' model, expected 'gr00t_n1_5' or 'groot'"),
        (
            {"model_type": "gr00t_n1_5", **SECTIONS, "backbone_cfg": {"select_layer": 3}},
            "[0-9]+ missing: gr00t.backbone",
        ),
        (
            {**NVIDIA_CONFIG, "eagle_config": {**SECTIONS["eagle_config"], "use_pixel_shuffle": True}},
            "use_pixel_shuffle is True, expected False",
        ),
        (
            {**NVIDIA_CONFIG, "action_head_cfg": {**SECTIONS["action_head_cfg"], "input_embedding_dim": 40}},
            "expected 48",
        ),
    ],
)
def test_foreign_and_mislabelled_checkpoints_are_refused(tmp_path, config, words):
    with pytest.raises(CheckpointError, match=words):
        from_checkpoint(published(tmp_path, config))


def test_tokenizers_and_environments_that_do_not_fit_are_refused(tmp_path):
    published(tmp_path, NVIDIA_CONFIG)
    with pytest.raises(ValueError, match="<IMG_CONTEXT> at 103, the model 200 and 190: not made for each other"):
        from_checkpoint(tmp_path, tokenizer=GOLDEN / "fake_tokenizer_eagle")
    with pytest.raises(ValueError, match="image_size is \\[32, 32\\], the model looks at squares of 28"):
        from_checkpoint(tmp_path, processing=record(image_size=(32, 32)))
    with pytest.raises(ValueError, match="embodiment is 32, the model has 32 of them"):
        from_checkpoint(tmp_path, processing=record(embodiment=32))
    wide = record(action_dim=33, action=Normalisation("identity"))
    with pytest.raises(ValueError, match="action_dim is 32, the environment has 33 action dimensions"):
        from_checkpoint(tmp_path, processing=wide)
    with pytest.raises(ValueError, match="not made for Eagle 2.5"):
        from_checkpoint(tmp_path, tokenizer=GOLDEN.parent / "pi0" / "fake_tokenizer")


# the nano preset


def test_nano_is_small_and_reproducible():
    one, two, other = (GR00TPolicy.build("gr00t-n1.5-nano", processing(64), seed=seed) for seed in (1, 1, 2))
    assert 2e6 < one.describe()["parameters"] < 4e6
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.gr00t.backbone.mlp1[0].weight, other.gr00t.backbone.mlp1[0].weight)
    image_token = one.config.eagle_config["image_token_index"]
    assert eagle_word_tokenizer(["zebra"]).token_to_id("<IMG_CONTEXT>") == image_token
