"""Stacking arrays that already lie one after another: the stack is a view of where they lie, and nothing is copied.

A simulator that keeps the images of its slots in one block hands them on as they are, up to the policy's batch. numpy
alone is needed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def stack_rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """``numpy.stack(arrays)`` along a new first axis; a view where they are consecutive pieces of one block of memory.

    The caller may not write to what it gets, nor keep it for longer than the arrays keep their values.

    Raises:
        ValueError: no arrays, or of different shapes.
    """
    if len(arrays) > 1 and _consecutive(arrays):
        first = arrays[0]
        # the view keeps ``first`` alive, and that its block, in which all of them lie
        return np.lib.stride_tricks.as_strided(first, (len(arrays), *first.shape), (first.nbytes, *first.strides))
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def _consecutive(arrays: Sequence[np.ndarray]) -> bool:
    first = arrays[0]
    start, block = _address(first), _block(first)
    if first.nbytes == 0 or block is first:
        return False
    return all(
        array.shape == first.shape
        and array.dtype == first.dtype
        and array.flags.c_contiguous
        and _address(array) == start + i * first.nbytes
        and _block(array) is block
        for i, array in enumerate(arrays)
    )


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _block(array: np.ndarray) -> Any:
    """What owns the memory: the last of the chain of bases. Neighbours by chance have different ones."""
    owner: Any = array
    while (base := getattr(owner, "base", None)) is not None:  # of arrays, and of what ``as_strided`` puts between them
        owner = base
    return owner
