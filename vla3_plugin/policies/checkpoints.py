"""Checkpoints on disk: reading published ones safely, and the directory format of our own.

A directory of ours holds ``config.json`` (family, preset, network and policy settings), ``model.safetensors``,
``processing.json`` and ``tokenizer.json``. Weights are safetensors only: a pickle can run code when it is opened.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vla3_plugin.policies.processing import Processing
from vla3_plugin.policies.prompts import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FORMAT = 1
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
HEADS = ("value_head.", "noise_head.")  # what RL adds to a published network: may start anew

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, of another architecture, or in a format that is not read."""


# reading any checkpoint


def read_config(path: Path) -> dict[str, Any]:
    """The object in ``config.json`` of directory ``path``."""
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: {path} is not a checkpoint directory")
    data = _read_object(file)
    _refuse_hub_code(data, file)
    return data


def _refuse_hub_code(data: Any, file: Path) -> None:
    """transformers fetches and runs a kernel where a config's attention implementation names a hub repository."""
    for key, value in data.items() if isinstance(data, dict) else ():
        names = list(value.values()) if isinstance(value, dict) else [value]
        if "attn_implementation" in key and any("/" in str(name) for name in names):
            raise CheckpointError(f"{file}: {key} is {value!r}, code from a hub, which is never run; use sdpa or eager")
        _refuse_hub_code(value, file)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is damaged: expected an object, got {type(data).__name__}")
    return data


def _weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if (path / INDEX).is_file():
        weight_map = _read_object(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX} is damaged: it has no weight_map")
        stray = sorted({str(name) for name in weight_map.values() if Path(str(name)).name != name})
        if stray:
            raise CheckpointError(f"{path / INDEX} names {', '.join(stray)}: expected names of files beside it")
        files = sorted({path / name for name in weight_map.values()})
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{path / INDEX} names {', '.join(absent)}, which do not exist")
        return files
    pickles = [file.name for pattern in PICKLES for file in path.glob(pattern)]
    if pickles:
        raise CheckpointError(
            f"{path} holds {', '.join(sorted(pickles))} and no {WEIGHTS}: pickles can run code when opened and are not "
            "read; convert them to safetensors"
        )
    raise CheckpointError(f"{path} holds no {WEIGHTS}")


def weight_shapes(path: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """Name to file and name to shape, from the headers of one file or of those an index names.

    Raises:
        CheckpointError: no safetensors, or a file that is damaged or cut short (found without reading the weights).
    """
    names: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():
                    names[name] = file
                    shapes[name] = tuple(reader.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or cut short ({file.stat().st_size} bytes): {error}") from None
    return names, shapes


def mismatch(
    wanted: dict[str, Tensor], targets: dict[str, str], shapes: dict[str, tuple[int, ...]], may_miss: set[str]
) -> list[str]:
    """What is missing, unexpected or of another shape, a sentence each; empty: the file holds this module.

    ``wanted``: the module's tensors. ``targets``: the file's name to the module's key. ``may_miss``: keys that the file
    need not have.
    """

    def some(keys: list[str]) -> str:
        return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")

    missing = sorted(set(wanted) - set(targets.values()) - may_miss)
    unexpected = sorted(name for name, key in targets.items() if key not in wanted)
    other = sorted(
        f"{name} {list(shapes[name])} instead of {list(wanted[key].shape)}"
        for name, key in targets.items()
        if key in wanted and shapes[name] != tuple(wanted[key].shape)
    )
    lists = (("missing", missing), ("unexpected", unexpected), ("of another shape", other))
    return [f"{len(keys)} {kind}: {some(keys)}" for kind, keys in lists if keys]


def fill(
    module: nn.Module,
    targets: dict[str, str],
    files: dict[str, Path],
    shapes: dict[str, tuple[int, ...]],
    may_miss: set[str],
    path: Path,
    what: str,
) -> None:
    """Copy every named tensor into ``module``; on the meta device only check.

    ``targets``: the file's name to the module's key, without the names that are to be skipped. ``what``: the model in
    the error's words ("pi0 model").

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape.
    """
    wanted = module.state_dict()
    if (audits := _AUDITS.get()) is not None:
        audits.append(Audit(wanted, targets, shapes, may_miss))
        return
    problems = mismatch(wanted, targets, shapes, may_miss)
    if problems:
        raise CheckpointError(f"{path} does not hold this {what}: {'; '.join(problems)}")
    if any(tensor.is_meta for tensor in wanted.values()):
        return  # asked for sizes and checks only
    for name, tensor in _tensors(files, set(targets)):
        wanted[targets[name]].copy_(tensor)


@dataclass
class Audit:
    """The arguments of one ``fill``, with the module's tensors as ``wanted``."""

    wanted: dict[str, Tensor]
    targets: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    may_miss: set[str]


_AUDITS: ContextVar[list[Audit] | None] = ContextVar("audits", default=None)


@contextmanager
def audited() -> Iterator[list[Audit]]:
    """Meanwhile ``fill`` notes what it is asked for; it neither copies nor refuses."""
    audits: list[Audit] = []
    token = _AUDITS.set(audits)
    try:
        yield audits
    finally:
        _AUDITS.reset(token)


def _tensors(files: dict[str, Path], names: set[str]) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():
                if name in names:
                    yield name, reader.get_tensor(name)


# parts of every family's loading


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    known = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
             "float64": torch.float64}  # fmt: skip
    if isinstance(name, torch.dtype):
        return name
    if name not in known:
        raise ValueError(f"dtype is {name!r}, expected one of {', '.join(known)}")
    return known[name]


def parse_settings(settings_class: type[T], settings: dict[str, Any], family: str) -> T:
    """``settings`` as the dataclass; an unknown name is an error that guesses what was meant."""
    known = {field.name for field in fields(settings_class)}  # type: ignore[arg-type]
    unknown = sorted(set(settings) - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{unknown[0]!r} is not a setting of {family}{hint}; known: {', '.join(sorted(known))}")
    return settings_class(**settings)


def with_tokenizer(processing: Processing, tokenizer: Tokenizer | str | Path) -> Processing:
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(Path(tokenizer))
    return processing.with_tokenizer(tokenizer)


def read_processing(
    given: Processing | str | Path | None, tokenizer: Tokenizer | str | Path | None, path: Path
) -> Processing:
    """The record given, or the checkpoint's own; the tokenizer given, or the record's, or the checkpoint's."""
    record = given if isinstance(given, Processing) else Processing.load(Path(given or path))
    if tokenizer is not None:
        return with_tokenizer(record, tokenizer)
    return record if record.prompts is not None else with_tokenizer(record, path)


def empty(make: Callable[[], T], dtype: torch.dtype) -> T:
    """What ``make`` builds, in ``dtype``; transformers' weights are allocated and not drawn, all others drawn alike."""
    from transformers.initialization import no_init_weights

    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]), no_init_weights():
            torch.manual_seed(0)
            return make()
    finally:
        torch.set_default_dtype(default)


