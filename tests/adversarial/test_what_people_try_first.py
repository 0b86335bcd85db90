"""What anybody tries who is let at a sandbox, one after the other, in one program: each ends, and the program goes on.

The same commands as one would submit through REST (`{"input": "Run this command: yes", "tools": ["shell"]}`), given to the tool
actor as a runner gives them, because a small model does not copy every one of them to the letter.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent_program.tool_events import ToolOutcome
from support.tools import Program, processes_with, tool_actor
from support.waiting import wait_for_async
from tool_runtime.actor import ToolActor
from tool_runtime.config import MIB, SandboxBackend, SandboxLimits

ONE_GB = 1_000_000_000
FETCH = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8123/').read().decode())\""


@pytest.fixture(params=[SandboxBackend.BUBBLEWRAP, SandboxBackend.LANDLOCK], ids=lambda backend: backend.value)
async def actor(request: pytest.FixtureRequest) -> AsyncIterator[ToolActor]:
    limits = SandboxLimits(processes_max=64)
    async with tool_actor(sandbox=request.param, limits=limits, concurrent_calls_max=4) as started:
        yield started


async def works(program: Program) -> bool:
    return (await program.shell("echo works")).output.splitlines()[0] == "works"


async def none_left(word: str) -> bool:
    return not processes_with(word)


async def test_a_file_server_serves_its_own_program_and_nobody_else(actor: ToolActor) -> None:
    program, other = Program(actor), Program(actor)
    begun = await program.shell(
        "echo mine > page; python3 -m http.server --bind 127.0.0.1 8123 >server.log 2>&1 & sleep 1"
    )
    assert begun.outcome is ToolOutcome.OK
    fetched = await program.shell(FETCH)
    if actor._settings.sandbox is SandboxBackend.BUBBLEWRAP:  # it has a loopback of its own, and jobs outlive calls
        assert "page" in fetched.output
    else:  # no socket opens at all
        assert "PermissionError" in (await program.shell("cat server.log")).output
    assert (await other.shell(FETCH)).outcome is ToolOutcome.ERROR
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", 8123), timeout=2)
    await actor.release(program.id, delete_workspace=True)
    await wait_for_async(lambda: none_left("http.server\0--bind"), what="the server ends with its program")


async def test_a_fork_bomb_goes_off_where_it_is(actor: ToolActor) -> None:
    program, other = Program(actor), Program(actor)
    assert await works(other)
    bombed = await program.shell("bomb() { bomb | bomb & }; bomb; sleep 1000", timeout_s=2)
    assert bombed.outcome in (ToolOutcome.TIMEOUT, ToolOutcome.ERROR)
    assert await works(other)
    assert await works(program)


async def test_yes_is_stopped_when_it_has_said_enough(actor: ToolActor) -> None:
    program = Program(actor)
    said = await program.shell("yes", timeout_s=100)
    assert said.outcome is ToolOutcome.ERROR
    assert "it printed too much" in said.output
    assert said.output.startswith("y\ny\n")
    assert said.output.count("\n") < 2100
    assert await works(program)


async def test_a_line_of_a_gigabyte_costs_no_memory(actor: ToolActor) -> None:
    program = Program(actor)
    command = f"head -c {ONE_GB} /dev/zero | tr '\\0' x"
    line = await program.shell(command, timeout_s=100)
    assert line.outcome is ToolOutcome.ERROR
    assert "it printed too much" in line.output
    assert len(line.output) < 70_000
    assert 15 * MIB < line.truncated_bytes < 40 * MIB  # it was stopped soon after the limit
    # In a file it is the file's limit that holds, and reading it is bounded.
    written = await program.shell(f"{command} > line; ls -l line | cut -d' ' -f5", timeout_s=100)
    assert int(written.output.split("\n")[0].split()[0]) <= 100 * MIB
    read = await program.run("read_file", {"path": "line"})
    assert len(read.output) < 60_000
    assert await works(program)


async def test_a_sleeper_in_the_background_that_holds_the_output_holds_up_nothing(actor: ToolActor) -> None:
    program = Program(actor)
    begun = await program.shell("sleep infinity & echo begun", timeout_s=100)
    assert (begun.outcome, begun.output) == (ToolOutcome.OK, "begun")
    assert await works(program)
    assert (await program.shell("jobs | wc -l")).output == "1"
    await actor.release(program.id, delete_workspace=True)
    await wait_for_async(lambda: none_left("sleep\0infinity"), what="the sleeper ends with its program")


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file of the host that anybody there may read."""
    with tempfile.TemporaryDirectory(prefix="ct-secret-") as directory:
        Path(directory).chmod(0o755)
        path = Path(directory, "secret")
        path.write_text("TOP SECRET")
        path.chmod(0o644)
        yield path
        assert path.read_text() == "TOP SECRET"


async def test_a_link_that_is_swapped_while_it_is_read_leads_nowhere_else(actor: ToolActor, secret: Path) -> None:
    program = Program(actor)
    race = f"echo fine > fine; (while :; do ln -sfn {secret} link; ln -sfn fine link; done) & true"
    assert (await program.shell(race)).outcome is ToolOutcome.OK
    seen: set[str] = set()
    for _ in range(40):
        seen.add((await program.run("read_file", {"path": "link"})).output.strip())
        await program.run("write_file", {"path": "link", "content": "fine\n"})
    assert "TOP SECRET" not in "".join(seen)
    assert "fine" in seen
