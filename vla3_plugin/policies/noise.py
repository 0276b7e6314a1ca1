"""Sampling noise that belongs to a request and to nothing else."""

from __future__ import annotations

import numpy as np
import torch

from vla3_plugin.policies.base import NoiseKey


def keyed_seed(key: NoiseKey) -> int:
    """A stable 64-bit hash of (run seed, episode id, chunk index)."""
    words = [part & 0xFFFF_FFFF_FFFF_FFFF for part in key]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def keyed_generator(key: NoiseKey) -> torch.Generator:
    """A CPU generator seeded by ``keyed_seed``.

    On the CPU whatever the model's device: the same request draws the same numbers everywhere, in any batch.
    """
    return torch.Generator().manual_seed(keyed_seed(key))
