"""Is the platform ready, and what do its parts count? Asked of every replica at once, each with a deadline.

A part is ready while at least one replica of it answers. A replica that is being replaced is not among those asked, so what
is missing is told by counting: how many answer, of how many, and since when it is so (as this process has seen it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agent_program.clock import Clock
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
    replicas_wanted: int
    #: Seconds for which fewer have answered than are wanted; None where all do.
    incomplete_for_s: float | None = None
    #: What its replicas say of how they work: which sandbox, and what holds its limits. Each once.
    remarks: tuple[str, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        return {
            "ready": self.is_ready,
            "reason": self.reason,
            "replicas_ready": self.replicas_ready,
            "replicas_wanted": self.replicas_wanted,
            "incomplete_for_s": self.incomplete_for_s,
            "remarks": list(self.remarks),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """The whole platform."""

    parts: dict[str, PartHealth]

    @property
    def is_ready(self) -> bool:
        return all(part.is_ready for part in self.parts.values())

    def to_wire(self) -> dict[str, Any]:
        wrong = [f"{name}: {part.reason}" for name, part in self.parts.items() if part.reason is not None]
        return {
            "status": "ready" if self.is_ready else "not_ready",
            "reason": "; ".join(wrong) or None,
            "parts": {name: part.to_wire() for name, part in self.parts.items()},
        }


class Health:
    """Readiness and metrics of everything behind the API."""

    def __init__(
        self,
        *,
        journal: Journal,
        fleet: Fleet,
        replicas_wanted: Mapping[str, int],
        clock: Clock,
        probe_timeout_s: float,
        scraped: Fleet | None = None,
    ) -> None:
        """`replicas_wanted`: by part name; a part that is not named wants one. `scraped`: whose metrics are gathered, where that is
        more than what readiness depends on."""
        self._journal = journal
        self._fleet = fleet
        self._scraped = scraped or fleet
        self._replicas_wanted = replicas_wanted
        self._clock = clock
        self._probe_timeout_s = probe_timeout_s
        #: Part → when it was first seen with too few replicas; parts that are whole are not in it.
        self._incomplete_since_s: dict[str, float] = {}

    async def readiness(self) -> Readiness:
        """Ask every part whether it works."""
        names = tuple(self._fleet.parts)
        store, *parts = await asyncio.gather(self._store(), *(self._part(name) for name in names))
        return Readiness(parts={STORE_PART: store, **dict(zip(names, parts, strict=True))})

    async def metrics_page(self) -> bytes:
        """Prometheus text: the replicas' own pages under a `replica` label, the journal's sums, and who did not answer."""
        names = tuple(self._scraped.parts)
        answers = await asyncio.gather(
            *(self._scraped.ask(name, "metrics_page", timeout_s=self._probe_timeout_s) for name in names)
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
            return self._judged(STORE_PART, 0, (str(error) or f"no answer within {self._probe_timeout_s:g} s",))
        return self._judged(STORE_PART, 1, ())

    async def _part(self, name: str) -> PartHealth:
        answer = await self._fleet.ask(name, "probe", timeout_s=self._probe_timeout_s)
        # A replica answers with its id, or with its id and a remark.
        remarks = tuple(sorted({one[1] for one in answer.answers if isinstance(one, tuple)}))
        return replace(self._judged(name, len(answer.answers), answer.faults), remarks=remarks)

    def _judged(self, name: str, replicas_ready: int, faults: tuple[str, ...]) -> PartHealth:
        wanted = self._replicas_wanted.get(name, 1)
        if replicas_ready >= wanted:
            self._incomplete_since_s.pop(name, None)
            return PartHealth(
                is_ready=True, reason="; ".join(faults) or None, replicas_ready=replicas_ready, replicas_wanted=wanted
            )
        now_s = self._clock.now_s()
        incomplete_for_s = now_s - self._incomplete_since_s.setdefault(name, now_s)
        count = f"{replicas_ready} of {wanted} {'replica answers' if wanted == 1 else 'replicas answer'}"
        why = "; ".join(faults) or "a replica is starting or being replaced"
        return PartHealth(
            is_ready=replicas_ready > 0,
            reason=f"{count}, for {incomplete_for_s:.0f} s now: {why}",
            replicas_ready=replicas_ready,
            replicas_wanted=wanted,
            incomplete_for_s=incomplete_for_s,
        )
