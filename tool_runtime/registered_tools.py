"""Every tool that this actor runs, and what runs each: built-in tools, registered functions, MCP servers.

The lists are one: a name has one meaning, and a tool that would take another's name is not registered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_program.clock import Clock
from agent_program.ids import ProgramId, TenantId
from tool_runtime import registry
from tool_runtime.config import OutputLimits, ToolRuntimeSettings
from tool_runtime.egress_proxy import EgressProxy
from tool_runtime.function_loading import load_functions
from tool_runtime.functions import FunctionTool, RunsIn, ToolContext
from tool_runtime.registry import BUILTIN_TOOLS, ToolKind, ToolSpec
from tool_runtime.sandbox import Execution, Executor, Sandboxing
from tool_runtime.spawning import Launcher
from tool_runtime.tool_call import ToolCall
from tool_runtime.trusted_functions import TrustedFunctions
from tool_runtime.workspaces import Workspaces

if TYPE_CHECKING:
    from tool_runtime.mcp_servers import McpServers

ReportProgress = Callable[[float, float | None, str | None], Awaitable[None]]


class RegisteredTools:
    """The tools of one actor."""

    def __init__(self, settings: ToolRuntimeSettings, clock: Clock) -> None:
        """Loads the registered functions.

        Raises:
            BadTool: one of them is not right.
        """
        self._settings = settings
        self._clock = clock
        self._functions = load_functions(settings.function_modules)
        self._static = {**BUILTIN_TOOLS, **{name: tool.spec for name, tool in self._functions.items()}}
        self._trusted = TrustedFunctions(clock, threads_max=settings.function_threads_max)
        self._servers: McpServers | None = None

    def start(self, launcher: Launcher, backend: Sandboxing, workspaces: Workspaces, proxy: EgressProxy | None) -> None:
        """Have the MCP servers listed; returns at once."""
        if not self._settings.mcp_servers:
            return
        # Here, because the SDK takes a second to import, which actors without servers need not spend.
        from tool_runtime.mcp_connect import McpConnector
        from tool_runtime.mcp_servers import McpServers

        connect = McpConnector(self._settings, launcher, backend, workspaces, proxy, self._clock)
        self._servers = McpServers(self._settings, connect, self._clock)
        self._servers.start()

    async def looked(self) -> None:
        """Wait until it is known what tools the MCP servers have, or that they cannot be asked."""
        if self._servers is not None:
            await self._servers.looked()

    def specs(self) -> Mapping[str, ToolSpec]:
        """Every tool by name; a server's tool does not take the place of one that was there before."""
        return {**(self._servers.specs() if self._servers is not None else {}), **self._static}

    def get(self, name: str) -> ToolSpec:
        """The tool called `name`; raises ToolNotFound."""
        spec = self._static.get(name)
        return spec if spec is not None else registry.get(name, self.specs())

    def limit_s(self, spec: ToolSpec, timeout_s: float) -> float:
        """How long a call of the tool that may take `timeout_s` may really take."""
        of_function = self._functions[spec.name].timeout_s if spec.name in self._functions else None
        of_server = self._servers.limit_s(spec) if self._servers is not None else None
        return min(timeout_s, of_function or timeout_s, of_server or timeout_s)

    def needs_sandbox(self, spec: ToolSpec) -> bool:
        """It runs in the program's own sandbox."""
        return spec.kind is ToolKind.BUILTIN or self._is_sandboxed(spec)

    def _is_sandboxed(self, spec: ToolSpec) -> bool:
        return spec.name in self._functions and self._functions[spec.name].runs_in is RunsIn.SANDBOX

    def sandboxed(self, spec: ToolSpec, sandbox: Executor) -> Executor:
        """What runs one call of the tool in `sandbox`."""
        return SandboxedFunction(self._functions[spec.name], sandbox) if self._is_sandboxed(spec) else sandbox

    async def hosted(
        self, held: contextlib.AsyncExitStack, spec: ToolSpec, call: ToolCall, report_progress: ReportProgress
    ) -> Executor:
        """What runs one call of a function in the actor, or of a server's tool; `held` keeps what it needs.

        Raises:
            McpFailed: the server cannot be used now.
            Overloaded: too many sessions are in use.
        """
        if spec.name in self._functions:
            return self._trusted.executor(self._functions[spec.name], _context(call, report_progress))
        assert self._servers is not None
        from tool_runtime.mcp_servers import Owner

        owner = Owner(tenant_id=call.tenant_id, program_id=call.program_id)
        return await held.enter_async_context(self._servers.use(spec, owner, report_progress))

    async def release(self, tenant_id: TenantId, program_id: ProgramId) -> None:
        """The program is over."""
        if self._servers is not None:
            await self._servers.release(tenant_id, program_id)

    async def rest_idle(self) -> float:
        """Close what nobody used for a while; returns the seconds until it should be looked at again."""
        return await self._servers.rest_idle() if self._servers is not None else 3600.0

    def status(self) -> dict[str, Any]:
        """Plain values for people and metrics."""
        return {
            "tools": len(self.specs()),
            "mcp_sessions": self._servers.sessions if self._servers is not None else 0,
            "mcp_faults": dict(self._servers.faults) if self._servers is not None else {},
            "function_threads": self._trusted.threads,
        }

    async def close(self) -> None:
        """End the servers."""
        if self._servers is not None:
            await self._servers.close()


@dataclass(frozen=True, slots=True)
class SandboxedFunction:
    """An `Executor` that has a sandbox call a registered function."""

    tool: FunctionTool
    sandbox: Executor

    async def execute(
        self,
        tool: str,
        fields: Mapping[str, Any],
        *,
        timeout_s: float,
        grace_s: float,
        output: OutputLimits,
        cancelled: asyncio.Event | None = None,
    ) -> Execution:
        """Call it in a process of its own there."""
        function = self.tool.function
        request = {
            "module": function.__module__,
            "function": function.__name__,
            "source": self.tool.source,
            "arguments": dict(fields),
        }
        return await self.sandbox.execute(
            "function",
            {"request": json.dumps(request)},
            timeout_s=timeout_s,
            grace_s=grace_s,
            output=output,
            cancelled=cancelled,
        )


def _context(call: ToolCall, report_progress: ReportProgress) -> ToolContext:
    loop = asyncio.get_running_loop()

    def report(progress: float, total: float | None = None) -> None:
        # A thread that was left behind may still report when the loop is closed.
        with contextlib.suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(_as_coroutine(report_progress(progress, total, None)), loop)

    return ToolContext(
        tenant_id=call.tenant_id, program_id=call.program_id, call_id=call.call_id, report_progress=report
    )


async def _as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable
