"""Orders to drain in Redis (or Valkey).

continuum:drains:<namespace>:<replica id>     string: JSON of deadline and departure; expires a while after the deadline
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from agent_program.clock import Clock, SystemClock
from agent_program.errors import StoreUnavailable
from agent_program.ids import ReplicaId
from continuum_router.drain_orders import KEPT_AFTER_S
from continuum_router.draining import Departure, DrainOrder
from tool_runtime.store_url import dialled_url

_T = TypeVar("_T")


class RedisDrainOrders:
    """The `DrainOrders` port over a Redis URL. Created without connecting; belongs to the event loop that first uses it."""

    def __init__(self, store_url: str, *, namespace: str, timeout_s: float = 2.0, clock: Clock | None = None) -> None:
        self._prefix = f"continuum:drains:{namespace}:"
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._redis = redis.asyncio.Redis.from_url(
            dialled_url(store_url, os.environ),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            decode_responses=True,
            max_connections=4,
            retry=Retry(NoBackoff(), 0),
        )

    async def get(self, replica_id: ReplicaId) -> DrainOrder | None:
        stored = await self._answer(self._redis.get(self._prefix + replica_id))
        return None if stored is None else parse_order(replica_id, str(stored))

    async def put(self, order: DrainOrder) -> None:
        left_s = max(0.0, order.deadline_wall_s - self._clock.wall_s()) + KEPT_AFTER_S
        call = self._redis.set(self._prefix + order.replica_id, order_text(order), px=round(left_s * 1000))
        await self._answer(call)

    async def withdraw(self, replica_id: ReplicaId) -> bool:
        return bool(await self._answer(self._redis.delete(self._prefix + replica_id)))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _answer(self, call: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except (RedisError, OSError, TimeoutError) as exc:
            raise StoreUnavailable(f"the store of drain orders does not answer: {exc or type(exc).__name__}") from exc


def order_text(order: DrainOrder) -> str:
    """An order as it is stored."""
    return json.dumps({"deadline_wall_s": order.deadline_wall_s, "departure": order.departure.value})


def parse_order(replica_id: ReplicaId, stored: str) -> DrainOrder | None:
    """A stored order; None where it is none of ours."""
    try:
        said: Any = json.loads(stored)
        return DrainOrder(
            replica_id=replica_id,
            deadline_wall_s=float(said["deadline_wall_s"]),
            departure=Departure(said["departure"]),
        )
    except (ValueError, KeyError, TypeError):
        return None
