"""Carries tool-latency history between the store and the scheduler, off the step loop.

Every few seconds: what this replica measured goes to the store in one batch, and the store's snapshot goes to the scheduler
when it is a new one. With the store away nothing is pushed, so the scheduler keeps the last snapshot and its own samples;
samples wait here, the oldest making room, and go out when the store is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from agent_program.clock import Clock
from agent_program.errors import StoreUnavailable
from agent_program.tool_events import LatencySample
from engine_replicas.scheduler_client import SchedulerClient
from tool_runtime.history import LatencyHistory

SAMPLES_WAITING_MAX = 4096

logger = logging.getLogger(__name__)


class LatencyFeed:
    """History in, history out."""

    def __init__(self, history: LatencyHistory, scheduler: SchedulerClient, clock: Clock):
        self._history = history
        self._scheduler = scheduler
        self._clock = clock
        self._samples: deque[LatencySample] = deque(maxlen=SAMPLES_WAITING_MAX)
        #: The snapshot that the scheduler has; None before the first.
        self.version: int | None = None
        #: When the store last said that the scheduler's snapshot is the newest.
        self.confirmed_s: float | None = None
        #: Rounds that found the store away.
        self.store_errors = 0
        self._is_store_away = False

    def add(self, sample: LatencySample) -> None:
        """Keep a sample for the next round."""
        self._samples.append(sample)

    async def round(self) -> None:
        """Write what waits, read the snapshot, push it if it is new."""
        try:
            await self._write()
            snapshot = await self._history.snapshot()
        except StoreUnavailable as exc:
            self.store_errors += 1
            if not self._is_store_away:
                logger.warning("tool-latency history is away: %s", exc, extra={"action": "latency_store_away"})
            self._is_store_away = True
            return
        self._is_store_away = False
        if snapshot.version != self.version:
            taken = await self._scheduler.call("continuum_push_latency", snapshot.to_dict())
            self.version = snapshot.version if taken is not None else self.version
        if snapshot.version == self.version:
            self.confirmed_s = self._clock.now_s()

    async def run(self, period_s: float) -> None:
        """Rounds for ever, until cancelled."""
        while True:
            try:
                await self.round()
            except Exception:
                # The feed outlives any one round: without it the scheduler would never hear of history again.
                logger.exception("a round of the latency feed failed", extra={"action": "latency_feed_failed"})
            await asyncio.sleep(period_s)

    async def close(self) -> None:
        """Let go of the store."""
        await self._history.close()

    async def _write(self) -> None:
        batch = tuple(self._samples)
        if not batch:
            return
        await self._history.add(batch)
        # Samples that came in meanwhile stay; with a full buffer they have pushed out some of the batch already.
        written = {id(sample) for sample in batch}
        self._samples = deque((s for s in self._samples if id(s) not in written), maxlen=SAMPLES_WAITING_MAX)
