"""This replica's metrics as Prometheus text: vLLM's own registry, and the scheduler's counters as `continuum_engine_*`.

The tables below say what is exported. Program ids are never labels. A number that the scheduler did not report is left out rather
than shown as zero. Phases of turns (queue, prefill, decode, first token) are vLLM's own histograms,
`vllm:request_queue_time_seconds` and its kin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from agent_program.histogram import cumulative

_PREFIX = "continuum_engine_"
#: name → (help, key in the stats). A key with a dot is one of a dict in the stats.
_GAUGES = {
    "programs": ("Programs that the scheduler remembers.", "programs"),
    "live_leases": ("Leases held now.", "live_leases"),
    "queueing_delay_seconds": ("T: mean queueing delay of turns whose KV had been evicted.", "queueing_delay_s"),
    "eta_ratio": ("How much of a program's remaining work its past tells: the paper's eta.", "eta"),
    "prefill_seconds_per_1k_tokens": ("Time to compute a context of 1000 tokens.", "prefill_reload_s_per_1k"),
    "reload_seconds_per_1k_tokens": (
        "Time to have a lost context of 1000 tokens back, tiers below the GPU included.",
        "reload_s_per_1k",
    ),
    "reload_found_ratio": ("Share of missed tokens that a tier below the GPU had.", "reload_found_share"),
    "queued_tokens": ("Tokens of the turns that wait.", "queued_tokens"),
    "lane_tokens": ("Tokens of first turns that run in the lane for them.", "lane_tokens"),
    "unadmitted_turns": ("Waiting turns of programs that have not been admitted.", "unadmitted_turns"),
    "unadmitted_tokens": ("Tokens of these turns.", "unadmitted_tokens"),
    "overdue_turns": ("Turns that have waited too long and go before all others.", "overdue_turns"),
    "turns_open": ("Turns that this replica is answering.", "turns_open"),
    "latency_snapshot_version": (
        "Version of the tool-latency history that the scheduler has.",
        "latency_snapshot_version",
    ),
    "latency_snapshot_age_seconds": (
        "Time since the store last confirmed that version as its newest.",
        "latency_snapshot_age_s",
    ),
}
_COUNTERS = {
    "leases_begun": ("Leases taken.", "leases_begun"),
    "loaded_tokens": ("Context tokens loaded from host memory or disk.", "loaded_tokens"),
    "latency_store_errors": ("Rounds that found tool-latency history away.", "latency_store_errors"),
    "ttl_predictions": (
        "Leases that ended as reused or expired and had a probability of that.",
        "calibration.predicted",
    ),
    "shadow_saved_tokens": (
        "Context that was computed again and that the shadow policy would have held.",
        "shadow.would_save_tokens",
    ),
    "shadow_lost_tokens": (
        "Context that was found and that the shadow policy would not have held, at most.",
        "shadow.would_recompute_tokens",
    ),
    "ttl_predicted_returns": ("Sum of these probabilities.", "calibration.predicted_sum"),
    "ttl_squared_errors": (
        "Sum over these leases of (probability - came back)^2; divided by their number, the Brier score.",
        "calibration.brier_sum",
    ),
}
_HISTOGRAMS = {
    "schedule_seconds": ("Time to schedule one step, vLLM's part and ours.", "schedule_s"),
    "lease_ttl_seconds": ("Deadlines that the policy chose, of leases that ended.", "calibration.ttl_s"),
    "lease_away_seconds": ("Time really away, of programs whose lease was reused.", "calibration.away_s"),
}
#: name → (help, label, {label value: key in the stats})
_LABELLED_GAUGES = {
    "kv_blocks": (
        "KV blocks; reclaimable ones are the retained ones that no queued turn waits for.",
        "state",
        {
            "total": "total_blocks",
            "free": "free_blocks",
            "retained": "retained_blocks",
            "reclaimable": "reclaimable_blocks",
        },
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
    "shadow_agreement": (
        "Turns that came back, by whose lease held their context: both policies', neither's, only one's.",
        "held_by",
        "shadow.agreement",
    ),
    "shadow_block_seconds": (
        "KV blocks times seconds that leases held, really and by the shadow policy.",
        "policy",
        "shadow.block_seconds",
    ),
    "scheduler_call_failures": ("Calls that the scheduler did not take.", "call", "scheduler_call_failures"),
}
#: name → (help, label, {label value: key in the stats})
_COUNTERS_OF_SEVERAL = {
    "context_tokens": (
        "Context of turns after a program's first.",
        "kind",
        {"reused": "reused_tokens", "recomputed": "recomputed_tokens"},
    ),
    "ttl_outcomes": (
        "Armed leases whose program came back within the deadline, or did not.",
        "outcome",
        {"returned": "calibration.returned", "late": "calibration.late"},
    ),
}


class _StatsCollector(Collector):
    def __init__(self, stats: Mapping[str, Any]):
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, (text, key) in _GAUGES.items():
            if (value := self._get(key)) is not None:
                yield GaugeMetricFamily(_PREFIX + name, text, value=value)
        for name, (text, key) in _COUNTERS.items():
            if (value := self._get(key)) is not None:
                yield CounterMetricFamily(_PREFIX + name, text, value=value)
        for name, (text, key) in _HISTOGRAMS.items():
            if (plain := self._get(key)) is not None:
                histogram = HistogramMetricFamily(_PREFIX + name, text, labels=[])
                histogram.add_metric([], *cumulative(plain))
                yield histogram
        for name, (text, label, keys) in _LABELLED_GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=[label])
            for label_value, value in self._known(keys).items():
                gauge.add_metric([label_value], value)
            yield gauge
        yield from self._kv_tokens()
        for name, (text, label, key) in _LABELLED_COUNTERS.items():
            if (values := self._get(key)) is not None:
                yield _counter(name, text, label, values)
        for name, (text, label, keys) in _COUNTERS_OF_SEVERAL.items():
            yield _counter(name, text, label, self._known(keys))

    def _kv_tokens(self) -> Iterator[Metric]:
        """KV in tokens, which is what people count in."""
        if (block_tokens := self._stats.get("block_tokens")) is None:
            return
        text, label, keys = _LABELLED_GAUGES["kv_blocks"]
        gauge = GaugeMetricFamily(_PREFIX + "kv_tokens", text.replace("KV blocks", "KV in tokens"), labels=[label])
        for label_value, blocks in self._known(keys).items():
            gauge.add_metric([label_value], blocks * block_tokens)
        yield gauge

    def _get(self, key: str) -> Any:
        value: Any = self._stats
        for part in key.split("."):
            value = (value or {}).get(part)
        return value

    def _known(self, keys: Mapping[str, str]) -> dict[str, Any]:
        found = {label_value: self._get(key) for label_value, key in keys.items()}
        return {label_value: value for label_value, value in found.items() if value is not None}


def _counter(name: str, text: str, label: str, values: Mapping[str, Any]) -> CounterMetricFamily:
    family = CounterMetricFamily(_PREFIX + name, text, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family


def exposition(scheduler_stats: Mapping[str, Any], own_stats: Mapping[str, Any]) -> str:
    """Prometheus text of this process: vLLM's metrics, the scheduler's counters, the replica's own."""
    ours = CollectorRegistry()
    ours.register(_StatsCollector({**scheduler_stats, **own_stats}))
    return (generate_latest(REGISTRY) + generate_latest(ours)).decode()
