"""Wake-ups inside one process: people wait on a topic, someone fires it.

A signal remembers that it was fired, so that "look, then wait" has no gap to fall into: fired between the look and the wait,
the wait returns at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Signal:
    """One waiter's end of a topic."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next firing since the last `wait`; False if `timeout_s` passed without one."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class SignalHub:
    """Topics and who waits on them. Holds nothing about topics that nobody waits on."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[Signal]] = {}

    @contextmanager
    def listen(self, topic: str) -> Iterator[Signal]:
        signal = Signal()
        self._waiting.setdefault(topic, set()).add(signal)
        try:
            yield signal
        finally:
            waiting = self._waiting[topic]
            waiting.discard(signal)
            if not waiting:
                del self._waiting[topic]

    def topics(self) -> frozenset[str]:
        """Topics that someone waits on."""
        return frozenset(self._waiting)

    def fire(self, topic: str) -> None:
        for signal in self._waiting.get(topic, ()):
            signal.fire()

    def fire_all(self) -> None:
        """After a time in which firings may have been missed: everyone looks again."""
        for topic in self._waiting:
            self.fire(topic)
