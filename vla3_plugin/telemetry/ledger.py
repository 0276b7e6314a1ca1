"""Which groups of the episode plan were trained on in which step, and which were dropped: the run's own account.

``ledger.jsonl`` in the run directory. A run that is resumed writes the steps it repeats again; the last line of a step
is the one that counts (``read_ledger``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vla3_plugin.telemetry.jsonl import JsonlWriter

LEDGER_FILE = "ledger.jsonl"


class Ledger:
    """Appends a line a step."""

    def __init__(self, run_dir: Path) -> None:
        self._writer = JsonlWriter(run_dir / LEDGER_FILE)

    def write(self, step: int, trained: Sequence[int], dropped: Sequence[int]) -> None:
        """``trained``: groups of this step's batch. ``dropped``: groups given up or too old since the step before."""
        self._writer.append({"step": step, "trained": sorted(trained), "dropped": sorted(dropped)})


@dataclass
class Account:
    """``trained`` and ``dropped``: step -> groups."""

    trained: dict[int, list[int]] = field(default_factory=dict)
    dropped: dict[int, list[int]] = field(default_factory=dict)

    @property
    def twice(self) -> list[int]:
        """Groups that stand there more than once."""
        seen: set[int] = set()
        again = []
        for groups in (*self.trained.values(), *self.dropped.values()):
            again += [g for g in groups if g in seen]
            seen.update(groups)
        return sorted(again)

    @property
    def groups(self) -> set[int]:
        return {g for groups in (*self.trained.values(), *self.dropped.values()) for g in groups}


def read_ledger(run_dir: Path, last_step: int | None = None) -> Account:
    """The account up to ``last_step``. A line that was cut short by a kill is left out."""
    account = Account()
    for line in (run_dir / LEDGER_FILE).read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if last_step is None or row["step"] <= last_step:
            account.trained[row["step"]], account.dropped[row["step"]] = row["trained"], row["dropped"]
    return account
