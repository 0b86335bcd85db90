"""What the small parts count, as Prometheus text: tool actors, runners, the embedded store. Engines have pages of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

#: name in the status → help
_TOOL_GAUGES = {
    "ready": "A sandbox holds and tools run.",
    "live_sandboxes": "Sandboxes alive.",
    "calls_running": "Tool calls running.",
    "calls_waiting": "Tool calls waiting for their session or a slot.",
    "samples_buffered": "Latency samples not yet in the store.",
}
_TOOL_COUNTERS = {
    "sandboxes_started": "Sandboxes started.",
    "sandboxes_closed_for_room": "Idle sandboxes closed to make room for others.",
    "samples_dropped": "Latency samples dropped while the store was away.",
}
_RUNNER_GAUGES = {
    "running": "Programs that the runner runs.",
    "running_max": "Programs that it may run at once.",
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
    return _page([*_families("continuum_tools_", status, _TOOL_GAUGES, _TOOL_COUNTERS), ended])


def runner_page(status: Mapping[str, Any]) -> str:
    """A runner's status."""
    return _page(_families("continuum_runner_", status, _RUNNER_GAUGES, {}))


def store_page(status: Mapping[str, Any]) -> str:
    """The embedded store's status."""
    return _page(_families("continuum_store_", status, _STORE_GAUGES, _STORE_COUNTERS))


def _families(
    prefix: str, status: Mapping[str, Any], gauges: Mapping[str, str], counters: Mapping[str, str]
) -> list[Metric]:
    return [
        *(GaugeMetricFamily(prefix + name, text, value=float(status[name])) for name, text in gauges.items()),
        *(CounterMetricFamily(prefix + name, text, value=float(status[name])) for name, text in counters.items()),
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
