"""The edge's queue: bounded, fair between tenants, honest about when to come again."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_program.ids import ProgramId, TenantId
from continuum_router.admission import EdgeAdmission, Ruling, RulingReason
from continuum_router.config import AdmissionSettings
from continuum_router.service_rate import ServiceRate

A, B = TenantId("a"), TenantId("b")
P = ProgramId("p")


def edge(**changes: Any) -> EdgeAdmission:
    return EdgeAdmission(AdmissionSettings(**{"turns_max": 2, "waiting_per_tenant_max": 3, **changes}))


def fill(target: EdgeAdmission, *, now_s: float = 0.0) -> list[int]:
    return [target.arrive(A, None, now_s=now_s).ticket for _ in range(2)]


def test_a_turn_starts_while_there_is_room_and_waits_when_there_is_none() -> None:
    target = edge()
    assert target.arrive(A, None, now_s=0.0).ruling is Ruling.START
    assert target.arrive(A, None, now_s=0.0).ruling is Ruling.START
    waiting = target.arrive(A, None, now_s=0.0)
    assert (waiting.ruling, waiting.reason) == (Ruling.WAIT, RulingReason.NO_ROOM)
    assert (target.running, target.waiting) == (2, 1)


def test_a_later_turn_of_a_program_that_was_let_in_is_never_refused_and_never_waits() -> None:
    target = edge(waiting_per_tenant_max=0)
    first = target.arrive(A, P, now_s=0.0)
    target.ended(first.ticket, now_s=1.0)
    fill(target)
    assert target.arrive(A, None, now_s=1.0).ruling is Ruling.REFUSE
    later = target.arrive(A, P, now_s=1.0)
    assert (later.ruling, later.reason) == (Ruling.START, RulingReason.ADMITTED_BEFORE)


def test_a_program_that_has_ended_is_new_again() -> None:
    target = edge(waiting_per_tenant_max=0)
    target.ended(target.arrive(A, P, now_s=0.0).ticket, now_s=1.0)
    fill(target)
    target.program_over(P)
    assert target.arrive(A, P, now_s=1.0).ruling is Ruling.REFUSE


def test_a_turn_that_ends_lets_the_next_one_start_in_order_of_arrival() -> None:
    target = edge()
    running = fill(target)
    waiting = [target.arrive(A, None, now_s=0.0).ticket for _ in range(3)]
    assert target.ended(running[0], now_s=1.0) == [waiting[0]]
    assert target.ended(running[1], now_s=1.0) == [waiting[1]]
    assert target.ended(running[1], now_s=1.0) == []  # it is over already


def test_a_tenants_queue_is_bounded_and_full_for_that_tenant_alone() -> None:
    target = edge()
    fill(target)
    for _ in range(3):
        target.arrive(A, None, now_s=0.0)
    refused = target.arrive(A, None, now_s=0.0)
    assert (refused.ruling, refused.reason) == (Ruling.REFUSE, RulingReason.TENANT_QUEUE_FULL)
    assert target.arrive(B, None, now_s=0.0).ruling is Ruling.WAIT


def test_all_queues_together_are_bounded() -> None:
    target = edge(waiting_max=1)
    fill(target)
    target.arrive(A, None, now_s=0.0)
    assert target.arrive(B, None, now_s=0.0).reason is RulingReason.QUEUES_FULL


def test_whoever_leaves_the_queue_makes_room_in_it() -> None:
    target = edge(waiting_per_tenant_max=1)
    fill(target)
    waiting = target.arrive(A, None, now_s=0.0)
    assert target.left(waiting.ticket)
    assert not target.left(waiting.ticket)
    assert target.arrive(A, None, now_s=0.0).ruling is Ruling.WAIT


# Fairness


def starts(target: EdgeAdmission, owners: dict[int, TenantId], running: list[int], count: int) -> list[TenantId]:
    """Who starts as turns end one by one."""
    order: list[TenantId] = []
    while len(order) < count:
        started = target.ended(running.pop(0), now_s=1.0)
        running += started
        order += [owners[ticket] for ticket in started]
    return order


def test_a_tenant_that_floods_does_not_hold_up_another_one() -> None:
    target = edge(waiting_per_tenant_max=100)
    running = fill(target)
    owners = {target.arrive(A, None, now_s=0.0).ticket: A for _ in range(50)}
    owners |= {target.arrive(B, None, now_s=0.0).ticket: B for _ in range(5)}
    order = starts(target, owners, running, 12)
    assert Counter(order)[B] == 5
    gaps = [at for at, tenant in enumerate(order) if tenant == B]
    assert max(later - earlier for earlier, later in pairwise(gaps)) <= 2


def test_weights_share_the_starts() -> None:
    target = edge(waiting_per_tenant_max=100, tenant_weights={"b": 3.0})
    running = fill(target)
    owners = {target.arrive(A, None, now_s=0.0).ticket: A for _ in range(40)}
    owners |= {target.arrive(B, None, now_s=0.0).ticket: B for _ in range(40)}
    assert Counter(starts(target, owners, running, 40)) == {B: 30, A: 10}


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    target = edge(waiting_per_tenant_max=200)
    running = fill(target)
    owners = {target.arrive(A, None, now_s=0.0).ticket: A for _ in range(100)}
    starts(target, owners, running, 30)
    owners |= {target.arrive(B, None, now_s=0.0).ticket: B for _ in range(20)}
    order = starts(target, owners, running, 20)
    assert abs(Counter(order)[A] - Counter(order)[B]) <= 1


# When to come again


def test_the_time_to_come_again_is_computed_from_the_rate_at_which_turns_end() -> None:
    target = edge(waiting_per_tenant_max=0)
    now_s = 0.0
    for _ in range(20):  # one turn every 4 s
        ticket = target.arrive(A, None, now_s=now_s).ticket
        now_s += 4.0
        target.ended(ticket, now_s=now_s)
    for _ in range(2):
        target.arrive(A, None, now_s=now_s)
    assert target.arrive(A, None, now_s=now_s).retry_after_s == 4


def test_before_any_turn_has_ended_it_is_a_setting() -> None:
    target = edge(waiting_per_tenant_max=0, retry_after_unknown_s=7)
    fill(target)
    assert target.arrive(A, None, now_s=0.0).retry_after_s == 7


def test_a_tenant_beside_others_is_told_its_share_and_nobody_more_than_the_bound() -> None:
    target = edge(waiting_per_tenant_max=1, retry_after_max_s=15)
    ticket = target.arrive(A, None, now_s=0.0).ticket
    target.ended(ticket, now_s=10.0)
    fill(target, now_s=10.0)
    target.arrive(A, None, now_s=10.0)
    assert target.retry_after_s(A, now_s=10.0) == 10
    assert target.retry_after_s(B, now_s=10.0) == 15  # 20 s, were it not bounded


def test_idle_time_does_not_make_the_rate_slow() -> None:
    rate = ServiceRate()
    assert rate.per_s(0.0) is None
    rate.began(0.0)
    rate.ended(0.5)
    rate.began(1000.0)
    rate.ended(1000.5)
    assert rate.per_s(2000.0) == 2.0 or abs((rate.per_s(2000.0) or 0) - 2.0) < 0.05


@given(
    events=st.lists(
        st.tuples(st.sampled_from(["arrive", "end", "leave"]), st.integers(0, 2), st.integers(0, 30)), max_size=120
    )
)
@settings(max_examples=60, deadline=None)
def test_under_any_events_queues_stay_bounded_and_nobody_is_forgotten(events: list[tuple[str, int, int]]) -> None:
    target = edge(waiting_max=5)
    running: list[int] = []
    waiting: list[int] = []
    for number, (kind, tenant, which) in enumerate(events):
        now_s = float(number)
        if kind == "arrive":
            program = ProgramId(f"p{which}") if which < 10 else None
            decision = target.arrive(TenantId(f"t{tenant}"), program, now_s=now_s)
            {Ruling.START: running, Ruling.WAIT: waiting}.get(decision.ruling, []).append(decision.ticket)
        elif kind == "end" and running:
            for started in target.ended(running.pop(which % len(running)), now_s=now_s):
                waiting.remove(started)
                running.append(started)
        elif kind == "leave" and waiting:
            assert target.left(waiting.pop(which % len(waiting)))
        assert target.running == len(running)
        assert target.waiting == len(waiting) <= 5
    while running:
        for started in target.ended(running.pop(), now_s=1000.0):
            waiting.remove(started)
            running.append(started)
    assert not waiting
