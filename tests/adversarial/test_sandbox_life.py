"""Attacks on the life of a sandbox and on what it says: daemons, dead actors, forged answers, leaks, and no sandbox at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent_program.errors import SandboxUnavailable
from agent_program.ids import ProgramId
from agent_program.tool_events import ToolOutcome
from support.tools import Program, descendants_of, processes_with, state_directory, tool_actor
from support.waiting import wait_for, wait_for_async
from tool_runtime import probes
from tool_runtime.actor import ToolActor
from tool_runtime.bubblewrap import find_python
from tool_runtime.config import SandboxBackend, SandboxLimits, ToolRuntimeSettings
from tool_runtime.launcher_client import LauncherClient
from tool_runtime.tool_call import ToolCall
from tool_runtime.unsafe_local import UnsafeLocal
from tool_runtime.workspaces import Workspaces

pytestmark = [pytest.mark.adversarial, pytest.mark.asyncio(loop_scope="module")]

DAEMONS = {
    "set apart and forked twice": 'python3 -c "import os,time\nif os.fork()==0:\n os.setsid()\n if os.fork()==0: time.sleep({mark})" && sleep 100',
    "deaf to signals": "trap '' INT TERM HUP QUIT; sleep {mark}",
    "stopped": "sleep {mark} & kill -STOP $!; kill -STOP $$",
    "in a session of its own": "setsid sleep {mark}",
    "holding the output": "sleep {mark} & disown; sleep 100",
}


@pytest.mark.parametrize("command", DAEMONS.values(), ids=DAEMONS)
async def test_nothing_outlives_its_timeout(program: Program, command: str) -> None:
    mark = f"700{len(command)}.{os.getpid()}"
    result = await program.shell(command.format(mark=mark), timeout_s=1)
    assert result.outcome is ToolOutcome.TIMEOUT
    wait_for(lambda: not processes_with(mark), what="the daemon is gone")
    assert (await program.shell("echo works")).output == "works"


@pytest.mark.parametrize("attack", ["kill -STOP 2; sleep 100", "kill -KILL 2; sleep 100", "kill -STOP 1 2; sleep 100"])
async def test_a_program_that_attacks_its_own_agent_loses_its_sandbox_and_nothing_else(
    program: Program, neighbour: Program, attack: str
) -> None:
    await neighbour.shell("A=1")
    result = await program.shell(attack, timeout_s=1)
    assert result.outcome in (ToolOutcome.TIMEOUT, ToolOutcome.INTERRUPTED)
    again = await program.shell("echo works")
    assert again.output.startswith("works")
    assert (await neighbour.shell("echo $A")).output == "1"


async def test_an_actor_that_is_killed_leaves_no_process(backend: SandboxBackend) -> None:
    mark = f"7777.{os.getpid()}"
    script = f"""
import asyncio, sys
sys.path[:0] = {[str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]!r}
from support.tools import Program, tool_actor

async def main():
    async with tool_actor(sandbox={backend.value!r}) as actor:
        await Program(actor).shell("sleep {mark} & (setsid sleep {mark} &); true")
        running = await Program(actor).shell_running("trap '' INT TERM; sleep {mark}")
        print("running", flush=True)
        await running

