"""Filter, score, pick."""

from __future__ import annotations

from collections import Counter

import pytest

from agent_program.ids import ReplicaId
from continuum_router.config import LoadWeights
from continuum_router.placement import Fleet, load_turns
from continuum_router.replica_view import KvReport, ReplicaView

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
WEIGHTS = LoadWeights()


def view(replica_id: ReplicaId, **fields: object) -> ReplicaView:
    return ReplicaView(**{"replica_id": replica_id, "turns_max": 64, **fields})  # type: ignore[arg-type]


def fleet(*views: ReplicaView, seed: int = 0, quarantine_s: float = 10.0) -> Fleet:
    made = Fleet(weights=WEIGHTS, seed=seed, quarantine_s=quarantine_s, report_period_s=1.0)
    made.replace(views, now_s=0.0)
    return made


def place(target: Fleet, programs: int) -> Counter[ReplicaId]:
    """Place so many new programs one after the other, each binding as it is placed."""
    bound: Counter[ReplicaId] = Counter()
    for number in range(programs):
        chosen = target.choose(f"program-{number}")
        assert chosen is not None
        bound[chosen] += 1
        target.set_programs(chosen, bound[chosen])
    return bound


# Score


def test_load_adds_turns_queued_tokens_kv_and_programs() -> None:
    loaded = view(A, queued_tokens=4096, kv=KvReport(total_blocks=100, free_blocks=50, retained_blocks=20))
    # 3 turns + 4096/2048 + 16 × (30 + 0.5 × 20)/100 + 0.5 × 4 programs = 3 + 2 + 6.4 + 2
    assert load_turns(loaded, turns=3, programs=4, weights=WEIGHTS) == pytest.approx(13.4)


def test_a_replica_that_reports_nothing_has_no_load() -> None:
    assert load_turns(view(A), turns=0, programs=0, weights=WEIGHTS) == 0


@pytest.mark.parametrize(
    "busier",
    [
        {"waiting": 1},
        {"running": 1},
        {"queued_tokens": 2048},
        {"kv": KvReport(total_blocks=100, free_blocks=80, retained_blocks=20)},
    ],
)
def test_the_less_loaded_replica_takes_the_new_program(busier: dict[str, object]) -> None:
    assert fleet(view(A, **busier), view(B)).choose("p") == B
    assert fleet(view(A), view(B, **busier)).choose("p") == A


# Pick


def test_no_replica_gives_no_choice() -> None:
    assert fleet().choose("p") is None


def test_programs_that_arrive_together_split_evenly() -> None:
    assert place(fleet(view(A), view(B)), 20) == {A: 10, B: 10}


def test_a_burst_fills_up_the_emptier_replica_first_and_then_alternates() -> None:
    # B carries 3 turns, worth 6 programs at half a turn each: A takes 6 before they are even, then 7 each.
    assert place(fleet(view(A), view(B, running=3)), 20) == {A: 13, B: 7}


def test_equals_are_spread_by_the_programs_id_and_the_same_id_gets_the_same_answer() -> None:
    target = fleet(view(A), view(B), view(C))
    picks = Counter(target.choose(f"program-{number}") for number in range(300))
    assert set(picks) == {A, B, C}
    assert min(picks.values()) > 60
    assert len({target.choose("program-7") for _ in range(10)}) == 1


def test_another_seed_breaks_ties_otherwise() -> None:
    ids = [f"program-{number}" for number in range(50)]
    picks = [[fleet(view(A), view(B), seed=seed).choose(name) for name in ids] for seed in (1, 2)]
    assert picks[0] != picks[1]


def test_the_same_history_gives_the_same_placements() -> None:
    def history() -> list[ReplicaId | None]:
        target = fleet(view(A), view(B), view(C), seed=5)
        picks = [target.choose(f"p{number}") for number in range(10)]
        target.turn_sent(A)
        target.lose(B, now_s=1.0)
        return picks + [target.choose(f"q{number}") for number in range(10)]

    assert history() == history()


# Filter


def test_a_full_replica_takes_no_program_while_another_is_open() -> None:
    busy = view(B, turns_max=64, running=60)
    assert fleet(view(A, turns_max=1, running=1), busy).choose("p") == B


