"""Checkpoints are whole or absent."""

import json
import os
from types import SimpleNamespace

import pytest

from vla3_plugin.trainer import checkpoint


def save(root, step, text="weights", keep=3, best=()):
    def write(directory):
        (directory / "actor").mkdir()
        (directory / "actor" / "model.bin").write_text(text)

    return checkpoint.save(root, step, write, {"step": step}, keep, best)


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
    assert not list(tmp_path.glob(".saving_*"))


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_what_a_killed_save_left_behind_goes_at_the_next_start(tmp_path, mode):
    save(tmp_path, 1)
    for name in (".saving_global_step_2", ".discarded_global_step_0"):
        (tmp_path / name / "actor").mkdir(parents=True)
    checkpoint.find(settings(tmp_path, mode))
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


def test_a_checkpoint_that_was_about_to_be_replaced_comes_back(tmp_path):
    """Killed between moving the old one of a step aside and moving the new one in."""
    save(tmp_path, 1).rename(tmp_path / ".replaced_global_step_1")
    assert checkpoint.find(settings(tmp_path)).name == "global_step_1"


def test_only_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep=2)
    assert checkpoint.steps(tmp_path) == [4, 5]


def test_the_best_is_kept_beside_the_newest(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step, keep=2, best={2} if step >= 2 else ())
    assert checkpoint.steps(tmp_path) == [2, 5, 6]
    save(tmp_path, 7, keep=2, best={6})
    assert checkpoint.steps(tmp_path) == [6, 7], "there is one best"


def test_newest_is_what_was_saved_last_not_the_greatest_step(tmp_path):
    """A run that began anew, or went back to step 3, is not resumed from the future that it left behind."""
    for step in (3, 6, 9, 4):
        save(tmp_path, step, keep=4)
    assert checkpoint.find(settings(tmp_path)).name == "global_step_4"
    save(tmp_path, 5, keep=2)
    assert checkpoint.steps(tmp_path) == [4, 5]


def test_a_clock_that_jumps_changes_nothing(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    os.utime(tmp_path / "global_step_1", (2e9, 2e9))
    assert checkpoint.find(settings(tmp_path)).name == "global_step_2"


def test_directories_without_a_manifest_of_ours_are_never_removed(tmp_path):
    (tmp_path / "global_step_1" / "actor").mkdir(parents=True)
    (tmp_path / "global_step_final").mkdir()
    for step in range(2, 6):
        save(tmp_path, step, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_1", "global_step_5", "global_step_final"]


def test_an_unknown_way_to_resume_is_refused(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match=r"trainer\.resume_mode: 'newest', expected one of disable"):
        checkpoint.find(settings(tmp_path, "newest"))


def test_nothing_to_resume_from_is_not_an_error(tmp_path):
    assert checkpoint.find(settings(tmp_path / "nowhere")) is None
    save(tmp_path, 1)
    assert checkpoint.find(settings(tmp_path, "disable")) is None


def test_the_manifest_names_every_file(tmp_path):
    path = save(tmp_path, 1)
    files = json.loads((path / checkpoint.MANIFEST).read_text())["files"]
    assert set(files) == {"actor/model.bin", checkpoint.STATE}
