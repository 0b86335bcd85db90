"""The authority on bindings: which replica a program belongs to, one answer for all routers.

The rule is compare-and-set. A router that wants a program bound says to which replica, and which replica it believes gone (the
one it wants to replace), if any. If the program is unbound, or bound to the replica believed gone, the wish becomes the
binding; otherwise nothing changes. Either way the answer is the binding that now stands, and its time to live starts anew. So
of several routers that bind a program at once the first wins and the others learn of it; a router whose belief is stale
replaces nothing. A replica id names one incarnation (Serve gives a replacement another id), so it doubles as the epoch:
nothing can be bound to a dead replica's successor by mistake.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from agent_program.clock import Clock
from agent_program.ids import ProgramId, ReplicaId


class Bindings(Protocol):
    """Who is bound where. Every method raises `StoreUnavailable` when the authority does not answer in time."""

    async def get(self, program_id: ProgramId) -> ReplicaId | None:
        """The replica that the program is bound to; its time to live is left alone."""
        ...

    async def bind(self, program_id: ProgramId, wanted: ReplicaId, *, replacing: ReplicaId | None = None) -> ReplicaId:
        """Bind the program to `wanted` if it is unbound or bound to `replacing`; returns the binding that now stands."""
        ...

    async def release(self, program_id: ProgramId, replica_id: ReplicaId) -> bool:
        """End the binding if it is to `replica_id`; returns whether it was. Any other binding stands."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


class MemoryBindings:
    """Bindings of one process, for tests, simulations and single-process use.

    Holds at most `capacity`; when it is full the binding nearest its end goes (all live equally long from their last use,
    so that is the least recently used one).
    """

    def __init__(self, *, clock: Clock, ttl_s: float, capacity: int = 1_000_000) -> None:
        if capacity < 1 or ttl_s <= 0:
            raise ValueError("capacity and ttl_s must be positive")
        self._clock = clock
        self._ttl_s = ttl_s
        self._capacity = capacity
        #: program → (replica, end of life), least recently used first.
        self._bound: OrderedDict[ProgramId, tuple[ReplicaId, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bound)

    async def get(self, program_id: ProgramId) -> ReplicaId | None:
        replica_id, ends_s = self._bound.get(program_id, (None, 0.0))
        return replica_id if self._clock.now_s() < ends_s else None

    async def bind(self, program_id: ProgramId, wanted: ReplicaId, *, replacing: ReplicaId | None = None) -> ReplicaId:
        standing = await self.get(program_id)
        if standing is None or standing == replacing:
            standing = wanted
        self._bound[program_id] = (standing, self._clock.now_s() + self._ttl_s)
        self._bound.move_to_end(program_id)
        self._forget_ended()
        return standing

    async def release(self, program_id: ProgramId, replica_id: ReplicaId) -> bool:
        if await self.get(program_id) != replica_id:
            return False
        del self._bound[program_id]
        return True

    async def close(self) -> None:
        self._bound.clear()

    def _forget_ended(self) -> None:
        now_s = self._clock.now_s()
        while self._bound:
            _, ends_s = next(iter(self._bound.values()))
            if ends_s > now_s and len(self._bound) <= self._capacity:
                return
            self._bound.popitem(last=False)
