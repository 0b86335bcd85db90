"""Counts of durations (or any sizes) in fixed buckets: what a metrics page shows of a distribution.

Adding is a bisection and two additions, so that it may stand in an engine's step. The plain form crosses processes:

    {"bounds": [0.1, 1.0], "counts": [3, 1, 0], "sum": 0.7}      3 up to 0.1, 1 up to 1.0, none above
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

#: Upper bounds for steps of an engine, in seconds.
STEP_BOUNDS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
#: For what a person or a tool takes, in seconds.
WAIT_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
#: For whole programs, in seconds.
PROGRAM_BOUNDS_S = (1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0)
#: For turns of a program.
TURN_BOUNDS = (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 30.0, 50.0, 100.0)


class Histogram:
    """How many values fell into each bucket."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending upper bounds; a value on a bound is in its bucket."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for another process."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


def cumulative(plain: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Buckets and sum as a Prometheus histogram has them: each bucket with all the smaller ones."""
    total, buckets = 0.0, []
    for bound, count in zip([*plain["bounds"], "+Inf"], plain["counts"], strict=True):
        total += count
        buckets.append((str(bound), total))
    return buckets, float(plain["sum"])
