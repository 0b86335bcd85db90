"""An execution under way, as its sandbox's reader fills it and its waiter watches it."""

from __future__ import annotations

import asyncio
import secrets

from tool_runtime.config import OutputLimits
from tool_runtime.output import bounded


class PendingExecution:
    """What has come of one execution so far, and the events that end it."""

    def __init__(self, limits: OutputLimits) -> None:
        self.nonce = secrets.token_hex(8)
        self.streams = {stream: bounded(limits) for stream in (b"stdout", b"stderr")}
        self.over_limit = asyncio.Event()
        #: Which limit, in words.
        self.limit = ""
        self.done = asyncio.Event()
        self.exit_code: int | None = None
        self.session_lost = False
        #: Set where it did not end by itself.
        self.failure: str | None = None
        self._bytes_max = limits.hard_bytes_max

    def feed(self, stream: bytes, data: bytes) -> None:
        kept = self.streams.get(stream)
        if kept is not None:
            kept.feed(data)
            if kept.total_bytes > self._bytes_max:
                self.exceed("it printed too much; write to a file, or print less")

    def exceed(self, limit: str) -> None:
        if not self.done.is_set() and not self.over_limit.is_set():
            self.limit = limit
            self.over_limit.set()

    def fail(self, reason: str) -> None:
        if not self.done.is_set():
            self.failure, self.session_lost = reason, True
            self.done.set()
