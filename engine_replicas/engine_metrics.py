"""This replica's metrics as Prometheus text: vLLM's own registry, and the scheduler's counters as `continuum_engine_*`.

Program ids are never labels. A counter that the scheduler did not report is left out rather than shown as zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

#: name → (help, key in the stats)
_GAUGES = {
    "programs": ("Programs that the scheduler remembers.", "programs"),
    "live_leases": ("Leases held now.", "live_leases"),
    "queueing_delay_seconds": ("T: mean queueing delay of turns whose KV had been evicted.", "queueing_delay_s"),
    "eta": ("How much of a program's remaining work its past tells.", "eta"),
    "queued_tokens": ("Tokens of the turns that wait.", "queued_tokens"),
    "turns_open": ("Turns that this replica is answering.", "turns_open"),
    "latency_snapshot_version": (
        "Version of the tool-latency history that the scheduler has.",
        "latency_snapshot_version",
    ),
}
_COUNTERS = {
    "leases_begun": ("Leases taken.", "leases_begun"),
    "latency_store_errors": ("Rounds that found tool-latency history away.", "latency_store_errors"),
}
#: name → (help, label, {label value: key in the stats})
_LABELLED_GAUGES = {
    "kv_blocks": (
        "KV blocks.",
        "state",
        {"total": "total_blocks", "free": "free_blocks", "retained": "retained_blocks"},
    ),
    "turns": ("Turns in the scheduler.", "state", {"running": "running", "waiting": "waiting"}),
}
#: name → (help, label, key of a dict in the stats)
_LABELLED_COUNTERS = {
    "leases": ("Leases ended, by outcome.", "outcome", "leases"),
    "lease_ends": ("Leases ended, by reason.", "reason", "lease_ends"),
    "not_retained": ("Turns after which nothing was retained, by reason.", "reason", "not_retained"),
    "prompts": (
        "Prompts of programs, by how their tokens relate to the turn before.",
        "continuity",
        "token_continuity",
    ),
    "scheduler_call_failures": ("Calls that the scheduler did not take.", "call", "scheduler_call_failures"),
}


class _StatsCollector(Collector):
    def __init__(self, stats: Mapping[str, Any]):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, (text, key) in _GAUGES.items():
            if (value := self._stats.get(key)) is not None:
                yield GaugeMetricFamily(f"continuum_engine_{name}", text, value=value)
        for name, (text, key) in _COUNTERS.items():
            if (value := self._stats.get(key)) is not None:
                yield CounterMetricFamily(f"continuum_engine_{name}", text, value=value)
        for name, (text, label, keys) in _LABELLED_GAUGES.items():
            gauge = GaugeMetricFamily(f"continuum_engine_{name}", text, labels=[label])
            for label_value, key in keys.items():
                if (value := self._stats.get(key)) is not None:
                    gauge.add_metric([label_value], value)
            yield gauge
        for name, (text, label, key) in _LABELLED_COUNTERS.items():
            yield _counter(name, text, label, self._stats.get(key) or {})
        tokens = {kind: self._stats.get(f"{kind}_tokens") for kind in ("reused", "recomputed")}
        yield _counter("context_tokens", "Context of turns after a program's first.", "kind", tokens)


def _counter(name: str, text: str, label: str, values: Mapping[str, Any]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"continuum_engine_{name}", text, labels=[label])
    for label_value, value in values.items():
        if value is not None:
            family.add_metric([label_value], value)
    return family


def exposition(scheduler_stats: Mapping[str, Any], own_stats: Mapping[str, Any]) -> str:
    """Prometheus text of this process: vLLM's metrics, the scheduler's counters, the replica's own."""
    ours = CollectorRegistry()
    ours.register(_StatsCollector({**scheduler_stats, **own_stats}))
    return (generate_latest(REGISTRY) + generate_latest(ours)).decode()
