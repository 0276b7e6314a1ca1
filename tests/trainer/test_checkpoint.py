"""Checkpoints are whole or absent."""

import json
from types import SimpleNamespace

import pytest

from vla3_plugin.trainer import checkpoint


def save(root, step, text="weights", keep=3):
    def write(directory):
        (directory / "actor").mkdir()
        (directory / "actor" / "model.bin").write_text(text)

    return checkpoint.save(root, step, write, {"step": step}, keep)


def settings(root, mode="auto", path=None):
    return SimpleNamespace(resume_mode=mode, resume_from_path=path, default_local_dir=str(root))


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, step)
    assert checkpoint.find(settings(tmp_path)).name == "global_step_10"
    assert checkpoint.read_state(tmp_path / "global_step_10") == {"step": 10}


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, damage, capsys):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / "actor" / "model.bin"
    if damage == "truncate":
        file.write_text("weig")
    elif damage == "flip":
        file.write_text("Weights")
    elif damage == "remove":
        file.unlink()
    else:
        (tmp_path / "global_step_2" / checkpoint.MANIFEST).write_text("{")
    assert checkpoint.find(settings(tmp_path)).name == "global_step_1"
    assert "skipping checkpoint global_step_2" in capsys.readouterr().out


def test_a_damaged_checkpoint_asked_for_by_name_is_an_error(tmp_path):
    path = save(tmp_path, 1)
    (path / "actor" / "model.bin").write_text("x")
    with pytest.raises(checkpoint.CheckpointError, match=r"model\.bin is not what was saved"):
        checkpoint.find(settings(tmp_path, "resume_path", str(path)))


def test_a_save_that_dies_leaves_the_previous_checkpoint(tmp_path):
    save(tmp_path, 1)

    def die(directory):
        (directory / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, 2, die, {}, keep=3)
    assert checkpoint.find(settings(tmp_path)).name == "global_step_1"
    save(tmp_path, 3)
    assert not list(tmp_path.glob(".saving_*")), "leftovers go with the next save"


def test_only_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep=2)
    assert checkpoint.steps(tmp_path) == [4, 5]


def test_nothing_to_resume_from_is_not_an_error(tmp_path):
    assert checkpoint.find(settings(tmp_path / "nowhere")) is None
    save(tmp_path, 1)
    assert checkpoint.find(settings(tmp_path, "disable")) is None


def test_the_manifest_names_every_file(tmp_path):
    path = save(tmp_path, 1)
    files = json.loads((path / checkpoint.MANIFEST).read_text())["files"]
    assert set(files) == {"actor/model.bin", checkpoint.STATE}
