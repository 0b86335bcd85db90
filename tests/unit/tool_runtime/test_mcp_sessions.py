"""Who gets a session with an MCP server, when one is opened again, and when one is given up: over sessions that are doubles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
import pytest

from agent_program.clock import ManualClock
from agent_program.errors import Overloaded
from agent_program.ids import DEFAULT_TENANT, ProgramId
from support.waiting import wait_for_async
from tool_runtime.config import McpServerSettings, OutputLimits, ToolRuntimeSettings
from tool_runtime.mcp_client import Answer, McpFailed
from tool_runtime.mcp_servers import McpServers, Owner
from tool_runtime.registry import ToolSpec
from tool_runtime.sandbox import Ending, Execution

WORK = types.Tool(name="work", description="Works.", input_schema={"type": "object"})


class Session:
    """A session whose calls end as `world` says."""

    def __init__(self, world: World, owner: Owner | None) -> None:
        self._world, self.owner = world, owner
        self.is_open = True

    async def tools(self, *, timeout_s: float) -> list[types.Tool]:
        return list(self._world.tools)

    async def call(self, tool: str, arguments: dict[str, Any], report: object) -> Answer:
        if self._world.call_fails is not None:
            raise self._world.call_fails
        self._world.is_called.set()
        await self._world.may_end.wait()
        return Answer(text="worked", is_error=False)

    async def close(self, *, at_once: bool = False) -> None:
        self.is_open = False
        self._world.closed.append((self.owner, at_once))


class World:
    """Servers, over sessions that are made here."""

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock()
        self.tools = [WORK]
        self.opened: list[Owner | None] = []
        self.closed: list[tuple[Owner | None, bool]] = []
        self.changed: Callable[[], None] = lambda: None
        self.open_fails: McpFailed | None = None
        self.call_fails: McpFailed | None = None
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.is_called = asyncio.Event()
        given = ToolRuntimeSettings(mcp_servers={"s": McpServerSettings(command="x")}, **settings)
        self.servers = McpServers(given, self._connect, self.clock, relist_pause_s=0.0)  # type: ignore[arg-type]

    async def _connect(
        self, name: str, server: McpServerSettings, owner: Owner | None, changed: Callable[[], None]
    ) -> Session:
        if self.open_fails is not None:
            raise self.open_fails
        self.opened.append(owner)
        if owner is not None:
            self.changed = changed
        return Session(self, owner)

    async def is_listed_as(self, description: str | None) -> bool:
        spec = self.servers.specs().get("s__work")
        return (spec.description if spec is not None else None) == description

    def spec(self) -> ToolSpec:
        return self.servers.specs()["s__work"]

    async def call(self, program: str, *, timeout_s: float = 100.0) -> Execution:
        async def silent(*_: object) -> None: ...

        async with self.servers.use(self.spec(), owner(program), silent) as call:
            return await call.execute("s__work", {}, timeout_s=timeout_s, grace_s=0, output=OutputLimits())


@asynccontextmanager
async def listed(**settings: Any) -> AsyncIterator[World]:
    """A world whose server has been listed."""
    world = World(**settings)
    world.servers.start()
    await world.servers.looked()
    try:
        yield world
    finally:
        await world.servers.close()


def owner(program: str) -> Owner:
    return Owner(tenant_id=DEFAULT_TENANT, program_id=ProgramId(program))


async def test_a_program_keeps_its_session_and_shares_it_with_nobody() -> None:
    async with listed() as world:
        for program in ("one", "two", "one"):
            assert (await world.call(program)).stdout.text == "worked"
        # The first is the one that lists, which is nobody's and closed at once.
        assert world.opened == [None, owner("one"), owner("two")]
        assert world.closed == [(None, False)]
        await world.servers.release(DEFAULT_TENANT, ProgramId("one"))
        assert world.closed[-1] == (owner("one"), False)
        assert world.servers.sessions == 1


async def test_a_session_that_breaks_is_opened_again_after_a_pause_that_doubles() -> None:
    async with listed() as world:
        world.call_fails = McpFailed("gone", is_over=True)
        assert (await world.call("one")).ending is Ending.INTERRUPTED
        assert world.closed[-1] == (owner("one"), True)
        for pause_s in (0.5, 1.0, 2.0):
            opened = len(world.opened)
            with pytest.raises(McpFailed, match=f"started again in {pause_s:.1f} s"):
                await world.call("one")
            assert len(world.opened) == opened
            world.clock.advance(pause_s)
            assert (await world.call("one")).ending is Ending.INTERRUPTED
        world.clock.advance(4.0)
        world.call_fails = None
        assert (await world.call("one")).stdout.text == "worked"
        world.call_fails = McpFailed("gone", is_over=True)
        await world.call("one")
        with pytest.raises(McpFailed, match=r"started again in 0\.5 s"):  # a call that worked makes good for all before
            await world.call("one")


async def test_a_refusal_leaves_the_session_as_it_is() -> None:
    async with listed() as world:
        world.call_fails = McpFailed("not like this")
        refused = await world.call("one")
        assert (refused.ending, refused.exit_code, refused.stdout.text) == (Ending.FINISHED, 1, "not like this")
        world.call_fails = None
        await world.call("one")
        assert world.opened.count(owner("one")) == 1


async def test_a_call_that_is_stopped_takes_its_server_with_it() -> None:
    async with listed() as world:
        world.may_end.clear()
        assert (await world.call("one", timeout_s=0.01)).ending is Ending.TIMED_OUT
        assert world.closed[-1] == (owner("one"), True)
        world.may_end.set()
        assert (await world.call("one")).stdout.text == "worked"  # at once: nothing had broken


async def test_a_caller_that_goes_away_takes_its_server_with_it() -> None:
    async with listed() as world:
        world.may_end.clear()
        calling = asyncio.create_task(world.call("one"))
        await world.is_called.wait()
        calling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await calling
        assert world.closed[-1] == (owner("one"), True)


async def test_the_session_idle_for_longest_makes_room_and_a_busy_one_does_not() -> None:
    async with listed(mcp_sessions_max=2) as world:
        for program in ("one", "two", "one", "three"):
            await world.call(program)
            world.clock.advance(1.0)
        assert world.closed[-1] == (owner("two"), False)
        world.may_end.clear()
        busy = [asyncio.create_task(world.call(program)) for program in ("one", "three")]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await world.call("four")
        world.may_end.set()
        await asyncio.gather(*busy)
        assert (await world.call("four")).stdout.text == "worked"


async def test_a_session_that_nobody_used_for_long_is_closed() -> None:
    async with listed(idle_sandbox_ttl_s=100.0) as world:
        await world.call("one")
        world.clock.advance(60.0)
        await world.call("two")
        world.clock.advance(50.0)
        assert await world.servers.rest_idle() == 25.0
        assert world.closed[-1] == (owner("one"), False)
        assert world.servers.sessions == 1


async def test_a_tool_that_is_another_one_now_is_not_called_and_is_listed_again() -> None:
    async with listed() as world:
        world.tools = [types.Tool(name="work", description="Does something else.", input_schema={"type": "object"})]
        with pytest.raises(McpFailed, match="is not what it was when it was listed"):
            await world.call("one")
        await wait_for_async(lambda: world.is_listed_as("Does something else."), what="the tool is listed again")
        assert (await world.call("two")).stdout.text == "worked"
        world.tools = []
        world.changed()  # the server says so itself
        await wait_for_async(lambda: world.is_listed_as(None), what="the tool is gone from the list")


async def test_a_server_that_cannot_be_reached_is_said_and_not_waited_for() -> None:
    world = World()
    world.open_fails = McpFailed("no answer", is_over=True)
    world.servers.start()
    await world.servers.looked()
    assert world.servers.faults == {"s": "no answer"}
    assert world.servers.specs() == {}
    await world.servers.close()
