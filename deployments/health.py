"""Is the platform ready, and what do its parts count? Asked of every replica at once, each with a deadline."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from agent_program.errors import StoreUnavailable
from deployments.fleet import Fleet
from deployments.journal import Journal
from deployments.platform_metrics import JournalCollector
from deployments.prometheus_text import MetricPages, exposition

STORE_PART = "store"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartHealth:
    """One part of the platform."""

    is_ready: bool
    #: Why it is not, or why only some of its replicas are; None where all is well.
    reason: str | None
    replicas_ready: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """The whole platform."""

    parts: dict[str, PartHealth]

    @property
    def is_ready(self) -> bool:
        return all(part.is_ready for part in self.parts.values())

    def to_wire(self) -> dict[str, Any]:
        parts = {
            name: {"ready": part.is_ready, "reason": part.reason, "replicas_ready": part.replicas_ready}
            for name, part in self.parts.items()
        }
        return {"status": "ready" if self.is_ready else "not_ready", "parts": parts}


class Health:
    """Readiness and metrics of everything behind the API."""

    def __init__(self, *, journal: Journal, fleet: Fleet, probe_timeout_s: float) -> None:
        self._journal = journal
        self._fleet = fleet
        self._probe_timeout_s = probe_timeout_s

    async def readiness(self) -> Readiness:
        """Ask every part whether it works."""
        names = tuple(self._fleet.parts)
        store, *parts = await asyncio.gather(self._store(), *(self._part(name) for name in names))
        return Readiness(parts={STORE_PART: store, **dict(zip(names, parts, strict=True))})

    async def metrics_page(self) -> bytes:
        """Prometheus text: the replicas' own pages under a `replica` label, the journal's sums, and who did not answer."""
        names = tuple(self._fleet.parts)
        answers = await asyncio.gather(
            *(self._fleet.ask(name, "metrics_page", timeout_s=self._probe_timeout_s) for name in names)
        )
        pages = MetricPages()
        for name, answer in zip(names, answers, strict=True):
            pages.set_gauge(
                "continuum_replicas_scraped", "Replicas that answered this scrape.", len(answer.answers), part=name
            )
            pages.set_gauge("continuum_replicas_silent", "Replicas that did not.", len(answer.faults), part=name)
            for replica_id, text in answer.answers:
                pages.add(text, {"replica": replica_id, "part": name})
        try:
            totals = await self._journal.totals()
        except StoreUnavailable:
            pages.set_gauge("continuum_store_up", "The store answers.", 0)
            return exposition(pages)
        pages.set_gauge("continuum_store_up", "The store answers.", 1)
        return exposition(pages, JournalCollector(totals))

    async def _store(self) -> PartHealth:
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                await self._journal.check()
        except (StoreUnavailable, TimeoutError) as error:
            return PartHealth(is_ready=False, reason=str(error) or "no answer in time", replicas_ready=0)
        return PartHealth(is_ready=True, reason=None, replicas_ready=1)

    async def _part(self, name: str) -> PartHealth:
        answer = await self._fleet.ask(name, "probe", timeout_s=self._probe_timeout_s)
        reason = "; ".join(answer.faults) or (None if answer.is_up else "no replica answers")
        return PartHealth(is_ready=answer.is_up, reason=reason, replicas_ready=len(answer.answers))
