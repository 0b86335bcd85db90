"""What a program asks of its client, and what becomes of the client's answers. Pure.

Two things are asked for: the output of a call of the client's own tool, and consent to a call that the platform would run.
A turn's other calls run first; then the program waits, held by no runner, until every call that waits has been answered:

    action.required    which calls, and until when
    tool.finished      a client tool's output; or a call that was refused, with the refusal as its output
    action.decided     consent or refusal
    tools.finished     the wait for the client's tools, as the scheduler sees it
    action.taken       nothing is left to answer; a runner goes on

Answers may come in any number of requests. The same answer again changes nothing; another answer to the same call is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_program.errors import IllegalTransition, InvalidRequest
from agent_program.ids import ToolKey
from agent_program.states import ProgramState
from agent_program.tool_events import ToolOutcome
from deployments.program import ActionKind, ProgramRecord, RequiredCall
from deployments.record_steps import apply_to_record
from deployments.steps import PendingCall, Step, StepKind
from tool_runtime.registry import ArgumentsInvalid, ToolKind, ToolSpec, parse_arguments
from tool_runtime.tool_key import combine, tool_key

#: As the engine's own bound on the arguments of a call that the platform runs.
_ARGUMENTS_BYTES_MAX = 1024 * 1024


class ActionConflict(InvalidRequest):
    """The call was answered otherwise before."""

    status, code = 409, "action_conflict"


class ActionNotFound(InvalidRequest):
    """The program asks for no such call."""

    status, code = 404, "action_not_found"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionAnswer:
    """What a client answers to one call."""

    call_id: str
    #: The client tool's output; None where the answer is a decision.
    output: str | None = None
    #: The client's tool failed; its output says how.
    is_error: bool = False
    #: Seconds that the tool itself took, where the client knows.
    duration_s: float | None = None
    #: Consent; None where the answer is an output.
    approved: bool | None = None
    #: Why it was refused, for the model.
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientWait:
    """A wait for a client's own tools that has just ended."""

    tool_key: ToolKey
    seconds: float
    outcome: ToolOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What a set of answers comes to; nothing where all of them were known."""

    steps: tuple[Step, ...]
    record: ProgramRecord
    #: Set where the last answer was among them and the program waited for the client's tools.
    wait: ClientWait | None


def required_calls(calls: Sequence[PendingCall], tools: Mapping[str, ToolSpec]) -> tuple[RequiredCall, ...]:
    """The calls among `calls` that wait for the client. A call that cannot run as it is (no such tool, wrong arguments) does
    not: the model is told at once."""
    asked = [(call, _kind_of(call, tools.get(call.tool))) for call in calls]
    return tuple(
        RequiredCall(call_id=call.call_id, kind=kind, tool=call.tool, arguments=call.arguments)
        for call, kind in asked
        if kind is not None
    )


def _kind_of(call: PendingCall, spec: ToolSpec | None) -> ActionKind | None:
    if spec is None or fault_of_arguments(call, spec) is not None:
        return None
    if spec.needs_approval and not call.is_approved:
        return ActionKind.APPROVAL
    return ActionKind.OUTPUT if spec.kind is ToolKind.CLIENT else None


def fault_of_arguments(call: PendingCall, spec: ToolSpec) -> str | None:
    """Why a client could not be asked to run the call, in words for the model; None where it can."""
    try:
        parse_arguments(spec, call.arguments, bytes_max=_ARGUMENTS_BYTES_MAX)
    except ArgumentsInvalid as error:
        return str(error)
    return None


def take(
    before: ProgramRecord, journaled: Sequence[Step], answers: Sequence[ActionAnswer], *, now_wall_s: float
) -> Taken:
    """The steps that `answers` are, for a program whose record and steps so far are `before` and `journaled`.

    Raises:
        ActionNotFound: an answer is to a call that the program never asked about.
        ActionConflict: an answer differs from an earlier one.
        InvalidRequest: an output where consent is asked for, or the other way round.
        IllegalTransition: the program does not wait, and what is answered was not answered before.
    """
    asked = _asked_ever(journaled)
    open_calls = {call.call_id: call for call in _open_calls(before)}
    steps: list[Step] = []
    record = before

    def add(kind: StepKind, data: Mapping[str, Any]) -> None:
        nonlocal record
        step = Step(seq=len(journaled) + len(steps) + 1, kind=kind, at=now_wall_s, data=data)
        record = apply_to_record(record, step)
        steps.append(step)

    for answer in answers:
        if answer.call_id not in asked:
            raise ActionNotFound(f"the program asks for no call {answer.call_id!r}", param="call_id")
        turn, call = asked[answer.call_id]
        _check_kind(answer, call)
        if call.call_id not in open_calls:
            _check_same(answer, _answered(journaled, turn, answer.call_id), before)
            continue
        del open_calls[call.call_id]
        _add_answer(add, turn, call, answer)
    if not steps:
        return Taken(steps=(), record=before, wait=None)
    wait = None
    if not open_calls:
        since, required = _last_required(journaled)
        wait = _client_wait(required, [*journaled, *steps], now_wall_s - since)
        if wait is not None:
            add(StepKind.TOOLS_FINISHED, {"turn": turn, "tool_key": wait.tool_key, "seconds": wait.seconds})
        add(StepKind.ACTION_TAKEN, {"turn": turn, "seconds": now_wall_s - since})
    return Taken(steps=tuple(steps), record=record, wait=wait)


def _add_answer(add: Any, turn: int, call: RequiredCall, answer: ActionAnswer) -> None:
    if call.kind is ActionKind.OUTPUT:
        outcome = ToolOutcome.ERROR if answer.is_error else ToolOutcome.OK
        add(StepKind.TOOL_FINISHED, _finished(turn, call, outcome, answer.output or "", answer.duration_s))
        return
    decision = {"approved": bool(answer.approved), "reason": answer.reason}
    add(StepKind.ACTION_DECIDED, {"turn": turn, "call_id": call.call_id, "tool": call.tool, **decision})
    if not answer.approved:
        why = f": {answer.reason}" if answer.reason else "."
        text = f"The call was not allowed to run{why}"
        add(StepKind.TOOL_FINISHED, _finished(turn, call, ToolOutcome.ERROR, text, None))


def _finished(
    turn: int, call: RequiredCall, outcome: ToolOutcome, output: str, duration_s: float | None
) -> dict[str, Any]:
    return {
        "turn": turn,
        "call_id": call.call_id,
        "tool": call.tool,
        "tool_key": tool_key(call.tool, call.arguments),
        "outcome": outcome.value,
        "output": output,
        "exit_code": None,
        "duration_s": duration_s or 0.0,
        "queue_s": 0.0,
        "truncated_bytes": 0,
    }


def _open_calls(record: ProgramRecord) -> list[RequiredCall]:
    return record.required_action.calls if record.required_action is not None else []


def _asked_ever(steps: Sequence[Step]) -> dict[str, tuple[int, RequiredCall]]:
    """Every call that the program ever asked its client about, with its turn; of a repeated id the last one."""
    return {
        call["call_id"]: (step.data["turn"], RequiredCall.model_validate(call))
        for step in steps
        if step.kind is StepKind.ACTION_REQUIRED
        for call in step.data["calls"]
    }


def _last_required(steps: Sequence[Step]) -> tuple[float, list[RequiredCall]]:
    last = next(step for step in reversed(steps) if step.kind is StepKind.ACTION_REQUIRED)
    return last.at, [RequiredCall.model_validate(call) for call in last.data["calls"]]


def client_key(calls: Sequence[RequiredCall]) -> ToolKey | None:
    """What the wait for the client's own tools is to the latency history; None where none of them is asked for."""
    return combine([tool_key(call.tool, call.arguments) for call in calls if call.kind is ActionKind.OUTPUT])


