"""How long tool calls took and waited, for metrics: a distribution for each tool key, of a bounded number of keys.

A tool key is the name of a command, so a program chooses it. A key gets a distribution of its own at its third call and while
there is room; until then, and for ever where there is none, its calls are counted under `other`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from agent_program.histogram import WAIT_BOUNDS_S, Histogram
from agent_program.ids import ToolKey

OTHER = "other"
_KEYS_MAX = 48
_CALLS_MIN = 3
_CANDIDATES_MAX = 256


class CallTimes:
    """Distributions of one tool actor's calls."""

    def __init__(self) -> None:
        self._ran: dict[str, Histogram] = {}
        self._queued = Histogram(WAIT_BOUNDS_S)
        self._candidates: OrderedDict[str, int] = OrderedDict()

    def waited(self, seconds: float) -> None:
        """A call waited for its session, its slot and its sandbox."""
        self._queued.add(seconds)

    def ran(self, key: ToolKey, seconds: float) -> None:
        """A call ran, whatever came of it."""
        name = self._name(key)
        if name not in self._ran:
            self._ran[name] = Histogram(WAIT_BOUNDS_S)
        self._ran[name].add(seconds)

    def to_plain(self) -> dict[str, Any]:
        """Plain values: `queued`, and `ran` by tool key."""
        return {"queued": self._queued.to_plain(), "ran": {name: times.to_plain() for name, times in self._ran.items()}}

    def _name(self, key: str) -> str:
        if key in self._ran:
            return key
        if len(self._ran) >= _KEYS_MAX:
            return OTHER
        calls = self._candidates.pop(key, 0) + 1
        if calls >= _CALLS_MIN:
            return key
        self._candidates[key] = calls
        if len(self._candidates) > _CANDIDATES_MAX:
            self._candidates.popitem(last=False)
        return OTHER
