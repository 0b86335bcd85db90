"""What the API says about tools: which there are, and how long they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_program.errors import ToolNotFound
from agent_program.ids import ToolKey
from tool_runtime.history import LatencyHistory
from tool_runtime.latency import ToolLatency
from tool_runtime.registry import ToolSpec, openai_schema

_QUANTILES = {"p50_s": 0.5, "p90_s": 0.9, "p95_s": 0.95, "p99_s": 0.99}


class NoSuchTool(ToolNotFound):
    """No such tool, and nothing was measured under this name."""

    status = 404


class ToolCatalog:
    """Registered tools and the latency history."""

    def __init__(self, specs: Mapping[str, ToolSpec], history: LatencyHistory) -> None:
        self._specs = specs
        self._history = history

    def list(self) -> dict[str, Any]:
        """All tools, in OpenAI's shape; `idempotent` says whether an interrupted call is repeated."""
        data = [{**openai_schema(spec), "idempotent": spec.idempotent} for spec in self._specs.values()]
        return {"object": "list", "data": data}

    async def latency(self, name: str) -> dict[str, Any]:
        """What was measured under a tool key: a tool's name, or a program that a shell ran, such as `pytest`.

        Raises:
            NoSuchTool: neither a tool nor a key with samples.
            StoreUnavailable: the history does not answer.
        """
        snapshot = await self._history.snapshot()
        known = snapshot.tools.get(ToolKey(name))
        if known is None and name not in self._specs:
            raise NoSuchTool(f"no tool called {name[:100]!r}, and nothing was measured under this name", param="name")
        return _to_wire(name, known or ToolLatency())

    async def latencies(self) -> dict[str, Any]:
        """Every tool key that anything was measured under, the most used first.

        Raises:
            StoreUnavailable: the history does not answer.
        """
        measured = (await self._history.snapshot()).tools.items()
        data = [_to_wire(key, latency) for key, latency in sorted(measured, key=lambda item: (-item[1].count, item[0]))]
        return {"object": "list", "data": data}


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
