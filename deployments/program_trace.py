"""A program's journal as spans: what happened when, for how long, inside of what. Pure; every exporter starts from here.

    invoke_agent                    the program, from submission to its end
      ├── queued                    until the first runner took it
      ├── chat MODEL                one attempt of a turn, as its runner saw it
      │     └── queue, prefill, decode       the engine's part
      ├── lease                     KV retained between two turns
      ├── execute_tool TOOL         one call, its own queue inside
      │     └── queue
      └── requires_action           waiting for the client

The journal says when a turn ended and how long its phases took in the engine, so the phases are laid back from the end, one after
the other; what is left at the beginning is the way to the engine. A lease's end is known as far as the journal knows it: its
deadline where it expired, otherwise the start of the next turn.

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI (`gen_ai.*`, in development there);
what they have no name for is `continuum.*`. No text of prompts, outputs or arguments is in a span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agent_program.tool_events import ToolOutcome
from deployments.program import ProgramRecord
from deployments.steps import Step, StepKind

_FAILED_OUTCOMES = {outcome.value for outcome in ToolOutcome} - {ToolOutcome.OK.value}

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value]


class SpanKind(StrEnum):
    """What a span is of; exporters choose colours and lanes by it."""

    PROGRAM = "program"
    WAIT = "wait"
    TURN = "turn"
    PHASE = "phase"
    TOOL = "tool"
    LEASE = "lease"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stretch of time. Times are Unix seconds."""

    kind: SpanKind
    name: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    #: Why it failed; None where it did not.
    error: str | None = None
    #: It goes on; `end_s` is then the moment of asking.
    is_open: bool = False
    children: tuple[Span, ...] = ()


def program_span(record: ProgramRecord, steps: Sequence[Step], *, now_s: float) -> Span:
    """The program's span with everything in it.

    Args:
        record: as the steps have left it.
        steps: all of them, in order.
        now_s: Unix seconds; where what goes on is cut off.
    """
    end_s = record.finished_at if record.finished_at is not None else max(now_s, record.created_at)
    children = [*_queued(record, steps, end_s), *_turns(record, steps, end_s), *_leases(steps, end_s)]
    children += [*_tools(steps, end_s), *_actions(steps, end_s)]
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.conversation.id": record.id,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": record.usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.usage.cached_tokens,
        "continuum.usage.recomputed_tokens": record.usage.recomputed_tokens,
        "continuum.tenant.id": record.tenant_id,
        "continuum.program.state": record.state.value,
        "continuum.program.turns": record.turns,
    }
    if record.end_reason is not None:
        attributes["continuum.program.end_reason"] = record.end_reason.value
    return Span(
        kind=SpanKind.PROGRAM,
        name="invoke_agent",
        start_s=record.created_at,
        end_s=end_s,
        attributes=attributes,
        error=record.error.code if record.error is not None else None,
        is_open=record.finished_at is None,
        children=tuple(sorted(children, key=lambda span: (span.start_s, -span.end_s))),
    )


def _queued(record: ProgramRecord, steps: Sequence[Step], end_s: float) -> Iterator[Span]:
    claimed_s = next((step.at for step in steps if step.kind is StepKind.PROGRAM_CLAIMED), None)
    yield Span(
        kind=SpanKind.WAIT,
        name="queued",
        start_s=record.created_at,
        end_s=max(record.created_at, end_s if claimed_s is None else claimed_s),
        is_open=claimed_s is None and record.finished_at is None,
    )


def _turns(record: ProgramRecord, steps: Sequence[Step], end_s: float) -> Iterator[Span]:
    """An attempt ends by what comes of it: finished, replayed, started again by another runner, or the program's end."""
    endings = (StepKind.TURN_FINISHED, StepKind.TURN_REPLAYED, StepKind.TURN_STARTED, StepKind.PROGRAM_ENDED)
    for position, step in enumerate(steps):
        if step.kind is not StepKind.TURN_STARTED:
            continue
        ending = next((later for later in steps[position + 1 :] if later.kind in endings), None)
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.conversation.id": record.id,
            "gen_ai.request.model": record.model,
            "continuum.turn": step.data["turn"],
            "continuum.turn.attempt": step.data["attempt"],
        }
        stop_s = max(step.at, end_s if ending is None else ending.at)
        is_finished = ending is not None and ending.kind is StepKind.TURN_FINISHED
        yield Span(
            kind=SpanKind.TURN,
            name=f"chat {record.model}",
            start_s=step.at,
            end_s=stop_s,
            attributes={**attributes, **_of_turn(ending.data)} if ending is not None and is_finished else attributes,
            error=None if ending is None or is_finished else _why_cut(ending),
            is_open=ending is None and record.finished_at is None,
            children=_phases(ending.data, step.at, stop_s) if ending is not None and is_finished else (),
        )


