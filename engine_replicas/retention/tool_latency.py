"""How long tools take, as this engine knows it: the shared history's last snapshot plus what it has seen itself since.

Every duration that an engine measures also goes to the shared history and comes back in a later snapshot. So that nothing
counts twice, a snapshot *replaces* what the engine saw itself, key by key. An engine's own samples stay only where they know
better: the snapshot does not have the key, or has so few samples of it that it must have lost some (a store that came back
empty). Without any snapshot (the store is away) the engine goes on with its own.

A snapshot carries a key's distribution as quantile points, each of which weighs count / points; an own sample weighs 1. Calls
that were cut off (`censored`) had not returned by then: they weigh in the total and at no duration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from agent_program.errors import InvalidRequest
from agent_program.ids import ToolKey
from engine_replicas.retention.duration_table import DurationTable
from engine_replicas.retention.ttl_argmax import BestTtl
from tool_runtime.latency import LatencySnapshot, ToolLatency

#: A snapshot with this many samples of a key is never taken for one that lost some.
_COUNT_TRUSTED = 256


class Durations:
    """The durations of one key: what a snapshot tells of them, and the newest `window` that the engine saw itself."""

    __slots__ = ("_own", "_shared", "_table", "_window", "count", "unreturned")

    def __init__(self, *, window: int) -> None:
        self._window = window
        self._own: deque[float] = deque()
        self._shared = ToolLatency()
        #: Both together; made again from them when it is next needed after a snapshot.
        self._table: DurationTable | None = DurationTable()
        #: Weight of calls that never returned in the time they were watched.
        self.unreturned = 0.0
        #: How many calls the distribution stands for.
        self.count = 0

    @property
    def own_count(self) -> int:
        """Calls that no snapshot holds yet."""
        return len(self._own)

    @property
    def pairs(self) -> tuple[tuple[float, float], ...]:
        """(seconds, weight) in ascending order of seconds. Costs time in proportion to them."""
        return tuple(self._durations().pairs())

    @property
    def mean_s(self) -> float:
        """Mean of the calls that returned; 0 without any."""
        return self._durations().mean_s

    def best_ttl(self, benefit_s: float) -> BestTtl:
        """The paper's TTL over these durations, where retaining brings `benefit_s` seconds."""
        return self._durations().best_ttl(benefit_s, unreturned=self.unreturned)

    def add(self, duration_s: float) -> None:
        """Take in what the engine saw itself; the oldest such duration goes when there are too many."""
        own, table = self._own, self._table
        own.append(duration_s)
        self.count += 1
        if table is not None:
            table.add(duration_s)
        if len(own) > self._window:
            oldest_s = own.popleft()
            self.count -= 1
            if table is not None:
                table.remove(oldest_s)

    def replace_shared(self, latency: ToolLatency, *, keep_own: bool) -> None:
        """Take what a snapshot tells in place of the last one's."""
        if not keep_own:
            self._own.clear()
        self._shared, self._table = latency, None
        self.unreturned = float(latency.censored_count)
        self.count = latency.count + latency.censored_count + len(self._own)

    def _durations(self) -> DurationTable:
        if self._table is None:
            points = self._shared.quantiles
            pairs = [(point, self._shared.count / len(points)) for point in points]
            pairs.extend((duration_s, 1.0) for duration_s in self._own)
            pairs.sort()
            self._table = DurationTable(pairs)
        return self._table


#: What is known of a tool that was never seen.
_NOTHING = Durations(window=0)


class ToolLatencyView:
    """Per-tool and global distributions of tool waits."""

    def __init__(self, *, window: int, tools_max: int) -> None:
        self._window = window
        self._tools_max = tools_max
        self._global = Durations(window=window)
        self._tools: dict[ToolKey, Durations] = {}
        #: The snapshot in use; None before the first.
        self.version: int | None = None

    def add_wait(self, tool: ToolKey | None, duration_s: float) -> None:
        """Learn how long a program waited, for `tool` if it is known."""
        self._global.add(duration_s)
        if tool is not None:
            self._touch(tool).add(duration_s)

    def add_call(self, tool: ToolKey, duration_s: float) -> None:
        """Learn how long one of several parallel calls took; their wait is one and is added apart."""
        self._touch(tool).add(duration_s)

    def all_tools(self) -> Durations:
        """S: durations of all tools."""
        return self._global

    def of_tool(self, tool: ToolKey | None) -> Durations:
        """S[f]: durations of one tool; empty for a tool never seen."""
        return self._tools.get(tool, _NOTHING) if tool is not None else _NOTHING

    def take_snapshot(self, plain: Mapping[str, Any]) -> int:
        """Adopt the shared history's snapshot. Returns the version now in use; the same version again changes nothing.

        Raises:
            InvalidRequest: not a snapshot; nothing is changed.
        """
        try:
            snapshot = LatencySnapshot.from_dict(plain)
        except ValueError as error:
            raise InvalidRequest(f"not a tool-latency snapshot: {error}") from error
        if snapshot.version == self.version:
            return snapshot.version
        for tool, history in self._tools.items():
            if tool not in snapshot.tools:
                history.replace_shared(ToolLatency(), keep_own=True)
        # The best known last, so that they are the ones that stay where there are too many.
        for tool, latency in sorted(snapshot.tools.items(), key=lambda item: item[1].count)[-self._tools_max :]:
            self._adopt(self._touch(tool), latency)
        self._adopt(self._global, snapshot.global_)
        self.version = snapshot.version
        return snapshot.version

    def counts(self) -> dict[str, int]:
        """Samples over all tools, those of them that no snapshot holds yet, and tools with a history."""
        return {
            "samples": self.all_tools().count,
            "own_samples": self._global.own_count,
            "tools": len(self._tools),
        }

    def _adopt(self, history: Durations, latency: ToolLatency) -> None:
        if latency.count + latency.censored_count >= min(history.own_count, _COUNT_TRUSTED):
            history.replace_shared(latency, keep_own=False)
        else:
            history.replace_shared(ToolLatency(), keep_own=True)

    def _touch(self, tool: ToolKey) -> Durations:
        """The tool's history, made the most recently used; the least recently used one goes when there are too many."""
        history = self._tools.pop(tool, None) or Durations(window=self._window)
        self._tools[tool] = history
        if len(self._tools) > self._tools_max:
            del self._tools[next(iter(self._tools))]
        return history
