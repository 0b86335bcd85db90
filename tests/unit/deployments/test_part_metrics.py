"""Pages of the parts, and one page made of many."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from deployments.part_metrics import runner_page, store_page, tools_page
from deployments.prometheus_text import MetricPages, exposition

TOOLS = {
    "ready": True,
    "sandbox": "bubblewrap",
    "reason": None,
    "live_sandboxes": 2,
    "sandboxes_started": 5,
    "sandboxes_closed_for_room": 1,
    "calls_running": 1,
    "calls_waiting": 0,
    "calls_ended": {"ok": 7, "timeout": 1},
    "samples_buffered": 0,
    "samples_dropped": 0,
}


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


def test_runners_and_stores_have_pages_too() -> None:
    assert samples(runner_page({"runner": "r", "running": 3, "running_max": 8}))["continuum_runner_running"] == 3
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


def test_a_page_that_does_not_parse_is_counted_and_hides_no_other() -> None:
    pages = MetricPages()
    pages.add('broken{a="b 1.0\n', {"replica": "a"})
    pages.add("fine 1.0\n", {"replica": "b"})
    assert pages.rejected == 1
    assert samples(exposition(pages).decode()) == {"fine[b]": 1}
