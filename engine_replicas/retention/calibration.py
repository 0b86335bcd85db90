"""Were the deadlines right? What the policy expected of each armed lease, against what happened.

A policy that sets a deadline expects the program back by then with some probability p. A lease that was reused says that it
came (1), one whose deadline passed that it did not (0); reclaimed and released leases say neither. From these:

    share within    returned / (returned + late), to be compared with the mean of p
    Brier score     mean of (p − came)²: 0 is a prophet, 0.25 a coin, and a policy that is worse than the share itself,
                    share · (1 − share), should not be trusted

The time that a program was really away is known for those that came: from the end of its turn to the arrival of its next one.
"""

from __future__ import annotations

from typing import Any

from agent_program.histogram import WAIT_BOUNDS_S, Histogram
from engine_replicas.retention.lease import LeaseEnd, LeaseEndReason, LeaseState


class Calibration:
    """Sums over the armed leases that ended."""

    def __init__(self) -> None:
        self._returned = self._late = self._predicted = 0
        self._predicted_sum = self._brier_sum = 0.0
        self._ttl_s = Histogram(WAIT_BOUNDS_S)
        self._away_s = Histogram(WAIT_BOUNDS_S)

    def ended(self, end: LeaseEnd) -> None:
        """A lease is over."""
        lease = end.lease
        if lease.state is not LeaseState.ARMED:
            return
        self._ttl_s.add(lease.ttl_s)
        if end.reason is LeaseEndReason.NEXT_TURN_SCHEDULED:
            came = True
            if lease.queued_since_s is not None:
                self._away_s.add(max(0.0, lease.queued_since_s - lease.started_s))
        elif end.reason is LeaseEndReason.DEADLINE_PASSED:
            came = False
        else:
            return
        self._returned += came
        self._late += not came
        if lease.return_probability is not None:
            self._predicted += 1
            self._predicted_sum += lease.return_probability
            self._brier_sum += (lease.return_probability - came) ** 2

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for metrics."""
        return {
            "returned": self._returned,
            "late": self._late,
            "predicted": self._predicted,
            "predicted_sum": self._predicted_sum,
            "brier_sum": self._brier_sum,
            "ttl_s": self._ttl_s.to_plain(),
            "away_s": self._away_s.to_plain(),
        }
