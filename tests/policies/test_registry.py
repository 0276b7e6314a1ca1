"""Policies by name: presets, directories, embedded checkpoints, third parties, and helpful refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from vla3_plugin.contract import Observation
from vla3_plugin.policies import registry
from vla3_plugin.policies.processing import Processing
from vla3_plugin.policies.registry import (
    build_policy,
    load_policy,
    load_processing,
    policy_class,
    policy_names,
    policy_summary,
)

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def record() -> Processing:
    return Processing.from_demos(
        RNG.normal(size=(50, 9)), RNG.normal(size=(50, 7)), cameras=["a"], image_size=(64, 64), max_tokens=24
    )


@pytest.fixture(scope="module")
def saved(record, tmp_path_factory):
    path = tmp_path_factory.mktemp("nano")
    build_policy("pi0-nano", record, seed=4).save(path)
    return path


def test_importing_the_registry_and_the_processing_imports_no_transformers():
    code = (
        "import sys, vla3_plugin.policies.registry, vla3_plugin.policies.processing as p; "
        "print([m for m in ('transformers', 'tokenizers', 'verl', 'ray') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_families_are_listed_and_unknown_ones_get_the_nearest():
    assert "pi0" in policy_names()
    with pytest.raises(ValueError, match="unknown policy family 'pi00' \\(did you mean 'pi0'\\?\\); known: .*pi0"):
        policy_class("pi00")


def test_a_third_party_family_is_found_through_its_entry_point(monkeypatch):
    class Entry:
        name, value = "theirs", "collections:OrderedDict"

    class Broken:
        name, value = "broken", "no_such_package_here:Policy"

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry, Broken])
    assert policy_names() == sorted([*registry.BUILT_IN, "broken", "theirs"])
    assert policy_class("theirs").__name__ == "OrderedDict"
    with pytest.raises(ValueError, match="'broken'.*no_such_package_here.*does not load: ModuleNotFoundError"):
        policy_class("broken")


def test_unknown_names_list_what_there_is(tmp_path, record):
    with pytest.raises(ValueError, match="unknown policy 'pi0-nanno' \\(did you mean 'pi0-nano'\\?\\).*pi0, pi0-nano"):
        load_policy("pi0-nanno")
    with pytest.raises(ValueError, match="unknown policy preset 'nano'.*known: pi0, pi0-nano"):
        build_policy("nano", record)
    with pytest.raises(ValueError, match="config.json is missing or names no architecture"):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="give `processing`"):
        load_policy("pi0-nano")


def test_a_directory_loads_its_policy_and_its_processing(saved, record):
    policy = load_policy(saved, noise_level=0.2)
    assert policy.policy.noise_level == 0.2
    assert load_processing(saved) == policy.processing == record
    shown = Observation({"a": RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)}, np.zeros(9, np.float32), "pick it up")
    for name, tensor in load_processing(saved).prepare([shown]).items():
        assert torch.equal(tensor, policy.prepare([shown])[name])


def test_a_preset_with_a_record_is_built(saved, record):
    fresh = load_policy("pi0-nano", processing=saved / "processing.json", seed=4)
    for a, b in zip(fresh.parameters(), load_policy(saved).parameters(), strict=True):
        assert torch.equal(a, b)
    assert load_processing("pi0-nano", processing=record).prompts is not None


def test_the_summary_knows_the_sizes_and_finds_damage_without_loading(saved, tmp_path):
    summary = policy_summary(saved, num_steps=8)
    assert summary == load_policy(saved, num_steps=8).describe()
    assert summary["parameters"] == summary["trainable"] > 1e6
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or cut short"):
        policy_summary(tmp_path)


def test_embedded_checkpoints_are_found_by_name(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "EMBEDDED", tmp_path)
    (tmp_path / "pi0-nano-toy").symlink_to(saved)
    assert registry.embedded_names() == ["pi0-nano-toy"]
    assert load_policy("pi0-nano-toy").describe() == load_policy(saved).describe()
    with pytest.raises(ValueError, match="did you mean 'pi0-nano-toy'"):
        load_policy("pi0-nano-tox")


def test_a_hub_id_is_fetched_and_a_failure_names_it(saved, monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert load_policy("someone/nano").describe() == load_policy(saved).describe()
    assert asked == [("someone/nano", ["*.json", "*.safetensors"])]

    def fail(name, allow_patterns):
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="'someone/nano'.*could not be fetched.*ConnectionError: offline"):
        load_policy("someone/nano")


def test_a_checkpoint_of_an_unknown_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "smolvla"}))
    with pytest.raises(ValueError, match="unknown policy family 'smolvla'.*known: .*pi0"):
        load_policy(tmp_path)
