"""What went wrong and was survived: a line in ``faults.jsonl``, one on the console, a count in the metrics."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FAULTS_FILE = "faults.jsonl"
_SHOWN = 300  # characters of a reason on the console; the file has all of it


class FaultLog:
    """Called with each fault: ``kind``, ``where``, ``why``, ``episodes`` (ids it touched). Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FAULTS_FILE
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def __call__(self, fault: Mapping[str, Any]) -> None:
        line = json.dumps({"time": time.time(), **fault})
        with self._lock:
            self._counts[fault["kind"]] += 1
            try:
                with self.path.open("a") as file:
                    file.write(line + "\n")
            except OSError as error:  # a full disk: what was survived must not end the run now
                fault = {**fault, "why": f"{fault['why']} ({self.path} could not be written: {error})"}
        why = " ".join(str(fault["why"]).split())
        shown = f": {why[:_SHOWN]}{'…' * (len(why) > _SHOWN)}" if why else ""
        print(f"vla3: {fault['kind'].replace('_', ' ')}, {fault['where']}{shown}", file=sys.stderr, flush=True)

    def metrics(self) -> dict[str, float]:
        """``faults/<kind>``: how many of each kind since the run began; kinds that never occurred are left out."""
        with self._lock:
            return {f"faults/{kind}": float(count) for kind, count in self._counts.items()}
