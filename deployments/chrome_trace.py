"""A program's spans as Chrome trace JSON, which Perfetto and `chrome://tracing` open. Pure.

Spans of one lane must lie inside each other or apart; tools of one turn run side by side, so each takes the first lane that is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deployments.program_trace import Span, SpanKind

_PROGRAM, _TURNS, _LEASES, _TOOLS = 1, 2, 3, 4
_LANES = {_PROGRAM: "program", _TURNS: "turns", _LEASES: "KV lease", _TOOLS: "tools"}


def chrome_trace(program: Span) -> dict[str, Any]:
    """The trace of one program; the earliest span begins at 0."""
    events = list(_events(program, program.start_s))
    lanes = sorted({event["tid"] for event in events})
    names = [_named("process_name", f"program {program.attributes['gen_ai.conversation.id']}")]
    names += [_named("thread_name", _LANES.get(lane, f"tools {lane - _TOOLS + 1}"), lane) for lane in lanes]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def _events(program: Span, zero_s: float) -> Iterator[dict[str, Any]]:
    yield _event(program, _PROGRAM, zero_s)
    busy_until_s: list[float] = []
    for span in program.children:
        lane = {SpanKind.WAIT: _PROGRAM, SpanKind.TURN: _TURNS, SpanKind.LEASE: _LEASES}.get(span.kind)
        if lane is None:
            lane = _TOOLS + _free(busy_until_s, span)
        yield _event(span, lane, zero_s)
        for child in span.children:
            yield _event(child, lane, zero_s)


def _free(busy_until_s: list[float], span: Span) -> int:
    for lane, until_s in enumerate(busy_until_s):
        if until_s <= span.start_s:
            busy_until_s[lane] = span.end_s
            return lane
    busy_until_s.append(span.end_s)
    return len(busy_until_s) - 1


def _event(span: Span, lane: int, zero_s: float) -> dict[str, Any]:
    arguments = dict(span.attributes)
    if span.error is not None:
        arguments["error"] = span.error
    if span.is_open:
        arguments["open"] = True
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind.value,
        "ts": round((span.start_s - zero_s) * 1e6),
        "dur": round((span.end_s - span.start_s) * 1e6),
        "pid": 1,
        "tid": lane,
        "args": arguments,
    }


def _named(kind: str, name: str, lane: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": lane, "args": {"name": name}}
