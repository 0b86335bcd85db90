"""How far a running call is, from whoever runs it to whoever waits for it: the latest word only, and not more than one a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

INTERVAL_S = 1.0
_MESSAGE_CHARS_MAX = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What a tool said last."""

    progress: float
    total: float | None
    message: str | None


class ProgressFeed:
    """One call's progress."""

    def __init__(self, *, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._latest: Update | None = None
        self._news = asyncio.Event()

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Take what the tool says; it never waits for anybody. What goes backwards is no progress and is left out."""
        if self._latest is not None and not progress >= self._latest.progress:
            return
        told = message[:_MESSAGE_CHARS_MAX] if message is not None else None
        self._latest = Update(progress=progress, total=total, message=told)
        self._news.set()

    async def until(self, running: asyncio.Task[Any]) -> AsyncIterator[Update]:
        """The updates while `running` runs; what came last is not held back by its end."""
        while not running.done():
            news = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait({running, news}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            if self._news.is_set() and self._latest is not None:
                self._news.clear()
                yield self._latest
                await asyncio.wait({running}, timeout=self._interval_s)
