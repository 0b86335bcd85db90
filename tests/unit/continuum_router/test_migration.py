"""When a bound program leaves a replica that lives."""

from __future__ import annotations

from typing import Any

import pytest

from agent_program.ids import ProgramId, ReplicaId
from continuum_router.config import MigrationSettings
from continuum_router.migration import KvBelief, KvBeliefs, Verdict, expected_wait_s, weigh
from continuum_router.replica_view import ReplicaView

A, B = ReplicaId("a"), ReplicaId("b")
P, Q = ProgramId("p"), ProgramId("q")
SETTINGS = MigrationSettings(margin_s=2.0, min_stay_s=30.0)
NOW_S = 100.0


def view(replica_id: ReplicaId, **fields: Any) -> ReplicaView:
    measured = {"turns_per_s": 2.0, "context_tokens_per_s": 1000.0}
    return ReplicaView(**{"replica_id": replica_id, "turns_max": 64, **measured, **fields})


#: 40 turns at 2 a second: 20 s.
BUSY, IDLE = view(A, waiting=40), view(B)


def belief(**fields: Any) -> KvBelief:
    return KvBelief(**{"replica_id": A, "kept_until_s": 50.0, "context_tokens": 8000, **fields})


def test_a_program_whose_kv_is_kept_stays_whatever_the_queue() -> None:
    kept = weigh(belief(kept_until_s=NOW_S + 1), BUSY, IDLE, now_s=NOW_S, settings=SETTINGS)
    assert kept.verdict is Verdict.KV_KEPT


def test_a_program_of_which_nothing_is_known_stays() -> None:
    assert weigh(None, BUSY, IDLE, now_s=NOW_S, settings=SETTINGS).verdict is Verdict.KV_UNKNOWN
    elsewhere = belief(replica_id=B)
    assert weigh(elsewhere, BUSY, IDLE, now_s=NOW_S, settings=SETTINGS).verdict is Verdict.KV_UNKNOWN


def test_it_moves_where_the_wait_and_the_recompute_there_are_shorter_than_the_wait_here() -> None:
    # here 40 / 2 = 20 s; there 0 s and 8,000 / 1,000 = 8 s.
    weighed = weigh(belief(), BUSY, IDLE, now_s=NOW_S, settings=SETTINGS)
    assert weighed.verdict is Verdict.MOVE
    assert weighed.to_detail() == {
        "migration": "move",
        "wait_here_s": 20.0,
        "wait_there_s": 0.0,
        "again_there_s": 8.0,
    }


@pytest.mark.parametrize(
    ("context_tokens", "verdict"),
    [
        (17_999, Verdict.MOVE),  # 20 − 17.999 > 2
        (18_001, Verdict.WITHIN_MARGIN),  # 20 − 18.001 < 2
        (20_000, Verdict.HERE_IS_SHORTER),  # 20 − 20 = 0
    ],
)
def test_the_margin(context_tokens: int, verdict: Verdict) -> None:
    known = belief(context_tokens=context_tokens)
    assert weigh(known, BUSY, IDLE, now_s=NOW_S, settings=SETTINGS).verdict is verdict


def test_turns_sent_there_since_its_report_wait_there_too() -> None:
    # 30 sent at 2 a second: 15 s there, and 8 s to compute: longer than 20 s here.
    weighed = weigh(belief(), BUSY, IDLE, now_s=NOW_S, sent_there=30, settings=SETTINGS)
    assert weighed.verdict is Verdict.HERE_IS_SHORTER


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (view(A, waiting=40, turns_per_s=None), IDLE),
        (BUSY, view(B, waiting=1, turns_per_s=None)),
        (BUSY, view(B, context_tokens_per_s=None)),
    ],
)
def test_nothing_moves_on_a_guess(here: ReplicaView, there: ReplicaView) -> None:
    assert weigh(belief(), here, there, now_s=NOW_S, settings=SETTINGS).verdict is Verdict.COST_UNKNOWN


def test_a_program_that_moved_a_moment_ago_stays() -> None:
    moved = belief(moved_s=NOW_S - 29)
    assert weigh(moved, BUSY, IDLE, now_s=NOW_S, settings=SETTINGS).verdict is Verdict.MOVED_RECENTLY
    long_ago = belief(moved_s=NOW_S - 31)
    assert weigh(long_ago, BUSY, IDLE, now_s=NOW_S, settings=SETTINGS).verdict is Verdict.MOVE


def test_an_empty_queue_is_no_wait_even_where_no_rate_is_known() -> None:
    assert expected_wait_s(view(A, turns_per_s=None)) == 0.0


def test_beliefs_are_bounded_and_remember_the_last_move() -> None:
    beliefs = KvBeliefs(capacity=1)
    beliefs.replied(P, A, kept_until_s=1.0, context_tokens=10)
    beliefs.moved(P, B, now_s=5.0)
    beliefs.replied(P, B, kept_until_s=9.0, context_tokens=20)
    assert beliefs.get(P) == KvBelief(replica_id=B, kept_until_s=9.0, context_tokens=20, moved_s=5.0)
    beliefs.replied(Q, A, kept_until_s=1.0, context_tokens=10)
    assert beliefs.get(P) is None
    beliefs.forget(Q)
    assert len(beliefs) == 0
