"""How many replicas there should be, and that none goes with leases that it still has."""

from __future__ import annotations

from typing import Any

import pytest

from agent_program.ids import ReplicaId
from continuum_router.autoscaling import ReplicaLoad, ScaleReason, Scaling, ScalingState, scale, wanted_replicas
from continuum_router.config import AutoscalingSettings

SETTINGS = AutoscalingSettings(
    replicas_min=1, replicas_max=8, kv_fraction_target=0.8, waiting_turns_per_replica=4.0, shrink_after_s=60.0,
    drain_s=100.0,
)  # fmt: skip
NAMES = [ReplicaId(f"r{number}") for number in range(8)]


def load(number: int, **fields: Any) -> ReplicaLoad:
    idle = {"working_blocks": 0, "total_blocks": 100, "waiting_turns": 0, "running_turns": 0, "live_leases": 0}
    return ReplicaLoad(**{"replica_id": NAMES[number], **idle, **fields})


def look(
    loads: list[ReplicaLoad], state: ScalingState | None = None, *, now_s: float, target: int | None = None
) -> Scaling:
    running = [one.replica_id for one in loads]
    return scale(
        loads, running=running, target=len(loads) if target is None else target, state=state or ScalingState(),
        now_s=now_s, settings=SETTINGS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loads", "wanted", "reason"),
    [
        # 160 of 200 blocks at a target of 0.8 are two replicas, though no turn runs: these are paused programs.
        ([load(0, working_blocks=80, live_leases=9), load(1, working_blocks=80)], 2, ScaleReason.ENOUGH),
        # 180 / (0.8 × 100) = 2.25
        ([load(0, working_blocks=100), load(1, working_blocks=80)], 3, ScaleReason.MEMORY),
        # 17 / 4 = 4.25
        ([load(0, waiting_turns=17), load(1)], 5, ScaleReason.WAITING),
        ([load(0), load(1)], 1, ScaleReason.ENOUGH),
        ([load(0, waiting_turns=1000)], 8, ScaleReason.WAITING),
    ],
)
def test_working_sets_and_waiting_turns_say_how_many(
    loads: list[ReplicaLoad], wanted: int, reason: ScaleReason
) -> None:
    assert wanted_replicas(loads, SETTINGS) == (wanted, reason)


def test_growing_is_at_once() -> None:
    grown = look([load(0, waiting_turns=9)], now_s=0.0)
    assert (grown.replicas, grown.reason) == (3, ScaleReason.WAITING)


def test_while_a_replica_has_not_said_how_it_is_nothing_changes() -> None:
    looked = scale([load(0)], running=NAMES[:2], target=2, state=ScalingState(), now_s=0.0, settings=SETTINGS)
    assert (looked.replicas, looked.reason) == (2, ScaleReason.UNKNOWN)


IDLE = [load(0, working_blocks=20), load(1, live_leases=3)]


def drained(now_s: float = 60.0) -> Scaling:
    pending = look(IDLE, now_s=0.0)
    return look(IDLE, pending.state, now_s=now_s)


def test_shrinking_waits_and_then_drains_the_newest_instead_of_stopping_it() -> None:
    pending = look(IDLE, now_s=0.0)
    assert (pending.replicas, pending.reason, pending.drain) == (2, ScaleReason.SHRINK_PENDING, None)
    ordered = look(IDLE, pending.state, now_s=60.0)
    assert (ordered.replicas, ordered.reason, ordered.drain) == (2, ScaleReason.DRAINING, NAMES[1])


def test_a_moment_of_load_starts_the_wait_anew() -> None:
    pending = look(IDLE, now_s=0.0)
    busy = look([load(0, working_blocks=100), load(1, working_blocks=60)], pending.state, now_s=30.0)
    assert look(IDLE, busy.state, now_s=61.0).reason is ScaleReason.SHRINK_PENDING


def test_a_replica_with_leases_is_not_removed_before_it_has_drained() -> None:
    state = drained().state
    for leases in (3, 1):
        looked = look([load(0), load(1, live_leases=leases, is_draining=True)], state, now_s=90.0)
        assert (looked.replicas, looked.drain) == (2, NAMES[1])
    empty = look([load(0), load(1, is_draining=True)], state, now_s=95.0)
    assert (empty.replicas, empty.reason) == (1, ScaleReason.DRAINED)


def test_a_replica_that_looks_empty_and_has_not_heard_of_the_order_is_not_removed() -> None:
    looked = look([load(0), load(1)], drained().state, now_s=61.0)
    assert (looked.replicas, looked.reason) == (2, ScaleReason.DRAINING)


def test_at_its_deadline_it_goes_with_what_it_has() -> None:
    looked = look([load(0), load(1, live_leases=3, is_draining=True)], drained().state, now_s=160.0)
    assert (looked.replicas, looked.reason) == (1, ScaleReason.DRAINED)


def test_while_serve_stops_it_no_other_is_ordered_to_drain() -> None:
    gone = look([load(0), load(1, is_draining=True)], drained().state, now_s=95.0)
    still_there = look([load(0), load(1, is_draining=True)], gone.state, now_s=96.0, target=1)
    assert (still_there.replicas, still_there.drain, still_there.undrain) == (1, None, None)
    after = look([load(0)], still_there.state, now_s=97.0)
    assert after.state == ScalingState()


def test_load_that_comes_back_withdraws_the_order() -> None:
    looked = look([load(0, waiting_turns=8), load(1, is_draining=True)], drained().state, now_s=70.0)
    assert (looked.undrain, looked.state) == (NAMES[1], ScalingState())


def test_a_victim_that_died_is_forgotten() -> None:
    looked = look([load(0), load(2)], drained().state, now_s=70.0)
    assert looked.state.victim is None


def test_bounds_hold_whatever_happens() -> None:
    assert look([load(0)], now_s=1000.0).replicas == 1
    crowded = [load(number, working_blocks=100, waiting_turns=50) for number in range(8)]
    assert look(crowded, now_s=0.0).replicas == 8
