"""A program that ended holds nothing: its KV and its sandbox are given back whatever happens to its runner meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agent_program.clock import SystemClock
from agent_program.errors import Unavailable
from deployments.journal import Claim, LeaseStatus
from deployments.memory_clients import ScriptedEngine, ScriptedTools, answer
from deployments.memory_journal import MemoryJournal
from deployments.ports import ReleasedProgram
from deployments.program_settings import ProgramSettings
from deployments.runner import ProgramRunner
from support.programs import Bench, spec
from support.waiting import wait_for_async


class BusyEngine(ScriptedEngine):
    """An engine that is long in taking the news of a program's end, as one in a long step is."""

    def __init__(self) -> None:
        super().__init__([answer("done")])
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def release(self, program_id: str) -> ReleasedProgram | None:
        self.asked.set()
        await self.may_answer.wait()
        return await super().release(program_id)


class CountingJournal(MemoryJournal):
    """Knows how often leases were reported lost."""

    lost = 0

    async def extend(self, claims: Sequence[Claim], *, lease_s: float) -> dict[str, LeaseStatus]:
        statuses = await super().extend(claims, lease_s=lease_s)
        self.lost += sum(status is LeaseStatus.LOST for status in statuses.values())
        return statuses


async def test_the_lease_that_ends_with_the_program_does_not_stop_its_release() -> None:
    """An ended program has no lease, which the extension of leases takes for one that was lost."""
    journal, engine, tools = CountingJournal(SystemClock()), BusyEngine(), ScriptedTools()
    runner = ProgramRunner(
        journal=journal,
        engine=engine,
        tools=tools,
        clock=SystemClock(),
        settings=ProgramSettings(lease_s=0.05, poll_s=0.02, retry_s=0.01, release_wait_s=0),
    )
    program = spec(created_at=SystemClock().wall_s())

    async def is_reported_lost() -> bool:
        return journal.lost > 0

    async def is_over() -> bool:
        return runner.status()["running"] == 0

    runner.start()
    try:
        await journal.create(program, queued_max=10)
        await engine.asked.wait()
        await wait_for_async(is_reported_lost, what="the runner asks for the lease of the ended program")
        engine.may_answer.set()
        await wait_for_async(is_over, what="the program to leave its runner")
    finally:
        await runner.close()
    assert (engine.released, tools.released) == ([program.id], [(program.id, True)])


async def test_the_end_and_the_sandbox_do_not_wait_for_a_busy_engine() -> None:
    engine = BusyEngine()
    bench = Bench(spec(), engine=engine, settings=ProgramSettings(release_wait_s=0))
    running = asyncio.create_task(bench.run())
    await engine.asked.wait()

    async def sandbox_is_released() -> bool:
        return bool(bench.tools.released)

    await wait_for_async(sandbox_is_released, what="the sandbox to be released")
    assert not running.done()
    assert (await bench.kinds())[-1] == "program.ended"
    engine.may_answer.set()
    await running


async def test_a_runner_that_is_stopped_meanwhile_finishes_the_release() -> None:
    engine = BusyEngine()
    bench = Bench(spec(), engine=engine)
    running = asyncio.create_task(bench.run())
    await engine.asked.wait()
    running.cancel()
    await asyncio.sleep(0)
    engine.may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (engine.released, bench.tools.released) == ([bench.program.id], [(bench.program.id, True)])


@pytest.mark.parametrize("fault", [RuntimeError("a fault"), Unavailable("away")])
async def test_a_fault_of_the_engine_does_not_keep_the_sandbox(fault: Exception) -> None:
    class Faulty(ScriptedEngine):
        async def release(self, program_id: str) -> ReleasedProgram | None:
            raise fault

    bench = Bench(spec(), engine=Faulty([answer("done")]))
    await bench.run()
    assert bench.tools.released == [(bench.program.id, True)]
    assert (await bench.kinds())[-1] == "program.ended"
