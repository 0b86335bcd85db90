"""Tool times: clients report them, the API tells them with what they are worth, and the command line draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from agent_program.clock import ManualClock
from agent_program.errors import Unavailable
from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolOutcome
from deployments.cli_latency import cdf, latency_lines
from deployments.fleet import PartAnswer
from deployments.tool_catalog import ToolDirectory
from support.api import ApiBench, error_of
from tool_runtime.registry import BUILTIN_TOOLS, ToolKind, ToolSpec

#: What an engine's statistics say: T = 4 s, eta = 0.5, 2 s to compute 8,000 tokens again.
ESTIMATES = {"retention": "continuum", "queueing_delay_s": 4.0, "eta": 0.5, "prefill_reload_s_per_1k": 0.25}


def sample(bench: ApiBench, tool: str, duration_s: float, outcome: ToolOutcome = ToolOutcome.OK) -> LatencySample:
    return LatencySample(
        tool=ToolKey(tool),
        duration_s=duration_s,
        outcome=outcome,
        source=SampleSource.TOOL_RUNTIME,
        at_wall_s=bench.clock.wall_s(),
    )


async def latency_of(bench: ApiBench, path: str) -> dict[str, Any]:
    async with bench.client() as client:
        found: dict[str, Any] = (await client.get(f"/v1/tools/{path}")).json()
    return found


async def test_what_a_client_reports_belongs_to_the_history() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        for body in (
            {"kind": "started", "tool": "bash", "arguments": {"command": "pytest"}},
            {"kind": "finished", "tool": "bash", "arguments": {"command": "pytest"}, "elapsed_s": 2.5},
            {"kind": "finished", "tool": "web", "elapsed_s": 9.0, "outcome": "timeout"},
            {"kind": "finished", "tool": "web"},  # without a time there is nothing to learn
        ):
            assert (await client.post("/v1/programs/mine/tool_events", json=body)).status_code == 202
    await bench.catalog._writer.flush()
    snapshot = await bench.history.snapshot()
    assert snapshot.tools[ToolKey("pytest")].quantiles == (2.5,)
    assert snapshot.tools[ToolKey("web")].censored_quantiles == (9.0,)
    assert snapshot.tools[ToolKey("web")].count == 0


async def test_a_report_is_answered_while_the_store_is_away() -> None:
    bench = ApiBench()
    await bench.history.close()
    async with bench.client() as client:
        for _ in range(3):
            body = {"kind": "finished", "tool": "x", "elapsed_s": 1.0}
            assert (await client.post("/v1/programs/mine/tool_events", json=body)).status_code == 202
    assert bench.catalog._writer.buffered == 3


async def test_the_ttl_goes_from_the_default_to_all_tools_to_the_tools_own_times() -> None:
    bench = ApiBench()
    bench.fleet.answers["engine", "stats_here"] = PartAnswer(answers=(("r1", ESTIMATES),), faults=("r2 is away",))

    async def ttl(tool: str) -> dict[str, Any]:
        (entry,) = (await latency_of(bench, f"{tool}/latency?context_tokens=8000"))["ttl_now"]
        return entry

    # Stage 1, at most 100 samples of anything: ln(T + reload) = ln(4 + 2).
    cold = await ttl("shell")
    assert (cold["replica"], cold["engine_policy"], cold["decision"]) == ("r1", "continuum", "cold_start")
    assert cold["ttl_s"] == pytest.approx(math.log(6.0))
    # Stage 2, all tools' times: B = 4 · 0.5 + 2 = 4; 101 calls of 1 s and all of them within it: keep for 1 s.
    await bench.history.add([sample(bench, "git", 1.0)] * 101)
    everything = await ttl("shell")
    assert (everything["decision"], everything["ttl_s"]) == ("global_history", 1.0)
    assert everything["inputs"] == {
        "context_tokens": 8000,
        "queueing_delay_s": 4.0,
        "eta": 0.5,
        "prefill_reload_s": 2.0,
        "benefit_s": 4.0,
        "samples": 101,
        "return_probability": 1.0,
    }
    # Stage 3, the tool's own: 60 calls of 2 s and 60 of 100 s; half come back within 2 s: 0.5 · 4 − 2 = 0, so nothing is kept.
    await bench.history.add([*[sample(bench, "make", 2.0)] * 60, *[sample(bench, "make", 100.0)] * 60])
    own = await ttl("make")
    assert (own["decision"], own["ttl_s"], own["inputs"]["samples"]) == ("tool_history", 0.0, 120)


async def test_an_engine_that_retains_nothing_or_none_that_answers_leaves_the_ttl_out() -> None:
    bench = ApiBench()
    bench.fleet.answers["engine", "stats_here"] = PartAnswer(answers=(("r1", {"running": 0}),), faults=())
    assert (await latency_of(bench, "shell/latency"))["ttl_now"] == []
    async with bench.client() as client:
        wrong = await client.get("/v1/tools/shell/latency?context_tokens=none")
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "context_tokens")


async def test_the_directory_asks_now_and_then_and_keeps_what_it_knows() -> None:
    clock, asked = ManualClock(), 0
    mine = ToolSpec(name="mine", description="", parameters={"type": "object"}, kind=ToolKind.FUNCTION)
    is_away = True

    async def ask() -> Sequence[ToolSpec]:
        nonlocal asked
        asked += 1
        if is_away:
            raise Unavailable("away")
        return [mine]

    directory = ToolDirectory(ask, clock=clock, refresh_s=15.0)
    assert await directory.specs() == BUILTIN_TOOLS
    clock.advance(14.0)
    await directory.specs()
    assert asked == 1
    is_away = False
    clock.advance(1.0)
    assert await directory.specs() == {"mine": mine}
    is_away = True
    clock.advance(15.0)
    assert await directory.specs() == {"mine": mine}
    assert asked == 3


def drawn(points: Sequence[float], **options: Any) -> list[str]:
    return [line.plain for line in cdf(points, **options)]


def test_the_curve_rises_to_all_calls_and_marks_how_long_kv_is_kept() -> None:
    lines = drawn([1.0, 2.0, 4.0, 8.0], rows=4, marks=[3.0])
    # Evenly spaced by their logarithm: 1, 2, 4 and 8 s.
    assert [line.split("█")[0].split()[0] for line in lines] == ["1.00", "2.00", "4.00", "8.00"]
    shares = [next(word for word in line.split() if word.endswith("%")) for line in lines]
    assert shares == ["25%", "50%", "75%", "100%"]
    assert [line.count("█") for line in lines] == [10, 20, 30, 40]
    assert [("◂" in line) for line in lines] == [False, False, True, False]


def test_calls_that_all_took_the_same_time_are_one_row() -> None:
    assert len(drawn([0.5, 0.5, 0.5])) == 1
    assert len(drawn([0.0])) == 1


def test_the_account_of_a_tool_names_its_calls_and_what_each_engine_would_do() -> None:
    found = {
        "tool": "pytest",
        "count": 3,
        "censored_count": 1,
        "quantiles_s": [1.0, 2.0, 30.0],
        "ttl_now": [
            {
                "replica": "r1",
                "ttl_s": 2.0,
                "decision": "tool_history",
                "inputs": {"context_tokens": 8192, "queueing_delay_s": 4.0, "eta": 0.5, "prefill_reload_s": 2.0},
            }
        ],
    }
    lines = [line.plain for line in latency_lines(found)]
    assert lines[0] == "pytest  3 calls, 1 cut off"
    assert "a context of 8,192 tokens would be kept 2.00 s (by this tool's own times" in lines[-1]
    assert [line.plain for line in latency_lines({**found, "count": 0, "quantiles_s": [], "ttl_now": []})] == [
        "pytest  0 calls, 1 cut off"
    ]
