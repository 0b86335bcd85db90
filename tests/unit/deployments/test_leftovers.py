"""What ended programs left with the tool actors is found by the journal, and nothing else is touched."""

from __future__ import annotations

import asyncio

import pytest

from agent_program.clock import ManualClock
from agent_program.ids import DEFAULT_TENANT, ProgramId
from deployments.leftovers import release_leftovers
from deployments.memory_clients import ScriptedEngine, ScriptedTools, answer
from deployments.memory_journal import MemoryJournal
from support.programs import Bench, spec
from support.scripted_sandboxes import ScriptedLauncher, scripted_actor
from support.tools import Program, state_directory
from tool_runtime.held_program import HeldProgram


def holding(program_id: str, *, is_live: bool) -> HeldProgram:
    return HeldProgram(tenant_id=DEFAULT_TENANT, program_id=ProgramId(program_id), is_live=is_live)


@pytest.fixture
def tools() -> ScriptedTools:
    return ScriptedTools()


async def ended_program() -> Bench:
    bench = Bench(spec(), engine=ScriptedEngine([answer("done")]))
    await bench.run()
    return bench


@pytest.mark.parametrize("is_live", [True, False])
async def test_what_an_ended_program_holds_is_released_with_its_files(tools: ScriptedTools, is_live: bool) -> None:
    bench = await ended_program()
    tools.leftovers = [holding(bench.program.id, is_live=is_live)]
    assert await release_leftovers(bench.journal, tools, delete_workspaces=True) == 1
    assert tools.released == [(bench.program.id, True)]


async def test_files_that_the_settings_keep_are_kept(tools: ScriptedTools) -> None:
    bench = await ended_program()
    tools.leftovers = [holding(bench.program.id, is_live=False)]
    assert await release_leftovers(bench.journal, tools, delete_workspaces=False) == 0
    tools.leftovers = [holding(bench.program.id, is_live=True)]
    assert await release_leftovers(bench.journal, tools, delete_workspaces=False) == 1
    assert tools.released == [(bench.program.id, False)]


async def test_a_program_that_runs_is_left_alone(tools: ScriptedTools) -> None:
    bench = Bench(spec(), engine=ScriptedEngine())
    await bench.submit()
    tools.leftovers = [holding(bench.program.id, is_live=True)]
    assert await release_leftovers(bench.journal, tools, delete_workspaces=True) == 0
    assert tools.released == []


async def test_of_a_program_that_nobody_knows_the_sandbox_goes_and_the_files_stay(tools: ScriptedTools) -> None:
    """Another platform may have its files on the same disk."""
    tools.leftovers = [holding("ours", is_live=True), holding("theirs", is_live=False)]
    assert await release_leftovers(MemoryJournal(ManualClock()), tools, delete_workspaces=True) == 1
    assert tools.released == [("ours", False)]


async def test_a_call_that_comes_after_the_release_is_found() -> None:
    """The actor cannot know that it came too late; the journal can."""
    clock, launcher = ManualClock(), ScriptedLauncher()
    with state_directory() as state:
        actor = scripted_actor(state, launcher, clock=clock, warm_sandboxes=0)
        bench = await ended_program()
        late = Program(actor, bench.program.id)
        await actor.release(late.id, delete_workspace=True)
        await late.shell("true")
        assert (launcher.alive, await actor.held(30.0)) == (1, [])
        clock.advance(31.0)

        class Actor(ScriptedTools):
            async def held(self, quiet_s: float) -> list[HeldProgram]:
                return await actor.held(quiet_s)

            async def release_everywhere(self, held: HeldProgram, *, delete_workspace: bool) -> None:
                await actor.release(held.program_id, tenant_id=held.tenant_id, delete_workspace=delete_workspace)

        assert await release_leftovers(bench.journal, Actor(), delete_workspaces=True) == 1
        assert launcher.alive == 0
        assert list((state / "workspaces").iterdir()) == []
        await asyncio.sleep(0)
        await actor.close()


async def test_files_are_known_by_their_program_after_the_actor_was_replaced() -> None:
    clock = ManualClock()
    with state_directory() as state:
        before = scripted_actor(state, ScriptedLauncher(), clock=clock, warm_sandboxes=0)
        program = Program(before)
        await program.shell("true")
        await before.close()
        after = scripted_actor(state, ScriptedLauncher(), clock=clock, warm_sandboxes=0)
        clock.advance(4e9)  # files have the machine's time
        assert await after.held(30.0) == [holding(program.id, is_live=False)]
        await after.release(program.id, delete_workspace=True)
        assert await after.held(30.0) == []
        await after.close()
