"""A golden directory: weights, inputs and outputs of a published implementation, which ours has to reproduce.

A directory holds ``config.json`` with the key ``family``, ``inputs.safetensors`` and ``outputs.safetensors``, and what
the family needs besides (``weights.safetensors``, a tokenizer's directory, more JSON). Further pairs of files named
``<set>_inputs.safetensors`` and ``<set>_outputs.safetensors`` belong to it as well; their tensors are read under the
names ``<set>.<name>``, so that no output goes unchecked because it lies in another file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

_FORMAT = "a golden directory holds config.json, inputs.safetensors and outputs.safetensors"


class GoldenError(ValueError):
    """A golden directory that cannot be read; the message is one line."""


class Named(dict[str, Any]):
    """A file's entries by name; one that is not there is a ``GoldenError`` naming the file, not a bare ``KeyError``."""

    def __init__(self, entries: Mapping[str, Any], file: Path) -> None:
        super().__init__(entries)
        self.file = file

    def __missing__(self, name: str) -> Any:
        raise GoldenError(f"{self.file}: holds no {name!r}, which this family's check needs")


@dataclass
class Golden:
    """One golden directory, read.

    ``inputs`` and ``outputs`` map a tensor's name to the tensor, shapes and dtypes as the family's README says. A name
    that ``config``, ``inputs`` or ``outputs`` does not hold raises ``GoldenError`` (``get`` and ``in`` work as ever).
    """

    path: Path
    family: str
    config: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]

    def json(self, name: str) -> Any:
        """Another JSON file of the directory. Raises ``GoldenError`` if it is missing or damaged."""
        return _json(self.path / name)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Another safetensors file of the directory. Raises ``GoldenError`` if it is missing or damaged."""
        return _tensors(self.path / name)

    def without_values(self) -> Golden:
        """The same directory with outputs of shape and dtype alone (meta tensors): what a port may know of them."""
        shapes = Named({name: tensor.to("meta") for name, tensor in self.outputs.items()}, self.path)
        return replace(self, outputs=shapes)


def read_golden(path: Path) -> Golden:
    """Read a golden directory, wherever it lies. Raises ``GoldenError`` if it is missing, damaged or incomplete."""
    path = Path(path)
    if not path.is_dir():
        raise GoldenError(f"{path}: no such directory; {_FORMAT}")
    config = _json(path / "config.json")
    family = config.get("family") if isinstance(config, dict) else None
    if not isinstance(family, str):
        raise GoldenError(f"{path / 'config.json'}: the key 'family' is {family!r}, expected a family's name")
    inputs, outputs = _collect(path, "inputs"), _collect(path, "outputs")
    if not outputs:
        raise GoldenError(f"{path / 'outputs.safetensors'}: holds no tensor, so there is nothing to compare with")
    return Golden(path, family, Named(config, path / "config.json"), inputs, outputs)


def _collect(path: Path, kind: str) -> Named:
    """Tensors of ``<kind>.safetensors`` and, under ``<set>.``, of every ``<set>_<kind>.safetensors``."""
    tensors = _tensors(path / f"{kind}.safetensors")
    for file in sorted(path.glob(f"*_{kind}.safetensors")):
        prefix = file.name.removesuffix(f"_{kind}.safetensors")
        tensors.update({f"{prefix}.{name}": tensor for name, tensor in _tensors(file).items()})
    return tensors


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GoldenError(f"{file}: no such file; {_FORMAT}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GoldenError(f"{file}: not valid JSON ({error}); copy the file again") from None


def _tensors(file: Path) -> Named:
    if not file.is_file():
        raise GoldenError(f"{file}: no such file; {_FORMAT}")
    try:
        return Named(load_file(file), file)
    except SafetensorError as error:
        raise GoldenError(f"{file}: not a readable safetensors file ({error}); copy the file again") from None