def _client_wait(required: Sequence[RequiredCall], steps: Sequence[Step], seconds: float) -> ClientWait | None:
    key = client_key(required)
    if key is None:
        return None
    ids = {call.call_id for call in required if call.kind is ActionKind.OUTPUT}
    outcomes = [
        ToolOutcome(step.data["outcome"])
        for step in steps
        if step.kind is StepKind.TOOL_FINISHED and step.data["call_id"] in ids
    ]
    is_error = ToolOutcome.ERROR in outcomes
    return ClientWait(tool_key=key, seconds=seconds, outcome=ToolOutcome.ERROR if is_error else ToolOutcome.OK)


def _check_kind(answer: ActionAnswer, call: RequiredCall) -> None:
    is_decision = answer.approved is not None
    if is_decision is not (call.kind is ActionKind.APPROVAL):
        wanted = "approve: true or false" if call.kind is ActionKind.APPROVAL else "output"
        raise InvalidRequest(f"call {call.call_id!r} of {call.tool} is answered by {wanted}", param="tool_outputs")


def _answered(steps: Sequence[Step], turn: int, call_id: str) -> Step | None:
    """The step that says how the call of that turn was answered."""
    kinds = (StepKind.ACTION_DECIDED, StepKind.TOOL_FINISHED)
    answers = (step for step in steps if step.kind in kinds and step.data["turn"] == turn)
    return next((step for step in answers if step.data["call_id"] == call_id), None)


def _check_same(answer: ActionAnswer, known: Step | None, record: ProgramRecord) -> None:
    if known is None:
        state = record.state if record.state.is_final else ProgramState.RUNNING
        raise IllegalTransition(f"the program is {state.value} and no longer asks for call {answer.call_id!r}")
    if known.kind is StepKind.ACTION_DECIDED:
        is_same = known.data["approved"] is answer.approved
    else:
        is_error = known.data["outcome"] == ToolOutcome.ERROR
        is_same = (known.data["output"], is_error) == (answer.output, answer.is_error)
    if not is_same:
        raise ActionConflict(f"call {answer.call_id!r} was answered otherwise before", param="call_id")
