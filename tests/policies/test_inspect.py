"""``vla3 policy inspect``: what is said of a checkpoint is what its loader does, and nothing but headers is read."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vla3_plugin.cli import main
from vla3_plugin.policies.inspect import inspect_policy
from vla3_plugin.policies.inspect_text import format_inspection
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.registry import EMBEDDED, load_policy

GOLDEN = Path(__file__).parents[1] / "golden"
NANO = EMBEDDED / "pi0-nano-libero"
HUB = "owner/name"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(NANO, tmp_path / "checkpoint"))


def edited(checkpoint: Path, edit) -> Path:
    weights = load_file(checkpoint / "model.safetensors")
    edit(weights)
    save_file(weights, checkpoint / "model.safetensors")
    return checkpoint


def test_an_embedded_checkpoint_is_what_its_loader_makes_of_it() -> None:
    found = inspect_policy("pi0-nano-libero")
    policy = load_policy("pi0-nano-libero")
    assert found["family"] == "pi0" and found["preset"] == "pi0-nano" and found["kind"] == "saved by vla3"
    assert found["parameters"]["total"] == sum(p.numel() for p in policy.parameters())
    assert found["parameters"]["trainable"] == sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert sum(part["total"] for part in found["parameters"]["parts"].values()) == found["parameters"]["total"]
    assert found["keys"]["matched"] == len(policy.state_dict()) and not found["keys"]["missing"]
    assert found["file"]["parameters_by_dtype"] == {"F16": found["parameters"]["total"]}
    assert found["processing"]["action"] == {"kind": policy.processing.action.kind, "dim": 7}
    assert found["processing"]["cameras"] == policy.processing.cameras
    assert found["tokenizer"]["tokens"] == policy.processing.prompts.tokenizer.get_vocab_size()
    assert found["problems"] == []


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "latency"])
def test_every_preset_is_told_without_an_environment(preset: str) -> None:
    found = inspect_policy(preset)
    assert found["family"] == PRESETS[preset].family
    assert found["keys"] is None and found["file"] is None and not found["processing"]["found"]
    assert found["parameters"]["total"] > (1e9 if not preset.endswith("nano") else 1e6)
    assert found["towers"] and all(tower["layers"] >= 1 for tower in found["towers"])
    assert found["problems"] == []
    assert preset in format_inspection(found)


def test_only_headers_are_read(checkpoint: Path) -> None:
    """The same answer from a file whose weights are holes."""
    expected = inspect_policy(checkpoint)
    file = checkpoint / "model.safetensors"
    size = file.stat().st_size
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    header = file.read_bytes()[: 8 + length]
    file.write_bytes(header)
    with open(file, "r+b") as holes:
        holes.truncate(size)
    assert inspect_policy(checkpoint) == expected


def test_keys_that_do_not_fit_are_told_by_kind(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bias = "pi0.action_out_proj.bias"

    def edit(weights: dict[str, torch.Tensor]) -> None:
        del weights["pi0.action_out_proj.weight"]
        weights["something.else"] = torch.zeros(3)
        weights[bias] = torch.zeros(5)

    before = inspect_policy(checkpoint)["keys"]["matched"]
    keys = inspect_policy(edited(checkpoint, edit))["keys"]
    assert keys["matched"] == before - 2
    assert keys["missing"] == ["pi0.action_out_proj.weight"]
    assert keys["unexpected"] == ["something.else"]
    assert keys["other_shape"] == [f"{bias} [5] instead of [7]"]
    assert main(["policy", "inspect", str(checkpoint)]) == 1
    out = capsys.readouterr().out
    assert "1 missing: pi0.action_out_proj.weight" in out and "1 keys of another shape" in out


def test_what_is_frozen_is_not_counted_as_trained() -> None:
    found = inspect_policy("pi0-nano-libero", freeze_vlm=True)
    policy = load_policy("pi0-nano-libero", freeze_vlm=True)
    assert found["parameters"]["trainable"] == sum(p.numel() for p in policy.parameters() if p.requires_grad)
    parts = found["parameters"]["parts"]
    assert all(part["trainable"] == 0 for name, part in parts.items() if ".vlm." in name)
    assert parts["value_head"]["trainable"] == parts["value_head"]["total"]


def test_lora_counts_are_those_of_the_wrapped_policy() -> None:
    from peft import LoraConfig, get_peft_model

    policy = load_policy("pi0-nano-libero")
    whole = sum(p.numel() for p in policy.parameters())
    config = LoraConfig(r=4, target_modules=policy.lora_targets, modules_to_save=policy.lora_whole)
    wrapped = get_peft_model(policy, config)
    counts = inspect_policy("pi0-nano-libero", lora_rank=4)["parameters"]
    assert counts["trainable"] == sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert counts["lora"] == sum(p.numel() for n, p in wrapped.named_parameters() if "lora_" in n)
    assert counts["total"] == whole


def test_memory_is_told_for_a_gpu_and_shrinks_with_their_number_and_with_what_is_frozen() -> None:
    found = {gpus: inspect_policy("pi0-nano", gpus=gpus) for gpus in (1, 8)}
    one, eight = found[1]["memory"], found[8]["memory"]
    parameters = found[1]["parameters"]["total"]
    assert one["training"]["parts"]["adamw states"] == 8 * parameters
    assert eight["training"]["parts"]["adamw states"] == parameters
    assert eight["training"]["bytes"] < one["training"]["bytes"] / 4
    assert eight["rollout"] == one["rollout"]
    assert one["rollout"]["parts"]["policy weights"] == 2 * parameters
    frozen = inspect_policy("pi0-nano", freeze_vlm=True)
    trained = frozen["parameters"]["trainable"]
    assert frozen["memory"]["training"]["parts"]["adamw states"] == 8 * trained < 8 * parameters


def test_missing_statistics_and_tokenizer_are_problems_and_keys_are_told_all_the_same(checkpoint: Path) -> None:
    (checkpoint / "processing.json").unlink()
    (checkpoint / "tokenizer.json").unlink()
    found = inspect_policy(checkpoint)
    assert found["keys"]["matched"] > 100 and not found["keys"]["missing"]
    assert found["processing"] == {"found": False, "unnorm_keys": []} and found["tokenizer"] == {"found": False}
    first, second = found["problems"]
    assert first.startswith("no processing: ") and "processing.json does not exist" in first
    assert second.startswith("no tokenizer: ") and "tokenizer" in second.removeprefix("no tokenizer: ")
    given = inspect_policy(checkpoint, processing=NANO / "processing.json")
    assert given["problems"] == [] and given["processing"]["found"] and given["tokenizer"]["found"]


def test_a_missing_tokenizer_alone_is_told_alone(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    found = inspect_policy(checkpoint)
    assert found["processing"]["found"] and found["tokenizer"] == {"found": False}
    assert len(found["problems"]) == 1 and "tokenizer.json" in found["problems"][0]


def test_a_published_checkpoint_lacks_a_value_head_and_statistics(tmp_path: Path) -> None:
    golden = GOLDEN / "pi0"
    config = json.loads((golden / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config["policy_config"], "type": "pi0"}))
    shutil.copy(golden / "weights.safetensors", tmp_path / "model.safetensors")
    shutil.copy(golden / "fake_tokenizer" / "tokenizer.json", tmp_path)
    text, vision = (config["paligemma_config_tiny"][f"{part}_config"] for part in ("text", "vision"))
    vlm = dict(model_type="paligemma", text_config=text, vision_config=vision, projection_dim=text["hidden_size"])
    sizes = dict(vlm_config={**vlm, "image_token_id": text["vocab_size"]}, dit_config=config["expert_config_tiny"])
    found = inspect_policy(tmp_path, model=sizes, executed=4)
    assert found["kind"] == "published checkpoint" and not found["processing"]["found"] and found["tokenizer"]["found"]
    keys = found["keys"]
    assert not keys["missing"] and not keys["unexpected"] and not keys["other_shape"]
    assert all(name.startswith("value_head.") for name in keys["fresh"]) and keys["fresh"]
    assert keys["unread"] == ["paligemma_with_expert.gemma_expert.lm_head.weight"]
    assert [problem[:13] for problem in found["problems"]] == ["no processing"]


@pytest.mark.parametrize("directory", ["pi0", "pi05", "gr00t_n1_5", "openvla", "openvla_oft"])
def test_every_key_of_the_full_size_layouts_is_matched_and_what_is_lacking_is_told(
    directory: str, tmp_path: Path
) -> None:
    """Names and shapes of the published model in a file without contents; no statistics, no tokenizer beside it."""
    published = json.loads((GOLDEN / directory / "full_size_keys.json").read_text())
    config = {key: value for key, value in published.items() if key.endswith(("_cfg", "_config"))}
    if "openvla" in directory:
        stats = json.loads((GOLDEN / directory / "config.json").read_text())["norm_stats"]
        config |= {"model_type": "openvla", "norm_stats": stats}
    config.setdefault("model_type", directory)
    (tmp_path / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, (_, shape) in published["keys"].items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    found = inspect_policy(tmp_path)
    keys = found["keys"]
    assert keys["matched"] + len(keys["unread"]) == len(published["keys"])
    assert not keys["missing"] and not keys["unexpected"] and not keys["other_shape"]
    assert all("_head." in name for name in keys["fresh"])
    assert [problem.partition(":")[0] for problem in found["problems"]] == ["no processing", "no tokenizer"]
    if "openvla" in directory:
        assert found["processing"]["unnorm_keys"] == sorted(stats)


def header_of(file: Path):
    """What the hub client says of a repository, made from a local file."""
    from huggingface_hub.utils import SafetensorsFileMetadata, TensorInfo

    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    header = json.loads(file.read_bytes()[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {
        name: TensorInfo(dtype=entry["dtype"], shape=entry["shape"], data_offsets=tuple(entry["data_offsets"]))
        for name, entry in header.items()
    }
    return SafetensorsFileMetadata(metadata=metadata, tensors=tensors)


def test_of_a_hub_repository_json_and_headers_are_fetched_and_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot(name: str, allow_patterns: list[str], local_dir: Path) -> None:
        assert name == HUB and allow_patterns == ["*.json"]
        for file in NANO.glob("*.json"):
            shutil.copy(file, local_dir)

    class Metadata:
        files_metadata = {"model.safetensors": header_of(NANO / "model.safetensors")}

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", lambda self, name: Metadata)
    expected, found = inspect_policy(NANO), inspect_policy(HUB)
    assert found["keys"] == expected["keys"] and found["parameters"] == expected["parameters"]
    assert found["file"]["parameters_by_dtype"] == expected["file"]["parameters_by_dtype"]


def test_headers_with_holes_are_readable_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from vla3_plugin.policies.inspect import fetch_headers

    class Metadata:
        files_metadata = {"model.safetensors": header_of(NANO / "model.safetensors")}

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", lambda self, name: Metadata)
    fetch_headers(HUB, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as ours, safe_open(NANO / "model.safetensors", "pt") as theirs:
        assert set(ours.keys()) == set(theirs.keys())
        for name in ours.keys():
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()


def test_an_unreachable_hub_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert main(["policy", "inspect", HUB]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert HUB in line and "no route" in line


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").write_text("{"), "config.json is damaged"),
        (lambda path: (path / "config.json").unlink(), "config.json"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\x00" * 20), "damaged or cut short"),
        (lambda path: (path / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), "pickles can run code"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_line(
    damage, message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(checkpoint)
    assert main(["policy", "inspect", str(checkpoint)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and str(checkpoint) in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pi0-nono"], "did you mean 'pi0-nano"),
        (["pi0-nano-libero", "--policy-option", "freeze_vml=true"], "did you mean 'freeze_vlm'"),
        (["pi0-nano-libero", "--gpus", "0"], "gpus is 0, expected at least 1"),
        (["latency", "--policy-option", "lora_rank=4"], "latency has no layers to adapt"),
    ],
)
def test_wrong_arguments_are_one_clear_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["policy", "inspect", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_json_is_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["policy", "inspect", "pi0-nano-libero", "--json", "--policy-option", "lora_rank=4", "--gpus", "2"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["gpus"] == 2 and found["parameters"]["lora"] > 0
