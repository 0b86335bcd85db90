"""The few numbers that a benchmark prints about a list of measurements."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, interpolated linearly between neighbours.

    Raises:
        ValueError: `values` is empty or `share` is outside 0..1.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError("percentile needs values and a share between 0 and 1")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, P95 and P99."""
    return {
        "mean": sum(values) / len(values),
        "p50": percentile(values, 0.50),
        "p95": percentile(values, 0.95),
        "p99": percentile(values, 0.99),
    }
