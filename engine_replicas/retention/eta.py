"""eta: how much a program's past says about its remaining length.

    eta = −Corr(k, N−k)     Pearson, over turns k = 1 … N−1 of finished programs of N turns, pooled over programs

It is 1 where all programs have one length (each served turn brings the end nearer), 0 where lengths are memoryless, and
negative where they are heavy-tailed. Within one program the correlation is always −1, so only pooling says anything: until
enough programs of at least two different lengths have finished, eta is the paper's cold-start value of 1.

The pooled sums of a program of N turns have closed forms in N, and all terms are integers, so that programs enter and
leave the window exactly and in O(1).
"""

from __future__ import annotations

from collections import Counter, deque

ETA_PRIOR = 1.0


class EtaEstimator:
    """eta over the newest finished programs."""

    def __init__(self, *, window: int, programs_min: int) -> None:
        self._window = window
        self._programs_min = programs_min
        self._lengths: deque[int] = deque()
        self._length_counts: Counter[int] = Counter()
        # Sums over all pooled pairs (k, r = N − k). By symmetry k and r have equal sums and equal sums of squares.
        self._pairs = 0
        self._sum_k = 0
        self._sum_kk = 0
        self._sum_kr = 0

    @property
    def programs(self) -> int:
        """Finished programs in the window that have at least two turns."""
        return len(self._lengths)

    def program_finished(self, turns: int) -> None:
        """Count a program that took `turns` turns. One turn has no remaining work to speak of and says nothing."""
        if turns < 2:
            return
        self._lengths.append(turns)
        self._add(turns, 1)
        if len(self._lengths) > self._window:
            self._add(self._lengths.popleft(), -1)

    def eta(self) -> float:
        """The estimate, in [−1, 1]; the prior of 1 until it can be told."""
        if len(self._lengths) < self._programs_min or len(self._length_counts) < 2:
            return ETA_PRIOR
        variance = self._pairs * self._sum_kk - self._sum_k**2
        covariance = self._pairs * self._sum_kr - self._sum_k**2
        if variance <= 0:
            return ETA_PRIOR
        return max(-1.0, min(1.0, -(covariance / variance)))

    def _add(self, turns: int, sign: int) -> None:
        n = turns
        sum_k = n * (n - 1) // 2
        sum_kk = (n - 1) * n * (2 * n - 1) // 6
        self._pairs += sign * (n - 1)
        self._sum_k += sign * sum_k
        self._sum_kk += sign * sum_kk
        self._sum_kr += sign * (n * sum_k - sum_kk)
        self._length_counts[n] += sign
        if not self._length_counts[n]:
            del self._length_counts[n]
