"""One turn's way to a replica and back, watched: deadlines, which replica lost it, and what its reply says for the router.

    no piece within the silence that is allowed, or not closed by the deadline    ReplicaLost: out of reach counts as dead
    the replica is lost, or its engine                                           the router hears of it, and the program's next
                                                                                 attempt leaves that replica, dead or not
    the turn closes                                                              the router hears how its replica stands

Knows neither Ray nor the engine; `ray_clients.py` gives it a stream of items, and so does a simulation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_program.clock import Clock
from agent_program.errors import EngineUnavailable
from agent_program.ids import ReplicaId
from agent_program.turn import TurnHints
from continuum_router.exchange import Note, TurnLost, TurnReplied
from deployments.ports import ReplicaLost, TurnOutcome
from engine_replicas.turn_stream import TurnClosed, TurnOpened


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReport:
    """What a replica adds behind a closed turn: how it stands, as `record_routing_stats` would say."""

    report: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnTaken:
    """What a replica says first: it has the turn, which may wait there for long before it opens."""

    replica_id: ReplicaId


TurnItem = TurnOpened | str | TurnClosed
SentItem = TurnTaken | TurnItem | TurnReport


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnPatience:
    """How long a turn may take; None for as long as it likes."""

    #: Seconds until it is closed, queueing included.
    turn_s: float | None = None
    #: Seconds between two pieces of a stream, from its first one on.
    silence_s: float | None = None


class TurnMinder:
    """Watches the turns that one client sends. One event loop owns it."""

    def __init__(self, *, patience: TurnPatience, clock: Clock, tell: Callable[[Note], None]) -> None:
        self._patience = patience
        self._clock = clock
        self._tell = tell

    async def watch(self, items: AsyncIterator[SentItem], hints: TurnHints | None) -> AsyncGenerator[TurnItem, None]:
        """The turn's items, without what is the router's.

        Raises:
            ReplicaLost: the replica was lost, or is out of reach. Whatever `items` raises.
        """
        replica_id: ReplicaId | None = None
        opened: TurnOpened | None = None
        closed: TurnClosed | None = None
        ends_s = None if self._patience.turn_s is None else self._clock.now_s() + self._patience.turn_s
        try:
            while True:
                silence_s = self._patience.silence_s if opened is not None and opened.is_stream else None
                try:
                    item = await self._next(items, ends_s, silence_s)
                except StopAsyncIteration:
                    break
                if isinstance(item, TurnTaken):
                    replica_id = item.replica_id
                    continue
                if isinstance(item, TurnReport):
                    self._replied(hints, replica_id, closed, item)
                    continue
                if isinstance(item, TurnOpened):
                    opened, replica_id = item, item.replica_id
                elif isinstance(item, TurnClosed):
                    closed = item
                yield item
            if opened is None or closed is None:
                raise ReplicaLost("the engine replica ended the turn without closing it")
        except (ReplicaLost, EngineUnavailable):
            if closed is None:
                self._lost(hints, replica_id)
            raise

    async def _next(self, items: AsyncIterator[SentItem], ends_s: float | None, silence_s: float | None) -> SentItem:
        left_s = None if ends_s is None else max(0.0, ends_s - self._clock.now_s())
        limits = [limit for limit in (left_s, silence_s) if limit is not None]
        try:
            async with asyncio.timeout(min(limits, default=None)):
                return await anext(items)
        except TimeoutError:
            raise ReplicaLost(f"the engine replica did not answer within {min(limits):g} s") from None

    def _lost(self, hints: TurnHints | None, replica_id: ReplicaId | None) -> None:
        self._tell(TurnLost(program_id=None if hints is None else hints.program_id, replica_id=replica_id))

    def _replied(
        self, hints: TurnHints | None, replica_id: ReplicaId | None, closed: TurnClosed | None, item: TurnReport
    ) -> None:
        if hints is None or replica_id is None or closed is None:
            return
        lease = closed.lease or {}
        kept_s = float(lease.get("ttl_s") or 0.0) if lease.get("blocks") else 0.0
        self._tell(
            TurnReplied(
                program_id=hints.program_id,
                replica_id=replica_id,
                report=item.report,
                kept_s=kept_s,
                context_tokens=closed.prompt_tokens + closed.output_tokens,
            )
        )


async def turn_outcome(
    items: AsyncIterator[TurnItem], error: Callable[[int, Mapping[str, Any]], Exception]
) -> TurnOutcome:
    """A whole turn that was not streamed.

    Args:
        error: an error document of the engine's, as an exception.

    Raises:
        ReplicaLost: the turn was not closed. What `error` makes of an answer that is not 200.
    """
    opened: TurnOpened | None = None
    closed: TurnClosed | None = None
    pieces: list[str] = []
    async for item in items:
        match item:
            case TurnOpened():
                opened = item
            case TurnClosed():
                closed = item
            case str():
                pieces.append(item)
    if opened is None or closed is None:
        raise ReplicaLost("the engine replica ended the turn without closing it")
    document = json.loads("".join(pieces))
    if opened.status != 200:
        raise error(opened.status, document)
    choice = document["choices"][0]
    return TurnOutcome(
        message=choice["message"],
        finish_reason=choice["finish_reason"],
        prompt_tokens=closed.prompt_tokens,
        cached_tokens=closed.cached_tokens,
        output_tokens=closed.output_tokens,
        replica=opened.replica_id,
        lease=closed.lease,
        timings=closed.timings,
        context_tokens_max=closed.context_tokens_max,
    )
