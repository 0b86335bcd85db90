"""The platform's own counters, as Prometheus families.

The journal's sums are the same whoever is asked, so every ingress replica exports the same numbers: aggregate with `max`, not
`sum`. Program ids are never labels.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from agent_program.histogram import cumulative
from deployments.journal import JournalTotals
from deployments.journal_histograms import DISTRIBUTIONS, plain

_PLAIN = {
    "turns": ("continuum_program_turns", "Finished turns of platform-run programs."),
    "turns_replayed": ("continuum_program_turns_replayed", "Turns that ran again because their replica was lost."),
    "resumed": ("continuum_programs_resumed", "Programs that a runner took over from another one."),
    "prompt_tokens": ("continuum_program_prompt_tokens", "Prompt tokens of finished turns."),
    "cached_tokens": ("continuum_program_reused_tokens", "Prompt tokens whose KV was reused."),
    "recomputed_tokens": (
        "continuum_program_recomputed_tokens",
        "Prompt tokens that an earlier turn of the program had computed and that were computed again.",
    ),
    "output_tokens": ("continuum_program_output_tokens", "Generated tokens of finished turns."),
    "tool_seconds": ("continuum_program_tool_seconds", "Seconds that programs waited for their tools."),
}


class JournalCollector(Collector):
    """What the journal counts."""

    def __init__(self, totals: JournalTotals) -> None:
        self._totals = totals

    def collect(self) -> Iterable[Metric]:
        counters = self._totals.counters
        states = GaugeMetricFamily("continuum_programs", "Programs in each state.", labels=["state"])
        for state, count in self._totals.by_state.items():
            states.add_metric([state], count)
        yield states
        for name, (family, text) in _PLAIN.items():
            yield CounterMetricFamily(family, text, value=counters.get(name, 0))
        for distribution in DISTRIBUTIONS:
            histogram = HistogramMetricFamily(distribution.family, distribution.text, labels=[])
            histogram.add_metric([], *cumulative(plain(distribution, counters)))
            yield histogram
        yield self._labelled("ended", "continuum_programs_ended", "Programs that ended.", ["state", "reason"])
        yield self._labelled("tool_calls", "continuum_program_tool_calls", "Tool calls that ended.", ["outcome"])
        yield self._labelled(
            "leases",
            "continuum_program_leases",
            "Leases on retained KV that ended, as their programs saw it.",
            ["outcome"],
        )

    def _labelled(self, prefix: str, family: str, text: str, labels: list[str]) -> Metric:
        metric = CounterMetricFamily(family, text, labels=labels)
        for name, amount in self._totals.counters.items():
            head, *values = name.split(":")
            if head == prefix and len(values) == len(labels):
                metric.add_metric(values, amount)
        return metric
