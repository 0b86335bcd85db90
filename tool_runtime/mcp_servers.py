"""The MCP servers of the settings: what tools they have, and a session of its own for each program that uses one.

    start ─► each server is listed once, in a session that sees no program's files; again when it says that its tools changed
    call  ─► the program's session with the server (opened if need be, its tools as they were listed) ─► the tool runs ─► answer

A server that runs here is a process in a sandbox beside the program's files, and no two programs share one: neither sees what the
other did in it, and what one makes of its server reaches nobody else. A server that breaks is started again, after a pause that
doubles as long as it keeps breaking; meanwhile calls are answered at once. A call that is stopped ends its server process, since
nothing else surely stops what it does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from agent_program.clock import Clock
from agent_program.errors import Overloaded, SandboxUnavailable
from agent_program.ids import ProgramId, TenantId
from tool_runtime.config import McpServerSettings, ToolRuntimeSettings
from tool_runtime.mcp_call import McpCall
from tool_runtime.mcp_client import McpFailed, McpSession, ReportProgress
from tool_runtime.mcp_results import joined
from tool_runtime.mcp_tools import ListedTool, Listing, digest, listing
from tool_runtime.pool import SandboxView, idle_too_long, to_make_room
from tool_runtime.registry import ToolSpec

_LOG = logging.getLogger(__name__)

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.5, 60.0
_RELIST_PAUSE_S = 2.0
_RETRY_AFTER_S = 5.0
_IDLE_CHECK_S = 30.0

Key = tuple[str, TenantId, ProgramId]


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """Whose session it is."""

    tenant_id: TenantId
    program_id: ProgramId


Connect = Callable[[str, McpServerSettings, Owner | None, Callable[[], None]], Awaitable[McpSession]]
"""Opens a session with a server for a program, or for nobody's files; told what to call when the server's tools changed."""


def backoff_s(failures: int) -> float:
    """How long to leave a server alone that failed so often in a row."""
    return min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 20)) if failures > 0 else 0.0


@dataclass(kw_only=True)
class ProgramSession:
    """A program's session with one server, or the place where it will be."""

    server: str
    #: Held while it is opened or closed.
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: McpSession | None = None
    #: Digests of the tools as this session listed them.
    digests: dict[str, str] = field(default_factory=dict)
    busy: int = 0
    last_used_s: float = 0.0
    failures: int = 0
    retry_at_s: float = 0.0


