"""Budgeted retries, and replicas that are given no more work for a while."""

from __future__ import annotations

from agent_program.ids import ReplicaId
from continuum_router.config import LoadWeights, RetrySettings
from continuum_router.placement import Fleet
from continuum_router.replica_view import ReplicaView
from continuum_router.resilience import Circuit, CircuitBreaker, RetryBudget

SETTINGS = RetrySettings(per_attempt=0.1, reserve=2, saved_max=3, failures_to_open=3, open_s=5.0, open_max_s=15.0)
A, B = ReplicaId("a"), ReplicaId("b")


def test_retries_are_a_fraction_of_the_traffic_beyond_the_reserve() -> None:
    budget = RetryBudget(SETTINGS)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(9):
        budget.first_attempt()
    assert not budget.spend()  # 0.9 of a retry is none
    budget.first_attempt()
    budget.first_attempt()
    assert budget.spend()


def test_saved_retries_have_a_ceiling_so_that_a_quiet_day_pays_for_no_storm() -> None:
    budget = RetryBudget(SETTINGS)
    for _ in range(10_000):
        budget.first_attempt()
    assert sum(budget.spend() for _ in range(100)) == 5  # reserve 2 + saved_max 3


def test_failures_in_a_row_open_the_circuit_and_an_answer_between_them_does_not() -> None:
    breaker = CircuitBreaker(SETTINGS)
    for _ in range(2):
        breaker.failed(0.0)
    breaker.answered(0.0)
    breaker.failed(0.0)
    breaker.failed(0.0)
    assert breaker.state(0.0) is Circuit.CLOSED
    breaker.failed(0.0)
    assert breaker.state(4.9) is Circuit.OPEN
    assert breaker.state(5.0) is Circuit.HALF_OPEN


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker(SETTINGS)
    for _ in range(3):
        breaker.failed(0.0)
    return breaker


def test_a_half_open_circuit_closes_on_an_answer() -> None:
    breaker = opened()
    breaker.answered(6.0)
    assert breaker.state(6.0) is Circuit.CLOSED
    breaker.failed(6.0)
    assert breaker.state(6.0) is Circuit.CLOSED  # it counts anew


def test_a_half_open_circuit_that_fails_opens_for_twice_as_long_up_to_a_bound() -> None:
    breaker = opened()
    for at_s, lasts_s in ((5.0, 10.0), (15.0, 15.0), (30.0, 15.0)):
        breaker.failed(at_s)
        assert breaker.state(at_s + lasts_s - 0.1) is Circuit.OPEN
        assert breaker.state(at_s + lasts_s) is Circuit.HALF_OPEN


def test_an_answer_from_before_the_circuit_opened_proves_nothing() -> None:
    breaker = opened()
    breaker.answered(1.0)
    assert breaker.state(1.0) is Circuit.OPEN


# In the fleet


def view(replica_id: ReplicaId, **fields: bool) -> ReplicaView:
    return ReplicaView(replica_id=replica_id, turns_max=8, **fields)


def fleet(*views: ReplicaView) -> Fleet:
    made = Fleet(weights=LoadWeights(), seed=0, quarantine_s=10.0, report_period_s=1.0, retries=SETTINGS)
    made.replace(views, now_s=0.0)
    return made


def test_programs_are_kept_off_a_suspect_replica_until_its_time_is_up() -> None:
    target = fleet(view(A), view(B))
    for _ in range(3):
        target.turn_failed(A, now_s=0.0)
    assert not target.keeps(A)
    assert {target.choose(f"p{number}") for number in range(20)} == {B}
    target.replace([view(A), view(B)], now_s=5.0)
    assert target.keeps(A)
    target.check_integrity()


def test_a_suspect_replica_is_better_than_a_draining_one_and_than_none() -> None:
    target = fleet(view(A), view(B, is_draining=True))
    for _ in range(3):
        target.turn_failed(A, now_s=0.0)
    assert target.choose("p") == A
    assert target.keeps(A)
    target.check_integrity()


def test_failures_of_a_replica_that_is_gone_change_nothing() -> None:
    target = fleet(view(A))
    target.turn_failed(B, now_s=0.0)
    target.turn_answered(B, now_s=0.0)
    assert target.choose("p") == A
