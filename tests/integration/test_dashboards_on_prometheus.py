"""Every expression of every dashboard, evaluated by a real Prometheus that scrapes the real pages of the parts: no panel is empty, and no
alert has an expression that it refuses. The parts behind the pages are doubles, so this takes seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from deployments.prometheus_text import MetricPages, exposition
from support import chart
from support.dashboards import boards, expressions
from support.metrics import exported_page, vllm_names
from support.prometheus import scraping
from support.promql import filled_in, metrics_of
from support.waiting import wait_for

pytestmark = pytest.mark.integration


class _Families:
    """A collector over families that are made already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def vllm_families() -> list[Metric]:
    """Families of the names of vLLM's that dashboards use, in its place: an engine would take a minute to start."""
    used = {name for board in boards() for _, expr in expressions(board) for name in metrics_of(expr)}
    found: dict[str, Metric] = {}
    for name in sorted(used & vllm_names()):
        base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count").removesuffix("_total")
        if base in found:
            continue
        if name.endswith("_total"):
            found[base] = counter = Metric(base, "vLLM's.", "counter")
            counter.add_sample(name, {}, 1.0)
            continue
        found[base] = histogram = Metric(base, "vLLM's.", "histogram")
        for bound in ("0.1", "1.0", "+Inf"):
            histogram.add_sample(f"{base}_bucket", {"le": bound}, 1.0)
        histogram.add_sample(f"{base}_count", {}, 1.0)
        histogram.add_sample(f"{base}_sum", {}, 0.05)
    return list(found.values())


def grown(families: list[Metric], times: int) -> bytes:
    """The page after so many scrapes: what counts has grown each time by as much as it was."""
    for_now = []
    for family in families:
        copy = Metric(family.name, family.documentation, family.type)
        factor = times if family.type in ("counter", "histogram") else 1
        for sample in family.samples:
            copy.add_sample(
                sample.name, sample.labels, (sample.value + (factor > 1)) * factor if factor > 1 else sample.value
            )
        for_now.append(copy)
    return exposition(MetricPages(), _Families(for_now))  # type: ignore[arg-type]


@contextmanager
def serving(page: str) -> Iterator[str]:
    """The page on a port, growing from scrape to scrape; gives its address."""
    families = [*text_string_to_metric_families(page), *vllm_families()]
    scrapes = iter(range(1, 1_000_000))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = grown(families, next(scrapes))
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_no_panel_is_empty_and_no_alert_is_refused(tmp_path: Path) -> None:
    page = await exported_page(tmp_path)
    with serving(page) as address, scraping(address, tmp_path) as prometheus:

        def empty() -> list[tuple[str, str]]:
            return [
                (title, expr)
                for name in boards()
                for title, expr in expressions(name)
                if not prometheus.query(filled_in(expr))
            ]

        with suppress(AssertionError):  # the comparison below says which
            wait_for(lambda: not empty(), what="every panel to have data", deadline_s=20)
        assert empty() == []
        for path in sorted((chart.CHART / "files" / "alerts").glob("*.yaml")):
            for group in yaml.safe_load(path.read_text())["groups"]:
                for rule in group["rules"]:
                    prometheus.query(rule["expr"])
