"""The paper's Eq. 2: how long to retain, given what retaining brings and how long tools take.

    tau* = argmax over tau in {0} ∪ {distinct durations seen} of  P(tau) · B − tau

P is the empirical distribution of durations and B = T·eta + PrefillReload the benefit in seconds. Between two durations P
is flat and the cost rises, so the maximum lies at a duration or at 0. Ties go to the smaller tau: the same gain for less
memory. `duration_table.py` finds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BestTtl:
    """The maximiser and what it promises."""

    ttl_s: float
    #: Share of tool calls that return within `ttl_s`.
    return_probability: float
    #: P·B − tau, in seconds; 0 where retaining does not pay.
    gain_s: float


def cold_start_ttl(benefit_s: float, *, mean_s: float = 1.0) -> float:
    """T_default: Eq. 2 maximised for durations ~ Exp(mean `mean_s`), where (1 − e^(−tau/mean))·B − tau has its maximum
    at mean·ln(B/mean); 0 where that is negative. The paper assumes a mean of 1 s and eta = 1."""
    if benefit_s <= mean_s:
        return 0.0
    return mean_s * math.log(benefit_s / mean_s)
