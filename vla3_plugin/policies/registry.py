"""Finding policies by name: families from the entry-point group ``vla3.policies``, sizes from the presets.

Importing this module imports no network: a family's module is loaded when one of its policies is asked for.
"""

from __future__ import annotations

import difflib
import json
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla3_plugin.policies.presets import PRESETS

if TYPE_CHECKING:
    from vla3_plugin.policies.base import VLAPolicy
    from vla3_plugin.policies.processing import Processing

GROUP = "vla3.policies"
BUILT_IN = {"pi0": "vla3_plugin.policies.pi0:PI0Policy"}  # so that a source tree works without installation


def policy_names() -> list[str]:
    """The families that can be loaded, built-in and third-party."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def policy_class(family: str) -> type[VLAPolicy]:
    """The class behind a family's name.

    Raises:
        ValueError: no such family, or its entry point does not load.
    """
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    target = {**found, **BUILT_IN}.get(family)
    if target is None:
        raise ValueError(_unknown("policy family", family, policy_names()))
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy family {family!r} ({target}) does not load: {type(error).__name__}: {error}") from error


def build_policy(preset: str, processing: Processing, **options: Any) -> VLAPolicy:
    """A preset with fresh weights. ``options`` go to the family's ``build`` (``policy``, ``model``, ``seed``, ...)."""
    if preset not in PRESETS:
        raise ValueError(_unknown("policy preset", preset, list(PRESETS)))
    return policy_class(PRESETS[preset].family).build(preset, processing, **options)  # type: ignore[attr-defined]


def load_policy(path_or_preset: str | Path, **overrides: Any) -> VLAPolicy:
    """A policy from a directory of ours, a published checkpoint (directory or hub id), or a preset.

    ``overrides``: ``policy`` (settings by name), ``dtype``, ``processing``, and what the family's ``load``,
    ``from_checkpoint`` or ``build`` takes beside them. A preset needs ``processing``.

    Raises:
        ValueError: it is none of the three, or the checkpoint is damaged, incomplete or of another architecture.
    """
    name, path = str(path_or_preset), Path(path_or_preset)
    if path.is_dir():
        family = _config(path).get("family")
        if family is not None:
            return policy_class(family).load(path, **overrides)  # type: ignore[attr-defined]
        kind = _config(path).get("model_type") or _config(path).get("type")
        if kind is None:
            raise ValueError(f"{path / 'config.json'} is missing or names no architecture: {path} is no checkpoint")
        return policy_class(kind).from_checkpoint(path, **overrides)  # type: ignore[attr-defined]
    if name in PRESETS:
        if "processing" not in overrides:
            raise ValueError(f"preset {name!r} needs `processing`: cameras and normalisation statistics")
        return build_policy(name, **overrides)
    if name.count("/") == 1 and not path.is_absolute() and not name.startswith("."):
        from vla3_plugin.policies.hub import download

        return load_policy(download(name), **overrides)
    raise ValueError(_unknown("policy", name, list(PRESETS)) + "; a checkpoint directory or a hub id (owner/name) also works")


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        data = json.loads(file.read_text()) if file.is_file() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    return data if isinstance(data, dict) else {}


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {what} {name!r}{hint}; known: {', '.join(known)}"
