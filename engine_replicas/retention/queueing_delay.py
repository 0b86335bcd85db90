"""T: how long a turn whose KV was given up waits in the queue, as a sliding mean.

The paper measures T on "requests that were evicted" and starts it at 0. Read here as: a turn that is not its branch's first
and was scheduled without a lease, whatever ended the lease (expiry, reclaim, a policy that retained nothing). That includes
the start-up, where nothing is retained yet, so that T leaves 0 with the first queue.

T starves when retention works: no evicted turn, no sample. Then the last values stand, however old. They are the price paid
the last time eviction happened; should the load have fallen since, leases are too long while memory is free, which costs
nobody anything; should it rise, too long leases get reclaimed, their turns are evicted turns, and T moves again.
"""

from __future__ import annotations

from collections import deque


class QueueingDelay:
    """Mean over the newest `window` delays of evicted turns."""

    def __init__(self, *, window: int) -> None:
        self._delays_s: deque[float] = deque(maxlen=window)
        self._sum_s = 0.0

    @property
    def samples(self) -> int:
        """Delays in the window."""
        return len(self._delays_s)

    def evicted_turn_waited(self, delay_s: float) -> None:
        """An evicted turn was scheduled `delay_s` after it arrived."""
        if len(self._delays_s) == self._delays_s.maxlen:
            self._sum_s -= self._delays_s[0]
        self._delays_s.append(delay_s)
        self._sum_s += delay_s

    def mean_s(self) -> float:
        """T in seconds; 0 before the first sample."""
        return max(0.0, self._sum_s / len(self._delays_s)) if self._delays_s else 0.0
