"""What keeps a fault from becoming a storm: a budget for retries, and a circuit breaker for each replica.

*Budget.* Each first attempt earns a fraction of a retry, up to a ceiling; each retry spends one. So however many turns a dying
replica takes with it, retries stay that fraction of the traffic, plus a reserve for quiet hours. (The scheme of Finagle's
RetryBudget and of gRPC's retry throttling.)

*Breaker.* `failures` lost turns in a row open a replica's circuit: programs are kept off it. After a while it is half open: it
takes programs again; the next lost turn opens it for twice as long, the next answer closes it.

    CLOSED ──failures──► OPEN ──open_s──► HALF_OPEN ──answer──► CLOSED
                          ▲                  │
                          └───── failure ────┘   (twice as long, up to open_max_s)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from continuum_router.config import RetrySettings


class RetryBudget:
    """How many retries the traffic has earned. Not thread-safe."""

    def __init__(self, settings: RetrySettings) -> None:
        self._settings = settings
        self._tokens = float(settings.reserve)

    @property
    def tokens(self) -> float:
        """Retries that may be made now; a fraction is none."""
        return self._tokens

    def first_attempt(self) -> None:
        """A turn is sent for the first time."""
        ceiling = self._settings.reserve + self._settings.saved_max
        self._tokens = min(ceiling, self._tokens + self._settings.per_attempt)

    def spend(self) -> bool:
        """Take one retry; False, with nothing changed, where none is left."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Circuit(StrEnum):
    """Whether a replica is given work."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class CircuitBreaker:
    """One replica's."""

    settings: RetrySettings
    failures_in_a_row: int = 0
    #: Until when it is open; None while it is closed.
    open_until_s: float | None = None
    #: How long it was opened for, the last time.
    opened_for_s: float = 0.0

    def state(self, now_s: float) -> Circuit:
        """How it stands."""
        if self.open_until_s is None:
            return Circuit.CLOSED
        return Circuit.OPEN if now_s < self.open_until_s else Circuit.HALF_OPEN

    def answered(self, now_s: float) -> None:
        """A turn came back. One that was sent before the circuit opened, and comes back while it is open, proves nothing."""
        if self.state(now_s) is not Circuit.OPEN:
            self.failures_in_a_row, self.open_until_s, self.opened_for_s = 0, None, 0.0

    def failed(self, now_s: float) -> None:
        """A turn was lost with the replica, or at its deadline."""
        state = self.state(now_s)
        self.failures_in_a_row += 1
        if state is Circuit.HALF_OPEN:
            self._open(now_s, min(2 * self.opened_for_s, self.settings.open_max_s))
        elif state is Circuit.CLOSED and self.failures_in_a_row >= self.settings.failures_to_open:
            self._open(now_s, self.settings.open_s)

    def _open(self, now_s: float, for_s: float) -> None:
        self.open_until_s, self.opened_for_s = now_s + for_s, for_s
