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
    assert (cold["replica"], cold["policy"], cold["decision"]) == ("r1", "continuum", "cold_start")
    assert cold["ttl_s"] == pytest.approx(math.log(6.0))
    # Stage 2, all tools' times: B = 4 · 0.5 + 2 = 4; 101 calls of 1 s and all of them within it: keep for 1 s.
    await bench.history.add([sample(bench, "git", 1.0)] * 101)
    everything = await ttl("shell")
    assert (everything["decision"], everything["ttl_s"]) == ("global_history", 1.0)
    assert everything["paper"]["inputs"] == {
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
    assert (own["decision"], own["ttl_s"], own["paper"]["inputs"]["samples"]) == ("tool_history", 0.0, 120)


async def ttl_entry(bench: ApiBench, path: str = "shell/latency", **stats: Any) -> dict[str, Any]:
    bench.fleet.answers["engine", "stats_here"] = PartAnswer(answers=(("r1", {**ESTIMATES, **stats}),), faults=())
    (entry,) = (await latency_of(bench, path))["ttl_now"]
    found: dict[str, Any] = entry
    return found


async def test_a_policy_that_keeps_until_outbid_has_a_price_and_no_time() -> None:
    entry = await ttl_entry(
        ApiBench(), "shell/latency?context_tokens=2000", retention="adaptive", ttl_max_s=1800.0, stall_s_per_1k=0.25
    )
    assert (entry["policy"], entry["decision"], entry["ttl_s"], entry["ttl_max_s"]) == (
        "adaptive",
        "priced",
        None,
        1800,
    )
    # Half a second of everybody's time, by a hazard that is at most one in half a second.
    assert entry["price"] == {"benefit_s": 0.5, "at_start": 1.0}
    # The paper's time stands beside it, and is not what will happen: ln(4 + 0.5).
    assert entry["paper"]["ttl_s"] == pytest.approx(math.log(4.5))


async def test_before_a_recompute_was_measured_the_price_is_not_known() -> None:
    entry = await ttl_entry(ApiBench(), retention="adaptive", stall_s_per_1k=0.0)
    assert (entry["decision"], entry["price"]) == ("priced", None)


@pytest.mark.parametrize(
    ("stats", "decision", "ttl_s"),
    [
        ({"retention": "adaptive", "is_reload_cheap": True}, "reload_is_cheap", 0.0),
        ({"retention": "end_of_turn"}, "end_of_turn", 0.0),
        ({"retention": "static_ttl"}, "static", None),
        ({"retention": "infercept"}, "least_waste", None),
        ({"retention": "continuum", "ttl_max_s": 0.5}, "cold_start", 0.5),
        ({"retention": "somebody_elses"}, None, None),
    ],
)
async def test_the_running_policy_decides(stats: dict[str, Any], decision: str | None, ttl_s: float | None) -> None:
    entry = await ttl_entry(ApiBench(), **stats)
    assert (entry["policy"], entry["decision"], entry["ttl_s"]) == (stats["retention"], decision, ttl_s)


async def test_a_context_is_by_default_no_longer_than_the_engines_model_takes() -> None:
    bench = ApiBench()
    assert (await ttl_entry(bench, context_tokens_max=4096))["context_tokens"] == 4096
    assert (await ttl_entry(bench, context_tokens_max=131_072))["context_tokens"] == 8192
    assert (await ttl_entry(bench, "shell/latency?context_tokens=100", context_tokens_max=4096))[
        "context_tokens"
    ] == 100


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


def account(**entry: Any) -> list[str]:
    paper = {
        "ttl_s": 2.0,
        "decision": "tool_history",
        "inputs": {"queueing_delay_s": 4.0, "eta": 0.5, "prefill_reload_s": 2.0},
    }
    told = {"replica": "r1", "context_tokens": 4096, "ttl_max_s": 1800.0, "paper": paper, **entry}
    found = {"tool": "pytest", "count": 3, "censored_count": 1, "quantiles_s": [1.0, 2.0, 30.0], "ttl_now": [told]}
    return [line.plain for line in latency_lines(found)]


def test_the_account_of_a_tool_names_its_calls_and_how_long_the_papers_policy_keeps() -> None:
    lines = account(policy="continuum", decision="tool_history", ttl_s=2.0)
    assert lines[0] == "pytest  3 calls, 1 cut off"
    assert lines[-2] == "r1 (continuum): after this tool a context of 4,096 tokens would be kept 2.00 s"
    assert lines[-1].startswith("  by the paper's formula: 2.00 s (by this tool's own times; recompute 2.00 s")
    assert any("kept until here" in line for line in lines)


def test_the_account_of_a_priced_tool_says_what_has_to_be_outbid_and_labels_the_papers_time() -> None:
    lines = account(policy="adaptive", decision="priced", ttl_s=None, price={"benefit_s": 0.5, "at_start": 1.0})
    assert "would be kept until a waiting turn brings more" in lines[-2]
    assert "price now 1 s saved a second (0.50 s of everybody's time" in lines[-2]
    assert lines[-1].startswith("  for comparison, the paper's formula would keep it 2.00 s")
    assert not any("kept until here" in line for line in lines)
    assert "price not known yet" in account(policy="adaptive", decision="priced", ttl_s=None, price=None)[-2]


def test_the_account_of_a_tool_without_engines_is_its_calls() -> None:
    found = {"tool": "pytest", "count": 0, "censored_count": 1, "quantiles_s": [], "ttl_now": []}
    assert [line.plain for line in latency_lines(found)] == ["pytest  0 calls, 1 cut off"]
