"""The statistics that lerobot ships beside pi0 and pi0.5 weights: its pipeline, ``policy_preprocessor.json``.

They say how states and actions were scaled in training. What they do not say is which of the environment's cameras is
which and what its dimensions are called, so they complete a record of the environment, and never make one alone.
Format as lerobot 0.4 to 0.6 writes it (``PolicyProcessorPipeline.save_pretrained``).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla3_plugin.policies.processing import EPS, Normalisation, Processing, ProcessingError

FILE = "policy_preprocessor.json"
_STEP, _RELATIVE = "normalizer_processor", "relative_actions_processor"
# lerobot's name of a map -> ours, and where its statistics lie
_MAPS: dict[str, tuple[str, dict[str, str]]] = {
    "IDENTITY": ("identity", {}),
    "MEAN_STD": ("mean_std", {"mean": "mean", "std": "std"}),
    "MIN_MAX": ("bounds", {"low": "min", "high": "max"}),
    "QUANTILES": ("quantiles", {"q01": "q01", "q99": "q99"}),
}
_KEYS = {"STATE": "observation.state", "ACTION": "action"}


def complete(record: Processing, path: Path) -> Processing:
    """``record`` with the statistics that the checkpoint at ``path`` was trained with, where it ships any.

    Raises:
        ProcessingError: they are damaged, of another number of dimensions than ``record``'s environment, or describe
            actions that are relative to the state.
    """
    if not (path / FILE).is_file():
        return record
    state, action = shipped(path)
    for what, found, need in (("state", state, record.state_dim), ("action", action, record.action_dim)):
        counts = {len(values) for values in found.stats.values()}
        if counts - {need}:
            raise ProcessingError(
                f"{path / FILE}: the checkpoint was trained on {max(counts)} {what} dimensions, the environment has "
                f"{need}: not made for each other"
            )
    ready = replace(record, state=state, action=action)
    ready.prompts = record.prompts
    return ready


def shipped(path: Path) -> tuple[Normalisation, Normalisation]:
    """How states and actions were normalised in the training of the checkpoint at ``path``.

    Raises:
        ProcessingError: see ``complete``.
    """
    file = path / FILE
    try:
        steps = {step["registry_name"]: step for step in json.loads(file.read_text())["steps"]}
        normalizer = steps[_STEP]
        settings, state_file = normalizer["config"], normalizer["state_file"]
        maps, eps = dict(settings["norm_map"]), float(settings.get("eps", EPS))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ProcessingError(
            f"{file} is no pipeline of lerobot's with one step {_STEP!r} and its statistics: {error!r}"
        ) from None
    if steps.get(_RELATIVE, {}).get("config", {}).get("enabled"):
        raise ProcessingError(
            f"{file}: {_RELATIVE} is enabled: the policy's actions are relative to the state, which is not supported; "
            "the simulator would take them for its own"
        )
    if eps > 1e-6:
        raise ProcessingError(f"{file}: {_STEP}.eps is {eps:g}, expected {EPS:g} as the published checkpoints have it")
    tensors = _tensors(path, str(state_file), file)
    state, action = (_normalisation(kind, maps.get(kind, "IDENTITY"), tensors, file) for kind in _KEYS)
    return state, action


def _tensors(path: Path, name: str, file: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if Path(name).name != name or not (path / name).is_file():
        raise ProcessingError(f"{file} names {name!r} as its statistics, which does not lie beside it")
    try:
        return load_file(path / name)
    except SafetensorError as error:
        raise ProcessingError(f"{path / name} is damaged: {error}") from None


def _normalisation(kind: str, name: str, tensors: dict[str, Any], file: Path) -> Normalisation:
    if name not in _MAPS:
        raise ProcessingError(f"{file}: norm_map.{kind} is {name!r}, expected one of {', '.join(_MAPS)}")
    ours, places = _MAPS[name]
    lost = [key for key in (f"{_KEYS[kind]}.{place}" for place in places.values()) if key not in tensors]
    if lost:
        raise ProcessingError(
            f"{file}: norm_map.{kind} is {name}, but {', '.join(lost)} is not among the statistics; without it "
            "the simulator would receive actions in other units than the policy was trained with"
        )
    stats = {key: tensors[f"{_KEYS[kind]}.{place}"].flatten().tolist() for key, place in places.items()}
    found = Normalisation(ours, stats)
    found.check(f"{file.name}: {kind.lower()}", max((len(values) for values in stats.values()), default=0))
    return found
