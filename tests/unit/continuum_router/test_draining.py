"""A replica on its way out."""

from __future__ import annotations

import pytest

from agent_program.clock import ManualClock
from agent_program.ids import ReplicaId
from continuum_router.drain_orders import KEPT_AFTER_S, MemoryDrainOrders
from continuum_router.draining import SERVING, Departure, DrainOrder, DrainReason, DrainState, drain_status
from continuum_router.redis_drain_orders import order_text, parse_order

A = ReplicaId("a")
ORDER = DrainOrder(replica_id=A, deadline_wall_s=1000.0, departure=Departure.LEAVE)


def test_without_an_order_it_serves() -> None:
    assert drain_status(None, turns_open=0, quiet_s=99.0, now_wall_s=0.0, settle_s=5.0) == SERVING
    assert SERVING.takes_programs
    assert not SERVING.must_leave


@pytest.mark.parametrize(
    ("turns_open", "quiet_s", "now_wall_s", "state", "reason"),
    [
        (3, 9.0, 10.0, DrainState.DRAINING, None),  # turns run
        (0, 4.9, 10.0, DrainState.DRAINING, None),  # one may still be on its way
        (0, 5.0, 10.0, DrainState.DRAINED, DrainReason.EMPTY),
        (3, 0.0, 1000.0, DrainState.DRAINED, DrainReason.DEADLINE),
    ],
)
def test_it_leaves_when_it_is_empty_or_at_its_deadline(
    turns_open: int, quiet_s: float, now_wall_s: float, state: DrainState, reason: DrainReason | None
) -> None:
    status = drain_status(ORDER, turns_open=turns_open, quiet_s=quiet_s, now_wall_s=now_wall_s, settle_s=5.0)
    assert (status.state, status.reason) == (state, reason)
    assert not status.takes_programs
    assert status.must_leave == (state is DrainState.DRAINED)


def test_one_that_is_to_be_stopped_waits_for_that() -> None:
    order = DrainOrder(replica_id=A, deadline_wall_s=0.0, departure=Departure.WAIT)
    status = drain_status(order, turns_open=0, quiet_s=9.0, now_wall_s=1.0, settle_s=5.0)
    assert status.state is DrainState.DRAINED
    assert not status.must_leave


async def test_orders_are_forgotten_a_while_after_their_deadline_and_can_be_withdrawn() -> None:
    clock = ManualClock(wall_s=0.0)
    orders = MemoryDrainOrders(clock=clock)
    await orders.put(ORDER)
    assert await orders.get(A) == ORDER
    assert await orders.get(ReplicaId("b")) is None
    assert await orders.withdraw(A)
    assert not await orders.withdraw(A)
    await orders.put(ORDER)
    clock.advance(1000.0 + KEPT_AFTER_S)
    assert await orders.get(A) is None


def test_a_stored_order_is_read_back_and_what_is_none_is_none() -> None:
    assert parse_order(A, order_text(ORDER)) == ORDER
    for nonsense in ("", "{}", "[]", '{"deadline_wall_s": 1, "departure": "fly"}'):
        assert parse_order(A, nonsense) is None
