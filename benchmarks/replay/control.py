"""What a scheduler is told beside its requests: the utility calls that the engine replica makes in production."""

from __future__ import annotations

from typing import Any

from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import ToolEventKind, ToolOutcome


class UtilityCalls:
    """The same calls, with the same plain arguments, as `EngineCoreClient.call_utility_async` would deliver them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def turn_over(self, program_id: ProgramId, branch: str, tool: ToolKey | None, *, is_last_turn: bool) -> None:
        self._scheduler.continuum_lease_arm(program_id, branch, tool, is_last_turn)

    def program_over(self, program_id: ProgramId) -> None:
        self._scheduler.continuum_release(program_id)

    def tool_event(
        self, program_id: ProgramId, kind: ToolEventKind, tool: ToolKey, elapsed_s: float, outcome: ToolOutcome | None
    ) -> None:
        self._scheduler.continuum_tool_event(program_id, kind.value, tool, elapsed_s, outcome and outcome.value)

    def retained_blocks(self) -> int:
        return int(self._scheduler.continuum_stats()["retained_blocks"])

    def stats(self) -> dict[str, object]:
        return dict(self._scheduler.continuum_stats())


class NoControl:
    """For vLLM's own scheduler, which knows nothing of programs."""

    def turn_over(self, program_id: ProgramId, branch: str, tool: ToolKey | None, *, is_last_turn: bool) -> None:
        """Nothing to tell."""

    def program_over(self, program_id: ProgramId) -> None:
        """Nothing to tell."""

    def tool_event(
        self, program_id: ProgramId, kind: ToolEventKind, tool: ToolKey, elapsed_s: float, outcome: ToolOutcome | None
    ) -> None:
        """Nothing to tell."""

    def retained_blocks(self) -> int:
        return 0

    def stats(self) -> dict[str, object]:
        return {}
