"""Which first turns start, which turns are passed, and what declarations of remaining work are worth."""

import pytest

from agent_program.ids import TenantId
from engine_replicas.admission import NoAdmission, WorkingSet, WorkingSetView, idle_weight
from engine_replicas.backfill import RETRY_S, Backfill
from engine_replicas.declared_work import DeclaredWork
from engine_replicas.ordering import Adaptive, FirstTurnLane, OrderedTurn, Plas

TENANT = TenantId("default")


def view(active: float, idle: float = 0.0) -> WorkingSetView:
    return WorkingSetView(tokens_total=10_000, active_tokens=active, idle_tokens=idle)


# --- admission ----------------------------------------------------------------------------------------------------------


def test_a_program_starts_while_its_first_turn_fits_beside_the_others_with_room_to_grow() -> None:
    rule = WorkingSet(fraction=0.95, wait_max_s=600.0)
    assert rule.admits(1000, 0.0, view(8000))
    assert not rule.admits(1100, 0.0, view(8000))


def test_paused_programs_count_by_how_soon_they_may_be_back() -> None:
    rule = WorkingSet(fraction=0.95, wait_max_s=600.0)
    assert not rule.admits(1000, 0.0, view(8000, idle=2000 * idle_weight(1.0)))
    assert rule.admits(1000, 0.0, view(8000, idle=2000 * idle_weight(0.001)))


def test_whoever_has_waited_too_long_starts_all_the_same() -> None:
    assert WorkingSet(fraction=0.95, wait_max_s=600.0).admits(1000, 601.0, view(20_000))


def test_without_admission_everybody_starts() -> None:
    assert NoAdmission().admits(10**9, 0.0, view(10**9))


# --- backfill -----------------------------------------------------------------------------------------------------------


def backfill(skips_max: int = 2, wait_max_s: float = 30.0) -> Backfill:
    return Backfill(skips_max=skips_max, wait_max_s=wait_max_s)


def test_a_turn_that_did_not_fit_is_passed() -> None:
    queue = backfill()
    queue.refused("a", 0.0)
    assert queue.first_to_try(["a", "b"], 0.1) == 1


def test_it_is_tried_again_when_memory_was_freed_or_after_a_while() -> None:
    queue = backfill()
    queue.refused("a", 0.0)
    queue.memory_freed()
    assert queue.first_to_try(["a", "b"], 0.1) == 0
    queue.refused("a", 0.1)
    assert queue.first_to_try(["a", "b"], 0.1 + RETRY_S) == 0


def test_no_more_than_so_many_are_passed() -> None:
    queue = backfill(skips_max=2)
    for turn in "abc":
        queue.refused(turn, 0.0)
    assert queue.first_to_try(list("abd"), 0.1) == 2
    assert queue.first_to_try(list("abcd"), 0.1) == 4


def test_one_that_has_not_fitted_for_too_long_is_not_passed_any_more() -> None:
    queue = backfill(wait_max_s=30.0)
    queue.refused("a", 0.0)
    queue.refused("a", 30.5)
    assert queue.first_to_try(["a", "b"], 30.6) == 2
    assert queue.first_to_try(["a", "b"], 31.0) == 0


def test_one_that_ran_starts_anew() -> None:
    queue = backfill()
    queue.refused("a", 0.0)
    queue.left("a")
    assert queue.first_to_try(["a"], 0.1) == 0


def test_with_no_skips_allowed_nothing_passes() -> None:
    queue = backfill(skips_max=0)
    queue.refused("a", 0.0)
    assert queue.first_to_try(["a", "b"], 0.1) == 2


# --- the lane -----------------------------------------------------------------------------------------------------------


def test_the_lane_closes_when_the_first_turns_that_run_hold_their_share() -> None:
    lane = FirstTurnLane(tokens_max=1000, time_share=1.0)
    lane.scheduled("a", tokens=600, prefill_s=0.0, now_s=0.0)
    assert lane.is_open(0.0)
    lane.scheduled("b", tokens=600, prefill_s=0.0, now_s=0.0)
    assert not lane.is_open(0.0)
    lane.left("a")
    lane.left("a")
    assert lane.is_open(0.0)


def test_the_lane_closes_when_first_turns_have_taken_their_share_of_the_time_and_opens_as_it_passes() -> None:
    lane = FirstTurnLane(tokens_max=10**9, time_share=0.1)
    for index in range(10):  # 3 s of prefill in all
        if lane.is_open(0.0):
            lane.scheduled(f"t{index}", tokens=1, prefill_s=0.3, now_s=0.0)
    assert not lane.is_open(0.0)
    assert not lane.is_open(1.9)
    assert lane.is_open(2.1)


