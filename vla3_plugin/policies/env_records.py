"""Processing records of the environments that the recipes use, for policies that bring none: presets with fresh
weights, and published weights that were not fine-tuned there.

``records/<environment>.json`` holds what only the environment knows: its cameras, the names of its state and action
dimensions, and their statistics over scripted demonstrations. The rest is the preset's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vla3_plugin.policies.presets import Preset
    from vla3_plugin.policies.processing import Processing

_RECORDS = Path(__file__).parent / "records"


def env_record_names() -> list[str]:
    """What ``processing`` may be beside a file: ``libero`` and so on."""
    return sorted(path.stem for path in _RECORDS.glob("*.json"))


def env_record(name: str, preset: Preset) -> Processing:
    """The record of environment ``name`` for a network of ``preset``'s image size, prompt and kind of statistics."""
    from vla3_plugin.policies.processing import Normalisation, Processing

    data = json.loads((_RECORDS / f"{name}.json").read_text())
    kind = preset.normalisation
    return Processing(
        cameras=data["cameras"],
        image_size=preset.image_size,
        state_dim=len(data["state_names"]),
        action_dim=len(data["action_names"]),
        state=Normalisation(kind, data["state"][kind]),
        action=Normalisation(kind, data["action"][kind]),
        prompt=preset.prompt,
        max_tokens=preset.max_tokens,
        state_names=data["state_names"],
        action_names=data["action_names"],
    )
