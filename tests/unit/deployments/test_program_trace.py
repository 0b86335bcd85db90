"""A program's journal as a timeline, for people (Chrome trace) and for tracing systems (OTLP)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent_program.ids import ReplicaId
from agent_program.states import ProgramState
from deployments.chrome_trace import chrome_trace
from deployments.memory_clients import ScriptedEngine, ScriptedTools, answer, tool_calls
from deployments.otlp_traces import OtlpTraces, make_exporter, otel_spans
from deployments.program import EndReason, ProgramFailure, Usage, new_record
from deployments.program_settings import ProgramSettings
from deployments.program_trace import Span, SpanKind, program_span
from deployments.runner import ProgramRunner
from deployments.steps import Step, StepKind
from deployments.telemetry_settings import TelemetrySettings
from deployments.turn_minder import turn_outcome
from engine_replicas.turn_stream import NOT_GENERATED, TurnClosed, TurnOpened, TurnTimings
from support.api import ApiBench
from support.programs import Bench, spec
from support.waiting import wait_for_async

LEASE = {"ttl_s": 5.0, "blocks": 12, "reason": "cold_start", "outcomes": {}}
TIMINGS = {"queue_s": 1.0, "prefill_s": 2.0, "decode_s": 3.0}
PROGRAM = spec(id="p", created_at=100.0, model="small")


def steps(*entries: tuple[StepKind, float, dict[str, Any]]) -> list[Step]:
    return [Step(seq=n, kind=kind, at=at, data=data) for n, (kind, at, data) in enumerate(entries, 1)]


def turn_ended(at: float, turn: int, **changes: Any) -> tuple[StepKind, float, dict[str, Any]]:
    data = {
        "turn": turn,
        "finish_reason": "tool_calls",
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "recomputed_tokens": 4,
        "output_tokens": 7,
        "seconds": 8.0,
        "timings": TIMINGS,
        "replica": "r1",
        "lease": LEASE,
        "lease_ends": {},
    }
    return StepKind.TURN_FINISHED, at, {**data, **changes}


WHOLE = steps(
    (StepKind.PROGRAM_QUEUED, 100.0, {}),
    (StepKind.PROGRAM_CLAIMED, 102.0, {"runner": "r", "resumed": False}),
    (StepKind.TURN_STARTED, 102.0, {"turn": 1, "attempt": 1}),
    turn_ended(110.0, 1),
    (StepKind.TOOL_STARTED, 110.0, {"turn": 1, "call_id": "a", "tool": "shell", "tool_key": "pytest"}),
    (StepKind.TOOL_STARTED, 110.0, {"turn": 1, "call_id": "b", "tool": "shell", "tool_key": "git"}),
    (StepKind.TOOL_FINISHED, 111.0, {"call_id": "b", "outcome": "timeout", "duration_s": 1.0, "queue_s": 0.0}),
    (StepKind.TOOL_FINISHED, 113.0, {"call_id": "a", "outcome": "ok", "duration_s": 2.5, "queue_s": 0.5}),
    (StepKind.TOOLS_FINISHED, 113.0, {"turn": 1, "tool_key": "git+pytest", "seconds": 3.0}),
    (StepKind.TURN_STARTED, 113.0, {"turn": 2, "attempt": 1}),
    turn_ended(120.0, 2, lease=None, lease_ends={"reused": 1}, finish_reason="stop"),
    (StepKind.PROGRAM_ENDED, 120.0, {"state": "completed", "end_reason": "answer", "lease_ends": {}}),
)
ENDED = new_record(PROGRAM).model_copy(
    update={
        "state": ProgramState.COMPLETED,
        "finished_at": 120.0,
        "end_reason": EndReason.ANSWER,
        "turns": 2,
        "usage": Usage(prompt_tokens=200, cached_tokens=120, output_tokens=14),
    }
)


def whole() -> Span:
    return program_span(ENDED, WHOLE, now_s=500.0)


def named(span: Span, name: str) -> list[Span]:
    return [child for child in span.children if child.name == name]


def every(span: Span) -> Iterator[Span]:
    yield span
    for child in span.children:
        yield from every(child)


def test_the_program_is_one_span_from_submission_to_its_end() -> None:
    span = whole()
    assert (span.start_s, span.end_s, span.is_open, span.error) == (100.0, 120.0, False, None)
    assert span.attributes["gen_ai.operation.name"] == "invoke_agent"
    assert span.attributes["gen_ai.conversation.id"] == "p"
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 120
    assert span.attributes["continuum.program.end_reason"] == "answer"


def test_waiting_for_a_runner_is_a_span_of_its_own() -> None:
    (queued,) = named(whole(), "queued")
    assert (queued.start_s, queued.end_s) == (100.0, 102.0)


def test_a_turns_phases_are_laid_back_from_its_end() -> None:
    first, _ = named(whole(), "chat small")
    assert [(phase.name, phase.start_s, phase.end_s) for phase in first.children] == [
        ("queue", 104.0, 105.0),
        ("prefill", 105.0, 107.0),
        ("decode", 107.0, 110.0),
    ]
    assert first.attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)


def test_phases_never_begin_before_their_turn() -> None:
    long = {"queue_s": 50.0, "prefill_s": 50.0, "decode_s": 3.0}
    journal = [
        *WHOLE[:3],
        Step(seq=4, kind=StepKind.TURN_FINISHED, at=110.0, data=turn_ended(110.0, 1, timings=long)[2]),
    ]
    (turn,) = named(program_span(new_record(PROGRAM), journal, now_s=111.0), "chat small")
    assert min(phase.start_s for phase in turn.children) == turn.start_s


def test_a_lease_lasts_to_the_next_turn_and_says_how_it_ended() -> None:
    (lease,) = named(whole(), "lease")
    assert (lease.start_s, lease.end_s) == (110.0, 113.0)
    assert lease.attributes["continuum.lease.outcome"] == "reused"


def test_an_expired_lease_ends_at_its_deadline() -> None:
    late = [*WHOLE[:3], *steps(turn_ended(110.0, 1), (StepKind.TURN_STARTED, 190.0, {"turn": 2, "attempt": 1}), turn_ended(195.0, 2, lease=None, lease_ends={"expired": 1}))]  # fmt: skip
    (lease,) = named(program_span(new_record(PROGRAM), late, now_s=200.0), "lease")
    assert (lease.start_s, lease.end_s) == (110.0, 115.0)


def test_tools_are_spans_that_fail_where_the_tool_did() -> None:
    tools = [span for span in whole().children if span.kind is SpanKind.TOOL]
    assert {(span.attributes["continuum.tool.key"], span.end_s, span.error) for span in tools} == {
        ("pytest", 113.0, None),
        ("git", 111.0, "timeout"),
    }
    (waited,) = (child for span in tools for child in span.children)
    assert (waited.name, waited.end_s - waited.start_s) == ("queue", 0.5)


@pytest.mark.parametrize(
    ("later", "error"),
    [
        ((StepKind.TURN_REPLAYED, 105.0, {"turn": 1, "attempt": 1, "reason": "gone"}), "replica_lost"),
        ((StepKind.TURN_STARTED, 105.0, {"turn": 1, "attempt": 2}), "runner_lost"),
        ((StepKind.PROGRAM_ENDED, 105.0, {"end_reason": "cancelled", "lease_ends": {}}), "cancelled"),
    ],
)
def test_an_attempt_that_came_to_nothing_says_why(later: tuple[StepKind, float, dict[str, Any]], error: str) -> None:
    journal = [*WHOLE[:3], *steps(later)]
    first = named(program_span(new_record(PROGRAM), journal, now_s=105.0), "chat small")[0]
    assert (first.end_s, first.error) == (105.0, error)


def test_what_goes_on_is_cut_off_at_the_moment_of_asking() -> None:
    span = program_span(new_record(PROGRAM), WHOLE[:5], now_s=112.0)
    assert span.is_open
    assert all(child.end_s <= 112.0 for child in every(span))
    assert [child.name for child in span.children if child.is_open] == ["lease", "execute_tool shell"]


def test_a_failed_program_names_its_error() -> None:
    failed = ENDED.model_copy(update={"error": ProgramFailure(code="turn_failed", message="no")})
    assert program_span(failed, WHOLE, now_s=0.0).error == "turn_failed"


def test_no_text_of_the_program_is_in_its_trace() -> None:
    secret = [*WHOLE[:4], *steps((StepKind.TOOL_STARTED, 110.0, {"turn": 1, "call_id": "a", "tool": "shell", "tool_key": "cat", "arguments": "cat hidden.txt"}))]  # fmt: skip
    assert "hidden.txt" not in json.dumps(chrome_trace(program_span(new_record(PROGRAM), secret, now_s=111.0)))


# --- Chrome trace -----------------------------------------------------------------------------------------------------


def events() -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(chrome_trace(whole())))
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_perfetto_gets_microseconds_from_the_programs_start() -> None:
    turn = next(event for event in events() if event["name"] == "chat small")
    assert (turn["ts"], turn["dur"]) == (2_000_000, 8_000_000)


def test_spans_of_a_lane_lie_inside_each_other_or_apart() -> None:
    by_lane: dict[int, list[tuple[int, int]]] = {}
    for event in events():
        by_lane.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for lane, spans in by_lane.items():
        for start, end in spans:
            for other_start, other_end in spans:
                overlaps = start < other_start < end < other_end
                assert not overlaps, lane


def test_every_lane_has_a_name() -> None:
    trace = chrome_trace(whole())
    named_lanes = {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {event["tid"] for event in events()} == named_lanes


async def test_the_api_gives_the_timeline_of_a_program_also_while_it_runs() -> None:
    bench = ApiBench()
    async with bench.client() as client:
        await client.post("/v1/programs", json={"input": "Go.", "tools": ["shell"], "program_id": "p"})
        before = (await client.get("/v1/programs/p/trace")).json()
        await bench.run_one(ScriptedEngine([answer("done")]))
        after = (await client.get("/v1/programs/p/trace")).json()
        assert (await client.get("/v1/programs/nobody/trace")).status_code == 404
    assert {event["name"] for event in before["traceEvents"] if event["ph"] == "X"} == {"invoke_agent", "queued"}
    assert "chat small" in {event["name"] for event in after["traceEvents"]}


async def test_phases_of_a_turn_are_journaled_as_the_engine_tells_them() -> None:
    timed = answer("done", timings=TurnTimings(queue_s=1.0, prefill_s=2.0, decode_s=3.0))
    bench = Bench(spec(), engine=ScriptedEngine([timed]))
    await bench.run()
    assert [step["timings"] for step in await bench.data("turn.finished")] == [TIMINGS]


# --- OTLP -------------------------------------------------------------------------------------------------------------


class Exporter:
    """Keeps what it is given."""

    def __init__(self, result: int = 0) -> None:
        self.batches: list[Sequence[Any]] = []
        self.result = result
        self.is_shut_down = False

    def export(self, spans: Sequence[Any]) -> Any:
        class Result:
            value = self.result

        self.batches.append(spans)
        return Result

    def shutdown(self) -> None:
        self.is_shut_down = True


def test_one_program_is_one_trace_with_the_same_spans() -> None:
    spans = otel_spans(whole(), service_name="continuum")
    assert len({span.context.trace_id for span in spans}) == 1
    assert len({span.context.span_id for span in spans}) == len(spans) == len(list(every(whole())))
    (root,) = (span for span in spans if span.parent is None)
    assert root.name == "invoke_agent"
    assert root.end_time - root.start_time == 20_000_000_000


def test_a_program_that_is_sent_twice_is_the_same_trace() -> None:
    first, again = (otel_spans(whole(), service_name="continuum") for _ in range(2))
    assert [span.context.span_id for span in first] == [span.context.span_id for span in again]


def test_failures_are_marked_as_the_conventions_want() -> None:
    failed = [
        span for span in otel_spans(whole(), service_name="x") if not span.status.is_ok and span.status.description
    ]
    assert [span.attributes["error.type"] for span in failed] == ["timeout"]


def test_names_are_those_of_the_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    used = {name for span in every(whole()) for name in span.attributes if name.startswith("gen_ai.")}
    assert used <= known


async def test_an_ended_program_is_exported_once_and_a_shutdown_waits_for_it() -> None:
    exporter = Exporter()
    traces = OtlpTraces(exporter, service_name="continuum")
    traces.program_ended(whole())
    await traces.close()
    assert len(exporter.batches) == 1
    assert (traces.dropped, exporter.is_shut_down) == (0, True)


async def test_a_collector_that_refuses_is_counted_and_harms_nobody() -> None:
    traces = OtlpTraces(Exporter(result=1), service_name="continuum")
    traces.program_ended(whole())
    await traces.close()
    assert traces.dropped == 1


async def test_a_flood_of_programs_is_dropped_beyond_a_bound() -> None:
    traces = OtlpTraces(Exporter(), service_name="continuum")
    for _ in range(100):
        traces.program_ended(whole())
    assert traces.dropped == 36
    await traces.close()


async def test_a_runner_sends_the_trace_of_a_program_that_it_ended() -> None:
    bench = Bench(spec(), engine=ScriptedEngine([tool_calls(("c", "shell", {"command": "ls"})), answer("done")]))
    await bench.submit()
    exporter = Exporter()
    runner = ProgramRunner(
        journal=bench.journal,
        engine=bench.engine,
        tools=ScriptedTools({"shell": ["ok"]}),
        clock=bench.clock,
        settings=ProgramSettings(),
        traces=OtlpTraces(exporter, service_name="continuum"),
    )
    runner.start()

    async def is_sent() -> bool:
        return bool(exporter.batches)

    await wait_for_async(is_sent, what="the trace")
    await runner.close()
    assert exporter.batches[0][0].name == "invoke_agent"


def test_traces_are_off_unless_an_endpoint_is_named_and_go_to_the_usual_path() -> None:
    assert TelemetrySettings().otlp_endpoint is None
    assert TelemetrySettings(otlp_endpoint="http://c:4318/").traces_url == "http://c:4318/v1/traces"
    assert TelemetrySettings(otlp_endpoint="http://c/v1/traces").traces_url == "http://c/v1/traces"
    with pytest.raises(ValueError, match="http://"):
        TelemetrySettings(otlp_endpoint="collector:4317")


def test_the_real_exporter_is_made_for_the_endpoint() -> None:
    exporter = make_exporter(TelemetrySettings(otlp_endpoint="http://127.0.0.1:1"))
    exporter.shutdown()


async def test_the_engines_phases_reach_the_outcome_of_a_turn() -> None:
    async def items() -> AsyncIterator[TurnOpened | TurnClosed | str]:
        yield TurnOpened(status=200, is_stream=False, replica_id=ReplicaId("r1"))
        yield json.dumps({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]})
        yield replace(NOT_GENERATED, timings=TurnTimings(queue_s=1.0, prefill_s=2.0, decode_s=3.0))

    outcome = await turn_outcome(items(), lambda status, document: AssertionError(document))
    assert outcome.timings == TurnTimings(queue_s=1.0, prefill_s=2.0, decode_s=3.0)
