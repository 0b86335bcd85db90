"""The paper's Eq. 2: how long to retain, given what retaining brings and how long tools take.

    tau* = argmax over tau in {0} ∪ {distinct durations seen} of  P(tau) · B − tau

P is the empirical distribution of durations and B = T·eta + PrefillReload the benefit in seconds. Between two durations P
is flat and the cost rises, so the maximum lies at a duration or at 0. Ties go to the smaller tau: the same gain for less
memory. One pass over sorted durations with a running count: O(n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BestTtl:
    """The maximiser and what it promises."""

    ttl_s: float
    #: Share of tool calls that return within `ttl_s`.
    return_probability: float
    #: P·B − tau, in seconds; 0 where retaining does not pay.
    gain_s: float


def best_ttl(pairs: Sequence[tuple[float, float]], benefit_s: float, *, unreturned: float = 0.0) -> BestTtl:
    """Maximise Eq. 2.

    Args:
        pairs: (duration in seconds, weight), ascending by duration; equal durations may repeat.
        benefit_s: B.
        unreturned: weight of calls that count in P's denominator and return at no duration.
    """
    total = sum(weight for _, weight in pairs) + unreturned
    best = BestTtl(ttl_s=0.0, return_probability=0.0, gain_s=0.0)
    returned = 0.0
    for index, (duration_s, weight) in enumerate(pairs):
        returned += weight
        if index + 1 < len(pairs) and pairs[index + 1][0] == duration_s:
            continue
        gain_s = returned / total * benefit_s - duration_s
        if gain_s > best.gain_s:
            best = BestTtl(ttl_s=duration_s, return_probability=returned / total, gain_s=gain_s)
    return best


def cold_start_ttl(benefit_s: float, *, mean_s: float = 1.0) -> float:
    """T_default: Eq. 2 maximised for durations ~ Exp(mean `mean_s`), where (1 − e^(−tau/mean))·B − tau has its maximum
    at mean·ln(B/mean); 0 where that is negative. The paper assumes a mean of 1 s and eta = 1."""
    if benefit_s <= mean_s:
        return 0.0
    return mean_s * math.log(benefit_s / mean_s)
