"""One program, run to its end: what is journaled, in which order, and what the engine and the tools are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agent_program.clock import ManualClock
from agent_program.errors import EngineUnavailable, InvalidRequest, Overloaded, SandboxUnavailable, Unavailable
from agent_program.ids import ToolKey
from agent_program.states import ProgramState
from agent_program.tool_events import ToolEventKind, ToolOutcome
from deployments.memory_clients import Gate, ScriptedEngine, ScriptedTools, answer, tool_calls
from deployments.ports import ContextOverflow, ReleasedProgram, ReplicaLost, ToolHostLost, TurnOutcome
from deployments.program import EndReason
from deployments.program_settings import ProgramSettings
from deployments.steps import CUT_OFF_NUDGE, INTERRUPTED_OUTPUT
from support.programs import Bench, limits, spec
from tool_runtime.tool_call import ToolCall, ToolProgress, ToolResult, ToolStarted

SHELL = tool_calls(("call_1", "shell", {"command": "pytest -q"}))
FAST = ProgramSettings(retry_s=0.001, engine_wait_s=30.0, store_wait_s=30.0)


async def test_an_answer_without_tools_ends_the_program() -> None:
    bench = Bench(spec(), engine=ScriptedEngine([answer("It is done.")]))
    await bench.run()
    assert await bench.kinds() == [
        "program.queued",
        "program.claimed",
        "turn.started",
        "turn.finished",
        "program.ended",
    ]
    record = await bench.journal.get(bench.program.id)
    assert (record.state, record.end_reason, record.turns) == (ProgramState.COMPLETED, EndReason.ANSWER, 1)
    assert record.output == "It is done."


async def test_an_answer_that_was_cut_off_says_so() -> None:
    bench = Bench(spec(), engine=ScriptedEngine([answer("It is", finish_reason="length")]))
    await bench.run()
    assert (await bench.journal.get(bench.program.id)).end_reason is EndReason.ANSWER_CUT_OFF


async def test_tool_results_become_messages_in_the_order_of_the_calls() -> None:
    slow, fast = Gate("first"), "second"
    engine = ScriptedEngine(
        [tool_calls(("a", "shell", {"command": "make"}), ("b", "read_file", {"path": "x"})), answer("done")]
    )
    bench = Bench(spec(), engine=engine, tools=ScriptedTools({"shell": [slow], "read_file": [fast]}))
    await bench.submit()
    _, loop = await bench.claim()
    running = asyncio.create_task(loop.run())
    await slow.reached.wait()
    slow.opened.set()
    await running
    assert engine.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": engine.bodies[1]["messages"][1]["tool_calls"]},
        {"role": "tool", "tool_call_id": "a", "content": "first"},
        {"role": "tool", "tool_call_id": "b", "content": "second"},
    ]


async def test_every_step_is_journaled_before_it_acts() -> None:
    """Seen from the engine and from the tool: when they are called, the journal already says that they start."""
    seen: dict[str, list[str]] = {}

    class Watching(ScriptedEngine):
        async def run_turn(self, *args: Any) -> TurnOutcome:
            seen.setdefault("turn", await bench.kinds())
            return await super().run_turn(*args)

    class WatchingTools(ScriptedTools):
        async def call(self, *args: Any) -> Any:
            seen.setdefault("tool", await bench.kinds())
            return await super().call(*args)

    bench = Bench(spec(), engine=Watching([SHELL, answer("done")]), tools=WatchingTools({"shell": ["ok"]}))
    await bench.run()
    assert seen["turn"][-1] == "turn.started"
    assert seen["tool"][-1] == "tool.started"


async def test_the_replica_is_told_when_tools_start_and_finish_and_the_next_turn_how_long_they_took() -> None:
    clock = ManualClock()

    class SlowTools(ScriptedTools):
        async def call(self, call: Any, on_started: Any) -> Any:
            result = await super().call(call, on_started)
            clock.advance(2.5)
            return result

    engine = ScriptedEngine([SHELL, answer("done")])
    bench = Bench(spec(), engine=engine, tools=SlowTools({"shell": ["ok"]}), clock=clock)
    await bench.run()
    assert [(event.kind, event.tool, event.elapsed_s, event.outcome) for event in engine.events] == [
        (ToolEventKind.STARTED, "pytest", 0.0, None),
        (ToolEventKind.FINISHED, "pytest", 2.5, ToolOutcome.OK),
    ]
    first, second = engine.hints
    assert (first.last_tool, first.last_tool_s) == (None, None)
    assert (second.last_tool, second.last_tool_s) == ("pytest", 2.5)
    assert (await bench.journal.get(bench.program.id)).tool_seconds == 2.5


class TellingTools(ScriptedTools):
    """Tools that say how far they are."""

    async def call(
        self, call: ToolCall, on_started: Callable[[ToolStarted | ToolProgress], Awaitable[None]]
    ) -> ToolResult:
        result = await super().call(call, on_started)
        await on_started(ToolProgress(call_id=call.call_id, tool_key=ToolKey("x"), progress=1.0, total=4.0))
        return result


async def test_what_a_tool_says_of_its_progress_reaches_the_replica() -> None:
    engine = ScriptedEngine([SHELL, answer("done")])
    await Bench(spec(), engine=engine, tools=TellingTools({"shell": ["ok"]})).run()
    assert [(event.kind, event.tool, event.progress) for event in engine.events] == [
        (ToolEventKind.STARTED, "pytest", None),
        (ToolEventKind.PROGRESS, "pytest", 0.25),
        (ToolEventKind.FINISHED, "pytest", None),
    ]


async def test_progress_of_one_of_several_calls_is_no_progress_of_all() -> None:
    calls = tool_calls(("a", "shell", {"command": "git log"}), ("b", "read_file", {"path": "x"}))
    engine = ScriptedEngine([calls, answer("done")])
    await Bench(spec(), engine=engine, tools=TellingTools({"shell": ["1"], "read_file": ["2"]})).run()
    told = [(event.tool, event.progress) for event in engine.events if event.kind is ToolEventKind.PROGRESS]
    assert told == [("git+read_file", None)] * 2


async def test_parallel_calls_are_one_wait_under_a_combined_key() -> None:
    engine = ScriptedEngine(
        [tool_calls(("a", "shell", {"command": "git log"}), ("b", "read_file", {"path": "x"})), answer("done")]
    )
    bench = Bench(spec(), engine=engine, tools=ScriptedTools({"shell": ["1"], "read_file": ["2"]}))
    await bench.run()
    assert [(event.kind, event.tool) for event in engine.events] == [
        (ToolEventKind.STARTED, "git+read_file"),
        (ToolEventKind.FINISHED, "git+read_file"),
    ]


async def test_at_most_so_many_calls_of_a_program_run_at_once() -> None:
    gates = [Gate(str(number)) for number in range(3)]
    calls = [(f"c{number}", "shell", {"command": "true"}) for number in range(3)]
    tools = ScriptedTools({"shell": list(gates)})
    settings = ProgramSettings(tool_calls_parallel_max=2)
    bench = Bench(spec(), engine=ScriptedEngine([tool_calls(*calls), answer("done")]), tools=tools, settings=settings)
    await bench.submit()
    _, loop = await bench.claim()
    running = asyncio.create_task(loop.run())
    await gates[1].reached.wait()
    await asyncio.sleep(0)
    assert len(tools.calls) == 2
    for gate in gates:
        gate.opened.set()
    await running
    assert len(tools.calls) == 3


async def test_calls_beyond_the_limit_of_a_turn_are_as_if_never_asked_for() -> None:
    calls = [(f"c{number}", "shell", {"command": "true"}) for number in range(5)]
    engine = ScriptedEngine([tool_calls(*calls), answer("done")])
    tools = ScriptedTools({"shell": ["ok"] * 5})
    bench = Bench(spec(), engine=engine, tools=tools, settings=ProgramSettings(tool_calls_per_turn_max=2))
    await bench.run()
    assert [call.call_id for call in tools.calls] == ["c0", "c1"]
    assert [call["id"] for call in engine.bodies[1]["messages"][1]["tool_calls"]] == ["c0", "c1"]


async def test_a_call_of_a_tool_that_the_program_may_not_use_is_answered_and_never_run() -> None:
    engine = ScriptedEngine([tool_calls(("a", "python", {"code": "1"})), answer("done")])
    bench = Bench(spec(tools=["shell"]), engine=engine)
    await bench.run()
    assert bench.tools.calls == []
    (finished,) = await bench.data("tool.finished")
    assert finished["outcome"] == "error"
    assert finished["output"] == "There is no tool 'python'. Tools: shell."


async def test_a_tool_call_that_is_refused_is_told_to_the_model() -> None:
    engine = ScriptedEngine([SHELL, answer("done")])
    refusal = InvalidRequest("the arguments are too large")
    bench = Bench(spec(), engine=engine, tools=ScriptedTools({"shell": [refusal]}))
    await bench.run()
    assert engine.bodies[1]["messages"][-1]["content"] == "The tool could not be run: the arguments are too large"


async def test_how_leases_ended_is_counted_once_also_when_the_replica_changes() -> None:
    def turn(replica: str, **outcomes: int) -> TurnOutcome:
        lease = {"ttl_s": 1.0, "blocks": 3, "reason": "cold_start", "outcomes": outcomes}
        return tool_calls(("c", "shell", {"command": "true"}), replica=replica, lease=lease)

    turns = [turn("r1"), turn("r1", reused=1), turn("r1", reused=1, expired=1), turn("r2", released=1)]
    program = spec(limits=limits(max_turns=4))
    bench = Bench(program, engine=ScriptedEngine(turns), tools=ScriptedTools({"shell": ["ok"] * 4}))
    await bench.run()
    ends = [step["lease_ends"] for step in await bench.data("turn.finished")]
    assert ends == [{}, {"reused": 1}, {"expired": 1}, {"released": 1}]
    assert (await bench.journal.get(program.id)).leases == {"reused": 1, "expired": 1, "released": 1}


@pytest.mark.parametrize(
    ("replica", "outcomes", "ends"),
    [
        ("r1", {"reused": 1, "released": 1}, {"released": 1}),
        ("another one", {"released": 2}, {"released": 2}),
    ],
)
async def test_how_the_last_lease_ended_is_counted_too(
    replica: str, outcomes: dict[str, int], ends: dict[str, int]
) -> None:
    engine = ScriptedEngine(
        [answer("done", replica="r1", lease={"outcomes": {"reused": 1}})],
        released_as=ReleasedProgram(replica=replica, lease_outcomes=outcomes),
    )
    bench = Bench(spec(), engine=engine)
    await bench.run()
    (ended,) = await bench.data("program.ended")
    assert ended["lease_ends"] == ends
    assert (await bench.journal.get(bench.program.id)).leases == {"reused": 1, **ends}


# Limits


async def test_the_turn_limit_ends_a_program_after_the_tools_of_its_last_turn() -> None:
    engine = ScriptedEngine([SHELL, SHELL])
    bench = Bench(spec(limits=limits(max_turns=2)), engine=engine, tools=ScriptedTools({"shell": ["1", "2"]}))
    await bench.run()
    record = await bench.journal.get(bench.program.id)
    assert (record.state, record.end_reason) == (ProgramState.COMPLETED, EndReason.MAX_TURNS)
    assert len(bench.tools.calls) == 2


async def test_turns_declare_how_many_are_to_come_and_which_is_the_last() -> None:
    engine = ScriptedEngine([SHELL, SHELL, SHELL])
    bench = Bench(spec(limits=limits(max_turns=3)), engine=engine, tools=ScriptedTools({"shell": ["ok"] * 3}))
    await bench.run()
    assert [hints.remaining_turns for hints in engine.hints] == [2, 1, 0]
    assert [hints.is_last_turn for hints in engine.hints] == [False, False, True]


async def test_a_program_without_tools_has_one_turn_and_says_so() -> None:
    engine = ScriptedEngine([answer("hello")])
    bench = Bench(spec(tools=[], tool_choice="none"), engine=engine)
    await bench.run()
    assert "tools" not in engine.bodies[0]
    assert engine.hints[0].is_last_turn


async def test_the_token_limit_ends_a_program_and_bounds_its_last_turn() -> None:
    engine = ScriptedEngine([SHELL, SHELL])
    program = spec(limits=limits(max_total_tokens=150, max_tokens_per_turn=64))
    bench = Bench(program, engine=engine, tools=ScriptedTools({"shell": ["1", "2"]}))
    await bench.run()
    # 110 tokens a turn: after the first, 40 are left for output.
    assert [body["max_tokens"] for body in engine.bodies] == [64, 40]
    assert (await bench.journal.get(program.id)).end_reason is EndReason.MAX_TOTAL_TOKENS


async def test_the_time_limit_counts_from_submission() -> None:
    clock = ManualClock()
    bench = Bench(spec(limits=limits(max_seconds=10)), engine=ScriptedEngine(), clock=clock)
    await bench.submit()
    clock.advance(11)
    _, loop = await bench.claim()
    await loop.run()
    assert (await bench.journal.get(bench.program.id)).end_reason is EndReason.MAX_SECONDS
    assert bench.engine.bodies == []


async def test_the_time_limit_cuts_a_tool_short() -> None:
    gate: Gate[str] = Gate("never")
    program = spec(limits=limits(max_seconds=0.05))
    bench = Bench(program, engine=ScriptedEngine([SHELL]), tools=ScriptedTools({"shell": [gate]}))
    await bench.run()
    assert gate.was_cancelled
    assert bench.tools.cancelled == [(program.id, None)]
    assert (await bench.journal.get(program.id)).end_reason is EndReason.MAX_SECONDS


async def test_a_required_tool_call_that_was_cut_off_is_asked_for_again() -> None:
    engine = ScriptedEngine([answer('[{"name": "sh', finish_reason="length"), SHELL])
    program = spec(tool_choice="required", limits=limits(max_turns=2))
    bench = Bench(program, engine=engine, tools=ScriptedTools({"shell": ["ok"]}))
    await bench.run()
    assert engine.bodies[0]["parallel_tool_calls"] is False
    assert engine.bodies[1]["messages"][-1] == {"role": "user", "content": CUT_OFF_NUDGE}
    assert (await bench.journal.get(program.id)).end_reason is EndReason.MAX_TURNS


# Failures


async def test_a_turn_whose_replica_is_lost_runs_again_and_the_journal_says_so() -> None:
    engine = ScriptedEngine([ReplicaLost("it was killed"), answer("done")])
    bench = Bench(spec(), engine=engine)
    await bench.run()
    assert (await bench.kinds())[2:] == [
        "turn.started",
        "turn.replayed",
        "turn.started",
        "turn.finished",
        "program.ended",
    ]
    assert [step["attempt"] for step in await bench.data("turn.started")] == [1, 2]
    assert (await bench.data("turn.replayed"))[0]["reason"] == "it was killed"
    assert engine.bodies[0] == engine.bodies[1]
    record = await bench.journal.get(bench.program.id)
    assert (record.state, record.replayed_turns) == (ProgramState.COMPLETED, 1)


async def test_a_turn_that_is_lost_twice_fails_the_program() -> None:
    bench = Bench(spec(), engine=ScriptedEngine([ReplicaLost(), ReplicaLost()]))
    await bench.run()
    record = await bench.journal.get(bench.program.id)
    assert (record.state, record.end_reason) == (ProgramState.FAILED, EndReason.ENGINE_UNAVAILABLE)
    assert record.error is not None
    assert "lost 2 times" in record.error.message


async def test_a_turn_waits_while_no_replica_takes_it() -> None:
    engine = ScriptedEngine([EngineUnavailable(), EngineUnavailable(), answer("done")])
    bench = Bench(spec(), engine=engine, settings=FAST)
    await bench.run()
    assert (await bench.journal.get(bench.program.id)).state is ProgramState.COMPLETED
    # It was delayed once, however often it was refused.
    assert (await bench.kinds())[2:4] == ["turn.started", "turn.delayed"]
    assert (await bench.kinds()).count("turn.delayed") == 1


async def test_a_turn_that_nobody_ever_takes_fails_the_program() -> None:
    settings = ProgramSettings(engine_wait_s=0)
    bench = Bench(spec(), engine=ScriptedEngine([EngineUnavailable("all gone")]), settings=settings)
    await bench.run()
    record = await bench.journal.get(bench.program.id)
    assert (record.state, record.end_reason) == (ProgramState.FAILED, EndReason.ENGINE_UNAVAILABLE)
    assert record.error is not None
    assert record.error.message == "all gone"


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (ContextOverflow("too long"), EndReason.CONTEXT_OVERFLOW, "context_length_exceeded"),
        (InvalidRequest("bad sampling"), EndReason.TURN_FAILED, "invalid_request"),
    ],
)
async def test_a_turn_that_the_engine_refuses_fails_the_program(error: Exception, reason: EndReason, code: str) -> None:
    bench = Bench(spec(), engine=ScriptedEngine([error]))
    await bench.run()
    record = await bench.journal.get(bench.program.id)
    assert (record.state, record.end_reason) == (ProgramState.FAILED, reason)
    assert record.error is not None
    assert record.error.code == code


async def test_a_call_whose_actor_is_lost_is_reported_as_interrupted_and_not_repeated() -> None:
    engine = ScriptedEngine([SHELL, answer("done")])
    bench = Bench(spec(), engine=engine, tools=ScriptedTools({"shell": [ToolHostLost()]}))
    await bench.run()
    assert len(bench.tools.calls) == 1
    assert engine.bodies[1]["messages"][-1]["content"] == INTERRUPTED_OUTPUT
    assert engine.events[-1].outcome is ToolOutcome.INTERRUPTED


async def test_an_idempotent_call_whose_actor_is_lost_runs_once_more() -> None:
    engine = ScriptedEngine([tool_calls(("a", "read_file", {"path": "x"})), answer("done")])
    bench = Bench(spec(), engine=engine, tools=ScriptedTools({"read_file": [ToolHostLost(), "text"]}))
    await bench.run()
    assert len(bench.tools.calls) == 2
    assert engine.bodies[1]["messages"][-1]["content"] == "text"


@pytest.mark.parametrize("error", [Overloaded(), SandboxUnavailable(), Unavailable()])
async def test_a_call_waits_while_nothing_takes_it_and_the_model_does_not_hear_of_it(error: Exception) -> None:
    engine = ScriptedEngine([SHELL, answer("done")])
    tools = ScriptedTools({"shell": [error, error, "ok"]})
    bench = Bench(spec(), engine=engine, tools=tools, settings=FAST)
    await bench.run()
    assert engine.bodies[1]["messages"][-1]["content"] == "ok"


async def test_a_call_that_nothing_ever_takes_fails_the_program() -> None:
    tools = ScriptedTools({"shell": [SandboxUnavailable("no sandbox holds here")]})
    settings = ProgramSettings(tool_wait_s=0)
    bench = Bench(spec(), engine=ScriptedEngine([SHELL]), tools=tools, settings=settings)
    await bench.run()
    record = await bench.journal.get(bench.program.id)
    assert (record.state, record.end_reason) == (ProgramState.FAILED, EndReason.TOOLS_UNAVAILABLE)
    assert record.error is not None
    assert record.error.message == "no sandbox holds here"


# Cancellation


async def test_cancelling_during_a_turn_aborts_it() -> None:
    gate: Gate[TurnOutcome] = Gate(answer("never"))
    bench = Bench(spec(), engine=ScriptedEngine([gate]))
    await bench.submit()
    _, loop = await bench.claim()
    running = asyncio.create_task(loop.run())
    await gate.reached.wait()
    loop.cancel()
    await running
    assert gate.was_cancelled
    record = await bench.journal.get(bench.program.id)
    assert (record.state, record.end_reason) == (ProgramState.CANCELLED, EndReason.CANCELLED)
    assert bench.engine.released == [bench.program.id]


async def test_cancelling_during_a_tool_stops_it() -> None:
    gate: Gate[str] = Gate("never")
    bench = Bench(spec(), engine=ScriptedEngine([SHELL]), tools=ScriptedTools({"shell": [gate]}))
    await bench.submit()
    _, loop = await bench.claim()
    running = asyncio.create_task(loop.run())
    await gate.reached.wait()
    loop.cancel()
    await running
    assert bench.tools.cancelled == [(bench.program.id, None)]
    assert (await bench.journal.get(bench.program.id)).state is ProgramState.CANCELLED


async def test_a_program_cancelled_before_it_runs_never_reaches_the_engine() -> None:
    bench = Bench(spec(), engine=ScriptedEngine())
    await bench.submit()
    _, loop = await bench.claim()
    loop.cancel()
    await loop.run()
    assert bench.engine.bodies == []
    assert (await bench.journal.get(bench.program.id)).state is ProgramState.CANCELLED


@pytest.mark.parametrize("delete", [True, False])
async def test_the_end_releases_kv_and_sandbox(delete: bool) -> None:
    settings = ProgramSettings(delete_workspaces=delete)
    bench = Bench(spec(), engine=ScriptedEngine([answer("done")]), settings=settings)
    await bench.run()
    assert bench.engine.released == [bench.program.id]
    assert bench.tools.released == [(bench.program.id, delete)]
