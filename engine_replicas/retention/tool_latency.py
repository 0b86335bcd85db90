"""How long tools take, as this engine knows it: the shared history's last snapshot plus what it has seen itself since.

Every duration that an engine measures also goes to the shared history and comes back in a later snapshot. So that nothing
counts twice, a snapshot *replaces* what the engine saw itself, key by key. An engine's own samples stay only where they know
better: the snapshot does not have the key, or has so few samples of it that it must have lost some (a store that came back
empty). Without any snapshot (the store is away) the engine goes on with its own.

A snapshot carries a key's distribution as quantile points, each of which weighs count / points; an own sample weighs 1. Calls
that were cut off (`censored`) had not returned by then: they weigh in the total and at no duration.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_program.errors import InvalidRequest
from agent_program.ids import ToolKey
from tool_runtime.latency import LatencySnapshot, ToolLatency

#: A snapshot with this many samples of a key is never taken for one that lost some.
_COUNT_TRUSTED = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """A distribution of durations, and how many calls it stands for."""

    #: (seconds, weight) in ascending order of seconds.
    pairs: tuple[tuple[float, float], ...] = ()
    #: Weight of calls that never returned in the time they were watched.
    unreturned: float = 0.0
    count: int = 0

    @property
    def mean_s(self) -> float:
        """Mean of the calls that returned; 0 without any."""
        weight = sum(weight for _, weight in self.pairs)
        return sum(seconds * weight for seconds, weight in self.pairs) / weight if weight else 0.0


class SortedWindow:
    """The newest `size` values, kept in ascending order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_age: deque[float] = deque()
        self._ascending: list[float] = []

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, value: float) -> None:
        """Take in a value; the oldest goes when there are too many."""
        self._by_age.append(value)
        insort(self._ascending, value)
        if len(self._by_age) > self._size:
            del self._ascending[bisect_left(self._ascending, self._by_age.popleft())]

    def ascending(self) -> list[float]:
        """The values, smallest first. Not to be changed by the caller."""
        return self._ascending


@dataclass(slots=True)
class _History:
    """One key: the snapshot's part and the engine's own."""

    own: SortedWindow
    shared: Durations = field(default_factory=Durations)
    merged: Durations | None = None

    def add(self, duration_s: float) -> None:
        self.own.add(duration_s)
        self.merged = None

    def replace(self, shared: Durations, own: SortedWindow) -> None:
        self.shared, self.own, self.merged = shared, own, None

    def durations(self) -> Durations:
        if self.merged is None:
            # Two ascending runs: sorting them is a linear merge.
            pairs = [*self.shared.pairs, *((value, 1.0) for value in self.own.ascending())]
            pairs.sort()
            self.merged = Durations(
                pairs=tuple(pairs), unreturned=self.shared.unreturned, count=self.shared.count + len(self.own)
            )
        return self.merged


class ToolLatencyView:
    """Per-tool and global distributions of tool waits."""

    def __init__(self, *, window: int, tools_max: int) -> None:
        self._window = window
        self._tools_max = tools_max
        self._global = _History(SortedWindow(window))
        self._tools: dict[ToolKey, _History] = {}
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
        return self._global.durations()

    def of_tool(self, tool: ToolKey | None) -> Durations:
        """S[f]: durations of one tool; empty for a tool never seen."""
        history = self._tools.get(tool) if tool is not None else None
        return history.durations() if history is not None else Durations()

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
                history.replace(Durations(), history.own)
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
            "own_samples": len(self._global.own),
            "tools": len(self._tools),
        }

    def _adopt(self, history: _History, latency: ToolLatency) -> None:
        if latency.count + latency.censored_count >= min(len(history.own), _COUNT_TRUSTED):
            history.replace(_durations(latency), SortedWindow(self._window))
        else:
            history.replace(Durations(), history.own)

    def _touch(self, tool: ToolKey) -> _History:
        """The tool's history, made the most recently used; the least recently used one goes when there are too many."""
        history = self._tools.pop(tool, None) or _History(SortedWindow(self._window))
        self._tools[tool] = history
        if len(self._tools) > self._tools_max:
            del self._tools[next(iter(self._tools))]
        return history


def _durations(latency: ToolLatency) -> Durations:
    points = latency.quantiles
    return Durations(
        pairs=tuple((point, latency.count / len(points)) for point in points),
        unreturned=float(latency.censored_count),
        count=latency.count + latency.censored_count,
    )
