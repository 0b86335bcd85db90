"""Signals between processes, over Redis pub/sub: one connection a process, subscribed to what someone here waits on.

Pub/sub loses what is sent while the connection is down, so after every reconnect, and whenever a subscription is confirmed,
the waiters of the topic are fired: they look for themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from deployments.signals import Signal, SignalHub

logger = logging.getLogger(__name__)

PREFIX = "continuum:signal:"
_RECONNECT_S = 0.5


class RedisSignals:
    """`SignalHub` fed from Redis."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._hub = SignalHub()
        self._pubsub: PubSub | None = None
        self._reader: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncIterator[Signal]:
        """A signal of the topic; fired by `PUBLISH` on `PREFIX + topic` from any process."""
        is_first = topic not in self._hub.topics()
        with self._hub.listen(topic) as signal:
            if self._reader is None:
                self._reader = asyncio.create_task(self._read_forever(), name="journal-signals")
            elif is_first:
                await self._tell("subscribe", topic)
            try:
                yield signal
            finally:
                self._hub_left_alone(topic)

    def _hub_left_alone(self, topic: str) -> None:
        # Runs before the hub forgets this waiter; the unsubscription is a hint, so nobody waits for it.
        asyncio.get_running_loop().call_soon(self._unsubscribe_if_unused, topic)

    def _unsubscribe_if_unused(self, topic: str) -> None:
        if self._reader is not None and topic not in self._hub.topics():
            task = asyncio.create_task(self._tell("unsubscribe", topic))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _tell(self, command: str, topic: str) -> None:
        if self._pubsub is None:
            return  # the reader subscribes to everything that is waited on when it connects
        with suppress(RedisError, OSError):
            await getattr(self._pubsub, command)(PREFIX + topic)

    async def _read_forever(self) -> None:
        while True:
            try:
                await self._read()
            except (RedisError, OSError) as error:
                logger.warning("signals: connection lost, waiters poll meanwhile: %s", error)
            self._pubsub = None
            await asyncio.sleep(_RECONNECT_S)

    async def _read(self) -> None:
        async with self._client.pubsub() as pubsub:
            # The channel without a topic keeps the connection subscribed to something while nobody waits.
            await pubsub.subscribe(PREFIX, *(PREFIX + topic for topic in self._hub.topics()))
            self._pubsub = pubsub
            self._hub.fire_all()
            while True:
                message = await pubsub.get_message(timeout=None)
                if message is not None and message["type"] in ("message", "subscribe"):
                    channel = message["channel"]
                    name = channel.decode() if isinstance(channel, bytes) else channel
                    self._hub.fire(name.removeprefix(PREFIX))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
            self._reader = None
