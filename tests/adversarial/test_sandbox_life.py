"""Attacks on the life of a sandbox and on what it says: daemons, dead actors, forged answers, leaks, and no sandbox at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from agent_program.errors import SandboxUnavailable
from agent_program.ids import ProgramId
from agent_program.tool_events import ToolOutcome
from support.tools import Program, descendants_of, processes_with, state_directory, tool_actor
from support.waiting import wait_for
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


FORGERIES = {
    "nonsense": "b'\\xff' * 100",
    "a huge frame": "b'\\x7f\\xff\\xff\\xff' + b'x' * 1000",
    "fields cut off": "b'\\0\\0\\0\\3\\xff\\0\\0'",
    "an answer to another call": "frame(ev=b'done', id=b'999', nonce=b'x', exit_code=b'0')",
    "an answer with a wrong nonce": "frame(ev=b'done', id=b'1', nonce=b'0' * 16, exit_code=b'0') + frame(ev=b'done', id=b'2', nonce=b'', exit_code=b'0')",
    "a pickle": "frame(ev=pickle.dumps(print), id=pickle.dumps({}), data=b'\\x80\\x04.')",
    "nested json": "frame(ev=b'[' * 100000, id=b'{' * 100000)",
    "output without end": "b''.join(frame(ev=b'out', id=b'1', stream=b'stdout', data=b'x' * 60000) for _ in range(1000))",
    "an exit code that is none": "frame(ev=b'done', id=b'1', nonce=b'x', exit_code=b'9' * 10000)",
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
async def test_what_a_hostile_agent_sends_is_data_or_the_end_of_its_sandbox(
    program: Program, neighbour: Program, forgery: str
) -> None:
    """The program puts code of its own in place of the agent, whose socket it takes over by the agent's memory."""
    await neighbour.shell("A=1")
    hijacked = await hijack(program, forgery)
    assert hijacked.outcome is not None
    again = await program.shell("echo works", timeout_s=30)
    assert again.output.splitlines()[0] == "works" or again.outcome is not ToolOutcome.OK
    assert (await program.shell("echo works", timeout_s=30)).output.splitlines()[0] == "works"
    assert (await neighbour.shell("echo $A")).output == "1"


async def hijack(program: Program, forgery: str):
    """Have the agent's process send `forgery`: its Python is rewritten through /proc/2/mem."""
    code = textwrap.dedent(
        """
        import os, pickle, re, struct
        def frame(**fields):
            body = b"".join(
                bytes((len(name),)) + name.encode() + struct.pack(">I", len(value)) + value for name, value in fields.items()
            )
            return struct.pack(">I", len(body)) + body
        payload = FORGERY
        # The agent runs files.py from its own directory when it is first asked for a file; its path is a string in memory.
        wanted, replacement = b"/.agent\\0", b"/tmp/a\\0\\0"
        os.makedirs("/tmp/a/tool_runtime/inside", exist_ok=True)
        with open("/tmp/payload", "wb") as out:
            out.write(payload)
        with open("/tmp/a/tool_runtime/inside/files.py", "w") as out:
            out.write("import os\\nfor fd in range(3, 30):\\n  try:\\n    if os.readlink(f'/proc/self/fd/{fd}').startswith('socket'):\\n"
                      "      data = open('/tmp/payload', 'rb').read()\\n      os.set_blocking(fd, True)\\n"
                      "      while data: data = data[os.write(fd, data):]\\n  except OSError: pass\\n")
        replaced = 0
        with open("/proc/2/maps") as maps, open("/proc/2/mem", "r+b", buffering=0) as memory:
            for line in maps:
                if "rw-p" not in line:
                    continue
                start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
                memory.seek(start)
                try:
                    content = memory.read(end - start)
                except OSError:
                    continue
                for match in re.finditer(re.escape(b"/.agent/tool_runtime/inside\\0"), content):
                    memory.seek(start + match.start())
                    memory.write(b"/tmp/a/tool_runtime/inside\\0\\0")
                    replaced += 1
                for match in re.finditer(re.escape(wanted), content):
                    memory.seek(start + match.start())
                    memory.write(replacement)
                    replaced += 1
        replaced
        """
    ).replace("FORGERY", forgery)
    await program.python(code)
    return await program.run("read_file", {"path": "/tmp/payload"}, timeout_s=5)


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
    actor = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
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


def machine_state(directory: Path) -> dict[str, int]:
    """What a leak would show in."""
    with open("/proc/self/mountinfo") as mounts:
        mount_count = len(mounts.readlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "descendants": len(descendants_of(os.getpid())),
        "mounts": mount_count,
        "files": sum(len(names) + len(files) for _, names, files in os.walk(directory)),
    }


@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=pytest.mark.slow)])
async def test_opening_and_closing_leaks_nothing(backend: SandboxBackend, times: int) -> None:
    others = descendants_of(os.getpid())
    async with tool_actor(sandbox=backend) as actor:
        directory = actor._settings.state_dir
        assert directory is not None
        await cycle(actor, 4)
        (launcher,) = [pid for pid in descendants_of(os.getpid()) - others if "launcher" in command_of(pid)]
        before = machine_state(directory), len(os.listdir(f"/proc/{launcher}/fd"))
        await asyncio.gather(*(cycle(actor, times // 4) for _ in range(4)))
        # A closed socket's transport goes with the next turn of the loop.
        await asyncio.sleep(0)
        assert (machine_state(directory), len(os.listdir(f"/proc/{launcher}/fd"))) == before
        assert zombies_of(launcher) == []


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
        "export LEFT=1; f() { :; }; echo left > /tmp/left; echo left > /dev/shm/left; cd /tmp; umask 077"
    )
    await program.python("left = 1")
    state = await neighbour.shell("echo [$LEFT]; type f 2>&1 | tail -1; ls /tmp /dev/shm; pwd; umask")
    assert state.output == "[]\nbash: line 1: type: f: not found\n/dev/shm:\n\n/tmp:\n/workspace\n0022"
    assert "NameError" in (await neighbour.python("left")).output


class TestNoSandbox:
    """Where nothing holds, nothing runs."""

    async def refusal_of(self, **settings: object) -> str:
        before = descendants_of(os.getpid())
        with state_directory() as path:
            actor = ToolActor(ToolRuntimeSettings(state_dir=path, **settings), None)  # type: ignore[arg-type]
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
