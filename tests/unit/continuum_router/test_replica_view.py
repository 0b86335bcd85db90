"""A report comes from another process and another version: what it does not say is unknown, never an error."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_program.ids import ReplicaId
from continuum_router.replica_view import KvReport, ReplicaView

R = ReplicaId("r1")


def test_an_engine_report_is_read_whole() -> None:
    report = {
        "waiting": 3, "running": 2, "queued_tokens": 900,
        "free_blocks": 10, "retained_blocks": 30, "total_blocks": 100, "is_draining": True,
    }  # fmt: skip
    assert ReplicaView.from_report(R, 64, report) == ReplicaView(
        replica_id=R,
        turns_max=64,
        waiting=3,
        running=2,
        queued_tokens=900,
        kv=KvReport(total_blocks=100, free_blocks=10, retained_blocks=30),
        is_draining=True,
    )


def test_a_tool_actor_report_counts_sessions_as_running_and_calls_as_waiting() -> None:
    view = ReplicaView.from_report(R, 8, {"queued_calls": 4, "live_sessions": 5})
    assert (view.waiting, view.running, view.kv) == (4, 5, None)


@pytest.mark.parametrize(
    "report", [None, {}, {"waiting": "3"}, {"waiting": -1}, {"waiting": True}, {"waiting": math.nan}]
)
def test_what_is_absent_or_malformed_is_unknown(report: dict[str, object] | None) -> None:
    assert ReplicaView.from_report(R, 8, report) == ReplicaView(replica_id=R, turns_max=8)


@pytest.mark.parametrize(
    "report",
    [
        {"total_blocks": 100},
        {"free_blocks": 10},
        {"total_blocks": 0, "free_blocks": 0},
        {"total_blocks": 100, "free_blocks": 101},
    ],
)
def test_kv_is_unknown_unless_total_and_free_make_sense(report: dict[str, object]) -> None:
    assert ReplicaView.from_report(R, 8, report).kv is None


def test_retained_blocks_weigh_their_fraction() -> None:
    # 100 blocks: 10 free, 30 retained, so 60 in use: (60 + 0.5 × 30) / 100
    assert KvReport(total_blocks=100, free_blocks=10, retained_blocks=30).pressure(0.5) == pytest.approx(0.75)


NAMES = st.sampled_from(
    [
        "waiting",
        "running",
        "queued_tokens",
        "free_blocks",
        "retained_blocks",
        "total_blocks",
        "queued_calls",
        "live_sessions",
        "is_draining",
    ]
)
ANYTHING = (
    st.integers() | st.floats() | st.sampled_from(["", "3", "x"]) | st.booleans() | st.none() | st.lists(st.integers())
)


@settings(deadline=None)
@given(st.dictionaries(NAMES, ANYTHING))
def test_any_report_gives_a_view_whose_numbers_hold(report: dict[str, object]) -> None:
    view = ReplicaView.from_report(R, 8, report)
    assert min(view.waiting, view.running, view.queued_tokens) >= 0
    if view.kv is not None:
        assert 0 <= view.kv.retained_blocks <= view.kv.total_blocks - view.kv.free_blocks
        assert 0 <= view.kv.pressure(0.5) <= 1
