"""What the tests of several policy families share: observations of two cameras, requests, rows of a batch."""

import numpy as np

from vla3_plugin.contract import Observation

TASKS = ["pick up the red cube", "push the bowl to the left of the plate", "stack"]


def observations(count: int, size: int = 32, *, state: int = 9, rng: np.random.Generator) -> list[Observation]:
    return [
        Observation(
            {c: rng.integers(0, 256, (size, size, 3), dtype=np.uint8) for c in ("a", "b")},
            rng.normal(size=state).astype(np.float32),
            TASKS[i % 3],
        )
        for i in range(count)
    ]


def keys(count: int) -> list[tuple[int, int, int]]:
    return [(5, 100 + i, i % 3) for i in range(count)]


def rows(tensors, index):
    return {name: tensor[index] for name, tensor in tensors.items()}


def stored(inputs, chunk):
    return {**inputs, **{f"trace.{name}": tensor for name, tensor in chunk.trace.items()}}
