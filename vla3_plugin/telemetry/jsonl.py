"""Files of one JSON object a line, which a kill at any byte or a full disk cannot spoil."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsError(ValueError):
    """A metric that cannot be written, or a record that cannot be read."""


def plain(value: Any, key: str = "value") -> Any:
    """``value`` as JSON holds it: numpy and torch scalars as numbers, non-finite numbers as null, paths as text.

    Raises:
        MetricsError: something that has no place in a JSON line, such as a tensor of several elements.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{key}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{key}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        try:
            return plain(value.item(), key)
        except (ValueError, RuntimeError):
            pass  # several elements: numpy raises the one, torch the other
    raise MetricsError(f"{key}: {type(value).__name__} {str(value)[:60]!r}, expected a number, text, list or dict")


class JsonlWriter:
    """Appends one JSON object a line. Each record is one unbuffered write, so a killed process tears at most its last
    line; a torn line that an earlier process left is cut off on opening, lest the next record be glued to it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.path)
        self._file = open(self.path, "ab", buffering=0)
        self._waiting = b""  # what the disk would not take

    def append(self, record: Mapping[str, Any]) -> None:
        """A full disk loses nothing and ends nothing: the record waits in memory, and the user is told."""
        line = json.dumps(plain(record, self.path.name), ensure_ascii=False, allow_nan=False) + "\n"
        told, self._waiting = bool(self._waiting), self._waiting + line.encode()
        try:
            self._write_waiting()
        except OSError as error:
            if not told:
                print(f"vla3: {self.path}: {error}; records wait in memory", file=sys.stderr, flush=True)

    def _write_waiting(self) -> None:
        start, data = os.fstat(self._file.fileno()).st_size, memoryview(self._waiting)
        try:
            while (
                data
            ):  # the system may take less than everything (disk nearly full); the rest then fails with its reason
                data = data[self._file.write(data) :]
        except OSError:
            self._file.truncate(start)  # no torn line in the middle
            raise
        self._waiting = b""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._write_waiting()
        self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with open(path, "r+b") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """Records of a file; none if it does not exist. A torn last line is ignored.

    Raises:
        MetricsError: a line before the last is not a JSON object (the file was edited or the disk is failing).
    """
    path = Path(path)
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    last = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if i == last:
                break
            raise MetricsError(f"{path}, line {i + 1}: {line[:60]!r} is not a JSON object ({error})") from error
        records.append(record)
    return records