asyncio.run(main())
"""
    with state_directory() as place:  # it will not clean up after itself
        actor = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(place)}
        )
        assert actor.stdout is not None
        assert await actor.stdout.readline() == b"running\n"
        wait_for(lambda: len(processes_with(f"sleep\0{mark}")) >= 3, what="all three sleepers run")
        actor.kill()
        await actor.wait()
        wait_for(lambda: not processes_with(f"sleep\0{mark}"), what="no process of the killed actor is left")


async def test_a_sandbox_outlives_the_thread_that_asked_for_it(backend: SandboxBackend) -> None:
    """PR_SET_PDEATHSIG is per thread: a sandbox started from a thread that ends would be killed at once."""
    async with tool_actor(sandbox=backend) as actor:
        loop = asyncio.get_running_loop()
        program = Program(actor)
        results = []

        def ask() -> None:
            results.append(asyncio.run_coroutine_threadsafe(program.shell("A=1; sleep 100 & true"), loop).result())

        thread = threading.Thread(target=ask)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert results[0].outcome is ToolOutcome.OK
        assert (await program.shell("echo $A; jobs | grep -c sleep")).output == "1\n1"


async def cycle(actor: ToolActor, times: int) -> None:
    for _ in range(times):
        program = Program(actor)
        await program.shell("sleep 1000 & true")
        await actor.release(program.id, delete_workspace=True)


def machine_state(directory: Path, launcher: int) -> dict[str, int]:
    """What a leak would show in."""
    with open("/proc/self/mountinfo") as mounts:
        mount_count = len(mounts.readlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "descriptors of the launcher": len(os.listdir(f"/proc/{launcher}/fd")),
        "processes": len(descendants_of(launcher)),
        "zombies": len(zombies_of(launcher)),
        "mounts": mount_count,
        "files": sum(len(names) + len(files) for _, names, files in os.walk(directory)),
    }


#: Those of the second run, as a plain user, are fewer: what a leak would need is the same.
CYCLES, LANES = int(os.environ.get("CONTINUUM_TEST_CYCLES", "1000")), 8


async def test_opening_and_closing_leaks_nothing(backend: SandboxBackend) -> None:
    others = descendants_of(os.getpid())
    async with tool_actor(sandbox=backend, concurrent_calls_max=LANES) as actor:
        directory = actor._settings.state_dir
        assert directory is not None
        await asyncio.gather(*(cycle(actor, 1) for _ in range(LANES)))
        (launcher,) = [pid for pid in descendants_of(os.getpid()) - others if "launcher" in command_of(pid)]

        async def is_quiet() -> bool:
            state = machine_state(directory, launcher)
            return state["processes"] == state["zombies"] == 0

        # The last orphan is reaped a moment after its sandbox was reported gone.
        await wait_for_async(is_quiet, what="the first sandboxes are gone")
        before = machine_state(directory, launcher)
        await asyncio.gather(*(cycle(actor, CYCLES // LANES) for _ in range(LANES)))

        async def is_as_before() -> bool:
            return machine_state(directory, launcher) == before

        await wait_for_async(is_as_before, what=f"everything is as before: {before}")


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def zombies_of(parent: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                state, ppid = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[:2]
                if state == "Z" and int(ppid) == parent:
                    found.append(int(entry))
    return found


async def test_a_sandbox_carries_nothing_from_the_program_before(program: Program, neighbour: Program) -> None:
    await program.shell(
        "export LEFT=1; f() { :; }; echo left > $TMPDIR/left; echo left > /dev/shm/left; echo left > left; cd /usr; umask 077"
    )
    await program.python("left = 1")
    assert (await neighbour.shell("echo [$LEFT]")).output == "[]"
    assert "not found" in (await neighbour.shell("f")).output
    assert (await neighbour.shell("ls $TMPDIR . /dev/shm 2>/dev/null | grep left || echo nothing")).output == "nothing"
    assert (await neighbour.shell("[ $PWD = $HOME ] && umask")).output == "0022"
    assert "NameError" in (await neighbour.python("left")).output


async def test_a_parked_sandbox_carries_nothing_to_the_program_that_takes_it() -> None:
    async with tool_actor(sandbox=SandboxBackend.BUBBLEWRAP, warm_sandboxes=1) as actor:

        async def is_parked() -> bool:
            return bool((await actor.status())["sandboxes_warm"])

        for _ in range(3):
            await wait_for_async(is_parked, what="a sandbox is parked")
            program = Program(actor)
            found = await program.shell("ls -A . /tmp /dev/shm; echo [$LEFT]; cat /proc/[0-9]*/comm | grep -c sleep")
            assert found.output.split()[:5] == [".:", "/dev/shm:", "/tmp:", "[]", "0"], found.output
            await program.shell("touch left /tmp/left /dev/shm/left; export LEFT=1; sleep 1000 &")
            await actor.release(program.id, delete_workspace=True)
        assert (await actor.status())["sandboxes_claimed_warm"] == 3


class TestNoSandbox:
    """Where nothing holds, nothing runs."""

    async def refusal_of(self, **settings: object) -> str:
        before = descendants_of(os.getpid())
        with state_directory() as path:
            wanted = ToolRuntimeSettings(state_dir=path, sandbox=SandboxBackend.BUBBLEWRAP, **settings)  # type: ignore[arg-type]
            actor = ToolActor(wanted, None)
            try:
                with pytest.raises(SandboxUnavailable) as refused:
                    await actor.start()
                call = ToolCall(program_id=ProgramId("p"), call_id="1", tool="shell", arguments={"command": "true"})
                with pytest.raises(SandboxUnavailable):
                    async for _ in actor.call(call):
                        pass
                status = await actor.status()
                assert not status["ready"]
                assert status["reason"] == refused.value.message
                await actor.check_health()
            finally:
                await actor.close()
        assert descendants_of(os.getpid()) - before == set()
        return refused.value.message

    async def test_without_bwrap_tools_refuse_and_say_why(self) -> None:
        assert "there is no bwrap program" in await self.refusal_of(bwrap_path="/nonexistent/bwrap")

    async def test_a_bwrap_that_fails_is_no_sandbox(self) -> None:
        assert "the sandbox ended" in await self.refusal_of(bwrap_path="/usr/bin/false")

    async def test_a_bwrap_that_isolates_nothing_is_found_out(self, tmp_path: Path) -> None:
        """It runs the agent as it is: everything works, so only the probes can tell."""
        with state_directory() as place:
            impostor = place / "bwrap"
            root = Path(__file__).parents[2]
            impostor.write_text(
                f"#!{find_python()}\nimport os, sys\n"
                "words = sys.argv[sys.argv.index('--') + 1:]\n"
                f"words = [word.replace('/.agent', {str(root)!r}) for word in words]\n"
                "os.execv(words[0], words)\n"
            )
            impostor.chmod(0o755)
            reason = await self.refusal_of(bwrap_path=str(impostor))
        for hole in ("host file", "host listener", "abstract socket", "host processes", "new namespaces", "keyrings"):
            assert hole in reason


async def test_without_bwrap_the_next_tier_is_taken_and_named() -> None:
    async with tool_actor(sandbox=SandboxBackend.AUTO, bwrap_path="/nonexistent/bwrap") as actor:
        assert (await actor.status())["sandbox"] == "landlock"
        assert (await Program(actor).shell("echo works")).output == "works"


async def test_the_probes_find_what_is_open() -> None:
    """Against no isolation at all they must report, or they would report nothing anywhere."""
    launcher = LauncherClient()
    with state_directory() as path:
        workspaces = Workspaces(path, uid_first=200_000, uid_count=10)
        try:
            found = await probes.failures(
                UnsafeLocal(find_python()), launcher, workspaces, SandboxLimits(), start_timeout_s=30
            )
        finally:
            await launcher.close()
    names = {line.split(":")[0] for line in found}
    assert {"host file", "host listener", "abstract socket", "new namespaces", "keyrings", "vsock"} <= names
    assert "own workspace" not in names


async def test_a_launcher_told_to_stop_kills_what_it_started(backend: SandboxBackend) -> None:
    mark = f"7778.{os.getpid()}"
    others = descendants_of(os.getpid())
    async with tool_actor(sandbox=backend) as actor:
        running = await Program(actor).shell_running(f"sleep {mark}")
        (launcher,) = [pid for pid in descendants_of(os.getpid()) - others if "launcher" in command_of(pid)]
        os.kill(launcher, signal.SIGTERM)
        assert (await running).outcome is ToolOutcome.INTERRUPTED
        wait_for(lambda: not processes_with(f"sleep\0{mark}"), what="the sandbox is gone")
