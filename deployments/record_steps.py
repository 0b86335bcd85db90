"""What people see of a program, step by step: the record is the fold of the steps over the record of a queued program. Pure.

Also the steps that begin and end every program, which are made from its record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_program.states import ProgramEvent, ProgramState
from deployments.program import ActionKind, EndReason, ProgramFailure, ProgramRecord, ProgramSpec, RequiredAction
from deployments.steps import Step, StepKind, add_usage


def apply_to_record(record: ProgramRecord, step: Step) -> ProgramRecord:
    """The record after one more step.

    Raises:
        IllegalTransition: the record's state does not allow the step.
    """
    data = step.data
    record = record.model_copy(update={"updated_at": step.at})
    match step.kind:
        case StepKind.PROGRAM_QUEUED | StepKind.TURN_DELAYED:
            return record
        case StepKind.TURN_REPLAYED:
            return record.model_copy(update={"replayed_turns": record.replayed_turns + 1})
        case StepKind.PROGRAM_CLAIMED:
            return record.after(ProgramEvent.CLAIMED, started_at=record.started_at or step.at)
        case StepKind.TURN_STARTED:
            return record.after(ProgramEvent.TURN_STARTED)
        case StepKind.TURN_FINISHED:
            return record.model_copy(update=_turn_changes(record, data))
        case StepKind.TOOL_STARTED:
            is_first = record.state is not ProgramState.WAITING_TOOL
            record = record.after(ProgramEvent.TOOLS_STARTED) if is_first else record
            running = [record.current_tool, data["tool"]] if record.current_tool else [data["tool"]]
            return record.model_copy(update={"current_tool": "+".join(running), "tool_calls": record.tool_calls + 1})
        case StepKind.TOOL_FINISHED:
            running = (record.current_tool or "").split("+")
            if data["tool"] in running:
                running.remove(data["tool"])
            return _answered(record, data["call_id"]).model_copy(update={"current_tool": "+".join(running) or None})
        case StepKind.TOOLS_FINISHED:
            return record.model_copy(update={"tool_seconds": record.tool_seconds + data["seconds"]})
        case StepKind.ACTION_REQUIRED:
            return _action_required(record, data)
        case StepKind.ACTION_DECIDED:
            return _answered(record, data["call_id"])
        case StepKind.ACTION_TAKEN:
            return record.after(ProgramEvent.ACTION_TAKEN, required_action=None)
        case StepKind.PROGRAM_ENDED:
            return _ended(record, step)


def _action_required(record: ProgramRecord, data: Mapping[str, Any]) -> ProgramRecord:
    action = RequiredAction(expires_at=data["expires_at"], calls=data["calls"])
    # A call that the platform runs counts when it starts; one that the client runs starts here.
    started = sum(call.kind is ActionKind.OUTPUT for call in action.calls)
    return record.after(
        ProgramEvent.ACTION_REQUIRED,
        required_action=action,
        tool_calls=record.tool_calls + started,
        leases=_added(record.leases, data["lease_ends"]),
    )


def _answered(record: ProgramRecord, call_id: str) -> ProgramRecord:
    """Without what was asked of the client about the call."""
    action = record.required_action
    if action is None:
        return record
    left = [call for call in action.calls if call.call_id != call_id]
    return record.model_copy(update={"required_action": action.model_copy(update={"calls": left})})


def _turn_changes(record: ProgramRecord, data: Mapping[str, Any]) -> dict[str, Any]:
    content = data["message"].get("content")
    return {
        "turns": data["turn"],
        "usage": add_usage(record.usage, data),
        "replica": data["replica"],
        "leases": _added(record.leases, data["lease_ends"]),
        "output": content if isinstance(content, str) and content else record.output,
    }


def _added(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) + more.get(name, 0) for name in (*counts, *more)}


_ENDINGS = {
    ProgramState.COMPLETED: ProgramEvent.FINISHED,
    ProgramState.FAILED: ProgramEvent.ERRORED,
    ProgramState.CANCELLED: ProgramEvent.CANCELLED,
    ProgramState.EXPIRED: ProgramEvent.DEADLINE_PASSED,
}


def _ended(record: ProgramRecord, step: Step) -> ProgramRecord:
    error = step.data.get("error")
    return record.after(
        _ENDINGS[ProgramState(step.data["state"])],
        finished_at=step.at,
        end_reason=EndReason(step.data["end_reason"]),
        error=ProgramFailure(**error) if error else None,
        current_tool=None,
        required_action=None,
        leases=_added(record.leases, step.data["lease_ends"]),
    )


def queued_step(spec: ProgramSpec) -> Step:
    """The first step of every program."""
    data = {"model": spec.model, "tools": spec.tools, "limits": spec.limits.model_dump()}
    return Step(seq=1, kind=StepKind.PROGRAM_QUEUED, at=spec.created_at, data=data)


def ended_step(
    record: ProgramRecord,
    *,
    seq: int,
    at: float,
    state: ProgramState,
    reason: EndReason,
    error: ProgramFailure | None,
    lease_ends: Mapping[str, int] | None = None,
) -> Step:
    """The last step of every program."""
    data = {
        "state": state.value,
        "end_reason": reason.value,
        "error": error.model_dump() if error else None,
        "output": record.output,
        "lease_ends": dict(lease_ends or {}),
    }
    return Step(seq=seq, kind=StepKind.PROGRAM_ENDED, at=at, data=data)


def cancelled_while_queued(record: ProgramRecord, *, seq: int, at: float) -> tuple[Step, ProgramRecord]:
    """The step and the record of a program that is cancelled before any runner has taken it."""
    step = ended_step(record, seq=seq, at=at, state=ProgramState.CANCELLED, reason=EndReason.CANCELLED, error=None)
    return step, apply_to_record(record, step)
