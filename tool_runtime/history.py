"""Where latency samples go and snapshots come from: the port, and the implementation that lives in memory.

Writers are tool actors and engine replicas, in batches and never from a scheduler step. Readers are engine replicas, off
the step loop. Every window is bounded, and so is the number of tool keys: the key that was written longest ago makes room.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_program.clock import Clock, SystemClock
from agent_program.ids import ToolKey
from agent_program.tool_events import LatencySample
from tool_runtime.latency import LatencySnapshot, Observation, observation, summarise


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryLimits:
    """How much is remembered, and how fast it fades."""

    #: Samples kept per tool key; the oldest goes first.
    window_samples_max: int = 1024
    #: Samples kept over all keys together, for tools that are not known well enough yet.
    global_samples_max: int = 4096
    #: Tool keys kept; the one written longest ago goes first.
    keys_max: int = 512
    #: Age at which a sample weighs half as much in the quantiles; None weighs all alike.
    half_life_s: float | None = None


class LatencyHistory(Protocol):
    """Durable (or not) memory of tool durations."""

    async def add(self, samples: Sequence[LatencySample]) -> None:
        """Remember `samples`; an empty batch changes nothing.

        Raises:
            StoreUnavailable: the store does not answer; the caller may keep the batch and try again.
        """
        ...

    async def snapshot(self) -> LatencySnapshot:
        """Everything remembered, summarised.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        ...

    async def close(self) -> None:
        """Let go of connections. What was remembered stays."""
        ...


class MemoryHistory:
    """History in this process: for tests, and for an engine's own samples while the store is away."""

    def __init__(self, limits: HistoryLimits | None = None, clock: Clock | None = None) -> None:
        self._limits = limits or HistoryLimits()
        self._clock = clock or SystemClock()
        self._global: deque[Observation] = deque(maxlen=self._limits.global_samples_max)
        self._windows: OrderedDict[ToolKey, deque[Observation]] = OrderedDict()
        self._version = 0

    async def add(self, samples: Sequence[LatencySample]) -> None:
        if not samples:
            return
        self._version += 1
        for sample in samples:
            self._global.append(observation(sample))
            window = self._windows.setdefault(sample.tool, deque(maxlen=self._limits.window_samples_max))
            window.append(observation(sample))
            self._windows.move_to_end(sample.tool)
        while len(self._windows) > self._limits.keys_max:
            self._windows.popitem(last=False)

    async def snapshot(self) -> LatencySnapshot:
        now_wall_s, half_life_s = self._clock.wall_s(), self._limits.half_life_s
        return LatencySnapshot(
            version=self._version,
            global_=summarise(self._global, now_wall_s=now_wall_s, half_life_s=half_life_s),
            tools={
                key: summarise(window, now_wall_s=now_wall_s, half_life_s=half_life_s)
                for key, window in self._windows.items()
            },
        )

    async def close(self) -> None:
        """Nothing to let go of."""
