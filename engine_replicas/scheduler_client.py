"""The scheduler's utility calls, from the replica's side: bounded in time, counted, never in the way of a turn.

vLLM answers a utility call between two steps. A call to a core that dies is never answered, hence the time limit. The
lease is advice to the scheduler, so a call that fails is counted and logged and the turn goes on; only health is for the
caller to judge, from `silence_s`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any, Protocol

from agent_program.clock import Clock

logger = logging.getLogger(__name__)


class UtilityCalls(Protocol):
    """What is used of vLLM's engine-core client."""

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call `method` of the engine core with plain values."""
        ...


class SchedulerClient:
    """Calls the scheduler in the engine core."""

    def __init__(self, core: UtilityCalls, *, timeout_s: float, clock: Clock):
        self._core = core
        self._timeout_s = timeout_s
        self._clock = clock
        self._answered_at_s = clock.now_s()
        #: Calls that failed, by name.
        self.failures: Counter[str] = Counter()

    async def call(self, name: str, *args: Any) -> Any:
        """The scheduler's answer, or None where it gave none in time or failed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._core.call_utility_async(name, *args)
        except Exception as exc:  # noqa: BLE001 - whatever the other process raises comes back through this call
            self.failures[name] += 1
            logger.warning("the scheduler did not take %s: %r", name, exc, extra={"action": "scheduler_call_failed"})
            return None
        self._answered_at_s = self._clock.now_s()
        return answer

    @property
    def silence_s(self) -> float:
        """Seconds since the engine core last answered."""
        return self._clock.now_s() - self._answered_at_s
