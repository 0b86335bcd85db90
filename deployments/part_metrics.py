"""What the small parts count, as Prometheus text: tool actors, runners, ingresses, the embedded store. Engines have pages of their own.

A part that holds deployment handles also tells what their routers did in its process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from agent_program.histogram import cumulative

#: name in the status → help
_TOOL_GAUGES = {
    "ready": "A sandbox holds and tools run.",
    "live_sandboxes": "Sandboxes alive.",
    "sandboxes_warm": "Sandboxes started ahead, waiting for a program.",
    "calls_running": "Tool calls running.",
    "calls_waiting": "Tool calls waiting for their session or a slot.",
    "samples_buffered": "Latency samples not yet in the store.",
    "isolates": "The sandbox backend isolates: 1, or 0 for the one that is unsafe by name.",
    "history_reachable": "The store took the last batch of latency samples.",
    "tools": "Tools that programs may name here.",
    "mcp_sessions": "Sessions with MCP servers.",
    "function_threads": "Threads that run trusted functions.",
}
_TOOL_COUNTERS = {
    "sandboxes_started": "Sandboxes started.",
    "sandboxes_claimed_warm": "Sandboxes that a program got ready-made.",
    "sandboxes_closed_for_room": "Idle sandboxes closed to make room for others.",
    "samples_dropped": "Latency samples dropped while the store was away.",
}
_RUNNER_GAUGES = {
    "running": "Programs that the runner runs.",
    "running_max": "Programs that it may run at once.",
}
_RUNNER_COUNTERS = {"traces_dropped": "Traces of ended programs that were not delivered."}
_INGRESS_GAUGES = {"event_streams": "Open event streams."}
_ROUTER_GAUGES = {
    "bindings": "Bindings of programs to replicas that this process knows.",
    "unconfirmed_bindings": "Bindings made while the store was away that it has not confirmed.",
    "store_away": "The router decides without the store.",
}
_STORE_GAUGES = {
    "memory_bytes": "Memory in use.",
    "memory_max_bytes": "Memory that it may use.",
    "clients": "Connections.",
}
_STORE_COUNTERS = {"commands": "Commands processed."}


def tools_page(status: Mapping[str, Any]) -> str:
    """A tool actor's status."""
    ended = CounterMetricFamily("continuum_tools_calls_ended", "Tool calls that ended.", labels=["outcome"])
    for outcome, count in status["calls_ended"].items():
        ended.add_metric([outcome], count)
    faulty = GaugeMetricFamily("continuum_tools_mcp_faults", "MCP servers whose tools are missing.", labels=["server"])
    for server in status["mcp_faults"]:
        faulty.add_metric([server], 1)
    times = status["call_times"]
    queued = HistogramMetricFamily(
        "continuum_tools_call_queue_seconds", "Wait of tool calls for their session, a slot and a sandbox.", labels=[]
    )
    queued.add_metric([], *cumulative(times["queued"]))
    ran = HistogramMetricFamily(
        "continuum_tools_call_times_seconds",
        "Time that tool calls ran; keys that are rare or too many are under `other`.",
        labels=["tool"],
    )
    for tool, plain in times["ran"].items():
        ran.add_metric([tool], *cumulative(plain))
    plain_ones = _families("continuum_tools_", status, _TOOL_GAUGES, _TOOL_COUNTERS)
    return _page([*plain_ones, ended, faulty, queued, ran])


def runner_page(status: Mapping[str, Any], routers: Mapping[str, Mapping[str, Any]]) -> str:
    """A runner's status, and the counters of the routers in its process."""
    return _page(
        [*_families("continuum_runner_", status, _RUNNER_GAUGES, _RUNNER_COUNTERS), *_router_families(routers)]
    )


def ingress_page(status: Mapping[str, Any], routers: Mapping[str, Mapping[str, Any]]) -> str:
    """An ingress's status, and the counters of the routers in its process."""
    refused = CounterMetricFamily(
        "continuum_ingress_refusals", "Requests answered with an error, by its code.", labels=["code"]
    )
    for code, count in status["refusals"].items():
        refused.add_metric([code], count)
    return _page([*_families("continuum_ingress_", status, _INGRESS_GAUGES, {}), refused, *_router_families(routers)])


def _router_families(routers: Mapping[str, Mapping[str, Any]]) -> list[Metric]:
    placements = CounterMetricFamily(
        "continuum_router_placements",
        "Requests for which a replica was chosen, by reason.",
        labels=["target", "reason"],
    )
    gauges = [
        (name, GaugeMetricFamily(f"continuum_router_{name}", text, labels=["target"]))
        for name, text in _ROUTER_GAUGES.items()
    ]
    for target, counters in routers.items():
        for reason, count in counters["placements"].items():
            placements.add_metric([target, reason], count)
        for name, gauge in gauges:
            gauge.add_metric([target], float(counters[name]))
    return [placements, *(gauge for _, gauge in gauges)]


def store_page(status: Mapping[str, Any]) -> str:
    """The embedded store's status."""
    return _page(_families("continuum_store_", status, _STORE_GAUGES, _STORE_COUNTERS))


def _families(
    prefix: str, status: Mapping[str, Any], gauges: Mapping[str, str], counters: Mapping[str, str]
) -> list[Metric]:
    """Families of the numbers that are known; one that is None (not yet, or not here) is left out rather than zero."""
    kinds: tuple[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], Mapping[str, str]], ...] = (
        (GaugeMetricFamily, gauges),
        (CounterMetricFamily, counters),
    )
    return [
        kind(prefix + name, text, value=float(status[name]))
        for kind, texts in kinds
        for name, text in texts.items()
        if status[name] is not None
    ]


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _page(families: list[Metric]) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry).decode()
