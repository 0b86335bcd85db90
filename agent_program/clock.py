"""Time as an argument. Decision modules never read a clock: they are handed `now_s`.

`now_s` is monotonic and means nothing outside its machine; what crosses machines is a duration.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where adapters get the time from."""

    def now_s(self) -> float:
        """Monotonic seconds; only differences mean something."""
        ...

    def wall_s(self) -> float:
        """Unix seconds, for what people read and for timestamps that outlive a process."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told, for tests and for virtual-time replay."""

    def __init__(self, now_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._wall_offset_s = wall_s - now_s

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s + self._wall_offset_s

    def advance(self, seconds: float) -> None:
        """Move forward; a monotonic clock never goes back."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self._now_s += seconds
