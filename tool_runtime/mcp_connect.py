"""Opens sessions with MCP servers: a process in a sandbox beside a program's files, or HTTP to elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from agent_program.clock import Clock
from tool_runtime import mcp_transports
from tool_runtime.config import McpServerSettings, ToolRuntimeSettings
from tool_runtime.egress import EgressPolicy
from tool_runtime.egress_dialer import EgressDialer
from tool_runtime.egress_proxy import EgressProxy
from tool_runtime.mcp_client import McpSession, Streams
from tool_runtime.mcp_servers import Owner
from tool_runtime.pool import over_limit
from tool_runtime.sandbox import Sandboxing, SandboxSpec, ServerCommand
from tool_runtime.server_process import ServerProcess
from tool_runtime.spawning import Launcher
from tool_runtime.trees import usage_of
from tool_runtime.workspaces import Workspaces

#: On the sandbox's own loopback, where nothing else is.
_PROXY_PORT = 3128
#: Between two looks at the workspace of a busy server: at least so long, and so many times as long as a look takes.
_DISK_WATCH_S, _DISK_WATCH_PAUSE = 2.0, 5.0


class McpConnector:
    """Knows where servers run."""

    def __init__(
        self,
        settings: ToolRuntimeSettings,
        launcher: Launcher,
        backend: Sandboxing,
        workspaces: Workspaces,
        proxy: EgressProxy | None,
        clock: Clock,
    ) -> None:
        """`proxy` gives the servers that run here the network that it allows; without one they have none."""
        self._settings = settings
        self._launcher = launcher
        self._backend = backend
        self._workspaces = workspaces
        self._proxy = proxy
        self._clock = clock

    async def __call__(
        self, name: str, server: McpServerSettings, owner: Owner | None, on_tools_changed: Callable[[], None]
    ) -> McpSession:
        """Open a session; without an owner, in an empty place that is removed at its end.

        Raises:
            McpFailed: there is none to be had.
        """
        if server.url is not None:
            return await self._remote(name, server, server.url, on_tools_changed)
        local = LocalServer(self._clock)

        @asynccontextmanager
        async def transport() -> AsyncIterator[Streams]:
            async with self._place(owner) as (workspace, uid):
                await local.start(
                    self._launcher, self._spec(server, workspace, uid), self._backend, self._proxy, server
                )
                async with (
                    local.watched(lambda: self._disk_excess(workspace)),
                    mcp_transports.lines(local.process) as streams,
                ):
                    yield streams

        return await McpSession.open(
            name, transport, timeout_s=server.start_timeout_s, on_tools_changed=on_tools_changed, peer=local
        )

    async def _remote(
        self, name: str, server: McpServerSettings, url: str, on_tools_changed: Callable[[], None]
    ) -> McpSession:
        target = urlsplit(url)
        rule = f"{target.hostname}:{target.port or (443 if target.scheme == 'https' else 80)}"
        allowed = (*self._settings.egress.allow_addresses, *server.allow_addresses)
        dialer = EgressDialer(EgressPolicy([rule], allowed), timeout_s=self._settings.egress.connect_timeout_s)
        headers = {header: value.get_secret_value() for header, value in server.headers.items()}
        return await McpSession.open(
            name,
            lambda: mcp_transports.http(url, headers, dialer, timeout_s=server.start_timeout_s),
            timeout_s=server.start_timeout_s,
            on_tools_changed=on_tools_changed,
        )

    @asynccontextmanager
    async def _place(self, owner: Owner | None) -> AsyncIterator[tuple[Path, int | None]]:
        """A directory, and the user that has it."""
        if owner is not None:
            directory = self._workspaces.ensure(owner.tenant_id, owner.program_id)
            yield directory, self._workspaces.uid(owner.tenant_id, owner.program_id)
            return
        directory, uid = self._workspaces.park()
        try:
            yield directory, uid
        finally:
            await asyncio.to_thread(self._workspaces.discard, directory)

    def _spec(self, server: McpServerSettings, workspace: Path, uid: int | None) -> SandboxSpec:
        assert server.command is not None
        return SandboxSpec(
            workspace=workspace,
            uid=uid,
            limits=self._settings.limits,
            proxy_port=_PROXY_PORT if self._proxy is not None else None,
            server=ServerCommand(
                argv=(server.command, *server.args),
                environment={name: value.get_secret_value() for name, value in server.env.items()},
                readable=server.readable,
            ),
        )

    def _disk_excess(self, workspace: Path) -> str | None:
        limits = self._settings.limits
        usage = usage_of(workspace, bytes_max=limits.workspace_bytes_max, files_max=limits.workspace_files_max)
        return over_limit(usage, limits)


class LocalServer:
    """A server that runs here, as its session sees it (`mcp_client.Peer`)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._busy = asyncio.Event()
        self._process: ServerProcess | None = None

    @property
    def process(self) -> ServerProcess:
        assert self._process is not None
        return self._process

    async def start(
        self,
        launcher: Launcher,
        spec: SandboxSpec,
        backend: Sandboxing,
        proxy: EgressProxy | None,
        server: McpServerSettings,
    ) -> None:
        """Start the process; raises what `ServerProcess.start` raises."""
        plan = backend.plan(spec)
        self._process = await ServerProcess.start(
            launcher, plan, proxy, timeout_s=server.start_timeout_s, clock=self._clock
        )

    async def busy(self, is_busy: bool) -> None:
        """A call runs, or none does any more."""
        self._busy.set() if is_busy else self._busy.clear()
        if self._process is not None:
            await self._process.watch(is_busy=is_busy)

    async def last_words(self) -> str:
        """Why it ended; empty if it did not."""
        if self._process is None:
            return ""
        words = await self._process.last_words()
        return "" if self._process.is_alive else words

    async def kill(self) -> None:
        """End it without a good-bye."""
        if self._process is not None:
            await self._process.exceed("a call of it had to be stopped")

    @asynccontextmanager
    async def watched(self, excess: Callable[[], str | None]) -> AsyncIterator[None]:
        """While calls run, look at what the workspace holds, and end a server that filled it."""
        watching = asyncio.create_task(self._watch(excess))
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _watch(self, excess: Callable[[], str | None]) -> None:
        while True:
            await self._busy.wait()
            started_s = self._clock.now_s()
            found = await asyncio.to_thread(excess)
            if found is not None:
                await self.process.exceed(found)
                return
            await asyncio.sleep(max(_DISK_WATCH_S, _DISK_WATCH_PAUSE * (self._clock.now_s() - started_s)))
