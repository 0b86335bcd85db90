"""Where a program without a binding goes: relatives, shared beginnings, load."""

from __future__ import annotations

from typing import Any

import pytest

from agent_program.ids import ProgramId, ReplicaId
from agent_program.turn import TurnHints
from continuum_router.affinity import Affinity, PrefixIndex, PrefixMark, RecentPrefixes, affinity_of, prefix_mark
from continuum_router.config import LoadWeights, RetrySettings
from continuum_router.placement import Fleet, Placement, Reason
from continuum_router.preference import NO_TIES, Ties, choose
from continuum_router.replica_view import KvReport, ReplicaView

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
WEIGHTS = LoadWeights()


def view(replica_id: ReplicaId, **fields: Any) -> ReplicaView:
    return ReplicaView(**{"replica_id": replica_id, "turns_max": 64, **fields})


def fleet(*views: ReplicaView) -> Fleet:
    made = Fleet(weights=WEIGHTS, seed=0, quarantine_s=10.0, report_period_s=1.0, retries=RetrySettings())
    made.replace(views, now_s=0.0)
    return made


def placed(target: Fleet, ties: Ties = NO_TIES, avoid: tuple[ReplicaId, ...] = ()) -> Placement:
    placement = choose(target, "p", ties=ties, weights=WEIGHTS, avoid=avoid)
    assert placement is not None
    return placement


def test_without_ties_the_least_loaded_replica_takes_it() -> None:
    assert placed(fleet(view(A, running=1), view(B))) == Placement(replica_id=B, reason=Reason.NEW)


def test_no_replica_is_no_placement() -> None:
    assert choose(fleet(), "p", ties=NO_TIES, weights=WEIGHTS) is None


# Relatives


def test_a_sub_program_goes_where_its_parent_is_although_another_replica_is_idle() -> None:
    placement = placed(fleet(view(A, running=5), view(B)), Ties(parent=A))
    assert placement == Placement(replica_id=A, reason=Reason.PARENT)
    assert placement.detail == {
        "load_turns": 5.0,
        "least_loaded": "b",
        "least_load_turns": 0.0,
        "kv_pressure": 0.0,
    }


@pytest.mark.parametrize(
    "parents",
    [
        {"running": 9},  # 9 > 0 + family_turns_max
        {"kv": KvReport(total_blocks=100, free_blocks=5, retained_blocks=0)},  # 95 % in use
        {"is_draining": True},
        {"running": 4, "turns_max": 4},  # full
    ],
)
def test_a_parents_replica_without_room_takes_no_sub_programs(parents: dict[str, Any]) -> None:
    assert placed(fleet(view(A, **parents), view(B)), Ties(parent=A)).replica_id == B


def test_a_parents_replica_that_is_gone_or_failed_the_turn_does_not_count() -> None:
    assert placed(fleet(view(A), view(B)), Ties(parent=C)).reason is Reason.NEW
    assert placed(fleet(view(A), view(B, running=3)), Ties(parent=A), avoid=(A,)).replica_id == B


def test_a_program_that_goes_on_with_an_ended_one_goes_where_that_was() -> None:
    placement = placed(fleet(view(A, running=2), view(B)), Ties(previous=A))
    assert (placement.replica_id, placement.reason) == (A, Reason.PREVIOUS)


def test_the_parent_comes_before_the_previous_program() -> None:
    assert placed(fleet(view(A), view(B)), Ties(parent=B, previous=A)).reason is Reason.PARENT


# Shared beginnings


def test_a_replica_that_has_the_beginning_is_worth_the_tokens_that_need_not_be_computed() -> None:
    busier = fleet(view(A, running=1), view(B))
    # 4,096 tokens at 2,048 a turn are worth 2 turns: 1 − 2 < 0.
    assert placed(busier, Ties(prefix=(A,), prefix_tokens=4096)) == Placement(replica_id=A, reason=Reason.SHARED_PREFIX)
    # 1,024 tokens are worth half a turn: 1 − 0.5 > 0.
    assert placed(busier, Ties(prefix=(A,), prefix_tokens=1024)).replica_id == B


def test_a_hot_beginning_does_not_draw_everybody_to_one_replica() -> None:
    # A million tokens are worth no more than prefix_turns_max = 4 turns.
    assert placed(fleet(view(A, running=5), view(B)), Ties(prefix=(A,), prefix_tokens=1_000_000)).replica_id == B


def test_of_several_that_have_the_beginning_the_least_loaded_takes_it() -> None:
    target = fleet(view(A, running=3), view(B, running=2), view(C, running=1))
    assert placed(target, Ties(prefix=(A, B), prefix_tokens=8192)).replica_id == B


# Avoiding


def test_a_replica_where_the_turn_failed_is_used_only_where_there_is_no_other() -> None:
    assert placed(fleet(view(A), view(B, running=9)), avoid=(A,)).replica_id == B
    assert placed(fleet(view(A)), avoid=(A,)).replica_id == A


# Marks


def body(system: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "x"}], **more}


def test_equal_beginnings_have_equal_marks_whatever_follows() -> None:
    one, other = body("Be brief."), body("Be brief.")
    other["messages"].append({"role": "assistant", "content": "y"})
    assert prefix_mark(one) == prefix_mark(other)
    assert prefix_mark(one) != prefix_mark(body("Be long."))
    assert prefix_mark(one) != prefix_mark(body("Be brief.", tools=[{"type": "function"}]))


def test_tenants_whose_kv_is_apart_have_marks_of_their_own() -> None:
    assert prefix_mark(body("Be brief.", cache_salt="a")) != prefix_mark(body("Be brief.", cache_salt="b"))


@pytest.mark.parametrize("malformed", [{}, {"messages": 3}, {"messages": ["x"]}, {"messages": "system"}])
def test_a_request_without_a_beginning_has_no_mark(malformed: dict[str, Any]) -> None:
    assert prefix_mark(malformed) is None


def test_affinity_is_read_off_the_request_and_whatever_else_comes_is_none() -> None:
    hints = TurnHints(program_id=ProgramId("p"), parent_program_id=ProgramId("q"), previous_program_id=ProgramId("r"))
    assert affinity_of({}, hints) == Affinity(parent=ProgramId("q"), previous=ProgramId("r"))
    assert affinity_of(None, None) == Affinity()
    assert affinity_of(body("Be brief."), None).prefix == prefix_mark(body("Be brief."))


def test_a_replica_tells_of_the_beginnings_that_it_used_last() -> None:
    recent = RecentPrefixes(capacity=2)
    for fingerprint in (1, 2, 1, 3):
        recent.note(PrefixMark(fingerprint=fingerprint, tokens=10))
    recent.note(None)
    assert recent.fingerprints() == [1, 3]


def test_the_index_is_bounded_in_beginnings_and_in_replicas() -> None:
    index = PrefixIndex(capacity=2, replicas_max=2)
    for replica_id in (A, B, C):
        index.note([1], replica_id)
    assert index.replicas(PrefixMark(fingerprint=1, tokens=1)) == (B, C)
    index.note([2, 3], A)
    assert len(index) == 2
    assert index.replicas(PrefixMark(fingerprint=1, tokens=1)) == ()
    assert index.replicas(None) == ()
