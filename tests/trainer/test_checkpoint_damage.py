"""Damaged, half-written and foreign checkpoints: each is refused with the file's name, and nothing waits for ever."""

import json
import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vla3_plugin.trainer import checkpoint, checkpoint_state

SECONDS = 20


def write(directory: Path) -> None:
    for name, size in (("actor/model_world_size_1_rank_0.pt", 5000), ("policy/model.safetensors", 3000)):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(random.Random(size).randbytes(size))


def settings(root, mode="auto", path=None):
    return SimpleNamespace(resume_mode=mode, resume_from_path=path, default_local_dir=str(root))


@pytest.fixture
def root(tmp_path):
    """Two whole checkpoints, of which each test damages the newer."""
    for step in (1, 2):
        checkpoint.save(tmp_path / "run", step, write, {"step": step}, keep=3)
    return tmp_path / "run"


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def truncate(path, draw):
    file = draw.choice(_files(path))
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))])
    return file.name


def flip(path, draw):
    file = draw.choice(_files(path))
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 1, 3, 50))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(bytes(data))
    return file.name


def remove(path, draw):
    file = draw.choice(_files(path))
    file.unlink()
    return file.name


def add(path, draw):
    file = draw.choice([path, path / "actor", path / "policy"]) / f"extra{draw.randrange(100)}.pt"
    file.write_bytes(b"x")
    return file.name


def swap(path, draw):
    """Two files of a checkpoint, one in the other's place: sizes may agree, what is inside does not."""
    one, other = draw.sample([f for f in _files(path) if f.name != checkpoint.MANIFEST], 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    return ""


def link_file(path, draw):
    """Out of the directory, to the very bytes that the manifest promises."""
    file = draw.choice(_files(path))
    moved = path.parent / "elsewhere"
    file.rename(moved)
    file.symlink_to(moved)
    return file.name


def link_folder(path, draw):
    folder = path / draw.choice(("actor", "policy"))
    moved = path.parent / "elsewhere"
    folder.rename(moved)
    folder.symlink_to(moved, target_is_directory=True)
    return folder.name


def pipe(path, draw):
    """Opening one for reading waits for a writer that never comes."""
    file = draw.choice(_files(path))
    file.unlink()
    os.mkfifo(file)
    return file.name


def garbage_manifest(path, draw):
    garbage = ["", "{", "[]", "null", '{"files": {}}', "[" * 100_000, '{"format": 1e999}', "\x00" * 64, "9" * 5000]
    (path / checkpoint.MANIFEST).write_text(draw.choice(garbage))
    return checkpoint.MANIFEST


def _edit(path, **changes):
    data = json.loads((path / checkpoint.MANIFEST).read_text())
    (path / checkpoint.MANIFEST).write_text(json.dumps(data | changes))
    return checkpoint.MANIFEST


def other_format(path, draw):
    return _edit(path, format=draw.choice((0, 2, 99, "1", None, [1])))


def wrong_fields(path, draw):
    field = draw.choice(("step", "sequence", "files"))
    return _edit(path, **{field: draw.choice((None, -1, "2", [], True, 1.5))})


def empty_files(path, draw):
    return _edit(path, files={})


def names_outside(path, draw):
    files = json.loads((path / checkpoint.MANIFEST).read_text())["files"]
    outside = draw.choice(("../../secret", "/etc/passwd", "actor/../../secret", ".."))
    return _edit(path, files=files | {outside: {"bytes": 1, "sha256": "0"}})


def file_in_its_place(path, draw):
    shutil.rmtree(path)
    path.write_text("a file")
    return path.name


def verls_own(path, draw):
    """What verl's own trainers write: no manifest."""
    (path / checkpoint.MANIFEST).unlink()
    return checkpoint.MANIFEST


KINDS = [
    truncate, truncate, truncate, flip, flip, flip, remove, add, swap, link_file, link_folder, pipe, garbage_manifest,
    other_format, wrong_fields, empty_files, names_outside, file_in_its_place, verls_own,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(57))
def test_a_damaged_checkpoint_is_skipped_and_the_one_before_it_used(root, seed, capsys):
    draw, damage = random.Random(seed), KINDS[seed % len(KINDS)]
    path = root / "global_step_2"
    named = damage(path, draw)
    start = time.monotonic()
    found = checkpoint.find(settings(root))
    assert found == root / "global_step_1"
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "skipping" in line]
    assert "skipping checkpoint global_step_2: " in warning and str(root) in warning and named in warning
    with pytest.raises(checkpoint.CheckpointError, match=r"trainer\.resume_from_path: .*global_step_2") as refused:
        checkpoint.find(settings(root, "resume_path", str(path)))
    assert named in str(refused.value)
    assert time.monotonic() - start < SECONDS


