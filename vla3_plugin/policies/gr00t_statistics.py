"""Processing records from the statistics that published GR00T N1.5 checkpoints ship.

lerobot writes its pipeline (``policy_preprocessor.json``) and the data set's statistics beside the weights. NVIDIA's
fine-tunes ship ``experiment_cfg/metadata.json``: statistics by named part of the robot, but neither the order in which
the parts were concatenated nor how each was normalised, so the order has to be given and min/max is what is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from vla3_plugin.policies.checkpoints import read_config
from vla3_plugin.policies.gr00t_processing import GR00TProcessing, MinMax
from vla3_plugin.policies.processing import ProcessingError

LEROBOT, NVIDIA = "policy_preprocessor.json", "experiment_cfg/metadata.json"
_STEP = "groot_pack_inputs_v3"
_IMAGES = "observation.images."


def shipped_record(path: Path, *, image_size: tuple[int, int], **options: Any) -> GR00TProcessing:
    """The record of the checkpoint at ``path``.

    ``options``: ``cameras`` (the environment's names, in the order of training; lerobot's default: the checkpoint's
    own names), ``embodiment``, and for NVIDIA's ``state_parts`` and ``action_parts``, in the order of training. Further
    ones are fields of ``GR00TProcessing``.

    Raises:
        ProcessingError: there are no statistics, they are damaged, or something has to be given to read them.
    """
    if (path / LEROBOT).is_file():
        return _lerobot(path, image_size, **options)
    if (path / NVIDIA).is_file():
        return _nvidia(path / NVIDIA, image_size, **options)
    raise ProcessingError(
        f"{path} has no processing.json, {LEROBOT} or {NVIDIA}: without the statistics of the data it was trained on "
        "the simulator would receive actions in normalised units. Give `processing`"
    )


def _lerobot(
    path: Path, image_size: tuple[int, int], *, cameras: Sequence[str] | None = None,
    embodiment: str | int | None = None, **fields: Any,
) -> GR00TProcessing:  # fmt: skip
    file = path / LEROBOT
    steps = [step for step in _object(file).get("steps") or () if step.get("registry_name") == _STEP]
    if len(steps) != 1:
        raise ProcessingError(f"{file} has {len(steps)} steps {_STEP!r}, expected 1: not a pipeline of GR00T N1.5")
    step = steps[0].get("config") or {}
    if not step.get("normalize_min_max", True):
        raise ProcessingError(f"{file}: {_STEP}.normalize_min_max is false: nothing says how states were scaled")
    name = steps[0].get("state_file")
    if not name or not (path / name).is_file():
        raise ProcessingError(f"{file} names {name!r} as the statistics of {_STEP}, which does not exist")
    try:
        tensors = load_file(path / name)
    except SafetensorError as error:
        raise ProcessingError(f"{path / name} is damaged: {error}") from None
    state, action = (
        MinMax(stats={kind: tensors[f"{part}.{kind}"].flatten().tolist() for kind in ("min", "max")
                      if f"{part}.{kind}" in tensors})
        for part in ("observation.state", "action")
    )  # fmt: skip
    if embodiment is None:
        tag = step.get("embodiment_tag", "new_embodiment")
        embodiment = (step.get("embodiment_mapping") or {}).get(tag, tag)
    if cameras is None:
        features = read_config(path).get("input_features") or {}
        cameras = sorted(key.removeprefix(_IMAGES) for key in features if key.startswith(_IMAGES))
    fields = {"formalize": bool(step.get("formalize_language", False)), **fields}
    return _record(file, state, action, cameras, image_size, embodiment, fields)


def _nvidia(
    file: Path, image_size: tuple[int, int], *, cameras: Sequence[str] | None = None,
    embodiment: str | int | None = None, state_parts: Sequence[str] | None = None,
    action_parts: Sequence[str] | None = None, **fields: Any,
) -> GR00TProcessing:  # fmt: skip
    data = _object(file)
    if embodiment is None and len(data) == 1:
        embodiment = next(iter(data))
    if embodiment not in data:
        raise ProcessingError(f"{file} holds embodiments {sorted(data)}, asked for {embodiment!r}: give `embodiment`")
    statistics = data[str(embodiment)].get("statistics") or {}
    state = _parts(file, statistics, "state", state_parts)
    action = _parts(file, statistics, "action", action_parts)
    return _record(file, state, action, cameras, image_size, embodiment, {"formalize": True, **fields})


def _parts(file: Path, statistics: dict[str, Any], what: str, order: Sequence[str] | None) -> MinMax:
    found = statistics.get(what) or {}
    if order is None or sorted(order) != sorted(found):
        raise ProcessingError(
            f"{file} has statistics of {what} parts {list(found)}, {what}_parts is {order and list(order)}: give all "
            "of them, in the order in which the training's data config concatenates them"
        )
    try:
        stats = {kind: [float(value) for part in order for value in found[part][kind]] for kind in ("min", "max")}
    except (KeyError, TypeError, ValueError) as error:
        raise ProcessingError(f"{file}: statistics of {what} are damaged: {type(error).__name__}: {error}") from None
    return MinMax(stats=stats)


def _record(
    file: Path, state: MinMax, action: MinMax, cameras: Sequence[str] | None, image_size: tuple[int, int],
    embodiment: str | int, fields: dict[str, Any],
) -> GR00TProcessing:  # fmt: skip
    if not cameras:
        raise ProcessingError(f"{file} names no cameras: give `cameras`, in the order of training")
    try:
        return GR00TProcessing(
            cameras=list(cameras), image_size=image_size, state_dim=len(state.stats.get("min", ())),
            action_dim=len(action.stats.get("min", ())), state=state, action=action, embodiment=embodiment, **fields,
        )  # fmt: skip
    except ProcessingError as error:
        raise ProcessingError(f"{file}: {error}") from None


def _object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ProcessingError(f"{file} is damaged: {error}") from None
    if not isinstance(data, dict):
        raise ProcessingError(f"{file} is damaged: expected an object, got {type(data).__name__}")
    return data
