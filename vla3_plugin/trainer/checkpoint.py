"""Checkpoints that are whole or absent: written beside, synced, renamed; the newest whole one is found on resume."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST, STATE, PREFIX = "manifest.json", "trainer.json", "global_step_"


class CheckpointError(RuntimeError):
    """A checkpoint that was asked for by name and cannot be used."""


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(root: Path, step: int, write: Callable[[Path], Any], state: dict[str, Any], keep: int) -> Path:
    """Let ``write`` fill a temporary directory, add ``state`` and a manifest, and move it into place.

    A run killed at any point leaves the previous checkpoint; leftovers are removed by the next save. The ``keep``
    newest are retained.
    """
    root.mkdir(parents=True, exist_ok=True)
    final, temporary = root / f"{PREFIX}{step}", root / f".saving_{PREFIX}{step}"
    for leftover in root.glob(".saving_*"):
        shutil.rmtree(leftover)
    temporary.mkdir()
    write(temporary)
    (temporary / STATE).write_text(json.dumps(state, indent=1))
    files = sorted(p for p in temporary.rglob("*") if p.is_file())
    manifest = {os.fspath(p.relative_to(temporary)): {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}
    (temporary / MANIFEST).write_text(json.dumps({"step": step, "files": manifest}, indent=1))
    for path in [*files, temporary / MANIFEST, temporary]:
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    _sync(root)
    for old in steps(root)[:-keep]:
        shutil.rmtree(root / f"{PREFIX}{old}")
    return final


def steps(root: Path) -> list[int]:
    """Steps of the checkpoints below ``root``, ascending, whole or not."""
    names = [p.name.removeprefix(PREFIX) for p in root.glob(f"{PREFIX}*") if p.is_dir()]
    return sorted(int(name) for name in names if name.isdigit())


def fault(path: Path) -> str | None:
    """What is wrong with the checkpoint at ``path``, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{path / MANIFEST} cannot be read ({error})"
    for name, expected in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != expected["bytes"] or _digest(file) != expected["sha256"]:
            return f"{file} is not what was saved (size or checksum differ)"
    return None


def find(trainer: Any) -> Path | None:
    """The checkpoint to resume from, by verl's keys ``resume_mode`` (disable, auto, resume_path) and its directory.

    Raises:
        CheckpointError: ``resume_mode=resume_path`` names one that is damaged.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        path = Path(trainer.resume_from_path)
        wrong = fault(path)
        if wrong:
            raise CheckpointError(f"trainer.resume_from_path: {wrong}; name another checkpoint")
        return path
    root = Path(trainer.default_local_dir)
    for step in reversed(steps(root)):
        path = root / f"{PREFIX}{step}"
        wrong = fault(path)
        if wrong is None:
            return path
        print(f"vla3: skipping checkpoint {path.name}: {wrong}")
    return None


def read_state(path: Path) -> dict[str, Any]:
    return json.loads((path / STATE).read_text())
