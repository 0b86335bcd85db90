"""Tools of MCP servers, called as programs call them: the same over stdio in a sandbox and over streamable HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from agent_program.tool_events import ToolOutcome
from support.mcp import http_probe, probe_by_stdio, raw
from support.tools import Program, processes_with, tool_actor
from support.waiting import wait_for_async
from tool_runtime.actor import ToolActor
from tool_runtime.config import McpServerSettings
from tool_runtime.registry import ToolKind
from tool_runtime.tool_call import ToolProgress, ToolStarted

TRANSPORTS = ["stdio", "http"]


@contextlib.asynccontextmanager
async def actor_with_probe(transport: str, **settings: object) -> AsyncIterator[ToolActor]:
    """An actor that knows the test server as `probe`."""
    async with contextlib.AsyncExitStack() as stack:
        server: McpServerSettings
        if transport == "http":
            server = (await stack.enter_async_context(http_probe())).settings(**settings)
        else:
            server = probe_by_stdio(**settings)
        actor = await stack.enter_async_context(tool_actor(mcp_servers={"probe": server}))
        yield actor


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_program_uses_the_tools_of_a_server(transport: str) -> None:
    async with actor_with_probe(transport, trust=True) as actor:
        # Listed at the start, under the server's name, with schemas that models and the platform can use.
        specs = {spec.name: spec for spec in await actor.tools() if spec.kind is ToolKind.MCP}
        assert {"probe__echo", "probe__measure", "probe__picture"} <= set(specs)
        echo = specs["probe__echo"]
        assert (echo.server, echo.description, echo.idempotent) == ("probe", "Say a text again.", True)
        assert not specs["probe__measure"].idempotent

        program = Program(actor)
        # Arguments are checked before anything is asked of the server.
        events = await program.events("probe__echo", {"txt": "hi"})
        assert len(events) == 1
        assert "'text' is a required property" in events[0].output  # type: ignore[union-attr]

        result = await program.run("probe__echo", {"text": "hi", "times": 2})
        assert (result.outcome, result.output, result.tool_key) == (ToolOutcome.OK, "hihi", "probe__echo")
        assert (await program.run("probe__measure", {"text": "abc"})).output == '{\n  "characters": 3\n}'
        assert (await program.run("probe__picture", {})).output == "[image, image/png, 70 bytes]"
        failed = await program.run("probe__fail", {"why": "for a reason"})
        assert failed.outcome is ToolOutcome.ERROR
        assert "fail" in failed.output

        # Progress comes between the start and the result.
        events = await program.events("probe__count_to", {"number": 2, "pause_s": 0.3})
        assert isinstance(events[0], ToolStarted)
        told = [event for event in events if isinstance(event, ToolProgress)]
        assert told
        assert (told[-1].total, told[-1].fraction) in [(2.0, 0.5), (2.0, 1.0)]
        assert events[-1].output == "counted to 2"  # type: ignore[union-attr]

        # At its limit a call ends, and the server takes the next one.
        late = await program.run("probe__count_to", {"number": 1, "pause_s": 1000}, timeout_s=0.5)
        assert late.outcome is ToolOutcome.TIMEOUT
        assert (await program.run("probe__echo", {"text": "still"})).output == "still"


async def test_a_tool_that_appears_is_there_for_programs_that_come_later() -> None:
    async with actor_with_probe("http") as actor:
        await actor.tools()
        assert (await Program(actor).run("probe__become", {})).output == "changed"
        await wait_for_async(lambda: is_listed(actor, "probe__added"), what="the new tool is listed")
        assert (await Program(actor).run("probe__added", {"text": "new"})).output == "new"


async def is_listed(actor: ToolActor, name: str) -> bool:
    return name in {spec.name for spec in await actor.tools()}


async def test_a_server_by_stdio_sees_its_programs_files_and_nothing_of_the_host_or_of_other_programs() -> None:
    async with tool_actor(mcp_servers={"raw": raw()}) as actor:
        one, other = Program(actor), Program(actor)
        assert (await one.run("raw__write", {})).output == "/workspace"
        assert (await one.shell("cat note")).output == "mine"
        assert [(await program.run("raw__calls", {})).output for program in (one, one, other)] == ["1", "2", "1"]
        assert "No such file" in (await other.shell("cat note")).output
        variables, top = (await one.run("raw__environment", {})).output.splitlines()
        assert set(variables.split()) <= {"GIT_PAGER", "HOME", "LANG", "PAGER", "PATH", "PWD", "TERM", "TMPDIR", "USER"}
        assert not {"root", "home", "var"} & set(top.split())


async def test_secrets_in_the_settings_reach_the_server_and_no_log() -> None:
    server = raw(env={"TOKEN": "hush"})
    assert "hush" not in repr(server)
    async with tool_actor(mcp_servers={"raw": server}) as actor:
        assert "TOKEN" in (await Program(actor).run("raw__environment", {})).output


async def test_a_server_that_crashes_is_reported_and_started_again_and_leaves_nothing_behind() -> None:
    async with tool_actor(mcp_servers={"raw": raw()}) as actor:
        program = Program(actor)
        assert (await program.run("raw__leave_behind", {})).output == "left"
        crashed = await program.run("raw__crash", {})
        assert crashed.outcome is ToolOutcome.INTERRUPTED
        assert "the MCP server raw is gone: it ended (status 3): falling over" in crashed.output
        await wait_for_async(lambda: as_async(not processes_with("sleep\x004107.25")), what="no process is left")
        assert "broke down (1 in a row)" in (await program.run("raw__calls", {})).output
        # Another program's is not concerned.
        assert (await Program(actor).run("raw__calls", {})).output == "1"

        async def answers() -> bool:
            return (await program.run("raw__calls", {})).outcome is ToolOutcome.OK

        await wait_for_async(answers, what="the server is started again")
        await actor.release(program.id, delete_workspace=True)
        assert (await actor.status())["mcp_sessions"] == 1


async def test_a_server_elsewhere_that_goes_away_is_reported_and_found_again_when_it_is_back() -> None:
    async with http_probe() as probe, tool_actor(mcp_servers={"probe": probe.settings()}) as actor:
        await actor.tools()
        program = Program(actor)
        assert (await program.run("probe__calls", {})).output == "1"
        probe.kill()
        lost = await program.run("probe__calls", {})
        assert lost.outcome is ToolOutcome.INTERRUPTED
        assert "the MCP server probe" in lost.output
        await probe.start()

        async def answers() -> bool:
            return (await program.run("probe__calls", {})).outcome is ToolOutcome.OK

        await wait_for_async(answers, what="the server is found again")


async def as_async(value: bool) -> bool:
    return value


async def test_the_session_that_is_idle_for_longest_makes_room() -> None:
    async with tool_actor(mcp_servers={"raw": raw()}, mcp_sessions_max=1) as actor:
        one, other = Program(actor), Program(actor)
        for program in (one, other, one):
            assert (await program.run("raw__calls", {})).output == "1"
        assert (await actor.status())["mcp_sessions"] == 1