class McpServers:
    """Every server of the settings."""

    def __init__(
        self,
        settings: ToolRuntimeSettings,
        connect: Connect,
        clock: Clock,
        *,
        relist_pause_s: float = _RELIST_PAUSE_S,
    ) -> None:
        """`relist_pause_s`: between two listings of a server that keeps saying that its tools changed."""
        self._relist_pause_s = relist_pause_s
        self._settings = settings
        self._servers = settings.mcp_servers
        self._connect = connect
        self._clock = clock
        self._listings: dict[str, Listing] = {}
        #: Why a server's tools are not there, by server.
        self.faults: dict[str, str] = {}
        self._changed = {name: asyncio.Event() for name in self._servers}
        self._first_look = {name: asyncio.Event() for name in self._servers}
        self._sessions: dict[Key, ProgramSession] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Have every server listed; returns at once."""
        self._tasks = [asyncio.create_task(self._keep_listed(name)) for name in self._servers]

    async def looked(self) -> None:
        """Wait until each server was listed once, or could not be."""
        for looked in self._first_look.values():
            await looked.wait()

    def specs(self) -> dict[str, ToolSpec]:
        """The tools of every server that was listed, by the platform's name."""
        return {name: tool.spec for listed in self._listings.values() for name, tool in listed.tools.items()}

    def limit_s(self, spec: ToolSpec) -> float | None:
        """What a call of the tool may take by its server's settings; None for the call's own limit."""
        return self._servers[spec.server].timeout_s if spec.server in self._servers else None

    @property
    def sessions(self) -> int:
        """Sessions of programs that are open."""
        return sum(1 for entry in self._sessions.values() if entry.session is not None)

    @asynccontextmanager
    async def use(self, spec: ToolSpec, owner: Owner, report_progress: ReportProgress) -> AsyncIterator[McpCall]:
        """What runs one call of a server's tool, with the program's session kept open meanwhile.

        Raises:
            McpFailed: there is no session to be had, or the tool is not what was listed; the message is for the model.
            Overloaded: as many sessions as may be are busy.
        """
        assert spec.server is not None
        listed = self._listed(spec)
        key = (spec.server, owner.tenant_id, owner.program_id)
        entry = self._sessions.setdefault(key, ProgramSession(server=spec.server))
        entry.busy += 1
        try:
            async with entry.changing:
                session = await self._opened(entry, owner)
            if entry.digests.get(listed.remote_name) != listed.digest:
                self._changed[spec.server].set()
                raise McpFailed(
                    f"The tool {spec.name} is not what it was when it was listed, so it was not called. "
                    "Programs that start from now on see it as it is."
                )
            settings = self._servers[spec.server]
            call = McpCall(
                session, listed.remote_name, report_progress, self._clock, ends_server=settings.command is not None
            )
            try:
                yield call
            finally:
                await self._after(entry, call)
        finally:
            entry.busy -= 1
            entry.last_used_s = self._clock.now_s()
            if entry.session is None and not entry.busy and not entry.failures:
                self._sessions.pop(key, None)

    async def release(self, tenant_id: TenantId, program_id: ProgramId) -> None:
        """The program is over: end its sessions."""
        for key in [key for key in self._sessions if key[1:] == (tenant_id, program_id)]:
            await self._close(self._sessions.pop(key))

    async def rest_idle(self) -> float:
        """Close what was not used for too long; returns the seconds until it should be looked at again."""
        ttl_s, now_s = self._settings.idle_sandbox_ttl_s, self._clock.now_s()
        for key in idle_too_long(self._views(), now_s=now_s, ttl_s=ttl_s):
            entry = self._sessions.pop(key)
            await self._close(entry)
        return min(ttl_s / 4, _IDLE_CHECK_S)

    async def close(self) -> None:
        """End every session and stop listing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._close(entry) for entry in self._sessions.values()))
        await asyncio.gather(*self._closing)
        self._sessions.clear()

    # Sessions

    def _listed(self, spec: ToolSpec) -> ListedTool:
        listed = self._listings.get(spec.server or "")
        tool = listed.tools.get(spec.name) if listed is not None else None
        if tool is None:
            raise McpFailed(f"The MCP server {spec.server} has no tool {spec.name} any more.")
        return tool

    async def _opened(self, entry: ProgramSession, owner: Owner) -> McpSession:
        if entry.session is not None and entry.session.is_open:
            return entry.session
        await self._close_session(entry)
        wait_s = entry.retry_at_s - self._clock.now_s()
        if wait_s > 0:
            raise McpFailed(
                f"The MCP server {entry.server} broke down ({entry.failures} in a row); it is started again in {wait_s:.1f} s at the "
                "earliest."
            )
        await self._make_room()
        settings = self._servers[entry.server]
        try:
            session = await self._connect(entry.server, settings, owner, self._changed[entry.server].set)
            try:
                tools = await session.tools(timeout_s=settings.start_timeout_s)
            except BaseException:
                await session.close()
                raise
        except (McpFailed, SandboxUnavailable) as exc:
            self._failed(entry)
            raise McpFailed(f"The call did not run: {exc}") from exc
        entry.session, entry.digests = session, {tool.name: digest(tool) for tool in tools}
        return session

    async def _after(self, entry: ProgramSession, call: McpCall) -> None:
        if not (call.must_end or call.broke):
            entry.failures = 0
            return
        async with entry.changing:
            if entry.session is call.session:  # otherwise another call of it has seen to that
                if call.broke:
                    self._failed(entry)
                await self._close_session(entry, at_once=True)

    def _failed(self, entry: ProgramSession) -> None:
        entry.failures += 1
        entry.retry_at_s = self._clock.now_s() + backoff_s(entry.failures)

    async def _make_room(self) -> None:
        while self.sessions >= self._settings.mcp_sessions_max:
            key = to_make_room(self._views())
            if key is None:
                raise Overloaded("every session with an MCP server is busy", retry_after_s=_RETRY_AFTER_S)
            await self._close(self._sessions.pop(key))

    def _views(self) -> list[SandboxView[Key]]:
        return [
            SandboxView(key=key, is_busy=entry.busy > 0, last_used_s=entry.last_used_s)
            for key, entry in self._sessions.items()
            if entry.session is not None or not entry.busy
        ]

    async def _close(self, entry: ProgramSession) -> None:
        async with entry.changing:
            await self._close_session(entry)

    async def _close_session(self, entry: ProgramSession, *, at_once: bool = False) -> None:
        session, entry.session = entry.session, None
        if session is not None:
            # A task of its own, so that whoever is cancelled while waiting for it does not leave it half closed.
            closing = asyncio.create_task(session.close(at_once=at_once))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)

    # Listing

    async def _keep_listed(self, name: str) -> None:
        """List a server until that works, and again whenever its tools are said to be others."""
        failures = 0
        while True:
            self._changed[name].clear()
            failures = 0 if await self._list(name) else failures + 1
            self._first_look[name].set()
            if failures:
                await asyncio.sleep(backoff_s(failures))
                continue
            await asyncio.sleep(self._relist_pause_s)
            await self._changed[name].wait()

    async def _list(self, name: str) -> bool:
        settings = self._servers[name]
        try:
            # Nobody is told of changes during this short session: it lists what there is at the end of it.
            session = await self._connect(name, settings, None, lambda: None)
            try:
                tools = await session.tools(timeout_s=settings.start_timeout_s)
            finally:
                await session.close()
        except (McpFailed, SandboxUnavailable) as exc:
            self.faults[name] = str(exc)
            _LOG.warning("the tools of the MCP server %s are not known: %s", name, exc)
            return False
        self.faults.pop(name, None)
        found = listing(name, tools, settings)
        for fault in found.faults:
            _LOG.warning("a tool of the MCP server %s is left out: %s", name, fault)
        self._listings[name] = found
        _LOG.info("the MCP server %s has %d tools: %s", name, len(found.tools), joined(sorted(found.tools)))
        return True
