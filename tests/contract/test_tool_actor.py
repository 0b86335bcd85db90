"""How a tool actor shares out slots and sandboxes, and what it leaves when it ends: asked of every sandbox backend."""

from __future__ import annotations

import asyncio
import os

import pytest

from agent_program.errors import Overloaded, SandboxUnavailable
from agent_program.ids import DEFAULT_TENANT, ProgramId, ToolKey
from agent_program.tool_events import ToolOutcome
from support.tools import Program, actor_with, descendants_of, processes_with, tool_actor
from support.waiting import wait_for_async
from tool_runtime.actor import ToolActor
from tool_runtime.config import OutputLimits, SandboxBackend
from tool_runtime.history import MemoryHistory
from tool_runtime.tool_call import ToolCall, ToolResult

#: Backends whose sandboxes are processes of this machine.
LOCAL = [SandboxBackend.BUBBLEWRAP, SandboxBackend.LANDLOCK, SandboxBackend.UNSAFE_LOCAL]


@pytest.fixture(params=[*LOCAL, SandboxBackend.KUBERNETES], ids=lambda backend: backend.value)
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    return request.param


async def no_sandbox_is_live(actor: ToolActor) -> bool:
    return (await actor.status())["live_sandboxes"] == 0


async def test_endless_output_is_stopped(backend: SandboxBackend) -> None:
    limits = OutputLimits(head_bytes=1000, tail_bytes=1000, hard_bytes_max=1_000_000)
    async with actor_with(backend, output=limits) as actor:
        program = Program(actor)
        result = await program.shell("yes", timeout_s=100)
        assert result.outcome is ToolOutcome.ERROR
        assert result.truncated_bytes > 900_000
        assert "it printed too much" in result.output
        assert len(result.output) < 3000
        assert (await program.shell("echo works")).output == "works"


