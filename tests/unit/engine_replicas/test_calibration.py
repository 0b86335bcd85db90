"""Deadlines against what happened."""

from __future__ import annotations

from typing import Any

import pytest

from agent_program.ids import ProgramId, TenantId
from engine_replicas.retention.calibration import Calibration
from engine_replicas.retention.lease import BranchKey, Lease, LeaseEnd, LeaseEndReason, LeaseState


def ended(reason: LeaseEndReason, **changes: Any) -> LeaseEnd:
    """A lease of a turn that ended at 10 s, armed for 5 s."""
    defaults: dict[str, Any] = {
        "lease_id": 1,
        "key": BranchKey(ProgramId("p"), ""),
        "tenant_id": TenantId("default"),
        "program_arrival_s": 0.0,
        "blocks": frozenset({1}),
        "tokens": 16,
        "started_s": 10.0,
        "away_since_s": 10.0,
        "ttl_s": 5.0,
        "deadline_s": 15.0,
        "state": LeaseState.ARMED,
        "return_probability": 0.8,
    }
    return LeaseEnd(lease=Lease(**{**defaults, **changes}), reason=reason)


def plain(*ends: LeaseEnd) -> dict[str, Any]:
    calibration = Calibration()
    for end in ends:
        calibration.ended(end)
    return calibration.to_plain()


def test_a_program_that_came_back_in_time_speaks_for_the_policy() -> None:
    told = plain(ended(LeaseEndReason.NEXT_TURN_SCHEDULED, queued_since_s=12.0))
    assert (told["returned"], told["late"]) == (1, 0)
    assert told["brier_sum"] == pytest.approx((0.8 - 1) ** 2)
    assert told["away_s"]["sum"] == pytest.approx(2.0), "away from the turn's end to the next one's arrival"


def test_one_that_did_not_speaks_against_it() -> None:
    told = plain(ended(LeaseEndReason.DEADLINE_PASSED))
    assert (told["returned"], told["late"]) == (0, 1)
    assert told["brier_sum"] == pytest.approx(0.8**2)
    assert told["away_s"]["sum"] == 0


@pytest.mark.parametrize("reason", [LeaseEndReason.OUTBID, LeaseEndReason.PROGRAM_OVER, LeaseEndReason.QUEUED_TOO_LONG])
def test_a_lease_that_was_taken_away_says_nothing(reason: LeaseEndReason) -> None:
    told = plain(ended(reason))
    assert (told["returned"], told["late"], told["predicted"]) == (0, 0, 0)
    assert sum(told["ttl_s"]["counts"]) == 1, "the deadline was chosen all the same"


def test_a_provisional_lease_has_no_deadline_that_anybody_chose() -> None:
    assert sum(plain(ended(LeaseEndReason.DEADLINE_PASSED, state=LeaseState.PROVISIONAL))["ttl_s"]["counts"]) == 0


def test_a_policy_without_probabilities_is_counted_and_not_scored() -> None:
    told = plain(ended(LeaseEndReason.DEADLINE_PASSED, return_probability=None))
    assert told["late"] == 1
    assert told["predicted"] == 0
