"""Checkpoints that are whole or absent: written beside, synced, renamed; the newest whole one is found on resume.

A checkpoint is a directory ``global_step_N`` with a manifest: format version, step, a sequence number, and every file's
size and SHA-256. It is used only if it holds exactly the manifest's files, unchanged. *Newest* is who has the greatest
sequence number, not the greatest step or time: a run that went back to step 3 is not resumed from the step 9 that it
left behind, and a clock that jumps changes nothing. Directories without a manifest of ours are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST, STATE, PREFIX = "manifest.json", "trainer.json", "global_step_"
MODES = ("disable", "auto", "resume_path")
_SAVING, _REPLACED, _DISCARDED = ".saving_", ".replaced_", ".discarded_"
_NAME = re.compile(rf"{PREFIX}(0|[1-9][0-9]*)")
_MANIFEST_BYTES = 64 << 20  # a longer one is not ours
_HASHERS = 4  # threads; hashlib lets go of the interpreter


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the file."""


@dataclass(frozen=True)
class Manifest:
    """``files``: path relative to the checkpoint -> (bytes, SHA-256 in hex)."""

    step: int
    sequence: int
    files: dict[str, tuple[int, str]]


# ---------------------------------------------------------------- saving


def save(
    root: Path, step: int, write: Callable[[Path], Any], state: dict[str, Any], keep: int, best: Collection[int] = ()
) -> Path:
    """Let ``write`` fill a temporary directory, add ``state`` and a manifest, and move it into place.

    A run killed at any point leaves the previous checkpoint; leftovers go at the next start or save. The ``keep``
    newest are retained, and those of the steps ``best``.

    Raises:
        OSError: the disk is full or failing. Whatever is raised, also by ``write``, the previous checkpoints are as
            they were and the half-written one is gone.
    """
    root.mkdir(parents=True, exist_ok=True)
    clean(root)
    final, temporary = root / f"{PREFIX}{step}", root / f"{_SAVING}{PREFIX}{step}"
    earlier = written(root)
    _check_room(root, earlier)
    try:
        temporary.mkdir()
        write(temporary)
        _write(temporary / STATE, json.dumps(state, indent=1))
        files = {name: temporary / name for name in _regular_files(temporary)}
        entries = {name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for name, path in files.items()}
        sequence = 1 + max((manifest.sequence for manifest, _ in earlier), default=0)
        manifest = {"format": FORMAT, "step": step, "sequence": sequence, "files": entries}
        for path in [*files.values(), *_directories(temporary)]:
            _sync(path)
        _write(temporary / MANIFEST, json.dumps(manifest, indent=1))
        _sync(temporary)
        replaced = root / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        _sync(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        clean(root)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
    _retire(root, keep, best)
    return final


def clean(root: Path) -> None:
    """Remove what a run that was killed while it saved has left behind; bring back what it was about to replace."""
    for leftover in [*root.glob(f"{_SAVING}*"), *root.glob(f"{_DISCARDED}*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    for replaced in root.glob(f"{_REPLACED}*"):
        final = root / replaced.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # a directory that may only be read
                replaced.rename(final)


def _retire(root: Path, keep: int, best: Collection[int]) -> None:
    """Remove all but the ``keep`` newest checkpoints and those of the steps ``best``."""
    for manifest, path in written(root)[:-keep]:
        if manifest.step in best:
            continue
        try:
            discarded = root / f"{_DISCARDED}{path.name}"
            path.rename(discarded)  # first out of sight: half a removal must not look like a damaged checkpoint
            shutil.rmtree(discarded)
        except OSError as error:
            print(f"vla3: the old checkpoint {path} could not be removed: {error}", flush=True)


def _check_room(root: Path, earlier: list[tuple[Manifest, Path]]) -> None:
    """Refuse to begin what cannot end, going by the size of the checkpoint before.

    Raises:
        OSError: ENOSPC, before any learner rank has begun to write.
    """
    if earlier:
        wanted = sum(size for size, _ in earlier[-1][0].files.values())
        free = shutil.disk_usage(root).free
        if free < wanted:
            raise OSError(
                errno.ENOSPC, f"{free / 1e6:,.1f} MB are free, the last one took {wanted / 1e6:,.1f} MB", root
            )


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _directories(root: Path) -> list[Path]:
    """Directories below ``root``, the deepest first."""
    return [Path(folder) for folder, _, _ in os.walk(root, topdown=False)]


def _regular_files(root: Path) -> list[str]:
    """Relative names of all files below ``root``, sorted.

    Raises:
        CheckpointError: a link, or something that is neither file nor directory: reading it could lead elsewhere or
            never end.
    """
    found = []
    for folder, directories, names in os.walk(root, onerror=_raise):
        for name in directories:
            if (path := Path(folder, name)).is_symlink():
                raise CheckpointError(f"{path} is a link: a checkpoint holds what it needs itself")
        for name in names:
            path = Path(folder, name)
            if path.is_symlink():
                raise CheckpointError(f"{path} is a link: a checkpoint holds what it needs itself")
            if not stat.S_ISREG(path.lstat().st_mode):
                raise CheckpointError(f"{path} is not a regular file")
            found.append(os.fspath(path.relative_to(root)))
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


# ---------------------------------------------------------------- finding


def steps(root: Path) -> list[int]:
    """Steps of the checkpoints below ``root``, ascending, whole or not."""
    return sorted(int(found[1]) for path in root.glob(f"{PREFIX}*") if (found := _NAME.fullmatch(path.name)))


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint ``path``.

    Raises:
        CheckpointError: there is none, or it is damaged or of another format; the message names it.
    """
    file = path / MANIFEST
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    if path.is_symlink() or file.is_symlink():
        raise CheckpointError(f"{path if path.is_symlink() else file} is a link: name the directory itself")
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MANIFEST_BYTES:
            raise CheckpointError(f"{file} is not a manifest (no regular file, or too long)")
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: half-written, or not a checkpoint of vla3") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is damaged: expected an object, got {type(data).__name__}")
    if data.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} is of format {data.get('format')!r}, expected {FORMAT}: another version wrote it"
        )
    step, sequence, files = data.get("step"), data.get("sequence"), data.get("files")
    if not all(type(number) is int and number >= 0 for number in (step, sequence)) or not isinstance(files, dict):
        raise CheckpointError(f"{file} is damaged: step, sequence or files is not what it should be")
    entries = {}
    for name, entry in files.items():
        if name != os.path.normpath(name) or os.path.isabs(name) or name.split("/")[0] == "..":
            raise CheckpointError(f"{file} names {name!r}, which is not inside the checkpoint")
        size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or not isinstance(digest, str):
            raise CheckpointError(f"{file} is damaged: no size and checksum of {name}")
        entries[name] = (size, digest)
    if STATE not in entries:
        raise CheckpointError(f"{file} is damaged: it does not name {STATE}")
    return Manifest(step, sequence, entries)  # type: ignore[arg-type]


def fault(path: Path) -> str | None:
    """What is wrong with the checkpoint at ``path``, or None. Reads every byte of it."""
    try:
        manifest = read_manifest(path)
        named = _NAME.fullmatch(path.name)
        if named and int(named[1]) != manifest.step:
            raise CheckpointError(f"{path / MANIFEST} is that of step {manifest.step}: the directory was renamed")
        _compare(path, manifest)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _compare(path: Path, manifest: Manifest) -> None:
    found = set(_regular_files(path)) - {MANIFEST}
    for name in sorted(set(manifest.files) - found):
        raise CheckpointError(f"{path / name} is missing")
    for name in sorted(found - set(manifest.files)):
        raise CheckpointError(f"{path / name} is not of this checkpoint: its manifest does not name it")
    for name, (size, _) in manifest.files.items():
        if (actual := (path / name).stat().st_size) != size:
            raise CheckpointError(f"{path / name} is not what was saved: {actual} bytes, expected {size}")
    with ThreadPoolExecutor(_HASHERS) as pool:
        digests = pool.map(lambda name: _digest(path / name), manifest.files)
        for (name, (_, expected)), digest in zip(manifest.files.items(), digests, strict=True):
            if digest != expected:
                raise CheckpointError(f"{path / name} is not what was saved: its checksum differs")


def written(root: Path) -> list[tuple[Manifest, Path]]:
    """Checkpoints below ``root`` that have a manifest of their own, the oldest first; their files are not looked at."""
    found = []
    for step in steps(root):
        path = root / f"{PREFIX}{step}"
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if manifest.step == step:
            found.append((manifest, path))
    return sorted(found, key=lambda item: (item[0].sequence, item[0].step))


def find(trainer: Any) -> Path | None:
    """The checkpoint to resume from, by verl's keys ``resume_mode`` (disable, auto, resume_path) and its directory.

    A damaged one is skipped (auto), with a line that names the file and what is wrong with it.

    Raises:
        CheckpointError: ``resume_mode=resume_path`` names one that is damaged.
    """
    root = Path(trainer.default_local_dir)
    if root.is_dir():
        clean(root)
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        if not trainer.resume_from_path:
            raise CheckpointError("trainer.resume_from_path: null with resume_mode=resume_path; name a checkpoint")
        path = Path(trainer.resume_from_path).expanduser().resolve()
        wrong = fault(path)
        if wrong:
            below = steps(path) if path.is_dir() else []
            hint = f"{PREFIX}{below[-1]} below it" if below else "another checkpoint"
            raise CheckpointError(f"trainer.resume_from_path: {wrong}; name {hint}")
        return path
    if trainer.resume_mode != "auto":
        raise CheckpointError(f"trainer.resume_mode: {trainer.resume_mode!r}, expected one of {', '.join(MODES)}")
    ordered = [path for _, path in written(root)]
    others = [path for step in steps(root) if (path := root / f"{PREFIX}{step}") not in ordered]
    for path in reversed([*ordered, *others]):
        wrong = fault(path)
        if wrong is None:
            return path
        print(f"vla3: skipping checkpoint {path.name}: {wrong}", flush=True)
    return None


def read_state(path: Path) -> dict[str, Any]:
    """What ``save`` was given as ``state``.

    Raises:
        CheckpointError: it cannot be read; the message names the file.
    """
    try:
        data = json.loads((path / STATE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path / STATE} is damaged: expected an object, got {type(data).__name__}")
    return data
