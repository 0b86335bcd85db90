"""Samples on their way from tool calls to the history: kept a moment, written together, never in the way of a call.

While the store is away samples wait, up to a bound; beyond it the oldest is dropped and counted. Nothing here raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque

from agent_program.errors import StoreUnavailable
from agent_program.tool_events import LatencySample
from tool_runtime.history import LatencyHistory

_LOG = logging.getLogger(__name__)
_BATCH_SAMPLES_MAX = 1000


class HistoryWriter:
    """Writes to one history from one event loop."""

    def __init__(self, history: LatencyHistory, *, flush_interval_s: float, buffered_samples_max: int) -> None:
        self._history = history
        self._flush_interval_s = flush_interval_s
        self._buffer: deque[LatencySample] = deque()
        self._buffered_samples_max = buffered_samples_max
        self._filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        #: Samples that were given up because the store was away for too long.
        self.dropped = 0
        #: The last write reached the store.
        self.is_store_reachable = True

    @property
    def buffered(self) -> int:
        """Samples that wait to be written."""
        return len(self._buffer)

    def record(self, sample: LatencySample) -> None:
        """Take a sample; returns at once."""
        if len(self._buffer) >= self._buffered_samples_max:
            self._buffer.popleft()
            self.dropped += 1
        self._buffer.append(sample)
        self._filled.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def flush(self) -> bool:
        """Write what is buffered now; False if the store is away."""
        while self._buffer:
            batch = [self._buffer.popleft() for _ in range(min(len(self._buffer), _BATCH_SAMPLES_MAX))]
            try:
                await self._history.add(batch)
            except StoreUnavailable as exc:
                self._put_back(batch)
                if self.is_store_reachable:
                    _LOG.warning("tool-latency samples wait for the store: %s", exc)
                self.is_store_reachable = False
                return False
        if not self.is_store_reachable:
            _LOG.info("the tool-latency store is back")
        self.is_store_reachable = True
        return True

    async def close(self) -> None:
        """Write what is left, if the store can take it, and stop."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        if not await self.flush():
            _LOG.warning("%d tool-latency samples are lost: the store is away", len(self._buffer))
        await self._history.close()

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            await asyncio.sleep(self._flush_interval_s)
            self._filled.clear()
            if not await self.flush():
                self._filled.set()  # try again after another interval

    def _put_back(self, batch: list[LatencySample]) -> None:
        room = self._buffered_samples_max - len(self._buffer)
        self.dropped += max(0, len(batch) - room)
        self._buffer.extendleft(reversed(batch[max(0, len(batch) - room) :]))
