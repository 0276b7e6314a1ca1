"""Finding policies by name: families from the entry-point group ``vla3.policies``, sizes from the presets, checkpoints
from directories, from the package and from the hub.

Importing this module imports no network: a family's module is loaded when one of its policies is asked for.
"""

from __future__ import annotations

import difflib
import json
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla3_plugin.policies.env_records import env_record, env_record_names
from vla3_plugin.policies.presets import PRESETS, Preset
from vla3_plugin.resources import PACKAGE

if TYPE_CHECKING:
    from vla3_plugin.policies.base import VLAPolicy
    from vla3_plugin.policies.processing import Processing

GROUP = "vla3.policies"
EMBEDDED = PACKAGE / "weights"
BUILT_IN = {  # so that a source tree works without installation
    "pi0": "vla3_plugin.policies.pi0:PI0Policy",
    "gr00t_n1_5": "vla3_plugin.policies.gr00t:GR00TPolicy",
    "groot": "vla3_plugin.policies.gr00t:GR00TPolicy",  # what lerobot calls it
    "pi05": "vla3_plugin.policies.pi05:PI05Policy",
    "openvla": "vla3_plugin.policies.openvla:OpenVLAPolicy",
    "openvla_oft": "vla3_plugin.policies.openvla_oft:OpenVLAOFTPolicy",
    "latency": "vla3_plugin.policies.latency:LatencyPolicy",
}
SHIPPED_STATISTICS = dict.fromkeys(("pi0", "pi05"), "vla3_plugin.policies.lerobot_statistics:complete")
RECORDS = {  # families whose processing record says more than ``Processing``
    "gr00t_n1_5": "vla3_plugin.policies.gr00t_processing:GR00TProcessing",
    "groot": "vla3_plugin.policies.gr00t_processing:GR00TProcessing",
    "openvla": "vla3_plugin.policies.openvla_processing:OpenVLAProcessing",
    "openvla_oft": "vla3_plugin.policies.openvla_processing:OpenVLAProcessing",
}
PUBLISHED_RECORDS = {  # families whose published checkpoints say enough to make a record of
    "gr00t_n1_5": "vla3_plugin.policies.gr00t_files:record_of",
    "groot": "vla3_plugin.policies.gr00t_files:record_of",
    "openvla": "vla3_plugin.policies.openvla_statistics:record_of",
    "openvla_oft": "vla3_plugin.policies.openvla_statistics:record_of",
}


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
        raise ValueError(
            f"policy family {family!r} ({target}) does not load: {type(error).__name__}: {error}"
        ) from error


def build_policy(preset: str, processing: Processing | None, **options: Any) -> VLAPolicy:
    """A preset with fresh weights. ``options`` go to the family's ``build`` (``seed``, ``model``, policy settings)."""
    if preset not in PRESETS:
        raise ValueError(_unknown("policy preset", preset, list(PRESETS)))
    return policy_class(PRESETS[preset].family).build(preset, processing, **options)  # type: ignore[attr-defined]


def load_policy(path_or_preset: str | Path, **options: Any) -> VLAPolicy:
    """A policy from a checkpoint directory of ours, an embedded one's name, a published checkpoint (directory or hub
    id), or a preset.

    ``options``: ``dtype``, ``processing``, ``tokenizer`` and policy settings by name (``noise_level=0.3``); what a
    family takes is documented at its ``load``, ``from_checkpoint`` and ``build``. A preset needs ``processing``: a
    record, its file, or the name of an environment whose record ships (``env_records``).

    Raises:
        ValueError: it is none of these, or the checkpoint is damaged, incomplete or of another architecture.
    """
    name = str(path_or_preset)
    if name in PRESETS and not Path(name).is_dir():
        if not PRESETS[name].needs_processing:
            return build_policy(name, None, **options)
        if "processing" not in options:
            raise ValueError(
                f"preset {name!r} has no weights and knows no environment: give `processing` (a processing.json, or "
                f"one of {', '.join(env_record_names())}), or a checkpoint: a directory, a hub id or an embedded one "
                f"({', '.join(embedded_names()) or 'none'})"
            )
        record = options.pop("processing")
        return build_policy(name, _load_record(record, PRESETS[name].family, PRESETS[name]), **options)
    path = checkpoint_path(path_or_preset)
    kind = family_of(path, options.pop("family", None))
    if options.get("processing") in env_record_names():
        options["processing"] = _record_at(path, kind, options["processing"])
    if "family" in _config(path):
        return policy_class(kind).load(path, **options)  # type: ignore[attr-defined]
    return policy_class(kind).from_checkpoint(path, **options)  # type: ignore[attr-defined]


