"""What an engine knows of tool latency: the shared snapshot plus its own samples, none counted twice."""

import random
from typing import Any

import pytest

from agent_program.errors import InvalidRequest
from agent_program.ids import ToolKey
from engine_replicas.retention.tool_latency import Durations, ToolLatencyView
from tool_runtime.latency import LatencySnapshot, ToolLatency

PYTEST, GIT = ToolKey("pytest"), ToolKey("git")


def latency(*seconds: float, count: int | None = None, censored: int = 0) -> ToolLatency:
    return ToolLatency(
        count=len(seconds) if count is None else count, quantiles=tuple(sorted(seconds)), censored_count=censored
    )


def snapshot(version: int, global_: ToolLatency, **tools: ToolLatency) -> dict[str, Any]:
    known = {ToolKey(tool): value for tool, value in tools.items()}
    return LatencySnapshot(version=version, global_=global_, tools=known).to_dict()


def view(window: int = 100, tools_max: int = 100) -> ToolLatencyView:
    return ToolLatencyView(window=window, tools_max=tools_max)


def test_own_waits_count_for_their_tool_and_for_all_tools() -> None:
    known = view()
    known.add_wait(PYTEST, 3.0)
    known.add_wait(None, 1.0)
    assert known.of_tool(PYTEST).pairs == ((3.0, 1.0),)
    assert known.all_tools().pairs == ((1.0, 1.0), (3.0, 1.0))


def test_one_of_several_parallel_calls_counts_for_its_tool_only() -> None:
    known = view()
    known.add_call(PYTEST, 3.0)
    assert known.of_tool(PYTEST).count == 1
    assert known.all_tools().count == 0


def test_a_tool_never_seen_has_no_durations() -> None:
    assert view().of_tool(PYTEST).count == 0
    assert view().of_tool(None).count == 0


def test_a_snapshot_replaces_what_it_contains_already() -> None:
    known = view()
    known.add_wait(PYTEST, 3.0)
    known.take_snapshot(snapshot(1, latency(3.0, 4.0), pytest=latency(3.0, 4.0)))
    assert known.of_tool(PYTEST).count == 2
    assert known.all_tools().count == 2


def test_samples_after_a_snapshot_add_to_it() -> None:
    known = view()
    known.take_snapshot(snapshot(1, latency(3.0, 4.0), pytest=latency(3.0, 4.0)))
    known.add_wait(PYTEST, 3.5)
    assert known.of_tool(PYTEST).pairs == ((3.0, 1.0), (3.5, 1.0), (4.0, 1.0))


def test_quantile_points_weigh_as_many_samples_as_they_stand_for() -> None:
    known = view()
    known.take_snapshot(snapshot(1, latency(1.0, 2.0, count=1000)))
    assert known.all_tools().pairs == ((1.0, 500.0), (2.0, 500.0))
    assert known.all_tools().count == 1000


def test_calls_that_were_cut_off_weigh_as_not_returned() -> None:
    known = view()
    known.take_snapshot(snapshot(1, latency(1.0, censored=3)))
    assert (known.all_tools().unreturned, known.all_tools().count) == (3.0, 4)


def test_a_key_that_the_snapshot_does_not_have_keeps_its_own_samples() -> None:
    known = view()
    known.add_wait(GIT, 0.1)
    known.take_snapshot(snapshot(1, latency(3.0), pytest=latency(3.0)))
    assert known.of_tool(GIT).pairs == ((0.1, 1.0),)


def test_a_store_that_came_back_empty_does_not_wipe_out_what_the_engine_saw() -> None:
    known = view()
    for second in range(50):
        known.add_wait(PYTEST, float(second))
    known.take_snapshot(snapshot(2, latency(1.0), pytest=latency(1.0)))
    assert known.of_tool(PYTEST).count == 50
    assert known.all_tools().count == 50


def test_a_full_snapshot_is_trusted_however_much_the_engine_saw() -> None:
    known = view(window=2000)
    for _ in range(2000):
        known.add_wait(PYTEST, 1.0)
    known.take_snapshot(snapshot(2, latency(2.0, count=300), pytest=latency(2.0, count=300)))
    assert known.of_tool(PYTEST).pairs == ((2.0, 300.0),)


def test_a_key_that_leaves_the_snapshot_leaves_the_view() -> None:
    known = view()
    known.take_snapshot(snapshot(1, latency(3.0), pytest=latency(3.0)))
    known.take_snapshot(snapshot(2, latency(3.0)))
    assert known.of_tool(PYTEST).count == 0


def test_the_same_version_again_changes_nothing() -> None:
    known = view()
    known.take_snapshot(snapshot(1, latency(3.0), pytest=latency(3.0)))
    known.add_wait(PYTEST, 5.0)
    assert known.take_snapshot(snapshot(1, latency(3.0), pytest=latency(3.0))) == 1
    assert known.of_tool(PYTEST).count == 2


def test_a_lower_version_is_taken_because_a_store_may_start_again() -> None:
    known = view()
    known.take_snapshot(snapshot(900, latency(3.0)))
    assert known.take_snapshot(snapshot(2, latency(4.0))) == 2
    assert known.all_tools().pairs == ((4.0, 1.0),)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"version": "x", "global": {}, "tools": {}},
        {"version": 1, "global": latency(1.0).to_dict(), "tools": {"pytest": {"count": 1}}},
        {"version": 1, "global": {**latency().to_dict(), "quantiles": [2.0, 1.0]}, "tools": {}},
        {"version": 1, "global": {**latency().to_dict(), "quantiles": [float("nan")]}, "tools": {}},
    ],
)
def test_what_is_not_a_snapshot_is_refused_and_changes_nothing(wrong: dict[str, Any]) -> None:
    known = view()
    known.take_snapshot(snapshot(1, latency(3.0), pytest=latency(3.0)))
    with pytest.raises(InvalidRequest):
        known.take_snapshot(wrong)
    assert (known.version, known.of_tool(PYTEST).count, known.all_tools().count) == (1, 1, 1)


def test_the_number_of_tools_is_bounded_and_the_least_recently_used_goes() -> None:
    known = view(tools_max=10)
    for index in range(1000):
        known.add_wait(ToolKey(f"tool-{index}"), 1.0)
    assert known.counts()["tools"] == 10
    assert known.of_tool(ToolKey("tool-999")).count == 1
    assert known.of_tool(ToolKey("tool-0")).count == 0


def test_of_a_snapshot_with_too_many_tools_the_best_known_stay() -> None:
    known = view(tools_max=2)
    tools = {f"t{count}": latency(1.0, count=count) for count in (5, 1, 9)}
    known.take_snapshot(snapshot(1, latency(1.0), **tools))
    assert [known.of_tool(ToolKey(tool)).count for tool in ("t1", "t5", "t9")] == [0, 5, 9]


@pytest.mark.parametrize("seed", range(10))
def test_a_window_holds_the_newest_values_in_order(seed: int) -> None:
    rng = random.Random(seed)
    values = [float(rng.randrange(0, 20)) for _ in range(500)]
    window = Durations(window=37)
    for index, value in enumerate(values, start=1):
        window.add(value)
        assert window.pairs == tuple((value, 1.0) for value in sorted(values[max(0, index - 37) : index]))
