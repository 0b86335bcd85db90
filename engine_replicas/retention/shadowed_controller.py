"""The controller of an engine where a second policy looks on (`shadow.py`): it does what it always does, and tells the shadow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent_program.ids import ProgramId, ToolKey
from agent_program.tool_events import ToolEventKind, ToolOutcome
from agent_program.turn import TurnHints
from engine_replicas.retention.controller import RetentionController
from engine_replicas.retention.events import Armed, Changes, FinishedTurn, TurnEnding
from engine_replicas.retention.lease import BranchKey, LeaseEnd, LeaseEndReason
from engine_replicas.retention.programs import Program
from engine_replicas.retention.shadow import Shadow


class ShadowedController(RetentionController):
    """Decides as `RetentionController` does; whatever the shadow finds stays on paper."""

    def __init__(self, shadow: Shadow, *, blocks_total: int, free_blocks: Callable[[], int], **arguments: Any) -> None:
        """Start with no program.

        Args:
            shadow: who looks on.
            blocks_total: KV blocks of the engine.
            free_blocks: how many of them nobody holds now.
            arguments: the others of `RetentionController`.
        """
        super().__init__(blocks_total=blocks_total, **arguments)
        self._shadow = shadow
        self._blocks_total = blocks_total
        self._free_blocks = free_blocks

    def turn_arrived(self, turn_id: str, hints: TurnHints, now_s: float, *, has_stop_strings: bool = False) -> None:
        is_known = turn_id in self._turns
        super().turn_arrived(turn_id, hints, now_s, has_stop_strings=has_stop_strings)
        if not is_known:
            self._shadow.turn_arrived(turn_id, BranchKey(hints.program_id, hints.branch), now_s)

    def turn_scheduled(self, turn_id: str, hit_tokens: int, now_s: float) -> tuple[LeaseEnd, ...]:
        turn = self._turns.get(turn_id)
        is_news = turn is not None and not turn.is_scheduled
        ended = super().turn_scheduled(turn_id, hit_tokens, now_s)
        if turn is not None and is_news:
            self._shadow.turn_scheduled(
                turn_id,
                context_tokens=turn.context_tokens,
                hit_tokens=hit_tokens,
                loaded_tokens=turn.loaded_tokens,
                had_lease=turn.had_lease,
                now_s=now_s,
            )
        return ended

    def turn_finished(self, finished: FinishedTurn, now_s: float) -> Changes:
        turn = self._turns.get(finished.turn_id)
        is_over = turn is None or turn.program.is_over or turn.is_last
        changes = super().turn_finished(finished, now_s)
        if turn is not None:
            self._shadow.turn_left(finished.turn_id)
            if not is_over and (turn.is_armed_early or finished.ending is not TurnEnding.CUT):
                self._shadow.turn_ended(
                    finished,
                    turn.key,
                    tenant_id=turn.program.tenant_id,
                    program_arrival_s=turn.program.arrived_s,
                    tool=turn.early_tool or turn.hints.next_tool,
                    now_s=now_s,
                )
        return changes

    def arm(self, program_id: ProgramId, branch: str, tool: ToolKey | None, is_last_turn: bool, now_s: float) -> Armed:
        armed = super().arm(program_id, branch, tool, is_last_turn, now_s)
        if not is_last_turn:
            self._shadow.armed(BranchKey(program_id, branch), tool, now_s)
        return armed

    def tool_event(
        self,
        program_id: ProgramId,
        kind: ToolEventKind,
        tool: ToolKey,
        elapsed_s: float,
        outcome: ToolOutcome | None,
        now_s: float,
    ) -> None:
        super().tool_event(program_id, kind, tool, elapsed_s, outcome, now_s)
        program = self._programs.get(program_id)
        if program is None:
            return
        if kind is ToolEventKind.STARTED:
            self._shadow.tool_started(program_id, now_s - elapsed_s)
        elif kind is ToolEventKind.FINISHED and not program.tools.running:
            self._shadow.tools_finished(program_id, now_s)

    def release_all(self, reason: LeaseEndReason, now_s: float) -> tuple[LeaseEnd, ...]:
        self._shadow.cache_lost(reason, now_s)
        return super().release_all(reason, now_s)

    def expire(self, now_s: float) -> tuple[LeaseEnd, ...]:
        ended = super().expire(now_s)
        # What leases do not hold of the blocks that are not free, turns do; those of `ended` are given back only now.
        held = self._ledger.blocks_held + sum(len(end.lease.blocks) for end in ended)
        blocks_running = self._blocks_total - self._free_blocks() - held
        self._shadow.time_passed(blocks_running=blocks_running, now_s=now_s)
        return ended

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "shadow": self._shadow.stats()}

    def _end_program(self, program: Program, reason: LeaseEndReason, now_s: float) -> tuple[LeaseEnd, ...]:
        self._shadow.program_over(program.program_id, now_s)
        return super()._end_program(program, reason, now_s)

    def _note_all(self, ended: tuple[LeaseEnd, ...], now_s: float) -> tuple[LeaseEnd, ...]:
        for end in ended:
            self._shadow.real_lease_ended(end, now_s)
        return super()._note_all(ended, now_s)
