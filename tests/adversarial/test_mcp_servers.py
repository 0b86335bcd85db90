"""MCP servers that misbehave: each does what it can, and neither the actor nor the next call minds."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent_program.tool_events import ToolOutcome
from support.mcp import raw
from support.tools import Program, descendants_of, tool_actor
from support.waiting import wait_for_async
from tool_runtime.actor import ToolActor
from tool_runtime.config import MIB, OutputLimits, SandboxBackend, SandboxLimits

BACKENDS = [SandboxBackend.BUBBLEWRAP, SandboxBackend.LANDLOCK]


@asynccontextmanager
async def actor_with(*ways: str, sandbox: SandboxBackend = BACKENDS[0], **settings: object) -> AsyncIterator[ToolActor]:
    """An actor with one server for each way to misbehave, which is its name too."""
    servers = {way.replace("_", "-"): raw(way) for way in ways}
    async with tool_actor(sandbox=sandbox, mcp_servers=servers, **settings) as actor:
        yield actor


@pytest.mark.parametrize("sandbox", BACKENDS, ids=lambda backend: backend.value)
async def test_what_a_server_sends_out_of_order_is_passed_over(sandbox: SandboxBackend) -> None:
    async with actor_with("wrong_id", "noise", "refuses", "no_answer", "asks", sandbox=sandbox) as actor:
        program = Program(actor)
        for server in ("wrong-id", "noise"):
            assert (await program.run(f"{server}__work", {})).output == "worked"
        refused = await program.run("refuses__work", {})
        assert (refused.outcome, "not like this" in refused.output) == (ToolOutcome.ERROR, True)
        nonsense = await program.run("no-answer__work", {})
        assert (nonsense.outcome, "no answer" in nonsense.output) == (ToolOutcome.ERROR, True)
        asked = json.loads((await program.run("asks__work", {})).output)
        assert "not supported" in asked["error"]["message"]


@pytest.mark.parametrize("way", ["flood", "long_line"])
async def test_a_server_that_sends_without_end_is_ended(way: str) -> None:
    async with actor_with(way) as actor:
        program = Program(actor)
        result = await program.run(f"{way.replace('_', '-')}__work", {}, timeout_s=100)
        assert result.outcome is ToolOutcome.INTERRUPTED
        assert "it sent" in result.output
        assert (await program.shell("echo works")).output == "works"


async def test_a_huge_answer_is_cut_to_its_head_and_tail() -> None:
    async with actor_with("huge", output=OutputLimits(head_bytes=1000, tail_bytes=1000)) as actor:
        result = await Program(actor).run("huge__work", {})
        assert result.outcome is ToolOutcome.OK
        assert result.truncated_bytes == 8_000_000 - 2000
        assert len(result.output) < 2100


async def test_a_server_that_hangs_is_ended_at_the_calls_limit() -> None:
    async with actor_with("hangs") as actor:
        await actor.tools()
        before, program = descendants_of(actor._launcher._process.pid), Program(actor)  # type: ignore[union-attr]
        assert (await program.run("hangs__work", {}, timeout_s=0.3)).outcome is ToolOutcome.TIMEOUT
        assert descendants_of(actor._launcher._process.pid) - before == set()  # type: ignore[union-attr]


async def test_a_server_that_fills_the_disk_is_ended() -> None:
    limits = SandboxLimits(workspace_bytes_max=5 * MIB)
    async with actor_with("fills", limits=limits) as actor:
        result = await Program(actor).run("fills__work", {}, timeout_s=100)
        assert result.outcome is ToolOutcome.INTERRUPTED
        assert "the workspace holds more than 5 MiB" in result.output


async def test_servers_that_cannot_be_listed_cost_the_others_nothing_and_say_why() -> None:
    servers = {way: raw(way, start_timeout_s=3) for way in ("silent", "dies", "many", "endless", "bad_root", "well")}
    servers["absent"] = raw().model_copy(update={"command": "/no/such/program", "args": ()})
    async with tool_actor(mcp_servers=servers) as actor:
        names = {spec.name for spec in await actor.tools() if spec.server is not None}
        assert {name.partition("__")[0] for name in names} == {"well"}
        faults = (await actor.status())["mcp_faults"]
        assert "did not greet within 3 s" in faults["silent"]
        assert "I would rather not" in faults["dies"]
        assert "lists more than 256 tools" in faults["many"]
        assert "lists more than 256 tools or 20 pages" in faults["endless"]
        assert "tools.1.inputSchema.type" in faults["bad_root"]
        assert "/no/such/program cannot be started: No such file or directory" in faults["absent"]
        program = Program(actor)
        unknown = await program.run("silent__work", {})
        assert (unknown.outcome, "there is no tool called" in unknown.output) == (ToolOutcome.ERROR, True)
        assert (await program.run("well__work", {})).output == "worked"


async def test_a_server_that_is_another_one_in_every_process_is_not_called() -> None:
    async with actor_with("shifty") as actor:
        result = await Program(actor).run("shifty__work", {})
        assert result.outcome is ToolOutcome.ERROR
        assert "is not what it was when it was listed" in result.output


async def test_tools_that_cannot_be_offered_are_left_out_and_a_hostile_schema_is_harmless() -> None:
    async with actor_with("ill_formed") as actor:
        names = {spec.name for spec in await actor.tools() if spec.server is not None}
        # Of two tools that come to one name the first stays.
        assert names == {f"ill-formed__{name}" for name in ("fine", "dotted_name", "far", "slow")}
        program = Program(actor)
        far = await program.run("ill-formed__far", {"a": 1})
        assert "cannot be applied" in far.output  # and nothing was fetched
        slow = await program.run("ill-formed__slow", {"a": "a" * 60 + "!"})
        assert slow.output == "worked"


async def test_hints_of_a_server_that_is_not_trusted_count_for_nothing() -> None:
    async with tool_actor(mcp_servers={"one": raw(trust=True), "two": raw(needs_approval=True)}) as actor:
        specs = {spec.name: spec for spec in await actor.tools()}
        assert specs["one__hints"].idempotent
        assert not specs["two__hints"].idempotent
        assert specs["two__work"].needs_approval


async def test_nothing_is_left_of_servers_when_the_actor_ends() -> None:
    before = descendants_of(os.getpid())
    async with actor_with("well", "hangs") as actor:
        program = Program(actor)
        await program.run("well__work", {})
        parked = [path.name for path in actor._settings.state_dir.joinpath("parked").iterdir()]  # type: ignore[union-attr]
        assert parked == []
        await actor.close()
    await wait_for_async(lambda: _none(before), what="no process is left")


async def _none(before: set[int]) -> bool:
    return descendants_of(os.getpid()) - before == set()
