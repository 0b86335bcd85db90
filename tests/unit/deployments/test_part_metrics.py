"""Pages of the parts, and one page made of many."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from agent_program.clock import ManualClock
from deployments.memory_clients import ScriptedEngine, ScriptedTools
from deployments.memory_journal import MemoryJournal
from deployments.part_metrics import ingress_page, runner_page, store_page, tools_page
from deployments.program_settings import ProgramSettings
from deployments.prometheus_text import MetricPages, exposition
from deployments.runner import ProgramRunner
from tool_runtime.actor import ToolActor
from tool_runtime.config import ToolRuntimeSettings

TOOLS = {
    "ready": True,
    "sandbox": "bubblewrap",
    "isolates": True,
    "reason": None,
    "live_sandboxes": 2,
    "sandboxes_started": 5,
    "sandboxes_warm": 2,
    "sandboxes_claimed_warm": 3,
    "sandboxes_closed_for_room": 1,
    "calls_running": 1,
    "calls_waiting": 0,
    "calls_ended": {"ok": 7, "timeout": 1},
    "call_times": {
        "queued": {"bounds": [1.0], "counts": [8, 0], "sum": 0.5},
        "ran": {"pytest": {"bounds": [1.0], "counts": [5, 3], "sum": 12.0}},
    },
    "samples_buffered": 0,
    "samples_dropped": 0,
    "history_reachable": None,
    "tools": 6,
    "mcp_sessions": 0,
    "mcp_faults": {"files": "it does not answer"},
    "function_threads": 0,
}


RUNNER = {"runner": "r", "running": 3, "running_max": 8, "traces_dropped": 0}


def samples(page: str) -> dict[str, float]:
    """Samples of a page by name and labels."""
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_a_tool_actor_counts_its_calls_by_outcome() -> None:
    found = samples(tools_page(TOOLS))
    assert found["continuum_tools_calls_ended_total[ok]"] == 7
    assert found["continuum_tools_calls_ended_total[timeout]"] == 1
    assert found["continuum_tools_ready"] == 1
    assert found["continuum_tools_sandboxes_started_total"] == 5
    assert found["continuum_tools_sandboxes_warm"] == 2
    assert found["continuum_tools_sandboxes_claimed_warm_total"] == 3
    assert found["continuum_tools_mcp_faults[files]"] == 1
    assert "continuum_tools_history_reachable" not in found, "unknown is not zero"


def test_a_tool_actor_tells_how_long_each_tool_took_and_how_long_calls_waited() -> None:
    found = samples(tools_page(TOOLS))
    assert found["continuum_tools_call_times_seconds_bucket[1.0][pytest]"] == 5
    assert found["continuum_tools_call_times_seconds_count[pytest]"] == 8
    assert found["continuum_tools_call_queue_seconds_sum"] == 0.5


def test_an_ingress_tells_what_it_refused_and_what_its_routers_chose() -> None:
    routers = {"engine": {"placements": {"new": 2}, "bindings": 3, "unconfirmed_bindings": 0, "store_away": True}}
    found = samples(ingress_page({"event_streams": 1, "refusals": {"overloaded": 4}}, routers))
    assert found["continuum_ingress_refusals_total[overloaded]"] == 4
    assert found["continuum_router_placements_total[new][engine]"] == 2
    assert found["continuum_router_store_away[engine]"] == 1


async def test_every_number_of_a_tool_actors_status_has_a_family(tmp_path: Path) -> None:
    status = await ToolActor(ToolRuntimeSettings(state_dir=tmp_path), None).status()
    told_otherwise = {"sandbox", "reason", "limits_by", "call_times"}
    page = tools_page({**status, "isolates": True, "history_reachable": True})
    missing = [name for name in status if name not in told_otherwise and f"continuum_tools_{name}" not in page]
    assert missing == []


async def test_every_number_of_a_runners_status_has_a_family() -> None:
    clock = ManualClock()
    runner = ProgramRunner(
        journal=MemoryJournal(clock),
        engine=ScriptedEngine(),
        tools=ScriptedTools(),
        clock=clock,
        settings=ProgramSettings(),
    )
    status = runner.status()
    page = runner_page(status, {})
    assert [name for name in status if name != "runner" and f"continuum_runner_{name}" not in page] == []


def test_runners_and_stores_have_pages_too() -> None:
    assert samples(runner_page(RUNNER, {}))["continuum_runner_running"] == 3
    status = {"memory_bytes": 10, "memory_max_bytes": 20, "clients": 1, "commands": 5}
    assert samples(store_page(status))["continuum_store_commands_total"] == 5


def test_pages_of_replicas_become_one_family_with_their_labels() -> None:
    pages = MetricPages()
    pages.add(tools_page(TOOLS), {"replica": "a"})
    pages.add(tools_page({**TOOLS, "ready": False}), {"replica": "b"})
    page = exposition(pages).decode()
    assert page.count("# TYPE continuum_tools_ready gauge") == 1
    assert samples(page)["continuum_tools_ready[a]"] == 1
    assert samples(page)["continuum_tools_ready[b]"] == 0


def test_histograms_and_counters_keep_their_parts() -> None:
    text = (
        "# HELP t_seconds Time.\n# TYPE t_seconds histogram\n"
        't_seconds_bucket{le="1.0"} 2\nt_seconds_bucket{le="+Inf"} 3\nt_seconds_count 3\nt_seconds_sum 4.5\n'
    )
    pages = MetricPages()
    pages.add(text, {"replica": "a"})
    assert samples(exposition(pages).decode()) == {
        "t_seconds_bucket[1.0][a]": 2,
        "t_seconds_bucket[+Inf][a]": 3,
        "t_seconds_count[a]": 3,
        "t_seconds_sum[a]": 4.5,
    }


def test_labels_of_the_replica_win_over_the_pages_own_and_values_are_escaped() -> None:
    pages = MetricPages()
    pages.add('up{replica="mine",x="a,b\\"c"} 1.0 1700000000000\nplain 2\n', {"replica": 'r"1'})
    lines = exposition(pages).decode().splitlines()
    assert lines == ['up{x="a,b\\"c",replica="r\\"1"} 1.0 1700000000000', 'plain{replica="r\\"1"} 2']


def test_a_page_goes_through_a_parser_as_it_came_but_for_the_labels() -> None:
    text = tools_page(TOOLS)
    pages = MetricPages()
    pages.add(text, {"replica": "a"})

    def parsed(page: str) -> dict[str, list[tuple[str, dict[str, str], float]]]:
        return {
            family.name: [(one.name, {**one.labels, "replica": "a"}, one.value) for one in family.samples]
            for family in text_string_to_metric_families(page)
        }

    assert parsed(exposition(pages).decode()) == parsed(text)


def test_a_page_that_does_not_parse_is_counted_and_hides_no_other() -> None:
    pages = MetricPages()
    pages.add('broken{a="b 1.0\n', {"replica": "a"})
    pages.add("fine 1.0\n", {"replica": "b"})
    assert pages.rejected == 1
    assert samples(exposition(pages).decode()) == {"fine[b]": 1}
