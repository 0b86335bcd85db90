"""What a program does next, and why. The whole ReAct loop in one function:

    a tool call without a result?           run the tools
    the last turn called no tool?           that was the answer: end
    a limit reached?                        end, and say which
    otherwise                               run a turn

Limits are looked at between actions; the time limit also cuts an action short (`program_loop.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_program.ids import ProgramId, TenantId, ToolKey
from agent_program.states import ProgramState
from agent_program.turn import TurnHints
from deployments.program import EndReason, ProgramFailure, ProgramSpec
from deployments.steps import PendingCall, Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTurn:
    """Send the conversation to an engine."""

    turn: int
    #: 1 for the first try of this turn.
    attempt: int
    #: An OpenAI chat completion request.
    body: Mapping[str, Any]
    hints: TurnHints


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTools:
    """Run the calls that have no result yet."""

    turn: int
    calls: tuple[PendingCall, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The program is over."""

    state: ProgramState
    reason: EndReason
    error: ProgramFailure | None = None


Action = RunTurn | RunTools | End

FINISHED = ProgramState.COMPLETED


def next_action(
    spec: ProgramSpec,
    progress: Progress,
    *,
    now_wall_s: float,
    tool_schemas: Mapping[str, Mapping[str, Any]],
    turn_attempts_max: int,
    claims_in_a_row_max: int,
) -> Action:
    """The next action of a program that has not ended.

    Args:
        tool_schemas: each of the program's tools in OpenAI's shape, by name.
        turn_attempts_max: replicas on which a turn is run when each of them is lost.
        claims_in_a_row_max: runners that may take the program one after the other without finishing anything.
    """
    if progress.claims_in_a_row > claims_in_a_row_max:
        message = f"{progress.claims_in_a_row - 1} runners in a row were lost before they finished a step"
        return _failed(EndReason.RUNNERS_LOST, ProgramFailure(code="runners_lost", message=message))
    if progress.pending:
        return RunTools(turn=progress.turns, calls=progress.pending)
    if progress.turns and not progress.last_turn_called_tools and not spec.requires_tool:
        is_cut_off = progress.last_finish_reason == "length"
        return End(state=FINISHED, reason=EndReason.ANSWER_CUT_OFF if is_cut_off else EndReason.ANSWER)
    if (reached := _limit_reached(spec, progress, now_wall_s)) is not None:
        return End(state=FINISHED, reason=reached)
    if progress.replicas_lost >= turn_attempts_max:
        message = f"turn {progress.turns + 1} was lost {progress.replicas_lost} times with the replica that ran it"
        return _failed(EndReason.ENGINE_UNAVAILABLE, ProgramFailure(code="engine_unavailable", message=message))
    return _run_turn(spec, progress, tool_schemas)


def _failed(reason: EndReason, error: ProgramFailure) -> End:
    return End(state=ProgramState.FAILED, reason=reason, error=error)


def seconds_left(spec: ProgramSpec, now_wall_s: float) -> float:
    """Until `max_seconds`; never negative."""
    return max(0.0, spec.created_at + spec.limits.max_seconds - now_wall_s)


def _limit_reached(spec: ProgramSpec, progress: Progress, now_wall_s: float) -> EndReason | None:
    limits = spec.limits
    if progress.turns >= limits.max_turns:
        return EndReason.MAX_TURNS
    if limits.max_total_tokens is not None and progress.usage.total_tokens >= limits.max_total_tokens:
        return EndReason.MAX_TOTAL_TOKENS
    if seconds_left(spec, now_wall_s) <= 0:
        return EndReason.MAX_SECONDS
    return None


def _run_turn(spec: ProgramSpec, progress: Progress, tool_schemas: Mapping[str, Mapping[str, Any]]) -> RunTurn:
    turn = progress.turns + 1
    max_tokens = spec.limits.max_tokens_per_turn
    if spec.limits.max_total_tokens is not None:
        max_tokens = min(max_tokens, spec.limits.max_total_tokens - progress.usage.total_tokens)
    body: dict[str, Any] = {
        **spec.sampling,
        "model": spec.model,
        "messages": list(progress.messages),
        "max_tokens": max_tokens,
    }
    if spec.tools:
        body["tools"] = [tool_schemas[name] for name in spec.tools]
        body["tool_choice"] = spec.tool_choice
    if spec.requires_tool:
        # A grammar that requires a call lets a small model write calls until it is cut off, and then none of them counts.
        body.setdefault("parallel_tool_calls", False)
    hints = TurnHints(
        program_id=ProgramId(spec.id),
        tenant_id=TenantId(spec.tenant_id),
        is_last_turn=turn >= spec.limits.max_turns or not spec.tools,
        remaining_turns=spec.limits.max_turns - turn if spec.tools else 0,
        last_tool=ToolKey(progress.last_tool) if progress.last_tool else None,
        last_tool_s=progress.last_tool_s,
    )
    return RunTurn(turn=turn, attempt=progress.attempts + 1, body=body, hints=hints)
