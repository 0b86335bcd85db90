"""Latency history on the Redis protocol (Redis 7, Valkey 8 and later).

Keys, all in one hash slot so that a cluster can hold them:

    continuum:{latency}:version       string   grows by 1 with every batch
    continuum:{latency}:epoch         string   when the first batch was written; another one means that the store lost its data
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

import asyncio
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
from agent_program.tool_events import LatencySample, ToolOutcome
from tool_runtime.config import HistorySettings
from tool_runtime.history import HistoryLimits
from tool_runtime.latency import LatencySnapshot, Observation, ToolLatency, summarise
from tool_runtime.store_url import dialled_url

_PREFIX = "continuum:{latency}:"
_VERSION, _EPOCH = _PREFIX + "version", _PREFIX + "epoch"
_KEYS, _GLOBAL, _WINDOW = _PREFIX + "keys", _PREFIX + "global", _PREFIX + "window:"

#: One script, because a reader skips what it has seen by version: were the version taken in one step and the samples written
#: in another, a batch that lands late would carry a version that readers are already past.
#: KEYS: version, keys, global, epoch, window of each tool key. ARGV: global bound, window bound, keys bound, window prefix, samples
#: for the global list as one JSON array, then per window its tool key and its samples as one JSON array.
_ADD = """
local version = redis.call('INCR', KEYS[1])
if version == 1 then redis.call('SET', KEYS[4], table.concat(redis.call('TIME'), '.')) end
local function push(list, samples, bound)
  for _, sample in ipairs(cjson.decode(samples)) do redis.call('LPUSH', list, sample) end
  redis.call('LTRIM', list, 0, bound - 1)
end
push(KEYS[3], ARGV[5], ARGV[1])
for i = 5, #KEYS do
  local key = ARGV[6 + 2 * (i - 5)]
  push(KEYS[i], ARGV[7 + 2 * (i - 5)], ARGV[2])
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
        self._seen_epoch: str | bytes | None = None
        self._global = _Window([], self._limits.half_life_s)
        self._windows: dict[ToolKey, _Window] = {}

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
            json.dumps([_pack(sample) for sample in samples]),
        ]
        for key, packed in by_key.items():
            arguments += [key, json.dumps(packed)]
        keys = [_VERSION, _KEYS, _GLOBAL, _EPOCH, *(_WINDOW + key for key in by_key)]
        async with _translated():
            await self._add(keys=keys, args=arguments)

    async def snapshot(self) -> LatencySnapshot:
        async with _translated():
            await self._read_changes()
        # In a thread: with many windows this takes long enough to hold up the streams of an engine replica.
        return await asyncio.to_thread(self._summary, self._clock.wall_s())

    async def close(self) -> None:
        await self._redis.aclose()

    async def _read_changes(self) -> None:
        """Bring the local windows up to the store's version."""
        stored_version, epoch = await self._redis.mget(_VERSION, _EPOCH)
        version = int(stored_version or 0)
        if (version, epoch) == (self._seen_version, self._seen_epoch):
            return
        if epoch != self._seen_epoch:  # what is in the store now is what counts
            self._seen_version, self._windows = 0, {}
        versions = cast("list[tuple[str, float]]", await self._redis.zrange(_KEYS, 0, -1, withscores=True))
        changed = [key for key, written in versions if written > self._seen_version or key not in self._windows]
        reads = self._redis.pipeline(transaction=False)
        reads.lrange(_GLOBAL, 0, self._limits.global_samples_max - 1)
        for key in changed:
            reads.lrange(_WINDOW + key, 0, self._limits.window_samples_max - 1)
        global_packed, *windows_packed = await reads.execute()
        alive = {key for key, _ in versions}
        kept = {key: window for key, window in self._windows.items() if key in alive}
        half_life_s = self._limits.half_life_s
        read = {ToolKey(key): _Window(packed, half_life_s) for key, packed in zip(changed, windows_packed, strict=True)}
        self._windows, self._global = kept | read, _Window(global_packed, half_life_s)
        self._seen_version, self._seen_epoch = version, epoch

    def _summary(self, now_wall_s: float) -> LatencySnapshot:
        return LatencySnapshot(
            version=self._seen_version,
            global_=self._global.summary(now_wall_s),
            tools={key: window.summary(now_wall_s) for key, window in sorted(self._windows.items())},
        )


def redis_history(settings: HistorySettings, store_url: str) -> RedisHistory:
    """The history in the store, within the settings' bounds: all who write it must have the same."""
    return RedisHistory(
        store_url,
        HistoryLimits(
            window_samples_max=settings.window_samples_max,
            global_samples_max=settings.global_samples_max,
            keys_max=settings.keys_max,
            half_life_s=settings.half_life_s,
        ),
    )


class _Window:
    """A window as it was read, summarised when it is first asked for, and again only if age counts."""

    def __init__(self, packed: Sequence[str], half_life_s: float | None) -> None:
        self._packed = packed
        self._half_life_s = half_life_s
        self._observations: list[Observation] | None = None
        self._summary: ToolLatency | None = None

    def summary(self, now_wall_s: float) -> ToolLatency:
        if self._summary is not None and self._half_life_s is None:
            return self._summary
        if self._observations is None:
            unpacked = (_unpack(text) for text in self._packed)
            self._observations, self._packed = [one for one in unpacked if one is not None], ()
        self._summary = summarise(self._observations, now_wall_s=now_wall_s, half_life_s=self._half_life_s)
        return self._summary


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """The driver's errors as the platform's."""
    try:
        yield
    except (RedisError, OSError) as exc:
        raise StoreUnavailable(f"the tool-latency store does not answer: {exc}", retry_after_s=_RETRY_AFTER_S) from exc


def _pack(sample: LatencySample) -> str:
    return f"{sample.duration_s:.6f}:{sample.outcome}:{sample.source}:{sample.at_wall_s:.3f}"


#: Outcome as it is written → whether its duration is only a lower bound. A table, for it is asked for every sample.
_IS_CENSORED = {outcome.value: outcome.is_censored for outcome in ToolOutcome}


def _unpack(packed: str) -> Observation | None:
    try:
        duration, outcome, _, at_wall = packed.split(":")[:4]
        read = Observation(float(duration), _IS_CENSORED[outcome], float(at_wall))
    except (ValueError, KeyError):
        return None
    return read if math.isfinite(read.duration_s) and read.duration_s >= 0 else None