async def test_more_calls_than_may_wait_are_refused_as_overload(backend: SandboxBackend) -> None:
    async with actor_with(backend, concurrent_calls_max=1, queued_calls_max=1) as actor:
        first = await Program(actor).shell_running("sleep 0.5")
        waiting = asyncio.create_task(Program(actor).shell("true"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await Program(actor).shell("true")
        assert (await first).outcome is ToolOutcome.OK
        assert (await waiting).outcome is ToolOutcome.OK


async def test_a_call_cancelled_in_the_queue_never_starts(backend: SandboxBackend) -> None:
    async with actor_with(backend, concurrent_calls_max=2) as actor:
        running = [await Program(actor).shell_running("sleep 1000") for _ in range(2)]
        two = Program(actor)
        waiting = asyncio.create_task(two.events("shell", {"command": "true"}))
        await asyncio.sleep(0)
        assert await actor.cancel(two.id) == 1
        (only,) = await waiting
        assert isinstance(only, ToolResult)
        assert (only.outcome, only.duration_s) == (ToolOutcome.CANCELLED, 0.0)
        assert not any(task.done() for task in running)
        await actor.close()
        await asyncio.gather(*running)


async def test_waiting_is_told_apart_from_running_and_only_running_is_a_sample(backend: SandboxBackend) -> None:
    history = MemoryHistory()
    async with actor_with(backend, concurrent_calls_max=1, history=history) as actor:
        results = await asyncio.gather(*(Program(actor).shell("sleep 0.4") for _ in range(2)))
    assert max(result.queue_s for result in results) > 0.3
    samples = (await history.snapshot()).tools[ToolKey("sleep")]
    assert samples.quantiles == pytest.approx(sorted(result.duration_s for result in results), abs=0.05)


async def test_timeouts_are_censored_samples_and_failures_are_durations(backend: SandboxBackend) -> None:
    history = MemoryHistory()
    async with actor_with(backend, history=history, interrupt_grace_s=0) as actor:
        await Program(actor).shell("sleep 100", timeout_s=0.3)
        await Program(actor).shell("sleep 0; false")
    samples = (await history.snapshot()).tools
    assert (samples[ToolKey("sleep")].censored_count, samples[ToolKey("sleep")].count) == (1, 1)


async def test_of_too_many_sandboxes_the_one_idle_longest_is_closed_and_its_program_told(
    backend: SandboxBackend,
) -> None:
    async with actor_with(backend, live_sandboxes_max=2, concurrent_calls_max=2) as actor:
        one, two, three = (Program(actor) for _ in range(3))
        for program in (one, two, three):
            await program.shell("A=1; echo kept > file")
        assert (await actor.status())["live_sandboxes"] == 2
        again = await one.shell("echo [$A]; cat file")
        assert again.output.startswith("[]\nkept\n[This shell session is new")
        assert (await three.shell("echo [$A]")).output == "[1]"


async def test_an_idle_sandbox_is_closed(backend: SandboxBackend) -> None:
    async with actor_with(backend, idle_sandbox_ttl_s=0.2) as actor:
        await Program(actor).shell("true")
        await wait_for_async(lambda: no_sandbox_is_live(actor), what="the idle sandbox is closed")


async def number_parked(actor: ToolActor) -> int:
    return (await actor.status())["sandboxes_warm"]


async def test_a_new_program_takes_a_sandbox_that_is_ready_and_another_is_made() -> None:
    async with tool_actor(sandbox=SandboxBackend.BUBBLEWRAP, warm_sandboxes=1) as actor:
        await wait_for_async(lambda: number_parked(actor), what="a sandbox is parked")
        started = (await actor.status())["sandboxes_started"]
        program = Program(actor)
        assert (await program.shell("echo kept > file; cat file")).output == "kept"
        status = await actor.status()
        assert status["sandboxes_claimed_warm"] == 1
        await wait_for_async(lambda: number_parked(actor), what="another sandbox is parked")
        assert (await actor.status())["sandboxes_started"] == started + 1
        # Its files are where they would be without the pool.
        await actor.release(program.id, delete_workspace=False)
        assert (await program.shell("cat file")).output == "kept"
        assert (await actor.status())["sandboxes_claimed_warm"] == 1


async def test_parked_sandboxes_end_with_the_actor_and_leave_no_files() -> None:
    before = descendants_of(os.getpid())
    async with tool_actor(sandbox=SandboxBackend.BUBBLEWRAP, warm_sandboxes=2) as actor:
        await wait_for_async(lambda: number_parked(actor), what="a sandbox is parked")
        await actor.close()
        state_dir = actor._settings.state_dir
        assert state_dir is not None
        assert os.listdir(state_dir / "parked") == os.listdir(state_dir / "trash") == []
    assert descendants_of(os.getpid()) - before == set()


async def test_a_parked_sandbox_that_died_is_not_given_out() -> None:
    async with tool_actor(sandbox=SandboxBackend.BUBBLEWRAP, warm_sandboxes=1) as actor:
        await wait_for_async(lambda: number_parked(actor), what="a sandbox is parked")
        assert actor._sandboxes is not None
        await actor._sandboxes.warm._parked[0][0].close()
        assert (await Program(actor).shell("echo works")).output == "works"
        assert (await actor.status())["sandboxes_claimed_warm"] == 0


async def test_a_backend_whose_programs_see_the_hosts_paths_parks_none() -> None:
    async with tool_actor(sandbox=SandboxBackend.LANDLOCK, warm_sandboxes=2) as actor:
        assert (await Program(actor).shell("cd; basename $PWD; echo works")).output.endswith("works")
        assert (await actor.status())["sandboxes_warm"] == 0


async def test_a_sandbox_in_which_nothing_runs_goes_to_sleep_and_wakes_up_as_it_was(backend: SandboxBackend) -> None:
    async with actor_with(backend, idle_sandbox_sleep_s=0.05) as actor:
        program, busy = Program(actor), Program(actor)
        await program.shell("mkdir -p 'odd dir'; cd 'odd dir'; A=1; f() { echo f$A; }")
        await busy.shell("(sleep 0.5; echo late > late) & true")
        if backend is SandboxBackend.BUBBLEWRAP:
            await wait_for_async(lambda: is_asleep(actor, program), what="the sandbox is asleep")
        assert (await program.shell('f; basename "$PWD"; cat')).output == "f1\nodd dir"
        await program.python("x = 1")
        await asyncio.sleep(0.2)
        assert (await program.python("x")).output == "1"
        assert not await is_asleep(actor, busy)
        assert (await busy.shell("wait; cat late")).output == "late"


async def is_asleep(actor: ToolActor, program: Program) -> bool:
    assert actor._sandboxes is not None
    sandbox = actor._sandboxes._programs[DEFAULT_TENANT, program.id].sandbox
    return sandbox is not None and sandbox.is_asleep


async def test_a_shell_that_dies_in_its_sleep_is_replaced(backend: SandboxBackend) -> None:
    async with actor_with(backend, idle_sandbox_sleep_s=0.05) as actor:
        program = Program(actor)
        await program.shell("A=1")
        if backend is SandboxBackend.BUBBLEWRAP:
            await wait_for_async(lambda: is_asleep(actor, program), what="the sandbox is asleep")
        shells = [pid for pid in descendants_of(os.getpid()) if command_of(pid).startswith("bash --norc")]
        for pid in shells:
            os.kill(pid, 9)
        result = await program.shell("echo [$A]")
        if backend is SandboxBackend.BUBBLEWRAP:
            assert result.output.startswith("[]\n[This shell session is new")
        assert (await program.shell("echo works")).output.splitlines()[0] == "works"


async def test_closing_the_actor_leaves_no_process(backend: SandboxBackend) -> None:
    before = descendants_of(os.getpid())
    async with actor_with(backend) as actor:
        running = await Program(actor).shell_running("sleep 1000 & (setsid sleep 1000 &) ; sleep 1000")
        await actor.close()
        assert (await running).outcome is ToolOutcome.CANCELLED
    assert descendants_of(os.getpid()) - before == set()


async def test_a_call_to_an_actor_that_was_closed_is_refused(backend: SandboxBackend) -> None:
    async with actor_with(backend) as actor:
        await actor.close()
        call = ToolCall(program_id=ProgramId("p"), call_id="c", tool="shell", arguments={"command": "true"})
        with pytest.raises(SandboxUnavailable):
            async for _ in actor.call(call):
                pass
        with pytest.raises(SandboxUnavailable):
            await actor.check_health()


@pytest.mark.parametrize("backend", LOCAL, ids=lambda backend: backend.value)
async def test_a_launcher_that_dies_is_replaced(backend: SandboxBackend) -> None:
    before = descendants_of(os.getpid())
    async with actor_with(backend) as actor:
        program = Program(actor)
        mark = f"3603.{os.getpid()}"
        running = await program.shell_running(f"(setsid sleep {mark} &); sleep {mark} & sleep {mark}")
        await wait_for_async(lambda: as_async(len(processes_with(f"sleep\0{mark}")) == 3), what="all sleepers run")
        (launcher,) = [pid for pid in descendants_of(os.getpid()) - before if is_launcher(pid)]
        os.kill(launcher, 9)
        assert (await running).outcome is ToolOutcome.INTERRUPTED
        await wait_for_async(lambda: as_async(not processes_with(f"sleep\0{mark}")), what="no sleeper is left")
        assert (await program.shell("echo works")).output.startswith("works")
    assert descendants_of(os.getpid()) - before == set()


async def as_async(value: bool) -> bool:
    return value


def is_launcher(pid: int) -> bool:
    return "launcher.main" in command_of(pid)


def command_of(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as command:
        return command.read().replace(b"\0", b" ").decode()
