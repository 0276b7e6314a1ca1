"""What an env worker needs of a policy: its ``prepare``, without its network where the family allows that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla3_plugin.contract import EnvSpec
from vla3_plugin.policies.presets import PRESETS
from vla3_plugin.policies.processing import FILE
from vla3_plugin.policies.registry import checkpoint_path, describes_itself, load_policy, load_processing


def load_preparer(path: str | Path, **options: Any) -> Any:
    """Something with ``prepare(observations)``: the processing record where there is one, else the whole policy."""
    preset = None if Path(path).is_dir() else PRESETS.get(str(path))
    if preset is not None and not preset.needs_processing:
        return load_policy(path, **options)
    if preset is not None or "processing" in options:
        return load_processing(path, **options)
    directory = checkpoint_path(path)
    if (directory / FILE).is_file() or describes_itself(directory, options):
        return load_processing(path, **options)
    return load_policy(path, **options)


def check_env(preparer: Any, spec: EnvSpec) -> None:
    """Refuse a policy made for another environment; a family without a record checks its own inputs.

    Raises:
        ProcessingError: cameras, state or action dimensions differ.
    """
    record = preparer if hasattr(preparer, "check_env") else getattr(preparer, "processing", None)
    if record is not None:
        record.check_env(spec)
