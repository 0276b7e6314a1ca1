"""The driver's end of streaming: what is said of a step that came in micro-batches."""

import pytest

from vla3_plugin.trainer.streaming import _means


def test_a_short_micro_batch_counts_for_what_it_holds_and_padding_for_nothing():
    found = {
        "approx_kl": [(0.1, 30.0), (0.4, 10.0), (9.0, 0.0)],
        "lr": [(1e-4, 10.0)],
        "empty": [(2.0, 0.0), (4.0, 0.0)],
    }
    expected = {"actor/approx_kl": 0.175, "actor/lr": 1e-4, "actor/empty": 3.0}
    assert _means(found) == pytest.approx(expected)
