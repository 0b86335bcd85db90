"""Where orders to drain are kept: one for each replica incarnation, until a while after its deadline."""

from __future__ import annotations

from typing import Protocol

from agent_program.clock import Clock
from agent_program.ids import ReplicaId
from continuum_router.draining import DrainOrder

#: An order outlives its deadline by this, for a replica that is slow to go.
KEPT_AFTER_S = 3600.0


class DrainOrders(Protocol):
    """The orders. Every method raises `StoreUnavailable` when their keeper does not answer in time."""

    async def get(self, replica_id: ReplicaId) -> DrainOrder | None:
        """The order that stands for the replica."""
        ...

    async def put(self, order: DrainOrder) -> None:
        """The replica is to drain; a later order replaces an earlier one."""
        ...

    async def withdraw(self, replica_id: ReplicaId) -> bool:
        """The replica is to stay; False where nothing had been ordered."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class MemoryDrainOrders:
    """Orders of one process, for tests and simulations. Bounded by the orders whose time is not up."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._orders: dict[ReplicaId, DrainOrder] = {}

    async def get(self, replica_id: ReplicaId) -> DrainOrder | None:
        self._forget()
        return self._orders.get(replica_id)

    async def put(self, order: DrainOrder) -> None:
        self._forget()
        self._orders[order.replica_id] = order

    async def withdraw(self, replica_id: ReplicaId) -> bool:
        return self._orders.pop(replica_id, None) is not None

    async def close(self) -> None:
        self._orders.clear()

    def _forget(self) -> None:
        now = self._clock.wall_s()
        over = [name for name, order in self._orders.items() if order.deadline_wall_s + KEPT_AFTER_S <= now]
        for name in over:
            del self._orders[name]
