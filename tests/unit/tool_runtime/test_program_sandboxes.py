"""Programs' sandboxes over hundreds of interleavings of calls, cancellations, releases and housekeeping: none stays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from agent_program.clock import ManualClock
from agent_program.errors import PlatformError
from agent_program.ids import ProgramId
from agent_program.tool_events import ToolOutcome
from support.scripted_sandboxes import ScriptedLauncher, scripted_actor
from support.tools import Program, state_directory
from support.waiting import wait_for_async
from tool_runtime.actor import ToolActor

SEEDS = 150


@pytest.fixture
def state() -> Iterator[Path]:
    with state_directory() as path:
        yield path


class Schedule:
    """What a seed makes of a few programs on one actor."""

    def __init__(self, seed: int, state: Path) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.state = state
        self.launcher = ScriptedLauncher(seed, start_failures=0.05)
        self.actor = scripted_actor(
            state,
            self.launcher,
            clock=self.clock,
            live_sandboxes_max=4,
            concurrent_calls_max=3,
            warm_sandboxes=self.random.choice((0, 1)),
            idle_sandbox_sleep_s=1.0,
            idle_sandbox_ttl_s=5.0,
        )
        assert self.actor._sandboxes is not None
        self.sandboxes = self.actor._sandboxes

    async def turns(self) -> None:
        for _ in range(self.random.randrange(12)):
            await asyncio.sleep(0)

    async def run(self) -> None:
        self.sandboxes.warm.fill()
        keeping_house = asyncio.create_task(self.keep_house())
        await asyncio.gather(*(self.program(ProgramId(f"p{n}")) for n in range(6)))
        keeping_house.cancel()
        with suppress(asyncio.CancelledError):
            await keeping_house
        while self.sandboxes._closing:  # a release that its caller left goes on alone
            await asyncio.wait(set(self.sandboxes._closing))

    async def program(self, program_id: ProgramId) -> None:
        await self.turns()
        calls = [asyncio.create_task(self.call(program_id)) for _ in range(self.random.randrange(1, 4))]
        await asyncio.sleep(0)  # they have arrived
        for call in calls:
            await self.turns()
            if self.random.random() < 0.4:
                call.cancel()
        if self.random.random() < 0.5:
            await asyncio.wait(calls, timeout=0.01)  # some hang
        await self.release(program_id)
        await asyncio.wait(calls)

    async def call(self, program_id: ProgramId) -> None:
        tool, argument = self.random.choice((("shell", "command"), ("python", "code")))
        command = "hang" if self.random.random() < 0.1 and tool == "shell" else "true"
        with suppress(PlatformError):
            await Program(self.actor, program_id).run(tool, {argument: command}, timeout_s=30)

    async def release(self, program_id: ProgramId) -> None:
        """As a caller does who has little time."""
        releasing = asyncio.create_task(self.actor.release(program_id, delete_workspace=True))
        await asyncio.sleep(0)  # it has arrived
        await self.turns()
        if self.random.random() < 0.3:
            releasing.cancel()
        await asyncio.wait({releasing})

    async def keep_house(self) -> None:
        while True:
            await self.sandboxes.rest_idle()
            await self.sandboxes.check_disks()
            self.clock.advance(self.random.choice((0.1, 1.0, 3.0)))
            await self.turns()


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
async def test_whatever_the_order_of_calls_and_releases_nothing_stays(first: int) -> None:
    for seed in range(first, first + 50):
        with state_directory() as state:
            schedule = Schedule(seed, state)
            async with asyncio.timeout(60):
                await schedule.run()
            assert schedule.sandboxes.live == 0, f"seed {seed}"
            assert not schedule.sandboxes._programs, f"seed {seed}"
            assert list((state / "workspaces").iterdir()) == [], f"seed {seed}"
            await schedule.actor.close()
            assert schedule.launcher.alive == 0, f"seed {seed}"
            assert list((state / "parked").iterdir()) == [], f"seed {seed}"


async def test_a_release_whose_caller_gives_up_is_carried_through(state: Path) -> None:
    launcher = ScriptedLauncher()
    actor = scripted_actor(state, launcher, warm_sandboxes=0)
    program = Program(actor)
    running = asyncio.create_task(program.shell("hang", timeout_s=30))
    await started(actor)
    releasing = asyncio.create_task(actor.release(program.id, delete_workspace=True))
    await asyncio.sleep(0)
    releasing.cancel()
    assert (await running).outcome is ToolOutcome.CANCELLED
    assert actor._sandboxes is not None
    await asyncio.wait(set(actor._sandboxes._closing))
    assert (actor._sandboxes.live, launcher.alive) == (0, 0)
    assert list((state / "workspaces").iterdir()) == []


async def test_a_call_that_comes_while_its_program_is_released_makes_no_new_workspace(state: Path) -> None:
    actor = scripted_actor(state, ScriptedLauncher(), warm_sandboxes=0)
    program = Program(actor)
    releasing = asyncio.create_task(actor.release(program.id, delete_workspace=True))
    await asyncio.sleep(0)
    late = await program.shell("true")
    await releasing
    assert (late.outcome, late.duration_s) == (ToolOutcome.CANCELLED, 0.0)
    assert list((state / "workspaces").iterdir()) == []
    assert actor._sandboxes is not None
    assert not actor._sandboxes._programs


async def test_a_program_whose_files_cannot_be_removed_is_forgotten_all_the_same(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = scripted_actor(state, ScriptedLauncher(), warm_sandboxes=0)
    program = Program(actor)
    await program.shell("true")

    def fail(*_: object) -> bool:
        raise OSError("the disk says no")

    assert actor._sandboxes is not None
    with monkeypatch.context() as patched:
        patched.setattr(actor._sandboxes._workspaces, "delete", fail)
        with pytest.raises(OSError, match="the disk says no"):
            await actor.release(program.id, delete_workspace=True)
    assert actor._sandboxes.live == 0
    assert (await program.shell("true")).outcome is ToolOutcome.OK, "the id may be used again"
    await actor.close()


async def test_a_program_that_is_released_while_others_are_put_to_sleep_does_not_end_the_housekeeping(
    state: Path,
) -> None:
    clock = ManualClock()
    actor = scripted_actor(state, ScriptedLauncher(3), clock=clock, warm_sandboxes=0)
    programs = [Program(actor) for _ in range(5)]
    for program in programs:
        await program.shell("true")
    assert actor._sandboxes is not None
    clock.advance(6.0)
    resting = asyncio.create_task(actor._sandboxes.rest_idle())
    await asyncio.sleep(0)
    for program in programs:
        await actor.release(program.id, delete_workspace=True)
    await resting
    await actor.close()


async def test_a_sandbox_that_nobody_releases_is_closed_when_its_time_is_up(state: Path) -> None:
    clock, launcher = ManualClock(), ScriptedLauncher()
    actor = scripted_actor(state, launcher, clock=clock, warm_sandboxes=0, idle_sandbox_ttl_s=600.0)
    await Program(actor).shell("true")
    assert actor._sandboxes is not None
    clock.advance(599.0)
    again_s = await actor._sandboxes.rest_idle()
    assert launcher.alive == 1
    clock.advance(1.0)
    await actor._sandboxes.rest_idle()
    assert launcher.alive == 0
    assert again_s <= 30.0, "and it is looked at often enough"


async def test_a_program_is_not_forgotten_while_a_call_of_it_waits(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgotten, it would get a second sandbox beside the one that nobody knows of any more."""
    monkeypatch.setattr("tool_runtime.program_sandboxes._PROGRAMS_REMEMBERED_MAX", 0)
    launcher = ScriptedLauncher()
    actor = scripted_actor(state, launcher, warm_sandboxes=0, live_sandboxes_max=1, concurrent_calls_max=1)
    first = Program(actor)
    running = asyncio.create_task(first.shell("hang", timeout_s=30))
    await started(actor)
    waiting = Program(actor)
    wait = asyncio.create_task(waiting.shell("true"))
    more = [asyncio.create_task(Program(actor).shell("true")) for _ in range(5)]
    await asyncio.sleep(0)
    assert actor._sandboxes is not None
    assert {program_id for _, program_id in actor._sandboxes._programs} >= {first.id, waiting.id}
    await actor.cancel(first.id)
    await asyncio.gather(running, wait, *more)
    for _, program_id in list(actor._sandboxes._programs):
        await actor.release(program_id, delete_workspace=True)
    assert launcher.alive == 0


async def started(actor: ToolActor) -> None:
    """Until a call runs."""

    async def runs() -> bool:
        return actor._running > 0

    await wait_for_async(runs, what="a call runs")
