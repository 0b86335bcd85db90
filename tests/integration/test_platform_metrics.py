"""Metrics, dashboards and traces of the running platform: a real Prometheus scrapes it while programs run, and every panel has data."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from support.dashboards import boards, expressions
from support.metrics import families, series_names, vllm_names
from support.platform import Json, Platform
from support.prometheus import scraping
from support.promql import filled_in, metrics_of
from support.waiting import wait_for

pytestmark = pytest.mark.integration

WORK: Json = {
    "input": "Run this command: echo hello",
    "tools": ["shell"],
    "tool_choice": "required",
    "sampling": {"temperature": 0},
    "limits": {"max_turns": 3, "max_tokens_per_turn": 60},
}
#: Panels that show something only after what a short and peaceful run does not have; each says why.
QUIET = {
    "Context it would save, and lose": "no shadow policy is set",
    "KV that leases hold": "no shadow policy is set",
    "MCP servers whose tools are missing": "there is no MCP server",
    "Programs moved": "no replica was lost",
    "Refused as overloaded": "nothing was shed",
    "T and eta": "no turn had lost its KV",
    "Turns after which nothing was retained": "the policy found all of them worth it",
    "Turns that went where their program is": "no rate before a second turn was placed in the window",
}


def test_every_panel_of_every_dashboard_has_data_while_programs_run(platform: Platform, tmp_path: Path) -> None:
    # A refused request, so that there is something to show of those.
    assert platform.client.post("/v1/programs", json={}).status_code == 400
    with scraping(platform.url.removeprefix("http://"), tmp_path) as prometheus:
        wait_for(lambda: prometheus.query("continuum_store_up"), what="the first scrape")
        for _ in range(3):
            ids = [platform.submit(**WORK) for _ in range(3)]
            for program_id in ids:
                platform.wait_for_end(program_id)

        def empty() -> list[tuple[str, str]]:
            return [
                (title, expr)
                for name in boards()
                for title, expr in expressions(name)
                if title not in QUIET and not prometheus.query(filled_in(expr).replace("[1m]", "[5m]"))
            ]

        with suppress(AssertionError):  # the comparison below says which
            wait_for(lambda: not empty(), what="every panel to have data", deadline_s=30)
        assert empty() == []


def test_the_page_has_every_metric_that_dashboards_name_and_follows_the_conventions(platform: Platform) -> None:
    page = platform.client.get("/metrics").text
    known = series_names(page) | {line.split("{")[0].split(" ")[0] for line in page.splitlines() if line[0] != "#"}
    missing = {name for board in boards() for _, expr in expressions(board) for name in metrics_of(expr)} - known
    assert {name for name in missing if "_shadow_" not in name} == set()
    assert {name for name in known if name.startswith("vllm:")} & vllm_names()
    parts = {sample.labels["part"] for sample in families(page)["continuum_replicas_scraped"].samples}
    assert {"engine", "tools", "runner", "ingress"} <= parts


def test_a_real_program_has_a_timeline_with_the_engines_phases(platform: Platform) -> None:
    program_id = platform.submit(**WORK)
    platform.wait_for_end(program_id)
    trace = platform.client.get(f"/v1/programs/{program_id}/trace").json()
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"invoke_agent", "queued", "queue", "prefill", "decode", "execute_tool shell"} <= names
