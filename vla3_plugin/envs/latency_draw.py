"""Distributions of durations, drawn by key: the same key gives the same duration in whatever order it is asked for.

numpy and the standard library alone; the environment's child, the benchmark's bound and the tests read the same code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Optional, Union

import numpy as np

KINDS = (
    "a number of ms, {kind: constant, ms}, {kind: lognormal, median_ms, sigma}, {kind: empirical, samples_ms} or "
    "{kind: empirical, file}"
)
_TINY = 1e-12  # keeps the normal quantile finite


def uniform(*key: int) -> float:
    """A number in [0, 1) that depends on ``key`` alone."""
    return float(np.random.default_rng([part & 0xFFFFFFFFFFFFFFFF for part in key]).random())


@dataclass(frozen=True)
class Duration:
    """A distribution of durations in milliseconds.

    ``samples_ms``, where given (sorted), are drawn with equal probability; otherwise the duration is lognormal, with
    ``sigma`` the standard deviation of its logarithm; ``sigma`` 0 is a constant.
    """

    median_ms: float
    sigma: float = 0.0
    samples_ms: Optional[tuple[float, ...]] = None

    def quantile(self, u: float) -> float:
        """The duration in ms below which a draw falls with probability ``u``, 0 <= u <= 1."""
        if self.samples_ms is not None:
            return self.samples_ms[min(int(u * len(self.samples_ms)), len(self.samples_ms) - 1)]
        if self.sigma == 0.0:
            return self.median_ms
        return self.median_ms * math.exp(self.sigma * NormalDist().inv_cdf(min(max(u, _TINY), 1.0 - _TINY)))

    def draw(self, *key: int) -> float:
        """The duration in ms of ``key``; by inversion, so that two distributions drawn by one key are compared
        pairwise (common random numbers).
        """
        return self.quantile(uniform(*key))

    @property
    def mean_ms(self) -> float:
        if self.samples_ms is not None:
            return float(np.mean(self.samples_ms))
        return self.median_ms * math.exp(self.sigma**2 / 2)

    def mean_of_max_ms(self, count: int) -> float:
        """Expected longest of ``count`` independent draws, to about 0.1%: the mean of ``quantile(u ** (1/count))``."""
        if count == 1 or (self.samples_ms is None and self.sigma == 0.0):
            return self.mean_ms
        grid = (np.arange(20_000) + 0.5) / 20_000
        return float(np.mean([self.quantile(u) for u in grid ** (1.0 / count)]))


def parse_duration(value: Union[float, Mapping[str, Any]], key: str) -> Duration:
    """The distribution that ``value`` describes; ``key`` is what errors call it.

    A ``file`` holds durations in ms, a JSON list or one a line; a relative path starts at the working directory.

    Raises:
        ValueError: not one of ``KINDS``, a number that is not finite or negative, or an unreadable file.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Duration(_number(value, key))
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: {value!r}, expected {KINDS}")
    given = dict(value)
    kind = given.pop("kind", None)
    needs = {"constant": {"ms"}, "lognormal": {"median_ms", "sigma"}}
    if kind in needs and set(given) == needs[kind]:
        numbers = {name: _number(number, f"{key}.{name}") for name, number in given.items()}
        return Duration(numbers.get("ms", numbers.get("median_ms", 0.0)), numbers.get("sigma", 0.0))
    if kind == "empirical" and set(given) in ({"samples_ms"}, {"file"}):
        samples = given["samples_ms"] if "samples_ms" in given else _read(given["file"], f"{key}.file")
        if not isinstance(samples, (list, tuple)) or not samples:
            raise ValueError(f"{key}.samples_ms: {samples!r}, expected a non-empty list of ms")
        ordered = tuple(sorted(_number(sample, f"{key}.samples_ms[{i}]") for i, sample in enumerate(samples)))
        return Duration(ordered[len(ordered) // 2], samples_ms=ordered)
    raise ValueError(f"{key}: {dict(value)}, expected {KINDS}")


def _number(value: Any, key: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{key}: {value!r}, expected a finite number, 0 or more")
    return number


def _read(path: Any, key: str) -> Any:
    try:
        text = Path(path).read_text()
    except (OSError, TypeError) as error:
        raise ValueError(
            f"{key}: {path!r} is not readable ({error}); expected a JSON list or one number a line"
        ) from None
    try:
        return json.loads(text) if text.lstrip().startswith("[") else text.split()
    except json.JSONDecodeError as error:
        raise ValueError(f"{key}: {path!r} is no JSON list: {error}") from None
