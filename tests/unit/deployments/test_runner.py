"""A runner takes programs, keeps them, loses them cleanly, and gives them back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agent_program.clock import SystemClock
from agent_program.errors import StoreUnavailable
from agent_program.states import ProgramState
from deployments.journal import Claim, LeaseStatus
from deployments.memory_clients import Gate, ScriptedEngine, ScriptedTools, answer
from deployments.memory_journal import MemoryJournal
from deployments.ports import TurnOutcome
from deployments.program import EndReason, ProgramRecord, ProgramSpec
from deployments.program_settings import ProgramSettings
from deployments.runner import ProgramRunner
from support.programs import spec
from support.waiting import wait_for_async

QUICK = ProgramSettings(lease_s=0.3, poll_s=0.05, retry_s=0.01)


def fresh(name: str) -> ProgramSpec:
    return spec(id=name, created_at=SystemClock().wall_s())


def runner(journal: MemoryJournal, engine: ScriptedEngine, **settings: Any) -> ProgramRunner:
    return ProgramRunner(
        journal=journal,
        engine=engine,
        tools=ScriptedTools(),
        clock=SystemClock(),
        settings=QUICK.model_copy(update=settings),
    )


@asynccontextmanager
async def running(*runners: ProgramRunner) -> AsyncIterator[None]:
    for one in runners:
        one.start()
    try:
        yield
    finally:
        for one in runners:
            await one.close()


async def ended(journal: MemoryJournal, program_id: str) -> ProgramRecord:
    async def look() -> ProgramRecord | None:
        record = await journal.get(program_id)
        return record if record.state.is_final else None

    return await wait_for_async(look, what=f"{program_id} to end")


async def test_a_queued_program_is_taken_and_run_to_its_end() -> None:
    journal = MemoryJournal(SystemClock())
    async with running(runner(journal, ScriptedEngine([answer("one"), answer("two")]))):
        await journal.create(fresh("a"), queued_max=10)
        assert (await ended(journal, "a")).output == "one"
        await journal.create(fresh("b"), queued_max=10)
        assert (await ended(journal, "b")).output == "two"


async def test_no_more_programs_are_taken_than_there_is_room_for() -> None:
    journal = MemoryJournal(SystemClock())
    first: Gate[TurnOutcome] = Gate(answer("one"))
    engine = ScriptedEngine([first, answer("two")])
    one = runner(journal, engine, running_per_runner_max=1)
    async with running(one):
        await journal.create(fresh("a"), queued_max=10)
        await journal.create(fresh("b"), queued_max=10)
        await first.reached.wait()
        assert one.status()["running"] == 1
        assert (await journal.get("b")).state is ProgramState.QUEUED
        first.opened.set()
        await ended(journal, "b")
    assert len(engine.bodies) == 2


async def test_a_long_turn_keeps_its_lease() -> None:
    journal = MemoryJournal(SystemClock())
    gate: Gate[TurnOutcome] = Gate(answer("late"))
    async with running(runner(journal, ScriptedEngine([gate])), runner(journal, ScriptedEngine())):
        await journal.create(fresh("a"), queued_max=10)
        await gate.reached.wait()
        await asyncio.sleep(QUICK.lease_s * 2)
        gate.opened.set()
        assert (await ended(journal, "a")).output == "late"
    kinds = [step.kind.value for step in await journal.steps("a")]
    assert kinds.count("program.claimed") == 1


async def test_a_cancellation_reaches_a_program_in_its_turn() -> None:
    journal = MemoryJournal(SystemClock())
    gate: Gate[TurnOutcome] = Gate(answer("never"))
    async with running(runner(journal, ScriptedEngine([gate]), lease_s=3600.0)):
        await journal.create(fresh("a"), queued_max=10)
        await gate.reached.wait()
        await journal.request_cancel("a")
        assert (await ended(journal, "a")).state is ProgramState.CANCELLED
    assert gate.was_cancelled


async def test_a_runner_that_is_closed_hands_its_programs_to_another_at_once() -> None:
    journal = MemoryJournal(SystemClock())
    gate: Gate[TurnOutcome] = Gate(answer("lost"))
    first = runner(journal, ScriptedEngine([gate]), lease_s=3600.0)
    first.start()
    await journal.create(fresh("a"), queued_max=10)
    await gate.reached.wait()
    await first.close()
    assert gate.was_cancelled
    async with running(runner(journal, ScriptedEngine([answer("done")]))):
        assert (await ended(journal, "a")).output == "done"


async def test_the_programs_of_a_runner_that_dies_are_taken_over_when_their_leases_run_out() -> None:
    journal = MemoryJournal(SystemClock())
    await journal.create(fresh("a"), queued_max=10)
    assert await journal.claim("dead", lease_s=0.05) is not None
    async with running(runner(journal, ScriptedEngine([answer("done")]))):
        assert (await ended(journal, "a")).output == "done"


async def test_a_runner_whose_lease_was_taken_stops_the_program() -> None:
    class Robbed(MemoryJournal):
        async def extend(self, claims: Any, *, lease_s: float) -> dict[str, LeaseStatus]:
            statuses = await super().extend(claims, lease_s=lease_s)
            return dict.fromkeys(statuses, LeaseStatus.LOST)

    journal = Robbed(SystemClock())
    gate: Gate[TurnOutcome] = Gate(answer("never"))
    one = runner(journal, ScriptedEngine([gate]))
    async with running(one):
        await journal.create(fresh("a"), queued_max=10)
        await gate.reached.wait()

        async def stopped() -> bool:
            return gate.was_cancelled

        await wait_for_async(stopped, what="the turn to be aborted")


async def test_an_error_of_the_runner_fails_the_program_and_no_other() -> None:
    journal = MemoryJournal(SystemClock())
    engine = ScriptedEngine([RuntimeError("a bug"), answer("done")])
    async with running(runner(journal, engine)):
        await journal.create(fresh("a"), queued_max=10)
        record = await ended(journal, "a")
        assert (record.state, record.end_reason) == (ProgramState.FAILED, EndReason.INTERNAL_ERROR)
        assert record.error is not None
        assert "a bug" not in record.error.message
        await journal.create(fresh("b"), queued_max=10)
        assert (await ended(journal, "b")).state is ProgramState.COMPLETED


async def test_a_runner_outlives_a_store_that_is_away() -> None:
    class Away(MemoryJournal):
        claims = 0

        async def claim(self, *arguments: Any, **options: Any) -> Claim | None:
            self.claims += 1
            if self.claims <= 3:
                raise StoreUnavailable
            return await super().claim(*arguments, **options)

    journal = Away(SystemClock())
    one = runner(journal, ScriptedEngine([answer("done")]))
    async with running(one):
        await journal.create(fresh("a"), queued_max=10)
        await ended(journal, "a")
        one.check_health()


async def test_programs_in_progress_survive_a_store_that_was_away_for_longer_than_their_leases() -> None:
    class Away(MemoryJournal):
        is_away = False

        async def claim(self, *arguments: Any, **options: Any) -> Claim | None:
            if self.is_away:
                raise StoreUnavailable
            return await super().claim(*arguments, **options)

        async def extend(self, *arguments: Any, **options: Any) -> dict[str, LeaseStatus]:
            if self.is_away:
                raise StoreUnavailable
            return await super().extend(*arguments, **options)

    journal = Away(SystemClock())
    gate: Gate[TurnOutcome] = Gate(answer("kept"))
    async with running(runner(journal, ScriptedEngine([gate])), runner(journal, ScriptedEngine())):
        await journal.create(fresh("a"), queued_max=10)
        await gate.reached.wait()
        journal.is_away = True
        await asyncio.sleep(QUICK.lease_s * 2)
        journal.is_away = False
        await asyncio.sleep(QUICK.lease_s)
        gate.opened.set()
        assert (await ended(journal, "a")).output == "kept"
    kinds = [step.kind.value for step in await journal.steps("a")]
    assert kinds.count("program.claimed") == 1


async def test_finished_programs_are_forgotten() -> None:
    journal = MemoryJournal(SystemClock())
    await journal.create(fresh("a"), queued_max=10)
    await journal.request_cancel("a")
    async with running(runner(journal, ScriptedEngine(), keep_finished_count=0)):

        async def forgotten() -> bool:
            return not (await journal.list(state=None, limit=10, after=None)).records

        await wait_for_async(forgotten, what="the program to be forgotten")
