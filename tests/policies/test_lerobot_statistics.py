"""Statistics beside lerobot's pi0 and pi0.5 checkpoints, in files as lerobot 0.6.1's pipelines write them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from vla3_plugin.policies.env_records import env_record
from vla3_plugin.policies.lerobot_statistics import FILE, complete, shipped
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.processing import ProcessingError
from vla3_plugin.policies.registry import load_policy, load_processing

STATS = "policy_preprocessor_step_3_normalizer_processor.safetensors"


def statistics(kinds=("mean", "std", "min", "max", "q01", "q99"), state=8, action=7):
    generator = torch.Generator().manual_seed(0)
    found = {"observation.state.count": torch.tensor([5.0])}
    for part, size in (("observation.state", state), ("action", action)):
        for kind in kinds:
            shift = {"min": -2.0, "q01": -1.5, "q99": 1.5, "max": 2.0}.get(kind, 0.0)
            found[f"{part}.{kind}"] = torch.rand(size, generator=generator) + shift
    return found


def write(path, maps=("QUANTILES", "QUANTILES"), relative=False, eps=1e-8, tensors=None, **changes):
    normalizer = {
        "registry_name": "normalizer_processor",
        "config": {"eps": eps, "features": {}, "norm_map": {"VISUAL": "IDENTITY", "STATE": maps[0], "ACTION": maps[1]}},
        "state_file": STATS,
    }
    steps = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "relative_actions_processor", "config": {"enabled": relative, "exclude_joints": []}},
        normalizer | changes,
    ]
    (path / FILE).write_text(json.dumps({"name": "policy_preprocessor", "steps": steps}))
    save_file(statistics() if tensors is None else tensors, path / STATS)


@pytest.mark.parametrize(
    ("name", "kind", "low", "high"),
    [
        ("MEAN_STD", "mean_std", "mean", "std"),
        ("QUANTILES", "quantiles", "q01", "q99"),
        ("MIN_MAX", "bounds", "min", "max"),
    ],
)
def test_they_are_what_the_checkpoint_was_trained_with(tmp_path, name, kind, low, high):
    write(tmp_path, (name, "QUANTILES"))
    state, action = shipped(tmp_path)
    expected, x = statistics(), torch.linspace(-1, 1, 8)
    one, other = expected[f"observation.state.{low}"], expected[f"observation.state.{high}"]
    reference = (x - one) / (other + 1e-8) if name == "MEAN_STD" else 2 * (x - one) / (other - one) - 1
    torch.testing.assert_close(state.forward(x), reference)
    assert (state.kind, action.kind) == (kind, "quantiles")
    torch.testing.assert_close(action.inverse(action.forward(x[:7])), x[:7])


def test_identity_needs_no_numbers(tmp_path):
    write(tmp_path, ("IDENTITY", "MEAN_STD"), tensors=statistics(("mean", "std")))
    assert shipped(tmp_path)[0].kind == "identity"


def test_an_environments_record_keeps_its_cameras_and_gives_way_to_the_checkpoints_statistics(tmp_path):
    record = env_record("libero", PRESETS["pi05"])
    assert complete(record, tmp_path) is record, "where none are shipped the environment's own stand"
    write(tmp_path)
    found = complete(record, tmp_path)
    assert (found.cameras, found.state_names, found.prompt) == (record.cameras, record.state_names, record.prompt)
    assert found.action.stats["q01"] == statistics()["action.q01"].tolist() != record.action.stats["q01"]


def test_a_checkpoint_that_is_loaded_for_an_environment_acts_in_its_own_units(tmp_path):
    """The same for the network and for who prepares its inputs, which are different processes."""
    preset = "pi05-nano"
    load_policy(preset, processing="libero").save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "processing.json").unlink()
    write(tmp_path)
    found = load_processing(tmp_path, processing="libero")
    assert found.action.stats["q01"] == statistics()["action.q01"].tolist()
    assert load_policy(tmp_path, processing="libero").processing.action == found.action
    assert config["family"] == "pi05"


def test_a_checkpoint_with_statistics_and_no_environment_says_what_to_give(tmp_path):
    load_policy("pi05-nano", processing="libero").save(tmp_path)
    (tmp_path / "processing.json").unlink()
    write(tmp_path)
    with pytest.raises(ProcessingError, match=r"give `processing`, one of libero, maniskill"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"maps": ("QUANTILE10", "QUANTILES")}, r"norm_map.STATE is 'QUANTILE10', expected one of IDENTITY, MEAN_STD"),
        ({"relative": True}, "actions are relative to the state"),
        ({"eps": 1e-3}, r"eps is 0.001"),
        ({"tensors": statistics(("mean", "std"))}, r"observation.state.q01, observation.state.q99 is not among"),
        ({"tensors": statistics(action=6)}, "trained on 6 action dimensions, the environment has 7"),
        ({"state_file": "../elsewhere.safetensors"}, "does not lie beside it"),
        ({"registry_name": "another"}, "no pipeline of lerobot's"),
    ],
)
def test_statistics_that_cannot_be_used_are_refused_by_name(tmp_path, change, message):
    write(tmp_path, **change)
    with pytest.raises(ProcessingError, match=message):
        complete(env_record("libero", PRESETS["pi05"]), tmp_path)


def test_damaged_files_are_refused(tmp_path):
    write(tmp_path)
    (tmp_path / STATS).write_bytes(b"\0" * 40)
    with pytest.raises(ProcessingError, match="is damaged"):
        shipped(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ProcessingError, match="no pipeline"):
        shipped(tmp_path)