def test_no_more_than_a_little_lane_time_is_saved_up() -> None:
    lane = FirstTurnLane(tokens_max=10**9, time_share=0.1)
    lane.scheduled("a", tokens=1, prefill_s=1.5, now_s=1000.0)
    assert not lane.is_open(1000.0)


def turn(**known: float) -> OrderedTurn:
    facts = {"is_overdue": False, "is_preempted": False, "is_retained": False, "program_arrival_s": 0.0, **known}
    return OrderedTurn(**facts)  # type: ignore[arg-type]


def test_adaptive_order_is_overdue_lane_resident_least_work_arrival() -> None:
    order = [
        turn(is_overdue=True, program_arrival_s=9.0, remaining_s=9.0),
        turn(is_in_lane=True, program_arrival_s=9.0, remaining_s=9.0),
        turn(is_retained=True, program_arrival_s=8.0, remaining_s=9.0),
        turn(remaining_s=1.0, program_arrival_s=9.0),
        turn(remaining_s=2.0, program_arrival_s=1.0),
        turn(remaining_s=2.0, program_arrival_s=2.0),
    ]
    order.reverse()
    by_key = sorted(order, key=Adaptive().waiting_key)
    assert by_key == order[::-1]


def test_plas_serves_the_program_first_that_was_served_least_in_doubling_levels() -> None:
    order = [
        turn(attained_s=0.5, program_arrival_s=9.0),
        turn(attained_s=3.5, program_arrival_s=5.0),
        turn(attained_s=4.5, program_arrival_s=6.0),
        turn(attained_s=40.0, program_arrival_s=1.0),
    ]
    order.reverse()
    by_key = sorted(order, key=Plas().waiting_key)
    assert by_key == order[::-1]
    same_level = [turn(attained_s=5.0, program_arrival_s=1.0), turn(attained_s=4.0, program_arrival_s=2.0)]
    same_level.reverse()
    by_key = sorted(same_level, key=Plas().waiting_key)
    assert by_key == same_level[::-1]


# --- declared work ------------------------------------------------------------------------------------------------------


def test_remaining_work_is_the_declared_turns_left_at_the_programs_own_pace() -> None:
    work = DeclaredWork()
    assert work.remaining_s(TENANT, declared_turns=10, turns_done=4, attained_s=8.0) == pytest.approx(6 * 2.0)


def test_a_program_without_a_turn_yet_goes_at_everybodys_pace() -> None:
    work = DeclaredWork()
    work.turn_ran(3.0)
    assert work.remaining_s(TENANT, declared_turns=5, turns_done=0, attained_s=0.0) == pytest.approx(15.0)


def test_one_that_outlives_its_declaration_is_expected_to_go_on_in_proportion() -> None:
    work = DeclaredWork()
    assert work.remaining_s(TENANT, declared_turns=10, turns_done=20, attained_s=20.0) == pytest.approx(7.0)


def test_declarations_of_a_tenant_whose_programs_end_earlier_are_discounted() -> None:
    work = DeclaredWork()
    for _ in range(64):
        work.program_ended(TENANT, declared_turns=100, turns=20)
    assert work.ratio(TENANT) == pytest.approx(0.2, abs=0.06)
    assert work.ratio(TenantId("another")) == 1.0
    left_s = work.remaining_s(TENANT, declared_turns=100, turns_done=10, attained_s=10.0)
    assert left_s == pytest.approx(100 * work.ratio(TENANT) - 10)


def test_a_program_that_declares_nothing_counts_as_typical() -> None:
    work = DeclaredWork()
    assert work.remaining_s(TENANT, declared_turns=None, turns_done=3, attained_s=3.0) == 0.0
    for turns in (10, 20, 30):
        work.declared(work.remaining_s(TENANT, declared_turns=turns, turns_done=1, attained_s=1.0))
    typical_s = work.remaining_s(TENANT, declared_turns=None, turns_done=50, attained_s=3.0)
    assert 9.0 <= typical_s <= 29.0


def test_nonsense_declarations_change_nothing() -> None:
    work = DeclaredWork()
    work.program_ended(TENANT, declared_turns=0, turns=5)
    work.program_ended(TENANT, declared_turns=5, turns=0)
    assert work.ratio(TENANT) == 1.0
