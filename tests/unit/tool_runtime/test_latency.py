"""Windows of samples as quantiles that an engine can hold."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolOutcome
from tool_runtime.latency import (
    CENSORED_QUANTILES_MAX,
    QUANTILES_MAX,
    LatencySnapshot,
    Observation,
    ToolLatency,
    maximum_of,
    observation,
    summarise,
)


def samples(
    durations_s: Sequence[float], *, outcome: ToolOutcome = ToolOutcome.OK, at_wall_s: float = 0.0
) -> list[Observation]:
    return [
        observation(
            LatencySample(
                tool=ToolKey("x"),
                duration_s=duration_s,
                outcome=outcome,
                source=SampleSource.TOOL_RUNTIME,
                at_wall_s=at_wall_s,
            )
        )
        for duration_s in durations_s
    ]


def test_a_small_window_is_told_exactly() -> None:
    assert summarise(samples([3.0, 1.0, 2.0, 2.0])).quantiles == (1.0, 2.0, 2.0, 3.0)


def test_a_large_window_is_told_in_equally_probable_points() -> None:
    # 512 samples 0 … 511 in 256 points: point i is the (i + ½)/256 quantile, which is the second of each pair's first: 2i.
    latency = summarise(samples([float(i) for i in range(512)]))
    assert latency.quantiles == tuple(float(2 * i) for i in range(256))


def test_quantiles_of_a_summary() -> None:
    latency = ToolLatency(count=4, quantiles=(1.0, 2.0, 3.0, 4.0))
    assert [latency.quantile(p) for p in (0.0, 0.25, 0.26, 0.5, 1.0)] == [1.0, 1.0, 2.0, 2.0, 4.0]
    assert latency.mean_s() == 2.5
    assert ToolLatency().quantile(0.5) is None
    assert ToolLatency().mean_s() is None


def test_half_as_recent_weighs_half_per_half_life() -> None:
    # Two halvings: an old sample weighs ¼ of a new one, so 4 old ones weigh as much as 1 new one: the median is between them.
    window = samples([10.0] * 4, at_wall_s=0.0) + samples([1.0], at_wall_s=20.0)
    latency = summarise(window, now_wall_s=20.0, half_life_s=10.0)
    assert latency.quantile(0.5) == 1.0
    assert latency.quantile(0.51) == 10.0
    assert latency.count == 5


def test_a_sample_from_the_future_weighs_no_more_than_one_from_now() -> None:
    now, future = samples([1.0], at_wall_s=100.0), samples([2.0], at_wall_s=1e9)
    assert summarise(now + future, now_wall_s=100.0, half_life_s=1.0).quantile(0.5) == 1.0


def test_samples_too_old_to_weigh_anything_weigh_alike() -> None:
    ancient = samples([1.0, 2.0], at_wall_s=0.0)
    assert summarise(ancient, now_wall_s=1e9, half_life_s=0.001).quantiles == (1.0, 2.0)


def test_the_slowest_of_two_side_by_side() -> None:
    # F(1) = ½·½, F(2) = 1·½, F(3) = 1·1 → probabilities ¼, ¼, ½.
    slowest = maximum_of(
        [ToolLatency(count=9, quantiles=(1.0, 2.0)), ToolLatency(count=5, quantiles=(1.0, 3.0), censored_count=2)]
    )
    assert [slowest.quantile(p) for p in (0.25, 0.26, 0.5, 0.51)] == [1.0, 2.0, 2.0, 3.0]
    assert (slowest.count, slowest.censored_count) == (5, 2)


def test_the_slowest_is_unknown_if_one_part_is() -> None:
    assert maximum_of([ToolLatency(count=1, quantiles=(1.0,)), ToolLatency()]) == ToolLatency()
    assert maximum_of([]) == ToolLatency()


def test_a_snapshot_survives_the_wire() -> None:
    snapshot = LatencySnapshot(
        version=7,
        global_=summarise(samples([1.0, 2.0])),
        tools={ToolKey("x"): summarise(samples([1.0], outcome=ToolOutcome.TIMEOUT))},
    )
    assert LatencySnapshot.from_dict(json.loads(json.dumps(snapshot.to_dict()))) == snapshot


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"version": -1, "global": ToolLatency().to_dict(), "tools": {}},
        {"version": 1, "global": ToolLatency().to_dict(), "tools": {"x": {}}},
        {"version": 1, "global": ToolLatency().to_dict() | {"quantiles": [2.0, 1.0]}, "tools": {}},
        {"version": 1, "global": ToolLatency().to_dict() | {"quantiles": [float("nan")]}, "tools": {}},
        {"version": 1, "global": ToolLatency().to_dict() | {"quantiles": [1.0] * (QUANTILES_MAX + 1)}, "tools": {}},
        {"version": True, "global": ToolLatency().to_dict(), "tools": {}},
        {"version": 1, "global": None, "tools": {}},
    ],
)
def test_what_is_no_snapshot_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        LatencySnapshot.from_dict(broken)


@given(
    st.lists(st.floats(0, 1e6), max_size=700),
    st.lists(st.floats(0, 1e6), max_size=150),
    st.none() | st.floats(0.1, 1e4),
)
def test_summaries_are_ascending_bounded_and_within_what_was_seen(
    finished: list[float], censored: list[float], half_life_s: float | None
) -> None:
    window = samples(finished) + samples(censored, outcome=ToolOutcome.CANCELLED, at_wall_s=5.0)
    latency = summarise(window, now_wall_s=10.0, half_life_s=half_life_s)
    assert (latency.count, latency.censored_count) == (len(finished), len(censored))
    assert len(latency.quantiles) <= QUANTILES_MAX
    assert len(latency.censored_quantiles) <= CENSORED_QUANTILES_MAX
    assert bool(latency.quantiles) == bool(finished)
    assert list(latency.quantiles) == sorted(latency.quantiles)
    assert set(latency.quantiles) <= set(finished)
    assert LatencySnapshot.from_dict(LatencySnapshot(global_=latency).to_dict()).global_ == latency