def test_a_renamed_checkpoint_is_not_taken_for_another_step(root, capsys):
    (root / "global_step_2").rename(root / "global_step_9")
    assert checkpoint.find(settings(root)) == root / "global_step_1"
    assert "global_step_9/manifest.json is that of step 2: the directory was renamed" in capsys.readouterr().out
    copy = root / "my_favourite"
    shutil.copytree(root / "global_step_9", copy)
    assert checkpoint.find(settings(root, "resume_path", str(copy))) == copy, "a name without a step promises none"


def test_with_no_usable_checkpoint_nothing_is_resumed_and_each_one_is_named(root, capsys):
    for path in root.iterdir():
        (path / "actor" / "model_world_size_1_rank_0.pt").unlink()
    assert checkpoint.find(settings(root)) is None
    out = capsys.readouterr().out
    assert out.count("skipping checkpoint") == 2 and out.count("rank_0.pt is missing") == 2


def test_the_directory_above_is_not_a_checkpoint_and_the_newest_below_it_is_offered(root):
    with pytest.raises(checkpoint.CheckpointError, match=r"manifest\.json is missing.*name global_step_2 below it"):
        checkpoint.find(settings(root, "resume_path", str(root)))


@pytest.mark.parametrize("path", [None, "", "/nowhere/at/all"])
def test_a_path_to_nothing_is_refused_by_its_key(root, path):
    with pytest.raises(checkpoint.CheckpointError, match=r"trainer\.resume_from_path"):
        checkpoint.find(settings(root, "resume_path", path))


def state(**changes):
    made = {key: 1 for key in (*checkpoint_state.BINDING, *checkpoint_state.EPISODES, *checkpoint_state.RESTORED)}
    return made | {checkpoint_state.POLICY: {"mean.weight": [16, 2], "mean.bias": [16]}} | changes


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"mean.weight": [16, 2]}, r"1 of 2 parameters differ: mean\.bias \[16\] there, absent here"),
        ({"mean.weight": [32, 2], "mean.bias": [32]}, r"mean\.bias \[16\] there, \[32\] here; mean\.weight"),
        ({"other": [1]}, "3 of 3 parameters differ"),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, shapes, message):
    with pytest.raises(checkpoint.CheckpointError, match=message) as refused:
        checkpoint_state.compare({"made_with": state()}, state(**{checkpoint_state.POLICY: shapes}), tmp_path)
    assert "trainer.json" in str(refused.value) and "resume_mode=disable" in str(refused.value)


@pytest.mark.parametrize("key", checkpoint_state.BINDING)
def test_settings_that_the_shards_depend_on_must_be_the_same(tmp_path, key):
    with pytest.raises(checkpoint.CheckpointError) as refused:
        checkpoint_state.compare({"made_with": state()}, state(**{key: 2}), tmp_path)
    assert key in str(refused.value) and "made with 1" in str(refused.value)


@pytest.mark.parametrize("key", [*checkpoint_state.EPISODES, *checkpoint_state.RESTORED])
def test_settings_that_make_it_another_run_are_told(tmp_path, key):
    (note,) = checkpoint_state.compare({"made_with": state()}, state(**{key: 2}), tmp_path)
    assert note.startswith(f"{key} is 2")
    assert checkpoint_state.compare({"made_with": state()}, state(), tmp_path) == []
