"""OpenVLA's processing: bins in environment units, the prompt, statistics of published checkpoints."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from vla3_plugin.policies import tokens
from vla3_plugin.policies.checkpoints import CheckpointError
from vla3_plugin.policies.openvla import OpenVLAPolicy
from vla3_plugin.policies.openvla_oft import OpenVLAOFTPolicy
from vla3_plugin.policies.openvla_processing import OpenVLAProcessing
from vla3_plugin.policies.processing import Normalisation, Processing, ProcessingError
from vla3_plugin.policies.prompts import word_tokenizer
from vla3_plugin.policies.registry import load_processing


def processing(**settings) -> Processing:
    rng = np.random.default_rng(7)
    return Processing.from_demos(
        rng.normal(size=(50, 9)), rng.normal(size=(50, 7)) * 0.3, cameras=["a", "b"], image_size=(32, 32),
        max_tokens=24, **{"normalisation": "quantiles", **settings},
    )  # fmt: skip


# environment units


def test_actions_are_bin_centres_in_environment_units_with_the_grippers_convention():
    record = OpenVLAProcessing.of(
        Processing(
            cameras=["a"], image_size=(32, 32), state_dim=0, state=Normalisation("identity"), action_dim=2,
            action=Normalisation("bounds", {"low": [2.0, 0.0], "high": [4.0, 1.0]}),
            gripper="unit_flip", gripper_binary=True,
        )
    )  # fmt: skip
    offsets = torch.tensor([[255, 255], [0, 0]])
    low, high = (2.0 + 2.0 / 510 * k for k in (1, 509))
    torch.testing.assert_close(record.token_actions(offsets), torch.tensor([[low, 1.0], [high, -1.0]]))
    demonstrated = torch.tensor([[2.0, 1.0], [4.0, -1.0]])
    assert torch.equal(record.action_offsets(demonstrated), offsets)


def test_masked_dimensions_are_left_as_they_are_and_the_epsilon_widens_the_others():
    made = dict(cameras=["a"], image_size=(32, 32), state_dim=0, state=Normalisation("identity"), action_dim=2,
                action=Normalisation("bounds", {"low": [0.0, 0.0], "high": [1.0, 1.0]}))  # fmt: skip
    record = OpenVLAProcessing(**made, raw_dims=[1], range_epsilon=1e-2)
    value = tokens.offset_values()
    got = record.offset_actions(torch.arange(256)[:, None].expand(-1, 2))
    torch.testing.assert_close(got[:, 1], value, atol=0, rtol=0)
    torch.testing.assert_close(got[:, 0], 0.5 * (value + 1) * 1.01)


def test_means_and_deviations_become_bounds_and_other_prompts_are_left_behind():
    plain = processing(normalisation="mean_std")
    record = OpenVLAProcessing.of(plain)
    assert record.action.kind == "bounds" and "In: What action" in record.prompt
    for name, sigmas in (("low", -3.0), ("high", 3.0)):
        expected = np.add(plain.action.stats["mean"], np.multiply(plain.action.stats["std"], sigmas))
        np.testing.assert_allclose(record.action.stats[name], expected)


def test_the_prompt_ends_with_the_blank_that_llama_has():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "in:", "out:", "▁", "stack"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    record = OpenVLAProcessing.of(processing()).with_tokenizer(tokenizer)
    record.prompts.prompt = "in: {task}\nout:"
    ids, mask = record.prompts(["STACK"])
    assert ids[0, :6].tolist() == [1, 2, 5, 3, 4, 0] and mask[0].sum() == 5
    with pytest.raises(ValueError, match="takes 29 tokens, the policy was made for 24"):
        record.prompts(["stack " * 25])


# statistics of published checkpoints

TURNED = {"q01": [1.0, 0.0], "q99": [-3.0, 1.0]}
STATS = {"q01": [-1.0, 0.0], "q99": [1.0, 1.0], "min": [-2.0, 0.0], "max": [2.0, 1.0], "mask": [True, False]}


def published(directory, norm_stats, **files) -> None:
    config = {"model_type": "openvla", "norm_stats": norm_stats, "image_sizes": [224, 224]}
    (directory / "config.json").write_text(json.dumps(config))
    for name, data in files.items():
        (directory / f"{name}.json").write_text(json.dumps(data))
    word_tokenizer(["a"]).save(str(directory / "tokenizer.json"))


def test_statistics_are_found_by_key_with_the_benchmarks_conventions(tmp_path):
    published(tmp_path, {"libero_spatial": {"action": STATS}, "bridge_orig": {"action": {**STATS, "q99": [3.0, 1.0]}}})
    record = load_processing(tmp_path, unnorm_key="libero_spatial", temperature=1.6)
    assert record.cameras == ["agentview"] and record.raw_dims == [1] and record.range_epsilon == 0.0
    assert (record.gripper, record.gripper_binary) == ("unit_flip", True)
    assert record.action.stats == {"low": [-1.0, -1.0], "high": [1.0, 1.0]}
    other = load_processing(tmp_path, unnorm_key="bridge_orig", cameras=["front"], family="openvla_oft")
    assert other.range_epsilon == 1e-8 and other.gripper == "unit" and other.action.stats["high"][0] == 3.0
    wide = load_processing(tmp_path, unnorm_key="libero_spatial", statistics="bounds")
    assert wide.action.stats["low"][0] == -2.0


@pytest.mark.parametrize(
    ("norm_stats", "files", "options", "words"),
    [
        ({"a": {"action": STATS}, "b": {"action": STATS}}, {}, {}, "unnorm_key must be chosen; .* for: a, b"),
        ({"libero_10": {"action": STATS}}, {}, {"unnorm_key": "libero_1"}, "did you mean 'libero_10'.* for: libero_10"),
        ({}, {}, {}, "has no action statistics"),
        ({"libero_a": {"action": {"q01": [0.0]}}}, {}, {}, "libero_a.action lacks q99; it has q01"),
        ({"libero_a": {"proprio": {}}}, {}, {}, "'libero_a' holds no `action`"),
        ({"libero_a": {"action": TURNED}}, {}, {}, r"q01\[0\] is 1.0, not below q99\[0\] = -3.0"),
        ({"libero_a": {"action": {**STATS, "mask": [True]}}}, {}, {}, "mask 1; expected as many"),
        ({"libero_a": {"action": STATS}}, {"dataset_statistics": {"libero_a": {"action": TURNED}}}, {},
         "different action statistics for 'libero_a'"),
        ({"mine": {"action": STATS}}, {}, {}, "belongs to no benchmark known here"),
        ({"bridge_orig": {"action": STATS}}, {}, {}, "does not name its cameras"),
        ({"libero_a": {"action": STATS}}, {"preprocessor_config": {"image_resize_strategy": "letterbox"}}, {},
         "image_resize_strategy is 'letterbox'"),
    ],
)  # fmt: skip
def test_missing_or_contradictory_statistics_stop_with_a_reason(tmp_path, norm_stats, files, options, words):
    published(tmp_path, norm_stats, **files)
    with pytest.raises((ProcessingError, CheckpointError), match=words):
        load_processing(tmp_path, **options)


def test_foreign_and_continuous_checkpoints_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="describes a 'llama' model, expected 'openvla'"):
        OpenVLAPolicy.from_checkpoint(tmp_path)
    published(tmp_path, {"libero_a": {"action": STATS}})
    (tmp_path / "action_head--150000_checkpoint.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="action_head--150000_checkpoint.pt: continuous action heads"):
        OpenVLAOFTPolicy.from_checkpoint(tmp_path)
