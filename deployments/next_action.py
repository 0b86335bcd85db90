"""What a program does next, and why. The whole ReAct loop in one function:

    it waits for its client?                expired: end; otherwise wait, without a runner
    a tool call without a result?           run those that the platform runs, then ask the client for the others
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
from deployments.access import cache_salt
from deployments.actions import required_calls
from deployments.program import ActionKind, EndReason, ProgramFailure, ProgramSpec, RequiredCall
from deployments.steps import PendingCall, Progress
from tool_runtime.registry import openai_schema


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
class AskClient:
    """Journal what the client is to do, and wait for it."""

    turn: int
    calls: tuple[RequiredCall, ...]
    #: Unix seconds.
    expires_at: float

    @property
    def is_human(self) -> bool:
        """Someone is asked for consent: that takes a person's time, and KV is not kept for so long."""
        return any(call.kind is ActionKind.APPROVAL for call in self.calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """The client has been asked and has not answered everything."""

    #: Unix seconds.
    expires_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The program is over."""

    state: ProgramState
    reason: EndReason
    error: ProgramFailure | None = None


Action = RunTurn | RunTools | AskClient | Wait | End

FINISHED = ProgramState.COMPLETED


def next_action(
    spec: ProgramSpec,
    progress: Progress,
    *,
    now_wall_s: float,
    turn_attempts_max: int,
    claims_in_a_row_max: int,
) -> Action:
    """The next action of a program that has not ended.

    Args:
        turn_attempts_max: replicas on which a turn is run when each of them is lost.
        claims_in_a_row_max: runners that may take the program one after the other without finishing anything.
    """
    if progress.claims_in_a_row > claims_in_a_row_max:
        message = f"{progress.claims_in_a_row - 1} runners in a row were lost before they finished a step"
        return _failed(EndReason.RUNNERS_LOST, ProgramFailure(code="runners_lost", message=message))
    if progress.action_expires_at is not None:
        return _wait(spec, progress.action_expires_at, now_wall_s)
    if progress.pending:
        return _run_or_ask(spec, progress, now_wall_s)
    if progress.turns and not progress.last_turn_called_tools and not spec.requires_tool:
        is_cut_off = progress.last_finish_reason == "length"
        return End(state=FINISHED, reason=EndReason.ANSWER_CUT_OFF if is_cut_off else EndReason.ANSWER)
    if (reached := _limit_reached(spec, progress, now_wall_s)) is not None:
        return End(state=FINISHED, reason=reached)
    if progress.replicas_lost >= turn_attempts_max:
        message = f"turn {progress.turns + 1} was lost {progress.replicas_lost} times with the replica that ran it"
        return _failed(EndReason.ENGINE_UNAVAILABLE, ProgramFailure(code="engine_unavailable", message=message))
    return _run_turn(spec, progress)


def _wait(spec: ProgramSpec, expires_at: float, now_wall_s: float) -> Wait | End:
    if now_wall_s >= expires_at:
        return End(state=ProgramState.EXPIRED, reason=EndReason.ACTION_EXPIRED)
    if seconds_left(spec, now_wall_s) <= 0:
        return End(state=FINISHED, reason=EndReason.MAX_SECONDS)
    return Wait(expires_at=min(expires_at, spec.created_at + spec.limits.max_seconds))


def _run_or_ask(spec: ProgramSpec, progress: Progress, now_wall_s: float) -> RunTools | AskClient | End:
    """What the platform runs comes first, so that the client is asked once a turn; and not for an output that no turn would
    read any more. A call that needs consent is worth asking about even then: what it does may be what the program is for."""
    asked = required_calls(progress.pending, spec.tools_by_name)
    asked_ids = {call.call_id for call in asked}
    ours = tuple(call for call in progress.pending if call.call_id not in asked_ids)
    if ours:
        return RunTools(turn=progress.turns, calls=ours)
    is_for_nothing = all(call.kind is ActionKind.OUTPUT for call in asked)
    if is_for_nothing and (reached := _limit_reached(spec, progress, now_wall_s)) is not None:
        return End(state=FINISHED, reason=reached)
    return AskClient(turn=progress.turns, calls=asked, expires_at=now_wall_s + spec.limits.action_expires_s)


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


def _run_turn(spec: ProgramSpec, progress: Progress) -> RunTurn:
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
    if (salt := cache_salt(spec.tenant_id)) is not None:
        body["cache_salt"] = salt
    if spec.tool_specs:
        body["tools"] = [openai_schema(tool) for tool in spec.tools_by_name.values()]
        body["tool_choice"] = spec.tool_choice
    if spec.requires_tool:
        # A grammar that requires a call lets a small model write calls until it is cut off, and then none of them counts.
        body.setdefault("parallel_tool_calls", False)
    hints = TurnHints(
        program_id=ProgramId(spec.id),
        tenant_id=TenantId(spec.tenant_id),
        is_last_turn=turn >= spec.limits.max_turns or not spec.tool_specs,
        remaining_turns=spec.limits.max_turns - turn if spec.tool_specs else 0,
        last_tool=ToolKey(progress.last_tool) if progress.last_tool else None,
        last_tool_s=progress.last_tool_s,
        parent_program_id=None if spec.parent_program_id is None else ProgramId(spec.parent_program_id),
        previous_program_id=None if spec.previous_program_id is None else ProgramId(spec.previous_program_id),
    )
    return RunTurn(turn=turn, attempt=progress.attempts + 1, body=body, hints=hints)
