"""The steps of a program, and what they add up to.

A program is its spec and an ordered list of steps. Each step is journaled *before* what it announces happens (a turn or a
tool call starts) and right *after* what it reports has happened (it finished). So whoever reads the list knows:

    turn.started without turn.finished   the turn may be running or lost; a turn changes nothing but KV, so it may run again
    tool.started without tool.finished   the call may have run; it never runs again unless the tool is idempotent
    action.required without action.taken the program waits for its client, and no runner has it (`actions.py`)

`apply` folds one step into `Progress` (what the loop needs to go on), `record_steps.apply_to_record` into the record (what people
see). Both are pure: a runner that takes over a program folds the journal and stands where the lost one stood.

Steps are also the program's event stream: `seq` is the event id, `kind` the event name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from agent_program.tool_events import ToolOutcome
from deployments.program import (
    ProgramSpec,
    Usage,
)

CUT_OFF_NUDGE = "Your reply was cut off before the tool call was complete. Call one tool, with short arguments."


class StepKind(StrEnum):
    """What a step says. The comment names the keys of `data`."""

    #: (model, tools, limits)
    PROGRAM_QUEUED = "program.queued"
    #: A runner took the program (runner, resumed: another one had it, and was lost or stopped).
    PROGRAM_CLAIMED = "program.claimed"
    #: (turn, attempt)
    TURN_STARTED = "turn.started"
    #: No replica takes the turn now; it waits (turn, reason).
    TURN_DELAYED = "turn.delayed"
    #: The replica was lost during the turn, which runs again (turn, attempt, reason).
    TURN_REPLAYED = "turn.replayed"
    #: (turn, message, finish_reason, prompt_tokens, cached_tokens, recomputed_tokens, output_tokens, seconds, timings, replica, lease,
    #: lease_ends: how leases of the program ended since its last turn, outcome → count)
    TURN_FINISHED = "turn.finished"
    #: (turn, call_id, tool, tool_key, arguments)
    TOOL_STARTED = "tool.started"
    #: (turn, call_id, tool, tool_key, outcome, output, exit_code, duration_s, queue_s, truncated_bytes)
    TOOL_FINISHED = "tool.finished"
    #: All calls of the turn have finished (turn, tool_key, seconds).
    TOOLS_FINISHED = "tools.finished"
    #: The turn's other calls have results; these wait for the client: (turn, calls, expires_at, is_kv_released, lease_ends).
    #: `calls` are `RequiredCall`s, `lease_ends` as of `turn.finished`.
    ACTION_REQUIRED = "action.required"
    #: The client agreed to a call, or refused it (turn, call_id, tool, approved, reason).
    ACTION_DECIDED = "action.decided"
    #: The client has answered every call (turn, seconds).
    ACTION_TAKEN = "action.taken"
    #: (state, end_reason, error, output, lease_ends: as of `turn.finished`, up to the release of what was still retained)
    PROGRAM_ENDED = "program.ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One entry of a program's journal."""

    #: 1 for the first step of a program, then without gaps.
    seq: int
    kind: StepKind
    #: Unix seconds.
    at: float
    data: Mapping[str, Any]

    def to_wire(self) -> dict[str, Any]:
        return {"seq": self.seq, "kind": self.kind.value, "at": self.at, "data": dict(self.data)}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Step:
        return cls(seq=int(wire["seq"]), kind=StepKind(wire["kind"]), at=float(wire["at"]), data=wire["data"])


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingCall:
    """A tool call that the model asked for and that has no result yet."""

    call_id: str
    tool: str
    #: As the model wrote it: JSON text, perhaps malformed.
    arguments: str
    #: `tool.started` is journaled: it may have run.
    is_started: bool = False
    #: The client agreed to it.
    is_approved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What the loop needs to know about a program to take its next step."""

    #: The conversation, ready to be sent.
    messages: tuple[Mapping[str, Any], ...]
    seq: int = 0
    turns: int = 0
    #: The number of the turn that is started and not finished; None between turns.
    open_turn: int | None = None
    #: How often the open turn was started, by any runner.
    attempts: int = 0
    #: How often it lost its replica.
    replicas_lost: int = 0
    #: How often a runner took the program since its last step that finished something.
    claims_in_a_row: int = 0
    pending: tuple[PendingCall, ...] = ()
    #: When the program stops waiting for its client, in Unix seconds; None while it does not wait.
    action_expires_at: float | None = None
    #: Results of the latest turn's calls, by call id; they become messages in the order of the calls when all are there.
    results: Mapping[str, str] = field(default_factory=dict)
    call_order: tuple[str, ...] = ()
    usage: Usage = field(default_factory=Usage)
    #: Prompt and output tokens of the latest turn: what the next prompt repeats.
    context_tokens: int = 0
    #: The most that it can be, as the engine said; None where it did not.
    context_tokens_max: int | None = None
    #: The replica of the latest turn, and how the program's leases had ended there until then: outcome → count.
    replica: str | None = None
    lease_outcomes: Mapping[str, int] = field(default_factory=dict)
    last_finish_reason: str | None = None
    last_turn_called_tools: bool = False
    #: The tool wait before the next turn, where one was measured.
    last_tool: str | None = None
    last_tool_s: float | None = None
    ended: bool = False


def begin(spec: ProgramSpec) -> Progress:
    """A program with no steps."""
    return Progress(messages=tuple(spec.messages))


def fold(spec: ProgramSpec, steps: Iterable[Step]) -> Progress:
    """Where the steps leave the program."""
    progress = begin(spec)
    for step in steps:
        progress = apply(spec, progress, step)
    return progress


def apply(spec: ProgramSpec, progress: Progress, step: Step) -> Progress:
    """`progress` after one more step.

    Raises:
        ValueError: the step is not the next one.
    """
    if step.seq != progress.seq + 1:
        raise ValueError(f"step {step.seq} does not follow step {progress.seq} of program {spec.id}")
    progress = replace(progress, seq=step.seq)
    data = step.data
    match step.kind:
        case StepKind.TURN_STARTED:
            return replace(progress, open_turn=data["turn"], attempts=data["attempt"])
        case StepKind.TURN_FINISHED:
            return _turn_finished(spec, progress, data)
        case StepKind.TOOL_STARTED:
            return replace(progress, pending=tuple(_started(call, data["call_id"]) for call in progress.pending))
        case StepKind.TOOL_FINISHED:
            return _tool_finished(progress, data)
        case StepKind.TOOLS_FINISHED:
            return replace(progress, last_tool=data["tool_key"], last_tool_s=data["seconds"])
        case StepKind.ACTION_REQUIRED:
            # An engine that has let go of the program begins to count anew.
            outcomes = {} if data["is_kv_released"] else progress.lease_outcomes
            return replace(progress, action_expires_at=data["expires_at"], claims_in_a_row=0, lease_outcomes=outcomes)
        case StepKind.ACTION_DECIDED:
            is_approved = data["approved"]
            return replace(progress, pending=_decided(progress.pending, data["call_id"], is_approved=is_approved))
        case StepKind.ACTION_TAKEN:
            return replace(progress, action_expires_at=None, claims_in_a_row=0)
        case StepKind.PROGRAM_CLAIMED:
            return replace(progress, claims_in_a_row=progress.claims_in_a_row + 1)
        case StepKind.TURN_REPLAYED:
            return replace(progress, replicas_lost=progress.replicas_lost + 1)
        case StepKind.PROGRAM_ENDED:
            return replace(progress, ended=True)
        case _:
            return progress


def calls_of(message: Mapping[str, Any]) -> tuple[PendingCall, ...]:
    """The tool calls of an assistant message."""
    calls = message.get("tool_calls") or ()
    return tuple(
        PendingCall(
            call_id=call["id"], tool=call["function"]["name"], arguments=_argument_text(call["function"]["arguments"])
        )
        for call in calls
    )


def _argument_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _turn_finished(spec: ProgramSpec, progress: Progress, data: Mapping[str, Any]) -> Progress:
    message = data["message"]
    calls = calls_of(message)
    messages = [*progress.messages, message]
    if spec.requires_tool and not calls:
        messages.append({"role": "user", "content": CUT_OFF_NUDGE})
    return replace(
        progress,
        messages=tuple(messages),
        turns=data["turn"],
        open_turn=None,
        attempts=0,
        replicas_lost=0,
        claims_in_a_row=0,
        pending=calls,
        results={},
        call_order=tuple(call.call_id for call in calls),
        usage=add_usage(progress.usage, data),
        context_tokens=data["prompt_tokens"] + data["output_tokens"],
        context_tokens_max=data.get("context_tokens_max"),
        replica=data["replica"],
        lease_outcomes=(data["lease"] or {}).get("outcomes", {}),
        last_finish_reason=data["finish_reason"],
        last_turn_called_tools=bool(calls),
        last_tool=None,
        last_tool_s=None,
    )


def _tool_finished(progress: Progress, data: Mapping[str, Any]) -> Progress:
    results = {**progress.results, data["call_id"]: data["output"]}
    pending = tuple(call for call in progress.pending if call.call_id != data["call_id"])
    progress = replace(progress, claims_in_a_row=0)
    if pending:
        return replace(progress, pending=pending, results=results)
    answers = [
        {"role": "tool", "tool_call_id": call_id, "content": results[call_id]} for call_id in progress.call_order
    ]
    return replace(progress, pending=(), results={}, messages=(*progress.messages, *answers))


def _decided(calls: tuple[PendingCall, ...], call_id: str, *, is_approved: bool) -> tuple[PendingCall, ...]:
    return tuple(replace(call, is_approved=is_approved) if call.call_id == call_id else call for call in calls)


def _started(call: PendingCall, call_id: str) -> PendingCall:
    return replace(call, is_started=True) if call.call_id == call_id else call


def add_usage(usage: Usage, data: Mapping[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens + data["prompt_tokens"],
        cached_tokens=usage.cached_tokens + data["cached_tokens"],
        recomputed_tokens=usage.recomputed_tokens + data["recomputed_tokens"],
        output_tokens=usage.output_tokens + data["output_tokens"],
    )


#: What a result says whose call was cut short by the loss of whoever ran it.
INTERRUPTED_OUTPUT = "The tool call was interrupted before it reported a result. It may have run in part, or in full. It was not run again."


def interrupted_result(call: PendingCall, *, tool_key: str) -> dict[str, Any]:
    """The data of the `tool.finished` step for a call that started and was lost."""
    return {
        "call_id": call.call_id,
        "tool": call.tool,
        "tool_key": tool_key,
        "outcome": ToolOutcome.INTERRUPTED.value,
        "output": INTERRUPTED_OUTPUT,
        "exit_code": None,
        "duration_s": 0.0,
        "queue_s": 0.0,
        "truncated_bytes": 0,
    }
