"""The batcher's benchmark says what it promises to say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_benchmark_runs_and_reports_what_it_promises():
    script = Path(__file__).parents[2] / "benchmarks" / "batcher.py"
    command = [sys.executable, str(script), "--json", "--seconds", "0.2", "--trials", "1", "--idle", "40"]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert all(min(row["per_second"]) > 0 for row in result["throughput"])
    assert len(result["delay"]) == 2, "one sender, and many"
    assert all(min(row["requests"]) > 0 for found in result["delay"].values() for row in found["below"])
    assert result["idle"]["requests"] == 40 and result["idle"]["early"] == 0