def _why_cut(ending: Step) -> str:
    match ending.kind:
        case StepKind.TURN_REPLAYED:
            return "replica_lost"
        case StepKind.TURN_STARTED:
            return "runner_lost"
        case _:
            return str(ending.data["end_reason"])


def _of_turn(data: Mapping[str, Any]) -> dict[str, Value]:
    found: dict[str, Value] = {
        "gen_ai.response.finish_reasons": (data["finish_reason"] or "none",),
        "gen_ai.usage.input_tokens": data["prompt_tokens"],
        "gen_ai.usage.output_tokens": data["output_tokens"],
        "gen_ai.usage.cache_read.input_tokens": data["cached_tokens"],
        "continuum.usage.recomputed_tokens": data["recomputed_tokens"],
    }
    return {**found, "continuum.replica.id": data["replica"]} if data["replica"] else found


def _phases(data: Mapping[str, Any], start_s: float, end_s: float) -> tuple[Span, ...]:
    timings = data.get("timings")
    if timings is None:
        return ()
    spans, at = [], end_s
    for phase in ("decode", "prefill", "queue"):
        begin = max(start_s, at - timings[f"{phase}_s"])
        spans.append(Span(kind=SpanKind.PHASE, name=phase, start_s=begin, end_s=at))
        at = begin
    return tuple(reversed(spans))


def _leases(steps: Sequence[Step], end_s: float) -> Iterator[Span]:
    for position, step in enumerate(steps):
        lease = step.data.get("lease") if step.kind is StepKind.TURN_FINISHED else None
        if not lease or not lease.get("ttl_s"):
            continue
        later = steps[position + 1 :]
        next_turn = next((one for one in later if one.kind is StepKind.TURN_STARTED), None)
        teller = next((one for one in later if "lease_ends" in one.data), None)
        outcome = _only(teller.data["lease_ends"]) if teller is not None else None
        stop_s = next_turn.at if next_turn is not None else end_s
        if outcome == "expired":
            stop_s = min(stop_s, step.at + lease["ttl_s"])
        yield Span(
            kind=SpanKind.LEASE,
            name="lease",
            start_s=step.at,
            end_s=max(step.at, stop_s),
            attributes={
                "continuum.lease.ttl": float(lease["ttl_s"]),
                "continuum.lease.blocks": lease.get("blocks", 0),
                "continuum.lease.reason": lease.get("reason", "unknown"),
                "continuum.lease.outcome": outcome or "unknown",
            },
            is_open=teller is None,
        )


def _only(ends: Mapping[str, int]) -> str | None:
    """How the lease ended, where the step tells of one way only."""
    return next(iter(ends)) if len(ends) == 1 else None


def _tools(steps: Sequence[Step], end_s: float) -> Iterator[Span]:
    finished = {step.data["call_id"]: step for step in steps if step.kind is StepKind.TOOL_FINISHED}
    for step in steps:
        if step.kind is not StepKind.TOOL_STARTED:
            continue
        done = finished.get(step.data["call_id"])
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": step.data["tool"],
            "gen_ai.tool.call.id": step.data["call_id"],
            "continuum.tool.key": step.data["tool_key"],
        }
        queue_s = 0.0
        if done is not None:
            attributes["continuum.tool.outcome"] = done.data["outcome"]
            queue_s = float(done.data["queue_s"])
        stop_s = max(step.at, end_s if done is None else done.at)
        queue = Span(kind=SpanKind.PHASE, name="queue", start_s=step.at, end_s=min(stop_s, step.at + queue_s))
        outcome = None if done is None else done.data["outcome"]
        yield Span(
            kind=SpanKind.TOOL,
            name=f"execute_tool {step.data['tool']}",
            start_s=step.at,
            end_s=stop_s,
            attributes=attributes,
            error=outcome if outcome in _FAILED_OUTCOMES else None,
            is_open=done is None,
            children=(queue,) if queue_s > 0 else (),
        )


def _actions(steps: Sequence[Step], end_s: float) -> Iterator[Span]:
    for position, step in enumerate(steps):
        if step.kind is StepKind.ACTION_REQUIRED:
            taken = next((one for one in steps[position + 1 :] if one.kind is StepKind.ACTION_TAKEN), None)
            yield Span(
                kind=SpanKind.WAIT,
                name="requires_action",
                start_s=step.at,
                end_s=max(step.at, end_s if taken is None else taken.at),
                is_open=taken is None,
            )
