"""The cost of a policy, in the parts that the benchmark says it has."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from policies.test_families import SMALL, small

_spec = importlib.util.spec_from_file_location("vla3_costs", Path(__file__).parents[2] / "benchmarks" / "policies.py")
assert _spec is not None and _spec.loader is not None
costs = importlib.util.module_from_spec(_spec)
sys.modules["vla3_costs"] = costs
_spec.loader.exec_module(costs)


@pytest.mark.parametrize("preset", SMALL)
def test_the_decoding_loop_has_no_graph_break(preset):
    with torch.no_grad():
        assert costs.graph_breaks(small(preset).eval()) == 0


@pytest.mark.parametrize("preset", SMALL)
def test_the_compiled_step_is_the_step(preset):
    """Traced whole, run without a compiler: what is left out of the graph would be an error."""
    with torch.no_grad():
        step, given = costs.step_of(small(preset).eval())
        torch._dynamo.reset()
        plain, traced = step(*given), torch.compile(step, backend="eager", fullgraph=True)(*given)
    torch.testing.assert_close(traced, plain)


def test_every_preset_for_a_cpu_is_measured(tmp_path, capsys):
    file = tmp_path / "out.json"
    costs.main(["--repeats", "1", "--batches", "1", "2", "--no-compile", "--json", str(file)])
    found = {result["preset"]: result for result in json.loads(file.read_text())["results"]}
    assert found.keys() == SMALL.keys()
    for result in found.values():
        for batch in (1, 2):
            whole = result["prefix"][str(batch)] + result["decode"][str(batch)]
            assert result["prefix"][str(batch)] > 0 and result["chunk"][str(batch)] == pytest.approx(whole / batch)
        assert 0 < result["evaluate"] and 0 < result["train"]
    assert capsys.readouterr().out.count("\n") == 2 + len(SMALL)
