"""``vla3 parity``: every golden directory agrees, and what does not agree or cannot be checked is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vla3_plugin.cli import main
from vla3_plugin.parity import oft
from vla3_plugin.parity.golden import GoldenError, read_golden
from vla3_plugin.parity.report import check, compare, families, format_report
from vla3_plugin.policies.openvla_images import resize_bicubic

GOLDEN = Path(__file__).parents[1] / "golden"
DIRECTORIES = sorted(path.parent for path in GOLDEN.glob("*/outputs.safetensors"))


def copied(tmp_path: Path, name: str = "flow_sde") -> Path:
    return Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def changed(directory: Path, tensor: str, by: float = 1e-3) -> Path:
    """The directory with one element of one golden output moved."""
    outputs = load_file(directory / "outputs.safetensors")
    outputs[tensor].view(-1)[0] += by
    save_file(outputs, directory / "outputs.safetensors")
    return directory


def test_there_is_a_directory_of_every_family() -> None:
    assert {read_golden(directory).family for directory in DIRECTORIES} == set(families())


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_every_golden_directory_passes(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(directory), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["directories"]
    names = {row["name"] for row in record["tensors"]}
    assert names | set(record["not_computed"]) == set(read_golden(directory).outputs)
    assert record["ok"] and all(row["ok"] for row in record["tensors"])
    # A check that leaves most out proves little. What is left out are internals of the reference.
    assert len(record["not_computed"]) <= 0.3 * len(names)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("flow_sde", "chain.K4.openpi.sde_all.x"), ("pi0", "v.tmix.v"), ("pi0", "policy.predict_action_chunk_K4")],
)
def test_an_output_that_differs_fails_and_is_named(
    name: str, tensor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = changed(copied(tmp_path, name), tensor)
    assert main(["parity", str(directory)]) == 1
    table = capsys.readouterr().out.strip().splitlines()
    (row,) = [line for line in table if line.startswith(f"{tensor} ")]
    assert "1.0e-03" in row and "FAILS: 1 of" in row
    assert table[-1].endswith(f"FAILS: {tensor}")


def test_weights_that_differ_fail(tmp_path: Path) -> None:
    directory = copied(tmp_path, "pi0")
    weights = load_file(directory / "weights.safetensors")
    weights["action_out_proj.bias"] += 1e-3
    save_file(weights, directory / "weights.safetensors")
    report = check(directory)
    assert "v.t0.v" in report.failed and "prefix.last_hidden" not in report.failed


def test_an_output_that_nothing_computes_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copied(tmp_path)
    outputs = load_file(directory / "outputs.safetensors")
    save_file({**outputs, "something.new": torch.zeros(2)}, directory / "outputs.safetensors")
    assert main(["parity", str(directory)]) == 1
    assert "FAILS: something.new" in capsys.readouterr().out.strip().splitlines()[-1]


def test_outputs_in_further_files_are_not_overlooked(tmp_path: Path) -> None:
    directory = copied(tmp_path)
    save_file({"a": torch.zeros(2)}, directory / "more_outputs.safetensors")
    assert check(directory).failed == ["more.a"]


def test_a_family_does_not_see_the_values_it_has_to_compute() -> None:
    golden = read_golden(GOLDEN / "flow_sde").without_values()
    assert all(tensor.is_meta for tensor in golden.outputs.values())
    assert not any(tensor.is_meta for tensor in golden.inputs.values())


def test_pixels_may_come_from_any_version_of_pillow(tmp_path: Path) -> None:
    directory = copied(tmp_path, "openvla")
    raw = torch.randint(0, 256, (48, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    save_file(
        {**load_file(directory / "inputs.safetensors"), "pre.raw_image_u8": raw}, directory / "inputs.safetensors"
    )
    processor = json.loads((directory / "config.json").read_text())["image_processor"]
    mean, std = (torch.tensor(processor[key]).flatten()[:, None, None] for key in ("means", "stds"))
    size = load_file(directory / "outputs.safetensors")["pre.pixel_values"].shape[-2:]
    old, new = (resize_bicubic(raw[None], size, rows_first)[0].permute(2, 0, 1) for rows_first in (False, True))
    assert (old != new).float().mean() > 0.1
    outside = torch.where(old == new, old, old + 1)
    for resized, agrees in ((old, True), (new, True), (outside, True), (old + 1, False)):
        outputs = load_file(directory / "outputs.safetensors")
        outputs["pre.pixel_values"] = ((resized.repeat(2, 1, 1) / 255.0 - mean) / std)[None].contiguous()
        save_file(outputs, directory / "outputs.safetensors")
        assert ("pre.pixel_values" not in check(directory).failed) == agrees


def test_the_references_oft_decodes_the_likeliest_token_of_the_whole_vocabulary(tmp_path: Path) -> None:
    directory = copied(tmp_path, "openvla_oft")
    weights = load_file(directory / "weights.safetensors")
    head = weights["language_model.lm_head.weight"]
    head[5] = 2 * head[31845]  # no action token, likelier than one that is chosen
    save_file(weights, directory / "weights.safetensors")
    outputs = load_file(directory / "outputs.safetensors")
    for name in outputs:
        if name.endswith(".actions"):  # chunks of one action
            outputs[name] = outputs[name][..., :1, :].contiguous()
    save_file(outputs, directory / "outputs.safetensors")
    with torch.no_grad():
        computed = oft.outputs(read_golden(directory).without_values())
    ids, table = computed["decode.token_ids"], computed["decode.unnormalized"]
    for name, chosen in (("upstream.0", "argmax_full"), ("upstream.1", "argmax_full"), ("rlinf", "argmax_256_token")):
        token = computed[f"bidir.{name}.{chosen}"]
        place = token.clamp(int(ids[0]), int(ids[-1])) - ids[0]
        expected = torch.stack([table[place[:, dim], dim] for dim in range(7)], dim=-1)[:, None]
        assert torch.equal(computed[f"bidir.{name}.actions"], expected[0] if "upstream" in name else expected)
    assert (computed["bidir.upstream.1.argmax_full"] == 5).any()


def damage(directory: Path, how: str) -> Path:
    config = directory / "config.json"
    if how == "missing":
        shutil.rmtree(directory)
    elif how == "empty":
        for file in directory.glob("*.*"):
            file.unlink()
    elif how == "config":
        config.write_text(config.read_text()[:-20])
    elif how == "no family":
        config.write_text("{}")
    elif how == "other family":
        config.write_text(json.dumps({**json.loads(config.read_text()), "family": "pi6"}))
    elif how == "no outputs":
        save_file({}, directory / "outputs.safetensors")
    elif how == "key":
        config.write_text(json.dumps({"family": "flow_sde"}))
    elif how == "input":
        inputs = load_file(directory / "inputs.safetensors")
        del inputs["chain.b"]
        save_file(inputs, directory / "inputs.safetensors")
    else:
        file = directory / how
        file.write_bytes(file.read_bytes()[:-100])
    return directory


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "no such directory"),
        ("empty", "config.json: no such file"),
        ("config", "config.json: not valid JSON"),
        ("no family", "the key 'family' is None"),
        ("other family", "unknown family 'pi6' .*known: .*flow_sde.*pi0"),
        ("no outputs", "nothing to compare with"),
        ("key", "config.json: holds no 'noise_net_range'"),
        ("input", "inputs.safetensors: holds no 'chain.b'"),
        ("inputs.safetensors", "inputs.safetensors: not a readable safetensors file"),
        ("outputs.safetensors", "outputs.safetensors: not a readable safetensors file"),
    ],
)
def test_a_damaged_directory_is_one_line_and_status_2(
    how: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = damage(copied(tmp_path), how)
    assert main(["parity", str(directory)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and str(directory) in err
    with pytest.raises(GoldenError, match=message):
        check(directory)


@pytest.mark.parametrize("file", ["weights.safetensors", "fake_tokenizer"])
def test_damaged_weights_and_a_missing_tokenizer_are_one_line(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copied(tmp_path, "pi0")
    if file == "fake_tokenizer":
        shutil.rmtree(directory / file)
    else:
        damage(directory, file)
    assert main(["parity", str(directory)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "damaged or cut short" in line or "fake_tokenizer" in line


def test_one_bad_directory_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(tmp_path / "absent"), str(GOLDEN / "flow_sde"), "--json"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert not record["ok"]
    assert "no such directory" in record["directories"][0]["error"]
    assert record["directories"][1]["ok"]


def compared(ours: torch.Tensor, golden: torch.Tensor, mask: torch.Tensor | None = None, tmp_path: Path = Path()):
    from vla3_plugin.parity.golden import Golden

    made = Golden(tmp_path, "x", {}, {}, {"t": golden})
    return compare(made, {"t": ours}, {}, None if mask is None else {"t": mask}).tensors[0]


def test_the_tolerance_is_absolute_plus_relative_and_that_of_the_coarser_dtype() -> None:
    golden = torch.tensor([0.0, 100.0])
    assert compared(golden + torch.tensor([1.9e-5, 9e-3]), golden).ok
    assert not compared(golden + torch.tensor([2.1e-5, 0.0]), golden).ok
    assert not compared(golden + torch.tensor([0.0, 1.1e-2]), golden).ok
    assert compared(golden + 1e-5, golden.double()).ok
    assert not compared(golden.double() + 1e-7, golden.double()).ok


def test_whole_numbers_and_booleans_have_no_tolerance() -> None:
    row = compared(torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3]))
    assert not row.ok and row.max_absolute == 1.0 and row.note == "1 of 3 elements beyond it"
    assert compared(torch.tensor([True]), torch.tensor([True])).ok
    assert not compared(torch.tensor([True]), torch.tensor([False])).ok
    assert "ours is torch.float32" in compared(torch.tensor([1.0]), torch.tensor([1])).note


def test_other_shapes_and_not_a_number_fail() -> None:
    assert compared(torch.zeros(2, 1), torch.zeros(2)).note == "ours has shape [2, 1]"
    assert not compared(torch.tensor([float("nan")]), torch.zeros(1)).ok
    assert not compared(torch.tensor([float("inf")]), torch.zeros(1)).ok
    assert compared(torch.tensor([float("-inf")]), torch.tensor([float("-inf")])).ok


def test_a_mask_leaves_out_what_has_no_meaning_and_never_everything() -> None:
    ours, golden = torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 0.0], [9.0, 9.0, 9.0]])
    assert compared(ours, golden, torch.tensor([True, False])).ok
    assert not compared(ours, golden, torch.tensor([True, True])).ok
    assert not compared(ours, ours, torch.tensor([False, False])).ok
    assert not compared(ours, ours, torch.tensor([True])).ok


def test_nothing_compared_is_no_agreement() -> None:
    golden = read_golden(GOLDEN / "flow_sde")
    report = compare(golden, {}, {"*": "because"})
    assert not report.ok and not report.failed
    assert format_report(report).endswith("FAILS: nothing was compared")
