"""A program that changes hands, and a journal that goes away: nothing runs twice, nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_program.clock import ManualClock
from agent_program.errors import StoreUnavailable
from agent_program.states import ProgramState
from deployments.journal import Claim, LeaseLost
from deployments.memory_clients import Gate, ScriptedEngine, ScriptedTools, answer, tool_calls
from deployments.memory_journal import MemoryJournal
from deployments.ports import ReplicaLost, TurnOutcome
from deployments.program import EndReason, new_record
from deployments.program_settings import ProgramSettings
from deployments.record_steps import apply_to_record
from deployments.steps import INTERRUPTED_OUTPUT
from support.programs import Bench, spec

SHELL = tool_calls(("call_1", "shell", {"command": "pytest -q"}))
FAST = ProgramSettings(retry_s=0.001, store_wait_s=30.0)


async def stop_at(bench: Bench, gate: Gate[Any]) -> None:
    """Run until the gate is reached, then lose the runner: it stops without a word, and its lease lapses."""
    _, loop = await bench.claim()
    running = asyncio.create_task(loop.run())
    await gate.reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert isinstance(bench.clock, ManualClock)
    bench.clock.advance(11)


async def test_a_turn_that_was_in_progress_runs_again_under_the_next_runner() -> None:
    gate: Gate[TurnOutcome] = Gate(answer("lost"))
    bench = Bench(spec(), engine=ScriptedEngine([gate, answer("done")]))
    await bench.submit()
    await stop_at(bench, gate)
    _, loop = await bench.claim("runner_2")
    await loop.run()
    assert await bench.kinds() == [
        "program.queued",
        "program.claimed",
        "turn.started",
        "program.claimed",
        "turn.started",
        "turn.finished",
        "program.ended",
    ]
    assert [step["resumed"] for step in await bench.data("program.claimed")] == [False, True]
    assert (await bench.journal.get(bench.program.id)).output == "done"


async def test_losing_runners_does_not_use_up_the_replay_of_a_turn() -> None:
    gates = [Gate(answer("lost")) for _ in range(3)]
    bench = Bench(spec(), engine=ScriptedEngine([*gates, ReplicaLost(), answer("done")]))
    await bench.submit()
    for gate in gates:
        await stop_at(bench, gate)
    _, loop = await bench.claim("runner_4")
    await loop.run()
    assert (await bench.journal.get(bench.program.id)).output == "done"


async def test_a_program_that_loses_runner_after_runner_fails() -> None:
    gates = [Gate(answer("lost")) for _ in range(2)]
    settings = ProgramSettings(claims_in_a_row_max=2)
    bench = Bench(spec(), engine=ScriptedEngine([*gates]), settings=settings)
    await bench.submit()
    for gate in gates:
        await stop_at(bench, gate)
    _, loop = await bench.claim("runner_3")
    await loop.run()
    record = await bench.journal.get(bench.program.id)
    assert (record.state, record.end_reason) == (ProgramState.FAILED, EndReason.RUNNERS_LOST)


async def test_finished_steps_are_not_repeated_by_the_next_runner() -> None:
    gate: Gate[TurnOutcome] = Gate(answer("lost"))
    engine = ScriptedEngine([SHELL, gate, answer("done")])
    bench = Bench(spec(), engine=engine, tools=ScriptedTools({"shell": ["result"]}))
    await bench.submit()
    await stop_at(bench, gate)
    _, loop = await bench.claim("runner_2")
    await loop.run()
    assert len(bench.tools.calls) == 1
    assert engine.bodies[2] == engine.bodies[1]
    assert [step["turn"] for step in await bench.data("turn.finished")] == [1, 2]


async def test_a_call_in_progress_is_stopped_and_reported_as_interrupted_by_the_next_runner() -> None:
    gate: Gate[str] = Gate("lost")
    engine = ScriptedEngine([SHELL, answer("done")])
    bench = Bench(spec(), engine=engine, tools=ScriptedTools({"shell": [gate]}))
    await bench.submit()
    await stop_at(bench, gate)
    bench.tools.cancelled.clear()
    _, loop = await bench.claim("runner_2")
    await loop.run()
    assert bench.tools.cancelled == [(bench.program.id, None)]
    assert len(bench.tools.calls) == 1
    assert engine.bodies[1]["messages"][-1]["content"] == INTERRUPTED_OUTPUT
    assert [step["outcome"] for step in await bench.data("tool.finished")] == ["interrupted"]


async def test_an_idempotent_call_in_progress_runs_again_under_the_next_runner() -> None:
    gate: Gate[str] = Gate("lost")
    engine = ScriptedEngine([tool_calls(("a", "read_file", {"path": "x"})), answer("done")])
    bench = Bench(spec(), engine=engine, tools=ScriptedTools({"read_file": [gate, "text"]}))
    await bench.submit()
    await stop_at(bench, gate)
    _, loop = await bench.claim("runner_2")
    await loop.run()
    assert engine.bodies[1]["messages"][-1]["content"] == "text"
    assert len(await bench.data("tool.started")) == 1


async def test_a_runner_that_lost_its_lease_stops_and_writes_nothing_more() -> None:
    gate: Gate[TurnOutcome] = Gate(answer("too late"))
    bench = Bench(spec(), engine=ScriptedEngine([gate, answer("done")]))
    await bench.submit()
    _, loop = await bench.claim()
    running = asyncio.create_task(loop.run())
    await gate.reached.wait()
    assert isinstance(bench.clock, ManualClock)
    bench.clock.advance(11)
    _, other = await bench.claim("runner_2")
    await other.run()
    gate.opened.set()
    with pytest.raises(LeaseLost):
        await running
    record = await bench.journal.get(bench.program.id)
    assert (record.output, record.turns) == ("done", 1)


class FlakyJournal(MemoryJournal):
    """Away for a number of appends; `applied` says whether those arrived all the same and only the answer was lost."""

    def __init__(self, clock: ManualClock, *, away: int, applied: bool) -> None:
        super().__init__(clock)
        self.away = away
        self._applied = applied

    async def append(self, claim: Claim, steps: Any, record: Any) -> None:
        if self.away:
            self.away -= 1
            if self._applied:
                await super().append(claim, steps, record)
            raise StoreUnavailable
        await super().append(claim, steps, record)


@pytest.mark.parametrize("applied", [False, True])
async def test_a_store_that_is_away_for_a_while_delays_a_program_and_loses_nothing(applied: bool) -> None:
    clock = ManualClock()
    journal = FlakyJournal(clock, away=3, applied=applied)
    bench = Bench(spec(), engine=ScriptedEngine([answer("done")]), journal=journal, clock=clock, settings=FAST)
    await bench.run()
    assert await bench.kinds() == [
        "program.queued",
        "program.claimed",
        "turn.started",
        "turn.finished",
        "program.ended",
    ]


async def test_a_store_that_stays_away_stops_the_runner() -> None:
    clock = ManualClock()
    journal = FlakyJournal(clock, away=1_000_000, applied=False)
    settings = ProgramSettings(store_wait_s=0)
    bench = Bench(spec(), engine=ScriptedEngine(), journal=journal, clock=clock, settings=settings)
    with pytest.raises(StoreUnavailable):
        await bench.run()
    assert bench.engine.bodies == []


# A runner may die at any point


class Died(Exception):
    """The runner is gone; nothing after this line of it ever runs."""


class MortalJournal(MemoryJournal):
    """Its runner dies at one of its appends: just before the steps are stored, or just after."""

    def __init__(self, clock: ManualClock, *, dies_at: int, stored: bool) -> None:
        super().__init__(clock)
        self._dies_at = dies_at
        self._stored = stored
        self.appends = 0

    async def append(self, claim: Claim, steps: Any, record: Any) -> None:
        self.appends += 1
        if self.appends != self._dies_at:
            await super().append(claim, steps, record)
            return
        if self._stored:
            await super().append(claim, steps, record)
        raise Died


class CountingEngine(ScriptedEngine):
    """Three turns that call a shell and a reader, then an answer: a function of the conversation, so that a turn that runs
    again says the same."""

    async def run_turn(self, body: Any, hints: Any) -> TurnOutcome:
        self.bodies.append(body)
        turn = 1 + sum(message["role"] == "assistant" for message in body["messages"])
        if turn > 3:
            return answer("done")
        return tool_calls(
            (f"shell-{turn}", "shell", {"command": f"step {turn}"}),
            (f"read-{turn}", "read_file", {"path": f"file {turn}"}),
        )


def mortal_bench(*, dies_at: int, stored: bool) -> Bench:
    clock = ManualClock()
    tools = ScriptedTools({"shell": ["did"] * 20, "read_file": ["text"] * 20})
    journal = MortalJournal(clock, dies_at=dies_at, stored=stored)
    return Bench(spec(), engine=CountingEngine(), tools=tools, journal=journal, clock=clock)


async def run_to_end(bench: Bench) -> int:
    """Run under one runner after the other until the program has ended; returns how many it took."""
    await bench.submit()
    for number in range(1, 4):
        _, loop = await bench.claim(f"runner_{number}")
        try:
            await loop.run()
            return number
        except Died:
            assert isinstance(bench.clock, ManualClock)
            bench.clock.advance(11)
            if (await bench.journal.get(bench.program.id)).state.is_final:
                return number
    raise AssertionError("the program did not end")


async def appends_of_a_whole_run() -> int:
    bench = mortal_bench(dies_at=10**9, stored=False)
    assert await run_to_end(bench) == 1
    assert isinstance(bench.journal, MortalJournal)
    return bench.journal.appends


@pytest.mark.parametrize("stored", [False, True])
async def test_a_runner_lost_at_any_step_loses_nothing_and_repeats_nothing(stored: bool) -> None:
    for dies_at in range(1, 1 + await appends_of_a_whole_run()):
        bench = mortal_bench(dies_at=dies_at, stored=stored)
        await run_to_end(bench)
        record = await bench.journal.get(bench.program.id)
        assert (record.state, record.end_reason, record.output) == (
            ProgramState.COMPLETED,
            EndReason.ANSWER,
            "done",
        ), dies_at
        shells = [call.call_id for call in bench.tools.calls if call.tool == "shell"]
        assert len(shells) == len(set(shells)), f"a call ran twice when the runner died at append {dies_at}"
        finished = [step["turn"] for step in await bench.data("turn.finished")]
        assert finished == [1, 2, 3, 4], dies_at
        answered = [step["call_id"] for step in await bench.data("tool.finished")]
        assert sorted(answered) == sorted(f"{tool}-{turn}" for tool in ("shell", "read") for turn in (1, 2, 3))
        steps = await bench.journal.steps(bench.program.id)
        assert [step.seq for step in steps] == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("stored", [False, True])
async def test_the_record_is_what_the_steps_add_up_to(stored: bool) -> None:
    for dies_at in (3, 5, 9):
        bench = mortal_bench(dies_at=dies_at, stored=stored)
        await run_to_end(bench)
        record = new_record(bench.program)
        for step in await bench.journal.steps(bench.program.id):
            record = apply_to_record(record, step)
        assert record == await bench.journal.get(bench.program.id)