def family_of(path: Path, wanted: str | None = None) -> str:
    """The family of a checkpoint directory. ``wanted``: for published files that fit several (OpenVLA-OFT's say
    ``openvla``); a directory of ours knows its own.

    Raises:
        ValueError: the directory names none, or is ours and of another family than ``wanted``.
    """
    config = _config(path)
    if (own := config.get("family")) is not None:
        if wanted not in (None, own):
            raise ValueError(f"family is {wanted!r}, {path / 'config.json'} is of family {own!r}")
        return own
    kind = wanted or config.get("model_type") or config.get("type")
    if kind is None and _config(path):
        from vla3_plugin.policies.pi0_files import unnamed_family

        kind = unnamed_family(path)
    if kind is None:
        raise ValueError(f"{path / 'config.json'} is missing or names no architecture: {path} is no checkpoint")
    return kind


def policy_summary(path_or_preset: str | Path, **options: Any) -> dict[str, Any]:
    """Sizes and settings of what ``load_policy`` would load, checked against the files' headers, without its memory."""
    import torch

    with torch.device("meta"):
        return load_policy(path_or_preset, **options).describe()


def load_processing(path_or_preset: str | Path, **options: Any) -> Processing:
    """The record that ``load_policy`` with the same arguments would use, without the network."""
    from vla3_plugin.policies.prompts import load_tokenizer, word_tokenizer

    name = str(path_or_preset)
    if name in PRESETS and not Path(name).is_dir():
        record = _load_record(options["processing"], PRESETS[name].family, PRESETS[name])
        if record.prompts is None and PRESETS[name].words:
            words = PRESETS[name].words
            own = getattr(record, "with_words", None)  # a family whose prompts hold more than words
            record = own(words) if own is not None else record.with_tokenizer(word_tokenizer(words))
    else:
        path = checkpoint_path(path_or_preset)
        family = family_of(path, options.get("family"))
        if describes_itself(path, options):
            return _attribute(PUBLISHED_RECORDS[family])(family, path, **options)
        record = _record_at(path, family, options.get("processing") or path)
        if record.prompts is None and "tokenizer" not in options:
            record = record.with_tokenizer(getattr(record, "read_tokenizer", load_tokenizer)(path))
    if isinstance(tokenizer := options.get("tokenizer"), str | Path):
        return record.with_tokenizer(getattr(record, "read_tokenizer", load_tokenizer)(Path(tokenizer)))
    return record if tokenizer is None else record.with_tokenizer(tokenizer)


def describes_itself(path: Path, options: dict[str, Any]) -> bool:
    """Whether ``load_processing`` makes the record of what a published checkpoint says, with no ``processing.json``."""
    if "processing" in options or (path / "processing.json").is_file():
        return False
    return family_of(path, options.get("family")) in PUBLISHED_RECORDS


def embedded_names() -> list[str]:
    """Checkpoints that ship with the package."""
    return sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))


def checkpoint_path(name: str | Path) -> Path:
    """The directory of a checkpoint given as a directory, an embedded one's name or a hub id (fetched).

    Raises:
        ValueError: it is none of them.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if str(name) in embedded_names():
        return EMBEDDED / str(name)
    if str(name).count("/") == 1 and not str(name).startswith((".", "/")):
        from vla3_plugin.policies.hub import download

        return download(str(name))
    known = [*embedded_names(), *PRESETS]
    raise ValueError(
        _unknown("policy", str(name), known) + "; a checkpoint directory or a hub id (owner/name) also works"
    )


def _load_record(record: Processing | str | Path, family: str, preset: Preset | None) -> Processing:
    """``record``, given as such, as a file or as an environment's name, as the family's own kind of record."""
    from vla3_plugin.policies.processing import Processing

    kind: Any = _attribute(RECORDS[family]) if family in RECORDS else Processing
    if record in env_record_names() and preset is not None:
        record = env_record(str(record), preset)
    if isinstance(record, Processing):
        return kind.of(record) if family in RECORDS else record
    return kind.load(Path(record))


def _record_at(path: Path, family: str, record: Processing | str | Path) -> Processing:
    """``record`` for the checkpoint at ``path``. An environment's record gives way to statistics that it ships."""
    found = _load_record(record, family, _preset_of(path, family))
    if record in env_record_names() and family in SHIPPED_STATISTICS:
        return _attribute(SHIPPED_STATISTICS[family])(found, path)
    return found


def _preset_of(path: Path, family: str) -> Preset | None:
    """What a checkpoint was built as: the preset that a directory of ours names, else its family's published sizes."""
    own = PRESETS.get(str(_config(path).get("preset")))
    return own or next((preset for preset in PRESETS.values() if preset.family == family), None)


def _attribute(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


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
