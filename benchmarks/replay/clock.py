"""Virtual time: a clock that the event loop moves."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the start of a replay; never goes back."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    def move_to(self, now_s: float) -> None:
        """Go on to a later time, or stay."""
        if now_s < self._now_s:
            raise ValueError(f"virtual time does not go back: {now_s} < {self._now_s}")
        self._now_s = now_s
