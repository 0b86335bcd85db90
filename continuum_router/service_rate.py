"""How fast something gets work done, as measured: ended pieces of work over the time in which there was any.

Idle time does not count, or a quiet night would look like a slow machine. Both sums fade with a half-life, so that the rate follows
what is served now.
"""

from __future__ import annotations

from math import exp2


class ServiceRate:
    """Pieces of work ended in a busy second. Not thread-safe."""

    def __init__(self, *, half_life_s: float = 30.0) -> None:
        if half_life_s <= 0:
            raise ValueError("half_life_s must be positive")
        self._half_life_s = half_life_s
        self._open = 0
        self._ended = 0.0
        self._busy_s = 0.0
        self._seen_s: float | None = None

    @property
    def open(self) -> int:
        """Pieces of work that are being done."""
        return self._open

    def began(self, now_s: float) -> None:
        """A piece of work came."""
        self._pass_time(now_s)
        self._open += 1

    def ended(self, now_s: float, *, is_done: bool = True) -> None:
        """A piece of work left; `is_done` where it was done and did not break off."""
        self._pass_time(now_s)
        self._open = max(0, self._open - 1)
        self._ended += is_done

    def per_s(self, now_s: float) -> float | None:
        """The rate; None until something ended after some time of work."""
        self._pass_time(now_s)
        return self._ended / self._busy_s if self._ended > 0 and self._busy_s > 0 else None

    def _pass_time(self, now_s: float) -> None:
        passed_s = 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        if self._open and passed_s:
            kept = exp2(-passed_s / self._half_life_s)
            self._ended *= kept
            self._busy_s = self._busy_s * kept + passed_s
