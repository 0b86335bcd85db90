"""Latency history on the Redis protocol (Redis 7, Valkey 8 and later).

Keys, all in one hash slot so that a cluster can hold them:

    continuum:{latency}:version       string   grows by 1 with every batch
    continuum:{latency}:keys          zset     tool key → version at which it was last written
    continuum:{latency}:global        list     packed samples of all keys, newest first, bounded
    continuum:{latency}:window:<key>  list     packed samples of one key, newest first, bounded

Nothing expires by time: every list is trimmed to its bound as it is written, and of too many keys the one written longest
ago is dropped. A batch is written by one script, so a reader sees all of it or nothing. A batch that is written again after a lost
connection may count twice, which a window of a thousand samples bears.

A packed sample is `duration:outcome:source:wall time`, as in `1.25:ok:tool_runtime:1700000000.0`. What does not parse, from
another version say, is left out.

`snapshot` reads the windows that changed since its last call and no others.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from agent_program.clock import Clock, SystemClock
from agent_program.errors import StoreUnavailable
from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolOutcome
from tool_runtime.history import HistoryLimits
from tool_runtime.latency import LatencySnapshot, summarise
from tool_runtime.store_url import dialled_url

_PREFIX = "continuum:{latency}:"
_VERSION, _KEYS, _GLOBAL, _WINDOW = _PREFIX + "version", _PREFIX + "keys", _PREFIX + "global", _PREFIX + "window:"

#: One script, because a reader skips what it has seen by version: were the version taken in one step and the samples written
#: in another, a batch that lands late would carry a version that readers are already past.
#: KEYS: version, keys, global, window of each tool key. ARGV: global bound, window bound, keys bound, window prefix, samples
#: for the global list as one JSON array, then per window its tool key and its samples as one JSON array.
_ADD = """
local version = redis.call('INCR', KEYS[1])
local function push(list, samples, bound)
  for _, sample in ipairs(cjson.decode(samples)) do redis.call('LPUSH', list, sample) end
  redis.call('LTRIM', list, 0, bound - 1)
end
push(KEYS[3], ARGV[5], ARGV[1])
for i = 4, #KEYS do
  local key = ARGV[6 + 2 * (i - 4)]
  push(KEYS[i], ARGV[7 + 2 * (i - 4)], ARGV[2])
  redis.call('ZADD', KEYS[2], version, key)
end
local surplus = redis.call('ZCARD', KEYS[2]) - ARGV[3]
if surplus > 0 then
  local dropped = redis.call('ZPOPMIN', KEYS[2], surplus)
  for i = 1, #dropped, 2 do redis.call('DEL', ARGV[4] .. dropped[i]) end
end
return version
"""
_RETRY_AFTER_S = 2.0


class RedisHistory:
    """Durable history that any number of actors and engines share."""

    def __init__(
        self,
        store_url: str,
        limits: HistoryLimits | None = None,
        clock: Clock | None = None,
        *,
        socket_timeout_s: float = 5.0,
    ) -> None:
        self._limits = limits or HistoryLimits()
        self._clock = clock or SystemClock()
        self._redis = Redis.from_url(
            dialled_url(store_url, os.environ),
            decode_responses=True,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            max_connections=4,
        )
        self._add = self._redis.register_script(_ADD)
        self._seen_version = 0
        self._global: list[LatencySample] = []
        self._windows: dict[ToolKey, list[LatencySample]] = {}

    async def add(self, samples: Sequence[LatencySample]) -> None:
        if not samples:
            return
        by_key: dict[ToolKey, list[str]] = {}
        for sample in samples:
            by_key.setdefault(sample.tool, []).append(_pack(sample))
        arguments: list[str | int] = [
            self._limits.global_samples_max,
            self._limits.window_samples_max,
            self._limits.keys_max,
            _WINDOW,
            json.dumps([_pack_global(sample) for sample in samples]),
        ]
        for key, packed in by_key.items():
            arguments += [key, json.dumps(packed)]
        keys = [_VERSION, _KEYS, _GLOBAL, *(_WINDOW + key for key in by_key)]
        async with _translated():
            await self._add(keys=keys, args=arguments)

    async def snapshot(self) -> LatencySnapshot:
        async with _translated():
            await self._read_changes()
        now_wall_s, half_life_s = self._clock.wall_s(), self._limits.half_life_s
        return LatencySnapshot(
            version=self._seen_version,
            global_=summarise(self._global, now_wall_s=now_wall_s, half_life_s=half_life_s),
            tools={
                key: summarise(window, now_wall_s=now_wall_s, half_life_s=half_life_s)
                for key, window in sorted(self._windows.items())
            },
        )

    async def close(self) -> None:
        await self._redis.aclose()

    async def _read_changes(self) -> None:
        """Bring the local windows up to the store's version."""
        version = int(await self._redis.get(_VERSION) or 0)
        if version == self._seen_version:
            return
        if version < self._seen_version:  # the store lost its data, and so do we: what it tells is what counts
            self._seen_version, self._global, self._windows = 0, [], {}
        versions = cast("list[tuple[str, float]]", await self._redis.zrange(_KEYS, 0, -1, withscores=True))
        changed = [key for key, written in versions if written > self._seen_version or key not in self._windows]
        reads = self._redis.pipeline(transaction=False)
        reads.lrange(_GLOBAL, 0, self._limits.global_samples_max - 1)
        for key in changed:
            reads.lrange(_WINDOW + key, 0, self._limits.window_samples_max - 1)
        global_packed, *windows_packed = await reads.execute()
        alive = {key for key, _ in versions}
        self._windows = {key: window for key, window in self._windows.items() if key in alive}
        self._windows |= {
            ToolKey(key): _unpack_all(ToolKey(key), packed) for key, packed in zip(changed, windows_packed, strict=True)
        }
        self._global = _unpack_global(global_packed)
        self._seen_version = version


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """The driver's errors as the platform's."""
    try:
        yield
    except (RedisError, OSError) as exc:
        raise StoreUnavailable(f"the tool-latency store does not answer: {exc}", retry_after_s=_RETRY_AFTER_S) from exc


def _pack(sample: LatencySample) -> str:
    return f"{sample.duration_s:.6f}:{sample.outcome}:{sample.source}:{sample.at_wall_s:.3f}"


def _pack_global(sample: LatencySample) -> str:
    return f"{_pack(sample)}:{sample.tool}"


def _unpack(key: ToolKey, packed: str) -> LatencySample | None:
    try:
        duration, outcome, source, at_wall = packed.split(":")[:4]
        sample = LatencySample(
            tool=key,
            duration_s=float(duration),
            outcome=ToolOutcome(outcome),
            source=SampleSource(source),
            at_wall_s=float(at_wall),
        )
    except ValueError:
        return None
    return sample if math.isfinite(sample.duration_s) and sample.duration_s >= 0 else None


def _unpack_all(key: ToolKey, packed: Sequence[str]) -> list[LatencySample]:
    return [sample for text in packed if (sample := _unpack(key, text)) is not None]


def _unpack_global(packed: Sequence[str]) -> list[LatencySample]:
    pairs = ((ToolKey(text.split(":", 4)[4]), text) for text in packed if text.count(":") >= 4)
    return [sample for key, text in pairs if (sample := _unpack(key, text)) is not None]
