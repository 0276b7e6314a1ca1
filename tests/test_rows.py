"""A stack of what lies in a row already is a view of it; everything else is copied, and the values are numpy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla3_plugin.rows import stack_rows


def block(count=4, shape=(3, 2), dtype=np.uint8):
    return np.arange(count * int(np.prod(shape))).astype(dtype).reshape(count, *shape)


@given(
    order=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    shape=st.sampled_from([(), (1,), (2, 3), (0,)]),
    dtype=st.sampled_from([np.uint8, np.float32, np.int64]),
)
def test_it_gives_what_numpy_gives_and_copies_nothing_exactly_where_rows_follow_one_another(order, shape, dtype):
    whole = block(6, shape, dtype)
    rows = [whole[i] if shape else whole[i : i + 1].reshape(()) for i in order]
    found = stack_rows(rows)
    np.testing.assert_array_equal(found, np.stack(rows))
    assert found.dtype == dtype
    in_a_row = order == list(range(order[0], order[0] + len(order)))
    if whole.nbytes:
        assert np.shares_memory(found, whole) == in_a_row
    if in_a_row and whole.nbytes:
        assert found.__array_interface__["data"][0] == rows[0].__array_interface__["data"][0]


def test_rows_of_rows_are_one_view():
    whole = block(6)
    pairs = [stack_rows([whole[i], whole[i + 1]]) for i in (0, 2, 4)]
    found = stack_rows(pairs)
    np.testing.assert_array_equal(found, whole.reshape(3, 2, 3, 2))
    assert np.shares_memory(found, whole)


def test_neighbours_that_different_owners_hold_are_copied():
    """By chance the allocator may put them side by side, and free one of them before the other."""
    memory = memoryview(bytearray(range(12)))
    first, second = np.frombuffer(memory[:6], np.uint8), np.frombuffer(memory[6:], np.uint8)
    found = stack_rows([first, second])
    assert not np.shares_memory(found, first) and not np.shares_memory(found, second)


def test_pieces_that_are_not_contiguous_are_copied():
    whole = block(4)
    columns = [whole[:, :, 0], whole[:, :, 1]]
    found = stack_rows(columns)
    np.testing.assert_array_equal(found, np.stack(columns))
    assert not np.shares_memory(found, whole)


def test_the_view_keeps_what_it_shows_alive():
    found = stack_rows(list(block(3)[1:]))
    np.testing.assert_array_equal(found, block(3)[1:])


def test_what_cannot_be_written_to_stays_so():
    whole = block(3)
    whole.flags.writeable = False
    assert not stack_rows(list(whole)).flags.writeable


def test_different_shapes_are_refused():
    with pytest.raises(ValueError, match="shape"):
        stack_rows([np.zeros(2), np.zeros(3)])
