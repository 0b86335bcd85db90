"""Bindings in Redis (or Valkey).

    continuum:bindings:<namespace>:<program id>     string: the replica id; expires a time to live after its last use

One key a program, so that each operation touches one key (it works on a Redis Cluster as it is) and Redis itself forgets
idle programs. The namespace is "engine" or "tools": a program is bound to one replica of each. The compare-and-set runs as a
script, atomic in the server.

The client belongs to the event loop that first uses it: make one `RedisBindings` per loop. It is created without connecting.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from agent_program.errors import StoreUnavailable
from agent_program.ids import ProgramId, ReplicaId
from tool_runtime.store_url import dialled_url

_T = TypeVar("_T")

#: KEYS[1] the binding; ARGV: replica wanted, replica to replace ('' for none), time to live in ms. Returns what stands.
_BIND = """
local standing = redis.call('GET', KEYS[1])
if (not standing) or standing == ARGV[2] then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
  return ARGV[1]
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return standing
"""

#: KEYS[1] the binding; ARGV: the replica that it must be to. Returns 1 if it was, and is now gone.
_RELEASE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


class RedisBindings:
    """The `Bindings` port over a Redis URL."""

    def __init__(
        self, store_url: str, *, namespace: str, ttl_s: float, timeout_s: float = 0.5, connections_max: int = 16
    ) -> None:
        """Nothing connects yet.

        Raises:
            ValueError: a namespace that is not of small letters, digits, `_` and `-`, or a URL that is not a Redis URL.
        """
        if not re.fullmatch(r"[a-z0-9_-]{1,64}", namespace):
            raise ValueError(f"namespace {namespace!r} may hold small letters, digits, _ and - only")
        self._prefix = f"continuum:bindings:{namespace}:"
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._timeout_s = timeout_s
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            dialled_url(store_url, os.environ),
            max_connections=connections_max,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            decode_responses=True,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = redis.asyncio.Redis.from_pool(pool)
        self._bind = self._redis.register_script(_BIND)
        self._release = self._redis.register_script(_RELEASE)

    async def get(self, program_id: ProgramId) -> ReplicaId | None:
        replica_id = await self._answer(self._redis.get(self._prefix + program_id))
        return None if replica_id is None else ReplicaId(replica_id)

    async def bind(self, program_id: ProgramId, wanted: ReplicaId, *, replacing: ReplicaId | None = None) -> ReplicaId:
        if not wanted:
            raise ValueError("a replica id is not empty")
        call = self._bind(keys=[self._prefix + program_id], args=[wanted, replacing or "", self._ttl_ms])
        return ReplicaId(await self._answer(cast(Awaitable[str], call)))

    async def release(self, program_id: ProgramId, replica_id: ReplicaId) -> bool:
        call = self._release(keys=[self._prefix + program_id], args=[replica_id])
        return bool(await self._answer(cast(Awaitable[int], call)))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _answer(self, call: Awaitable[Any]) -> Any:
        # The timeout spans the whole call: connecting, and loading the script after a server restart.
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except (RedisError, OSError, TimeoutError) as exc:
            raise StoreUnavailable(f"the binding store does not answer: {exc or type(exc).__name__}") from exc
