"""How long tools take, as a compact value that engines can hold: pure, no clocks, no store.

A *window* is the last `window_samples_max` samples of one tool key. A *snapshot* summarises every window at one moment:

    finished samples (ok, error)          → `count` and at most QUANTILES_MAX quantile points
    censored samples (timeout, cancelled, → `censored_count` and at most CENSORED_QUANTILES_MAX points; the true
                      interrupted)          durations are at least these

Quantile points carry equal probability: point i of n is the (i + ½)/n quantile. While a window holds no more finished
samples than QUANTILES_MAX, and no recency weighting is asked for, the points are the samples themselves, so that an
empirical CDF over them is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample

QUANTILES_MAX = 256
CENSORED_QUANTILES_MAX = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolLatency:
    """What is known of one tool key's durations."""

    #: Finished samples in the window.
    count: int = 0
    #: Ascending, in seconds; see the module's text for which quantiles they are.
    quantiles: tuple[float, ...] = ()
    #: Samples in the window of which only a lower bound is known.
    censored_count: int = 0
    #: Ascending lower bounds, in seconds.
    censored_quantiles: tuple[float, ...] = ()

    def quantile(self, probability: float) -> float | None:
        """Seconds within which `probability` of the finished calls ended; None with no finished sample."""
        if not self.quantiles:
            return None
        index = math.ceil(probability * len(self.quantiles)) - 1
        return self.quantiles[min(max(index, 0), len(self.quantiles) - 1)]

    def mean_s(self) -> float | None:
        """The mean of the finished durations (of the quantile points); None with no finished sample."""
        return sum(self.quantiles) / len(self.quantiles) if self.quantiles else None

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for msgpack and JSON."""
        return {
            "count": self.count,
            "quantiles": list(self.quantiles),
            "censored_count": self.censored_count,
            "censored_quantiles": list(self.censored_quantiles),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> ToolLatency:
        """Read `to_dict` back.

        Raises:
            ValueError: counts are negative, points are not finite ascending seconds, or there are too many.
        """
        return cls(
            count=_count(plain["count"]),
            quantiles=_points(plain["quantiles"], at_most=QUANTILES_MAX),
            censored_count=_count(plain["censored_count"]),
            censored_quantiles=_points(plain["censored_quantiles"], at_most=CENSORED_QUANTILES_MAX),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySnapshot:
    """Every tool key's latency at one moment."""

    #: Grows with every batch of samples written; equal versions of one store mean equal snapshots.
    version: int = 0
    #: All samples of all keys.
    global_: ToolLatency = ToolLatency()
    tools: Mapping[ToolKey, ToolLatency] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, for msgpack and JSON."""
        return {
            "version": self.version,
            "global": self.global_.to_dict(),
            "tools": {key: latency.to_dict() for key, latency in self.tools.items()},
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> LatencySnapshot:
        """Read `to_dict` back.

        Raises:
            ValueError: a field is missing or malformed.
        """
        try:
            return cls(
                version=_count(plain["version"]),
                global_=ToolLatency.from_dict(plain["global"]),
                tools={ToolKey(str(key)): ToolLatency.from_dict(value) for key, value in plain["tools"].items()},
            )
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"not a latency snapshot: {exc!r}") from exc


class Observation(NamedTuple):
    """What a sample comes to, once its window is known."""

    duration_s: float
    is_censored: bool
    at_wall_s: float


def observation(sample: LatencySample) -> Observation:
    """The sample without what its window does not need."""
    return Observation(sample.duration_s, sample.outcome.is_censored, sample.at_wall_s)


def summarise(
    window: Iterable[Observation], *, now_wall_s: float = 0.0, half_life_s: float | None = None
) -> ToolLatency:
    """Summarise one window.

    With `half_life_s`, a sample that is `a` seconds older than `now_wall_s` weighs 2^(−a / half_life_s) in the quantiles
    (counts stay plain counts); without it all weigh the same. Samples from the future (clocks differ) weigh 1.
    """
    finished: list[tuple[float, float]] = []
    censored: list[tuple[float, float]] = []
    for duration_s, is_censored, at_wall_s in window:
        weight = 1.0 if half_life_s is None else 2.0 ** (-max(0.0, now_wall_s - at_wall_s) / half_life_s)
        (censored if is_censored else finished).append((duration_s, weight))
    return ToolLatency(
        count=len(finished),
        quantiles=_quantile_points(finished, QUANTILES_MAX, is_weighted=half_life_s is not None),
        censored_count=len(censored),
        censored_quantiles=_quantile_points(censored, CENSORED_QUANTILES_MAX, is_weighted=half_life_s is not None),
    )


def maximum_of(latencies: Sequence[ToolLatency]) -> ToolLatency:
    """The latency of calls that run side by side: the slowest decides, F_max(x) = Π F_i(x), taking them as independent.

    `count` is the smallest of the parts' counts, the honest measure of how much is known; with a part that has no finished
    sample nothing is known of the maximum.
    """
    if not latencies or any(not latency.quantiles for latency in latencies):
        return ToolLatency()
    points = sorted({point for latency in latencies for point in latency.quantiles})
    previous, weighted = 0.0, []
    for point in points:
        probability = math.prod(_cdf(latency.quantiles, point) for latency in latencies)
        if probability > previous:
            weighted.append((point, probability - previous))
        previous = probability
    return ToolLatency(
        count=min(latency.count for latency in latencies),
        quantiles=_quantile_points(weighted, QUANTILES_MAX, is_weighted=True),
        censored_count=sum(latency.censored_count for latency in latencies),
    )


def _cdf(ascending: Sequence[float], value: float) -> float:
    return sum(1 for point in ascending if point <= value) / len(ascending)


def _quantile_points(weighted: list[tuple[float, float]], at_most: int, *, is_weighted: bool) -> tuple[float, ...]:
    """At most `at_most` equally probable points of a weighted sample, ascending."""
    ordered = sorted(weighted)
    total = sum(weight for _, weight in ordered)
    if not is_weighted and len(ordered) <= at_most:
        return tuple(value for value, _ in ordered)
    if total <= 0.0:  # every weight underflowed: all samples are equally ancient
        return _quantile_points([(value, 1.0) for value, _ in ordered], at_most, is_weighted=False) if ordered else ()
    # Four points a sample resolve its weight to a quarter of an average one; more would only repeat values.
    points_wanted = min(at_most, 4 * len(ordered))
    points: list[float] = []
    reached, index = ordered[0][1], 0
    for rank in range(points_wanted):
        target = (rank + 0.5) / points_wanted * total
        while reached < target and index < len(ordered) - 1:
            index += 1
            reached += ordered[index][1]
        points.append(ordered[index][0])
    return tuple(points)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"not a count: {value!r}")
    return value


def _points(values: Any, *, at_most: int) -> tuple[float, ...]:
    points = tuple(float(value) for value in values)
    if len(points) > at_most:
        raise ValueError(f"{len(points)} points, at most {at_most} allowed")
    if any(not math.isfinite(point) or point < 0 for point in points) or list(points) != sorted(points):
        raise ValueError("points must be ascending, finite and not negative")
    return points
