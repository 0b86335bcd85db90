"""One behaviour of the keeper of drain orders, whatever keeps them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agent_program.clock import SystemClock
from agent_program.errors import StoreUnavailable
from agent_program.ids import ReplicaId
from continuum_router.drain_orders import KEPT_AFTER_S, DrainOrders, MemoryDrainOrders
from continuum_router.draining import Departure, DrainOrder
from continuum_router.redis_drain_orders import RedisDrainOrders
from support.redis_server import SERVERS, RedisServer

A, B = ReplicaId("a"), ReplicaId("b")


def order(**changes: object) -> DrainOrder:
    now = SystemClock().wall_s()
    fields = {"replica_id": A, "deadline_wall_s": now + 60.0, "departure": Departure.WAIT, **changes}
    return DrainOrder(**fields)  # type: ignore[arg-type]


@pytest.fixture(params=["memory", *SERVERS])
async def orders(request: pytest.FixtureRequest) -> AsyncIterator[DrainOrders]:
    if request.param == "memory":
        yield MemoryDrainOrders(clock=SystemClock())
        return
    with RedisServer(SERVERS[request.param]()) as server:
        made = RedisDrainOrders(server.url, namespace="engine", timeout_s=10.0)
        yield made
        await made.close()


async def test_an_order_stands_for_its_replica_alone_until_it_is_withdrawn(orders: DrainOrders) -> None:
    given = order()
    await orders.put(given)
    assert await orders.get(A) == given
    assert await orders.get(B) is None
    assert await orders.withdraw(A)
    assert await orders.get(A) is None
    assert not await orders.withdraw(A)


async def test_a_later_order_replaces_an_earlier_one(orders: DrainOrders) -> None:
    await orders.put(order())
    later = order(departure=Departure.LEAVE)
    await orders.put(later)
    assert await orders.get(A) == later


async def test_an_order_whose_deadline_has_passed_stands_for_a_while(orders: DrainOrders) -> None:
    late = order(deadline_wall_s=SystemClock().wall_s() - 1.0)
    await orders.put(late)
    assert await orders.get(A) == late


async def test_an_order_expires_in_the_store() -> None:
    with RedisServer(SERVERS["valkey"]()) as server:
        orders = RedisDrainOrders(server.url, namespace="engine", timeout_s=10.0)
        await orders.put(order())
        with server.client() as client:
            left_ms = client.pttl("continuum:drains:engine:a")
            assert 0 < left_ms <= (60 + KEPT_AFTER_S) * 1000
            client.set("continuum:drains:engine:b", "nonsense")
        assert await orders.get(B) is None
        await orders.close()


async def test_a_server_that_is_not_there_is_the_store_being_unavailable() -> None:
    orders = RedisDrainOrders("redis://127.0.0.1:9", namespace="engine", timeout_s=0.2)
    for question in (orders.get(A), orders.put(order()), orders.withdraw(A)):
        with pytest.raises(StoreUnavailable):
            await question
    await orders.close()