# our own directories


def save(
    path: Path,
    state: dict[str, Tensor],
    *,
    family: str,
    preset: str | None,
    settings: Any,
    model: dict[str, Any],
    processing: Processing,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a directory that ``read_saved`` and ``fill_saved`` read back.

    ``settings``: the policy's dataclass; ``model``: what its network's config is made of; ``dtype``: store floating
    point weights in it.
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        tensors[name] = tensor.contiguous()
    config = {"format": FORMAT, "family": family, "preset": preset, "policy": asdict(settings), "model": model}
    (path / CONFIG).write_text(json.dumps(config, indent=1, default=str) + "\n")
    processing.save(path)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def read_saved(path: Path, family: str) -> dict[str, Any]:
    """``config.json`` of a directory of ours: ``preset``, ``policy`` and ``model``.

    Raises:
        CheckpointError: it is none, of another family or of another format.
    """
    data = read_config(path)
    if data.get("family") != family or data.get("format") != FORMAT:
        found = f"family {data.get('family')!r}, format {data.get('format')!r}"
        raise CheckpointError(f"{path / CONFIG}: {found}; expected {family!r}, {FORMAT}")
    absent = [key for key in ("policy", "model") if not isinstance(data.get(key), dict)]
    if absent:
        raise CheckpointError(f"{path / CONFIG} is damaged: it lacks {', '.join(absent)}")
    return data


def fill_saved(module: nn.Module, path: Path, what: str, *, overridden: bool, heads: Sequence[str] = HEADS) -> None:
    """Weights of a directory of ours. Heads that ``overridden`` settings gave another shape, or that they added or took
    away, start anew or are left out, with a warning."""
    files, shapes = weight_shapes(path)
    wanted, skipped, fresh = module.state_dict(), set(), set()
    for head in heads if overridden else ():
        ours = {key: tuple(value.shape) for key, value in wanted.items() if key.startswith(head)}
        stored = {key: shape for key, shape in shapes.items() if key.startswith(head)}
        if ours == stored:
            continue
        skipped |= set(stored)
        fresh |= set(ours)
        if ours:
            name = head.rstrip(".").replace("_", " ")
            logger.warning("the %s of %s does not fit the overridden settings: it starts anew", name, path)
    targets = {key: key for key in files if key not in skipped}
    fill(module, targets, {key: files[key] for key in targets}, shapes, fresh, path, what)
