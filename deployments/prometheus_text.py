"""Prometheus text of several replicas as one page.

Each replica's samples get its label, and families of the same name are put under one header, as the format demands. A
replica whose text does not parse is left out and counted, so that one bad page does not hide the others.

An engine's page has more than a thousand lines and is gathered at every scrape, so lines are not taken apart further than it takes:
a sample keeps its text, and the labels go in behind its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

_LABEL = r'[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*"'
_SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)(?:\{{((?:{_LABEL},?)*)\}})?( \S+(?: -?\d+)?)")
_HEADER = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][\w:]*)( .*)?")


@dataclass(slots=True)
class _Family:
    #: Its HELP and TYPE, by which.
    headers: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


class MetricPages:
    """Texts that were exported elsewhere, family by family."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}
        #: Pages that do not parse.
        self.rejected = 0

    def add(self, text: str, labels: Mapping[str, str]) -> None:
        """Put one page's samples under `labels`, which win over the page's own."""
        try:
            found = _parsed(text, labels)
        except ValueError:
            self.rejected += 1
            return
        for name, family in found.items():
            known = self._families.setdefault(name, _Family())
            known.headers = known.headers or family.headers
            known.samples += family.samples

    def set_gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        """A sample of our own, on the same page."""
        family = self._families.setdefault(name, _Family())
        family.headers = {"HELP": f"# HELP {name} {text}", "TYPE": f"# TYPE {name} gauge"}
        shown = f"{{{_written(labels)}}}" if labels else ""
        family.samples.append(f"{name}{shown} {float(value)}")

    def render(self) -> str:
        """Everything, one family after the other."""
        lines: list[str] = []
        for family in self._families.values():
            lines += [*family.headers.values(), *family.samples]
        return "\n".join(lines) + "\n" if lines else ""


def _parsed(text: str, labels: Mapping[str, str]) -> dict[str, _Family]:
    """The page by family. Raises ValueError where a line is neither a comment nor a sample."""
    behind = _written(labels)
    overridden = [_of_label(name) for name in labels]
    found: dict[str, _Family] = {}
    current: _Family | None = None
    current_name = ""
    for line in text.splitlines():
        if line.startswith("#"):
            header = _HEADER.fullmatch(line)
            if header is not None:
                current_name = header.group(2)
                current = found.setdefault(current_name, _Family())
                current.headers[header.group(1)] = line
            continue
        if not line:
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            raise ValueError(f"no sample: {line[:80]!r}")
        name, own, value = sample.groups()
        if current is None or not name.startswith(current_name):
            current_name, current = name, found.setdefault(name, _Family())
        own = (own or "").rstrip(",")
        for pattern in overridden:
            own = pattern.sub("", own).lstrip(",")
        shown = ",".join(part for part in (own, behind) if part)
        current.samples.append(f"{name}{{{shown}}}{value}" if shown else f"{name}{value}")
    return found


@cache
def _of_label(name: str) -> re.Pattern[str]:
    return re.compile(rf'(?:^|,){name}="(?:[^"\\\n]|\\.)*"')


def _written(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def exposition(pages: MetricPages, *collectors: Collector) -> bytes:
    """One page of everything: what was gathered, and what the collectors hold."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return pages.render().encode() + generate_latest(registry)
