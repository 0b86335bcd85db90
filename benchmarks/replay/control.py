"""What a scheduler is told beside its requests: the utility calls that the engine replica makes in production."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.core.sched.scheduler import Scheduler

from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import ToolEventKind, ToolOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """What a scheduler decided about the KV of a turn that ended."""

    #: Seconds from the end of the turn; 0 lets go at once, None keeps it without a deadline.
    ttl_s: float | None
    #: Why, in the scheduler's words.
    reason: str


class SchedulerControl(Protocol):
    """The utility calls of one replica's scheduler."""

    def turn_over(
        self, program_id: ProgramId, branch: str, tool: ToolKey | None, *, is_last_turn: bool
    ) -> Grant | None:
        """The turn's output is parsed: this tool runs next, or the program is over. None where nothing was decided."""
        ...

    def program_over(self, program_id: ProgramId) -> None:
        """Nothing of the program will come any more."""
        ...

    def tool_event(
        self, program_id: ProgramId, kind: ToolEventKind, tool: ToolKey, elapsed_s: float, outcome: ToolOutcome | None
    ) -> None:
        """A tool of the program started or finished."""
        ...

    def stats(self) -> dict[str, Any]:
        """The scheduler's counters: all that production reads, or what the router needs of vLLM's own class."""
        ...


class UtilityCalls:
    """The same calls, with the same plain arguments, as `EngineCoreClient.call_utility_async` would deliver them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def turn_over(
        self, program_id: ProgramId, branch: str, tool: ToolKey | None, *, is_last_turn: bool
    ) -> Grant | None:
        armed = self._scheduler.continuum_lease_arm(program_id, branch, tool, is_last_turn)
        if is_last_turn:
            return None
        ttl_s = armed["ttl_s"]
        return Grant(
            ttl_s=None if ttl_s is None or not math.isfinite(ttl_s) else float(ttl_s), reason=str(armed["reason"])
        )

    def program_over(self, program_id: ProgramId) -> None:
        self._scheduler.continuum_release(program_id)

    def tool_event(
        self, program_id: ProgramId, kind: ToolEventKind, tool: ToolKey, elapsed_s: float, outcome: ToolOutcome | None
    ) -> None:
        self._scheduler.continuum_tool_event(program_id, kind.value, tool, elapsed_s, outcome and outcome.value)

    def stats(self) -> dict[str, Any]:
        return dict(self._scheduler.continuum_stats())


class NoControl:
    """For vLLM's own scheduler, which knows nothing of programs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def turn_over(
        self, program_id: ProgramId, branch: str, tool: ToolKey | None, *, is_last_turn: bool
    ) -> Grant | None:
        return None

    def program_over(self, program_id: ProgramId) -> None:
        """Nothing to tell."""

    def tool_event(
        self, program_id: ProgramId, kind: ToolEventKind, tool: ToolKey, elapsed_s: float, outcome: ToolOutcome | None
    ) -> None:
        """Nothing to tell."""

    def stats(self) -> dict[str, Any]:
        pool = self._scheduler.kv_cache_manager.block_pool
        running, waiting = self._scheduler.get_request_counts()
        return {
            "total_blocks": pool.num_gpu_blocks - 1,
            "free_blocks": pool.get_num_free_blocks(),
            "retained_blocks": 0,
            "running": running,
            "waiting": waiting,
            "queued_tokens": sum(request.num_tokens for request in self._scheduler.waiting),
        }