def test_when_all_are_full_the_least_loaded_takes_it() -> None:
    assert fleet(view(A, turns_max=2, running=9), view(B, turns_max=2, running=3)).choose("p") == B


def test_a_draining_replica_takes_no_program_while_another_lives_even_a_full_one() -> None:
    target = fleet(view(A, is_draining=True), view(B, turns_max=1, running=5))
    assert target.choose("p") == B
    assert not target.keeps(A)


def test_a_draining_replica_keeps_and_takes_programs_when_there_is_no_other() -> None:
    target = fleet(view(A, is_draining=True))
    assert target.choose("p") == A
    assert target.keeps(A)


# What was sent since the report


def test_turns_sent_since_the_report_count_at_once_and_no_longer_when_they_end() -> None:
    target = fleet(view(A), view(B, running=1))
    target.turn_sent(A)
    target.turn_sent(A)
    assert target.choose("p") == B
    target.turn_ended(A)
    target.turn_ended(A)
    assert target.choose("p") == A


def test_a_report_that_has_seen_our_turns_does_not_count_them_twice() -> None:
    target = fleet(view(A), view(B, running=3))
    target.turn_sent(A)
    target.turn_sent(A)
    target.replace([view(A, running=2), view(B, running=3)], now_s=0.5)
    assert target.choose("p") == A  # 2 turns, not 4


def test_turns_of_other_routers_stay_when_ours_end() -> None:
    target = fleet(view(A), view(B, running=2))
    target.turn_sent(A)
    target.replace([view(A, running=4), view(B, running=2)], now_s=0.5)  # 3 of them are of others
    target.turn_ended(A)
    assert target.choose("p") == B


def test_an_equal_report_after_a_period_is_a_new_one() -> None:
    target = fleet(view(A, running=2), view(B, running=1))
    target.turn_sent(A)
    target.turn_sent(A)
    target.replace([view(A, running=3), view(B, running=1)], now_s=0.1)  # ours, and 1 of others
    target.turn_ended(A)
    target.turn_ended(A)
    target.replace([view(A, running=3), view(B, running=1)], now_s=0.2)  # repeated for another replica's sake
    assert target.choose("some-program") in (A, B)
    target.replace(
        [view(A, running=3), view(B, running=1)], now_s=1.2
    )  # ours are over and it is 3 still: all of others
    assert {target.choose(f"p{number}") for number in range(20)} == {B}


def test_events_of_a_replica_that_is_gone_change_nothing() -> None:
    target = fleet(view(A))
    target.turn_sent(B)
    target.turn_ended(B)
    target.set_programs(B, 5)
    assert len(target) == 1
    assert target.choose("p") == A


# Loss


def test_a_replica_that_is_no_longer_listed_is_lost_and_one_never_seen_is_not() -> None:
    target = fleet(view(A), view(B))
    target.replace([view(A)], now_s=1.0)
    assert target.is_lost(B)
    assert not target.is_lost(C)
    assert not target.is_lost(A)


def test_a_replica_seen_dying_stays_out_though_a_late_broadcast_lists_it_and_may_return_later() -> None:
    target = fleet(view(A), view(B), quarantine_s=10.0)
    target.lose(B, now_s=1.0)
    assert target.replace([view(A), view(B)], now_s=5.0) == []
    assert B not in target
    assert target.replace([view(A), view(B)], now_s=11.0) == [B]
    assert not target.is_lost(B)


def test_a_replica_presumed_lost_is_welcome_as_soon_as_it_is_listed() -> None:
    target = fleet(view(A))
    target.presume_lost(B, now_s=1.0)
    assert target.is_lost(B)
    assert target.replace([view(A), view(B)], now_s=1.0) == [B]


def test_presuming_a_live_replica_lost_changes_nothing() -> None:
    target = fleet(view(A))
    target.presume_lost(A, now_s=1.0)
    assert A in target
    assert not target.is_lost(A)


def test_what_is_remembered_of_lost_replicas_is_bounded() -> None:
    target = fleet(view(A))
    for number in range(10_000):
        target.lose(ReplicaId(f"gone-{number}"), now_s=float(number))
    remembered = sum(target.is_lost(ReplicaId(f"gone-{number}")) for number in range(10_000))
    assert remembered == 4096
    assert target.is_lost(ReplicaId("gone-9999"))
