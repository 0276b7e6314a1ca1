"""What a published OpenVLA checkpoint says about its data: action statistics by ``unnorm_key``, image preparation."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla3_plugin.policies.checkpoints import CheckpointError, read_config
from vla3_plugin.policies.openvla_processing import OpenVLAProcessing
from vla3_plugin.policies.processing import FILE, Normalisation, Processing, ProcessingError
from vla3_plugin.policies.prompts import FILE as TOKENIZER_FILE
from vla3_plugin.policies.prompts import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Source = Processing | str | Path

STATISTICS, PREPROCESSOR = "dataset_statistics.json", "preprocessor_config.json"
KINDS = {"quantiles": ("q01", "q99"), "bounds": ("min", "max")}
# What ``published_processing`` takes and a policy's own settings do not.
OPTIONS = ("unnorm_key", "statistics", "cameras", "convention", "crop_side", "max_tokens")


RANGE_EPSILON = {"openvla": 0.0, "openvla_oft": 1e-8}  # by family: what the published code adds to each range


@dataclass(frozen=True)
class Convention:
    """What checkpoints of one benchmark share and no file of theirs says."""

    cameras: tuple[str, ...]
    gripper: str
    gripper_binary: bool


CONVENTIONS = {
    # The data says 1 for open, 0 for closed; the simulator -1 for open.
    "libero": Convention(("agentview",), "unit_flip", True),
    # The data says 1 for open, 0 for closed; the simulator 1 for open.
    "widowx": Convention((), "unit", True),
    "none": Convention((), "none", False),
}
_GUESSES = (("libero", "libero"), ("bridge", "widowx"), ("maniskill", "widowx"))


def published_processing(
    path: Path,
    *,
    range_epsilon: float,
    unnorm_key: str | None = None,
    statistics: str = "quantiles",
    cameras: Sequence[str] | None = None,
    convention: str | None = None,
    crop_side: float = 1.0,
    max_tokens: int = 64,
) -> OpenVLAProcessing:
    """The record of a published checkpoint directory, without its tokenizer.

    ``unnorm_key``: which data set's statistics; may be left out where there is one. ``statistics``: ``quantiles`` (q01,
    q99) or ``bounds`` (min, max; openvla-oft's ALOHA). ``cameras``: the environment's names, in the order of training.
    ``convention``: one of ``CONVENTIONS``, guessed from how the key begins.

    Raises:
        ProcessingError: statistics are missing or contradict each other, or a camera or convention has to be named.
    """
    key, stats = action_statistics(path, unnorm_key)
    if statistics not in KINDS:
        raise ProcessingError(f"statistics is {statistics!r}, expected one of {', '.join(KINDS)}")
    name = convention or next((guess for start, guess in _GUESSES if key.startswith(start)), None)
    if name is None:
        raise ProcessingError(
            f"unnorm_key {key!r} belongs to no benchmark known here, so the gripper's convention is unknown and the "
            f"gripper might open where it should close: give `convention`, one of {', '.join(CONVENTIONS)}"
        )
    if name not in CONVENTIONS:
        raise ProcessingError(f"convention is {name!r}, expected one of {', '.join(CONVENTIONS)}")
    rules = CONVENTIONS[name]
    seen = list(rules.cameras if cameras is None else cameras)
    if not seen:
        raise ProcessingError("the checkpoint does not name its cameras: give `cameras`, the environment's names")
    low, high, raw = _vectors(stats, KINDS[statistics], f"{key}.action")
    images = _image_preparation(path)
    return OpenVLAProcessing(
        cameras=seen,
        state_dim=0,
        state=Normalisation("identity"),
        action_dim=len(low),
        action=Normalisation("bounds", {"low": low, "high": high}),
        raw_dims=raw,
        range_epsilon=range_epsilon,
        gripper=rules.gripper,
        gripper_binary=rules.gripper_binary,
        crop_side=crop_side,
        max_tokens=max_tokens,
        **images,
    )


def record_of(
    kind: str,
    path: Path,
    processing: Source | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    **options: Any,
) -> OpenVLAProcessing:
    """The record that ``from_checkpoint`` of family ``kind`` uses: the one given, or the directory's, or one made
    of the checkpoint's statistics.

    Of ``options`` those named ``OPTIONS`` count; a policy's other settings may be among them.
    """
    options = {key: value for key, value in options.items() if key in OPTIONS}
    if processing is None and not (path / FILE).is_file():
        made = published_processing(path, range_epsilon=RANGE_EPSILON[kind], **options)
        return readable(made, path if tokenizer is None else tokenizer)
    if options:
        raise ValueError(
            f"{', '.join(sorted(options))} given beside a processing record, which says the same: change the record"
        )
    return stored_record(processing or path, tokenizer, path)


def stored_record(given: Source, tokenizer: Tokenizer | str | Path | None, path: Path) -> OpenVLAProcessing:
    """A record given as such, as a file or as its directory, with the tokenizer given, its own or that of ``path``."""
    record = OpenVLAProcessing.of(given) if isinstance(given, Processing) else OpenVLAProcessing.load(Path(given))
    if tokenizer is not None:
        return readable(record, tokenizer)
    return record if record.prompts is not None else readable(record, path)


def readable(record: OpenVLAProcessing, tokenizer: Tokenizer | str | Path) -> OpenVLAProcessing:
    if not isinstance(tokenizer, str | Path):
        return record.with_tokenizer(tokenizer)
    if not (Path(tokenizer) / TOKENIZER_FILE).is_file():
        raise CheckpointError(
            f"{Path(tokenizer) / TOKENIZER_FILE} does not exist: give `tokenizer`, the one of openvla/openvla-7b "
            "in the tokenizers library's format"
        )
    return record.with_tokenizer(load_tokenizer(Path(tokenizer)))


def action_statistics(path: Path, unnorm_key: str | None) -> tuple[str, dict[str, Any]]:
    """The chosen key and its ``action`` statistics, from ``dataset_statistics.json`` and ``config.json``."""
    found: dict[str, dict[str, Any]] = {}
    own = path / STATISTICS
    sources = [(own, _object(own))] if own.is_file() else []
    sources.append((path / "config.json", read_config(path).get("norm_stats") or {}))
    for file, entries in sources:
        for name, entry in entries.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("action"), dict):
                raise ProcessingError(f"{file}: {name!r} holds no `action` statistics")
            if name in found and _numbers(found[name]) != _numbers(entry["action"]):
                raise ProcessingError(
                    f"{own} and {file} hold different action statistics for {name!r}: actions would be scaled by one "
                    "or the other; remove the one that the weights were not trained with"
                )
            found.setdefault(name, entry["action"])
    if not found:
        raise ProcessingError(
            f"{path} has no action statistics (norm_stats of config.json, {STATISTICS}): the simulator would receive "
            "actions in normalised units. Copy those the checkpoint was trained with, or give `processing`"
        )
    if unnorm_key is None and len(found) == 1:
        return next(iter(found.items()))
    if unnorm_key not in found:
        near = difflib.get_close_matches(str(unnorm_key), found, n=1, cutoff=0.3) if unnorm_key else []
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        what = "unnorm_key must be chosen" if unnorm_key is None else f"unnorm_key is {unnorm_key!r}{hint}"
        raise ProcessingError(f"{what}; {path} has statistics for: {', '.join(sorted(found))}")
    return unnorm_key, found[unnorm_key]


def _vectors(stats: dict[str, Any], names: tuple[str, str], where: str) -> tuple[list[float], list[float], list[int]]:
    """Lower and upper ends of each dimension's range, and which dimensions are left as they are."""
    absent = [name for name in names if name not in stats]
    if absent:
        raise ProcessingError(f"{where} lacks {', '.join(absent)}; it has {', '.join(sorted(stats))}")
    low, high = ([float(value) for value in stats[name]] for name in names)
    mask = stats.get("mask") or [True] * len(low)
    if len({len(low), len(high), len(mask)}) != 1:
        raise ProcessingError(
            f"{where}: {names[0]} has {len(low)} values, {names[1]} {len(high)}, mask {len(mask)}; expected as many"
        )
    raw = [i for i, scaled in enumerate(mask) if not scaled]
    for i in range(len(low)):
        if i in raw:
            low[i], high[i] = -1.0, 1.0
        elif not (math.isfinite(low[i]) and math.isfinite(high[i]) and low[i] < high[i]):
            raise ProcessingError(f"{where}: {names[0]}[{i}] is {low[i]}, not below {names[1]}[{i}] = {high[i]}")
    return low, high, raw


def _image_preparation(path: Path) -> dict[str, Any]:
    """Image size, means and deviations from the checkpoint's files; the published ones where a file is silent."""
    config = read_config(path)
    file = path / PREPROCESSOR
    stated = _object(file) if file.is_file() else {}
    for where, data in ((file, stated), (path / "config.json", config)):
        if (strategy := data.get("image_resize_strategy", "resize-naive")) != "resize-naive":
            raise CheckpointError(f"{where}: image_resize_strategy is {strategy!r}, only 'resize-naive' is built")
    kinds = stated.get("interpolations") or [stated.get("interpolation", "bicubic")]
    if set(kinds) != {"bicubic"}:
        raise CheckpointError(f"{file}: interpolation is {kinds}, only 'bicubic' is built")
    sizes = config.get("image_sizes") or [224, 224]
    if len(set(sizes)) != 1:
        raise CheckpointError(f"{path / 'config.json'}: image_sizes is {sizes}, expected one size for both towers")
    return {"image_size": (sizes[0], sizes[0]), **{k: stated[k] for k in ("means", "stds") if k in stated}}


def _numbers(stats: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stats.items() if name in ("q01", "q99", "min", "max", "mask")}


def _object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is damaged: expected an object, got {type(data).__name__}")
    return data
