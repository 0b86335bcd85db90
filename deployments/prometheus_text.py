"""Prometheus text of several replicas as one page.

Each replica's samples get its label, and families of the same name are put under one header, as the format demands. A
replica whose text does not parse is left out and counted, so that one bad page does not hide the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


@dataclass(eq=False)
class MetricPages(Collector):
    """A collector over texts that were exported elsewhere."""

    _families: dict[str, Metric] = field(default_factory=dict)
    rejected: int = 0

    def add(self, text: str, labels: Mapping[str, str]) -> None:
        """Put one page's samples under `labels`, which win over the page's own."""
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError:
            self.rejected += 1
            return
        for family in families:
            known = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples.extend(_labelled(family.samples, labels))

    def set_gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        """A sample of our own, on the same page."""
        family = self._families.setdefault(name, Metric(name, text, "gauge"))
        family.add_sample(name, labels, value)

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def _labelled(samples: Iterable[Sample], labels: Mapping[str, str]) -> Iterable[Sample]:
    return (sample._replace(labels={**sample.labels, **labels}) for sample in samples)


def exposition(*collectors: Collector) -> bytes:
    """One page of everything that the collectors hold."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)
