"""What the API says about tools: which there are, how long they take, and what that is worth."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agent_program.clock import Clock, SystemClock
from agent_program.errors import PlatformError, ToolNotFound
from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolEvent, ToolEventKind, ToolOutcome
from deployments.fleet import ENGINE_PART, Fleet
from deployments.ttl_now import ttl_now
from tool_runtime.history import LatencyHistory
from tool_runtime.history_writer import HistoryWriter
from tool_runtime.latency import LatencySnapshot, ToolLatency
from tool_runtime.registry import BUILTIN_TOOLS, ToolSpec, openai_schema

logger = logging.getLogger(__name__)

_QUANTILES = {"p50_s": 0.5, "p90_s": 0.9, "p95_s": 0.95, "p99_s": 0.99}
Specs = Callable[[], Awaitable[Mapping[str, ToolSpec]]]


class NoSuchTool(ToolNotFound):
    """No such tool, and nothing was measured under this name."""

    status = 404


class ToolDirectory:
    """Which tools programs may name: what a tool actor says, asked now and then; what is always there until one answers."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Sequence[ToolSpec]]] | None = None,
        *,
        static: Mapping[str, ToolSpec] = BUILTIN_TOOLS,
        clock: Clock | None = None,
        refresh_s: float = 15.0,
    ) -> None:
        """`ask` asks an actor; without it there are the `static` tools and no others."""
        self._ask = ask
        self._known = static
        self._clock = clock or SystemClock()
        self._refresh_s = refresh_s
        self._asked_s: float | None = None
        self._asking = asyncio.Lock()

    async def specs(self) -> Mapping[str, ToolSpec]:
        """The tools by name, at most `refresh_s` old while actors answer."""
        async with self._asking:
            now_s = self._clock.now_s()
            if self._ask is not None and (self._asked_s is None or now_s - self._asked_s >= self._refresh_s):
                try:
                    self._known = {spec.name: spec for spec in await self._ask()}
                except PlatformError as error:
                    logger.warning("no tool actor says which tools there are: %s", error.message)
                self._asked_s = self._clock.now_s()
        return self._known


class ToolCatalog:
    """Registered tools and the latency history."""

    def __init__(
        self,
        tools: Specs,
        history: LatencyHistory,
        *,
        fleet: Fleet | None = None,
        clock: Clock | None = None,
        k_cold_start: int = 100,
        engine_timeout_s: float = 5.0,
    ) -> None:
        """`fleet` has the engines, whose estimates say what a tool's times are worth; without one nothing is said of that."""
        self._tools = tools
        self._history = history
        self._fleet = fleet
        self._clock = clock or SystemClock()
        self._k_cold_start = k_cold_start
        self._engine_timeout_s = engine_timeout_s
        self._writer = HistoryWriter(history, flush_interval_s=0.5, buffered_samples_max=10_000)

    async def list(self) -> dict[str, Any]:
        """All tools, in OpenAI's shape; `idempotent` says whether an interrupted call is repeated."""
        data = [
            {
                **openai_schema(spec),
                "idempotent": spec.idempotent,
                "kind": spec.kind.value,
                "server": spec.server,
                "needs_approval": spec.needs_approval,
            }
            for spec in (await self._tools()).values()
        ]
        return {"object": "list", "data": data}

    def record(self, event: ToolEvent) -> None:
        """A client that runs its own tools reports one as finished: its time belongs to the history as any other.

        Returns at once. Without a duration there is nothing to record.
        """
        if event.kind is ToolEventKind.FINISHED and event.elapsed_s > 0:
            self._writer.record(
                LatencySample(
                    tool=event.tool,
                    duration_s=event.elapsed_s,
                    outcome=event.outcome or ToolOutcome.OK,
                    source=SampleSource.CLIENT,
                    at_wall_s=self._clock.wall_s(),
                )
            )

    async def latency(self, name: str, *, context_tokens: int | None = None) -> dict[str, Any]:
        """What was measured under a tool key: a tool's name, or a program that a shell ran, such as `pytest`; and what each
        engine's running policy would do with a context of `context_tokens` now; by default a usual one that the engine's model takes.

        Raises:
            NoSuchTool: neither a tool nor a key with samples.
            StoreUnavailable: the history does not answer.
        """
        snapshot = await self._history.snapshot()
        known = snapshot.tools.get(ToolKey(name))
        if known is None and name not in await self._tools():
            raise NoSuchTool(f"no tool called {name[:100]!r}, and nothing was measured under this name", param="name")
        latency = known or ToolLatency()
        return {
            **_to_wire(name, latency),
            "quantiles_s": list(latency.quantiles),
            "censored_quantiles_s": list(latency.censored_quantiles),
            "ttl_now": await self._ttls(name, snapshot, context_tokens),
        }

    async def latencies(self) -> dict[str, Any]:
        """Every tool key that anything was measured under, the most used first.

        Raises:
            StoreUnavailable: the history does not answer.
        """
        measured = (await self._history.snapshot()).tools.items()
        data = [_to_wire(key, latency) for key, latency in sorted(measured, key=lambda item: (-item[1].count, item[0]))]
        return {"object": "list", "data": data}

    async def close(self) -> None:
        """Write the samples that are left, and let go of the store."""
        await self._writer.close()

    async def _ttls(self, name: str, snapshot: LatencySnapshot, context_tokens: int | None) -> Sequence[dict[str, Any]]:
        """One entry for each engine replica that estimates anything and answers."""
        if self._fleet is None:
            return []
        answer = await self._fleet.ask(ENGINE_PART, "stats_here", timeout_s=self._engine_timeout_s)
        found = []
        for replica, stats in answer.answers:
            entry = ttl_now(name, snapshot, stats, context_tokens=context_tokens, k_cold_start=self._k_cold_start)
            if entry is not None:
                found.append({"replica": replica, **entry})
        return found


def _to_wire(name: str, latency: ToolLatency) -> dict[str, Any]:
    quantiles = {label: latency.quantile(probability) for label, probability in _QUANTILES.items()}
    return {
        "object": "tool_latency",
        "tool": name,
        "count": latency.count,
        "censored_count": latency.censored_count,
        "mean_s": latency.mean_s(),
        **quantiles,
    }
