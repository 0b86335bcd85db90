"""Distributions of tool calls have a bounded number of keys."""

from __future__ import annotations

from agent_program.ids import ToolKey
from tool_runtime.call_times import OTHER, CallTimes


def calls(times: CallTimes) -> dict[str, int]:
    return {name: sum(plain["counts"]) for name, plain in times.to_plain()["ran"].items()}


def test_a_key_has_a_distribution_of_its_own_once_it_is_no_accident() -> None:
    times = CallTimes()
    for _ in range(5):
        times.ran(ToolKey("pytest"), 1.0)
    assert calls(times) == {OTHER: 2, "pytest": 3}


def test_a_program_that_makes_names_up_makes_no_series() -> None:
    times = CallTimes()
    for n in range(10_000):
        times.ran(ToolKey(f"made-up-{n}"), 0.1)
    assert calls(times) == {OTHER: 10_000}


def test_names_that_are_repeated_are_bounded_as_well() -> None:
    times = CallTimes()
    for n in range(500):
        for _ in range(3):
            times.ran(ToolKey(f"made-up-{n}"), 0.1)
    assert len(calls(times)) <= 49
    assert sum(calls(times).values()) == 1500


def test_the_wait_before_a_call_is_a_distribution_of_its_own() -> None:
    times = CallTimes()
    times.waited(2.0)
    assert times.to_plain()["queued"]["sum"] == 2.0
    assert times.to_plain()["ran"] == {}
