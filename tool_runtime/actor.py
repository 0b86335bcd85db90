"""The tool actor: takes tool calls, runs them in their program's sandbox, and tells exactly how long they took.

    call ─► arguments checked ─► the program's session is free ─► a slot is free ─► its sandbox runs ─► ToolStarted
         └─ ToolResult (error)     (one call at a time)              (bounded)        (or is started)     the tool runs
                                                                                                       ─► ToolResult

A program keeps its sandbox between calls while there is room; of too many, the one idle for longest is closed, and its shell
and Python state is lost (the next call says so), its files are not. Whatever a call waits for before ToolStarted is `queue_s`
and no part of the latency history.

Nothing runs unless a backend passed its probes here (`backends.py`). A plain class: Ray Serve deploys it, tests call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from agent_program.clock import Clock, SystemClock
from agent_program.errors import InvalidRequest, Overloaded, SandboxUnavailable, ToolNotFound
from agent_program.ids import DEFAULT_TENANT, ProgramId, TenantId, ToolKey
from agent_program.tool_events import LatencySample, SampleSource, ToolOutcome
from tool_runtime import backends, registry, rendering
from tool_runtime.call_times import CallTimes
from tool_runtime.config import ToolRuntimeSettings
from tool_runtime.egress import EgressPolicy
from tool_runtime.egress_dialer import EgressDialer
from tool_runtime.egress_proxy import EgressProxy
from tool_runtime.held_program import HeldProgram
from tool_runtime.history import LatencyHistory
from tool_runtime.history_writer import HistoryWriter
from tool_runtime.http_fetch import HttpFetch
from tool_runtime.launcher_client import LauncherClient
from tool_runtime.live_sandbox import LiveSandbox
from tool_runtime.program_sandbox import ProgramReleased, ProgramSandbox, WorkspaceFull
from tool_runtime.program_sandboxes import ProgramSandboxes
from tool_runtime.progress import ProgressFeed, Update
from tool_runtime.queueing import CancelledInQueue, acquire_unless
from tool_runtime.redis_history import redis_history
from tool_runtime.registered_tools import RegisteredTools
from tool_runtime.registry import ArgumentsInvalid, ToolKind, ToolRefused, ToolSpec
from tool_runtime.sandbox import Execution, Executor, Sandboxing
from tool_runtime.spawning import Launcher
from tool_runtime.tool_call import ToolCall, ToolEventOfCall, ToolProgress, ToolResult, ToolStarted
from tool_runtime.tool_key import tool_key
from tool_runtime.workspace_calls import WorkspaceCalls
from tool_runtime.workspace_transfers import WorkspaceTransfers
from tool_runtime.workspaces import Workspaces

_LOG = logging.getLogger(__name__)
_OVERLOAD_RETRY_AFTER_S = 5.0
_AFTER_FAULT_S = 30.0


class ToolActor(WorkspaceCalls):
    """Runs the tool calls of the programs that are sent here."""

    def __init__(
        self,
        settings: ToolRuntimeSettings,
        store_url: str | None,
        *,
        history: LatencyHistory | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Starts nothing yet. `history` takes the place of the store at `store_url`; with neither no samples are kept.

        Raises:
            BadTool: a registered function is not right.
        """
        self._settings = settings
        self._clock = clock or SystemClock()
        self._history = history or (redis_history(settings.history, store_url) if store_url else None)
        self._writer: HistoryWriter | None = None
        self._egress_policy = EgressPolicy(settings.egress.allow_hosts, settings.egress.allow_addresses)
        self._dialer = EgressDialer(self._egress_policy, timeout_s=settings.egress.connect_timeout_s)
        self._host_tools: dict[str, Executor] = {"http_fetch": HttpFetch(self._dialer, settings.egress, self._clock)}
        self._tools = RegisteredTools(settings, self._clock)
        self._launcher: Launcher = LauncherClient()
        self._starting = asyncio.Lock()
        self._backend: Sandboxing | None = None
        self._refusal: str | None = None
        self._limits_by: str | None = None
        self._sandboxes: ProgramSandboxes | None = None
        self._transfers: WorkspaceTransfers | None = None
        self._slots = asyncio.Semaphore(settings.concurrent_calls_max)
        self._calls: dict[tuple[TenantId, ProgramId, str], asyncio.Event] = {}
        self._running = 0
        self._outcomes = dict.fromkeys(ToolOutcome, 0)
        self._times = CallTimes()
        self._housekeeping: list[asyncio.Task[None]] = []
        self._is_closed = False

    async def start(self) -> None:
        """Choose and probe a sandbox backend. Called by the first call too; a refusal is kept and not tried again.

        Raises:
            SandboxUnavailable: no sandbox holds here; the message says why.
        """
        async with self._starting:
            if self._is_closed:
                raise SandboxUnavailable("the tool actor is shutting down")
            if self._refusal is not None:
                raise SandboxUnavailable(self._refusal)
            if self._sandboxes is not None:
                return
            self._launcher, self._limits_by = backends.launcher_for(self._settings, self._clock)
            try:
                workspaces = Workspaces(
                    self._settings.state_dir or default_state_dir(),
                    uid_first=self._settings.sandbox_uid_first,
                    uid_count=self._settings.sandbox_uid_count,
                )
                self._backend = await backends.choose(self._settings, self._launcher, workspaces)
            except SandboxUnavailable as exc:
                _LOG.error("%s", exc.message)
                self._refusal = exc.message
                raise
            proxy = None if self._egress_policy.allows_nothing else EgressProxy(self._dialer, self._settings.egress)
            self._sandboxes = ProgramSandboxes(
                self._settings, self._launcher, self._backend, workspaces, self._clock, proxy
            )
            self._transfers = WorkspaceTransfers(self._settings, workspaces, self._sandboxes, self._clock)
            if self._history is not None:
                self._writer = HistoryWriter(
                    self._history,
                    flush_interval_s=self._settings.history.flush_interval_s,
                    buffered_samples_max=self._settings.history.buffered_samples_max,
                )
            self._tools.start(self._launcher, self._backend, workspaces, proxy)
            self._sandboxes.warm.fill()
            self._housekeeping = [
                asyncio.create_task(_again_and_again(self._sandboxes.clean)),
                asyncio.create_task(_again_and_again(self._sandboxes.rest_idle)),
                asyncio.create_task(_again_and_again(self._sandboxes.check_disks)),
                asyncio.create_task(_again_and_again(self._transfers.drop_stalled)),
                asyncio.create_task(_again_and_again(self._tools.rest_idle)),
            ]
            _LOG.info("tools run in %s sandboxes", self._backend.name)

    async def tools(self) -> list[ToolSpec]:
        """Every tool that runs here, once it is known which ones the MCP servers have.

        Raises:
            SandboxUnavailable: no sandbox holds here, and so no tool runs.
        """
        await self.start()
        await self._tools.looked()
        return list(self._tools.specs().values())

    async def call(self, call: ToolCall) -> AsyncIterator[ToolEventOfCall]:
        """Run one call: at most one `ToolStarted`, `ToolProgress` from tools that tell, then exactly one `ToolResult`.

        Closing the iterator cancels the call.

        What is wrong with the arguments or the tool is a result, which the model can act on.

        Raises:
            SandboxUnavailable: no sandbox holds here, or none can be started now.
            Overloaded: too many calls wait already.
            InvalidRequest: a call with this id is under way for this program, or the timeout is not a positive number.
        """
        queued_s = self._clock.now_s()
        timeout_s = self._timeout_s(call)
        try:
            spec = await self._spec(call.tool)
            arguments = registry.parse_arguments(spec, call.arguments, bytes_max=self._settings.arguments_bytes_max)
        except (ToolNotFound, ArgumentsInvalid) as exc:
            yield self._refused(call, str(exc))
            return
        await self.start()
        if len(self._calls) >= self._settings.concurrent_calls_max + self._settings.queued_calls_max:
            raise Overloaded("too many tool calls are waiting", retry_after_s=_OVERLOAD_RETRY_AFTER_S)
        identity = (call.tenant_id, call.program_id, call.call_id)
        if identity in self._calls:
            raise InvalidRequest(f"call {call.call_id!r} of this program is already under way", param="call_id")
        cancelled = self._calls[identity] = asyncio.Event()
        try:
            timeout_s = self._tools.limit_s(spec, timeout_s)
            async for event in self._run(call, spec, arguments, timeout_s, queued_s, cancelled):
                yield event
        finally:
            self._calls.pop(identity, None)

    async def cancel(self, program_id: ProgramId, call_id: str | None = None) -> int:
        """Stop one call of a program, or all of them; what they started is killed. Returns how many were under way."""
        found = [
            cancelled
            for (_, owner, running_id), cancelled in self._calls.items()
            if owner == program_id and call_id in (None, running_id)
        ]
        for cancelled in found:
            cancelled.set()
        return len(found)

    async def release(
        self, program_id: ProgramId, *, delete_workspace: bool, tenant_id: TenantId | None = None
    ) -> None:
        """The program is over: stop its calls, end its sandbox, and with `delete_workspace` remove its files.

        Without `tenant_id` it is the one whose calls came here, or the default one if none did.

        Raises:
            SandboxUnavailable: no sandbox holds here, so there is nothing that could be released.
        """
        await self.start()
        assert self._sandboxes is not None
        await self.cancel(program_id)
        tenants = [tenant_id] if tenant_id else self._sandboxes.tenants_of(program_id) or [DEFAULT_TENANT]
        for tenant in tenants:
            # The sandbox first, for that is carried through also when the caller gives up waiting.
            await self._sandboxes.release(tenant, program_id, delete_workspace=delete_workspace)
            await self._tools.release(tenant, program_id)

    async def _workspace_transfers(self) -> WorkspaceTransfers:
        await self.start()
        assert self._transfers is not None
        return self._transfers

    async def held(self, quiet_s: float) -> list[HeldProgram]:
        """What this actor holds of programs that ran nothing for `quiet_s`; whoever knows which of them are over releases those."""
        return [] if self._sandboxes is None else await self._sandboxes.held(quiet_s)

    async def status(self) -> dict[str, Any]:
        """Plain values for `/readyz`, metrics and people."""
        sandboxes, writer = self._sandboxes, self._writer
        return {
            "ready": sandboxes is not None and not self._is_closed,
            "sandbox": self._backend.name if self._backend is not None else None,
            "isolates": self._backend.isolates if self._backend is not None else None,
            "reason": self._refusal,
            "limits_by": self._limits_by,
            "live_sandboxes": sandboxes.live if sandboxes is not None else 0,
            "sandboxes_started": sandboxes.started if sandboxes is not None else 0,
            "sandboxes_warm": len(sandboxes.warm) if sandboxes is not None else 0,
            "sandboxes_claimed_warm": sandboxes.warm.claimed if sandboxes is not None else 0,
            "sandboxes_closed_for_room": sandboxes.closed_for_room if sandboxes is not None else 0,
            "calls_running": self._running,
            "calls_waiting": len(self._calls) - self._running,
            "calls_ended": {outcome.value: count for outcome, count in self._outcomes.items()},
            "call_times": self._times.to_plain(),
            "samples_buffered": writer.buffered if writer is not None else 0,
            "samples_dropped": writer.dropped if writer is not None else 0,
            "history_reachable": writer.is_store_reachable if writer is not None else None,
            **self._tools.status(),
        }

    async def check_health(self) -> None:
        """For Ray Serve. An actor whose probes failed is healthy in Serve's sense: starting it again would not help.

        Raises:
            SandboxUnavailable: the actor was closed.
        """
        if self._is_closed:
            raise SandboxUnavailable("the tool actor was closed")

    async def close(self) -> None:
        """Stop every call, end every sandbox, write the samples that are left. Nothing keeps running."""
        async with self._starting:  # what is being started is there to be closed, or is not started at all
            self._is_closed = True
        for cancelled in self._calls.values():
            cancelled.set()
        for task in self._housekeeping:
            task.cancel()
        await asyncio.gather(*self._housekeeping, return_exceptions=True)
        await self._tools.close()
        if self._sandboxes is not None:
            await self._sandboxes.close()
        await self._launcher.close()
        if self._writer is not None:
            await self._writer.close()

    async def _run(
        self,
        call: ToolCall,
        spec: ToolSpec,
        arguments: dict[str, Any],
        timeout_s: float,
        queued_s: float,
        cancelled: asyncio.Event,
    ) -> AsyncIterator[ToolEventOfCall]:
        assert self._sandboxes is not None
        tool, feed = spec.name, ProgressFeed()
        key = tool_key(tool, arguments)
        async with contextlib.AsyncExitStack() as held:
            program = held.enter_context(self._sandboxes.known(call.tenant_id, call.program_id))
            try:
                await self._admitted(held, program, tool, cancelled)
                executor, sandbox = await self._executor(held, program, spec, call, feed)
            except (CancelledInQueue, ProgramReleased):
                yield self._ended_in_queue(call, key, self._clock.now_s() - queued_s)
                return
            except WorkspaceFull as exc:
                yield self._refused(call, f"No more calls run: {exc}.")
                return
            except ToolRefused as exc:
                yield self._refused(call, str(exc))
                return
            queue_s = self._clock.now_s() - queued_s
            self._times.waited(queue_s)
            yield ToolStarted(call_id=call.call_id, tool_key=key, queue_s=queue_s)
            fields = _flat(arguments) if executor is sandbox else arguments
            executing = self._execute(key, executor, tool, fields, timeout_s, cancelled)
            if sandbox is not None:  # what runs in there tells nothing of its progress
                execution = await executing
            else:
                running = asyncio.create_task(executing)
                try:
                    async for update in feed.until(running):
                        yield _progress(call, key, update)
                    execution = await running
                finally:
                    await _ended(running)
            state_was_lost = sandbox is not None and program.executed(tool, execution, sandbox)
            files_were_lost = sandbox is not None and program.take_files_lost()
        outcome = rendering.outcome_of(execution)
        self._outcomes[outcome] += 1
        yield ToolResult(
            call_id=call.call_id,
            tool=tool,
            tool_key=key,
            outcome=outcome,
            output=rendering.text_of(
                tool, execution, timeout_s=timeout_s, state_was_lost=state_was_lost, files_were_lost=files_were_lost
            ),
            exit_code=execution.exit_code if spec.kind is ToolKind.BUILTIN else None,
            duration_s=execution.duration_s,
            queue_s=queue_s,
            truncated_bytes=execution.stdout.truncated_bytes + execution.stderr.truncated_bytes,
        )

    async def _admitted(
        self, held: contextlib.AsyncExitStack, program: ProgramSandbox, tool: str, cancelled: asyncio.Event
    ) -> None:
        """Wait for the program's session, then for a slot, and have `held` give them back.

        In this order: a call that waits for its own program's session takes no slot from others.

        Raises:
            CancelledInQueue: the call was cancelled meanwhile.
        """
        lock = program.session_locks.get(tool)
        if lock is not None:
            await acquire_unless(cancelled, lock)
            held.callback(lock.release)
        await acquire_unless(cancelled, self._slots)
        held.callback(self._slots.release)

    async def _spec(self, name: str) -> ToolSpec:
        """The tool called `name`; raises ToolNotFound. One that nobody knows may be a server's that is being listed."""
        try:
            return self._tools.get(name)
        except ToolNotFound:
            await self.start()
            await self._tools.looked()
            return self._tools.get(name)

    async def _executor(
        self,
        held: contextlib.AsyncExitStack,
        program: ProgramSandbox,
        spec: ToolSpec,
        call: ToolCall,
        feed: ProgressFeed,
    ) -> tuple[Executor, LiveSandbox | None]:
        """What runs the tool, and the program's sandbox where it runs in that; `held` keeps them for the time being."""
        assert self._sandboxes is not None
        if spec.name in self._host_tools:
            return self._host_tools[spec.name], None
        if not self._tools.needs_sandbox(spec):
            return await self._tools.hosted(held, spec, call, feed.report), None
        sandbox = await held.enter_async_context(self._sandboxes.use(program))
        return self._tools.sandboxed(spec, sandbox), sandbox

    async def _execute(
        self,
        key: ToolKey,
        executor: Executor,
        tool: str,
        fields: Mapping[str, Any],
        timeout_s: float,
        cancelled: asyncio.Event,
    ) -> Execution:
        """Run it, and record how long it took, also when the caller goes away meanwhile."""
        started_s = self._clock.now_s()
        self._running += 1
        outcome = ToolOutcome.CANCELLED
        try:
            execution = await executor.execute(
                tool,
                fields,
                timeout_s=timeout_s,
                grace_s=self._settings.interrupt_grace_s,
                output=self._settings.output,
                cancelled=cancelled,
            )
            outcome = rendering.outcome_of(execution)
            return execution
        finally:
            self._running -= 1
            self._times.ran(key, self._clock.now_s() - started_s)
            if self._writer is not None:
                self._writer.record(
                    LatencySample(
                        tool=key,
                        duration_s=self._clock.now_s() - started_s,
                        outcome=outcome,
                        source=SampleSource.TOOL_RUNTIME,
                        at_wall_s=self._clock.wall_s(),
                    )
                )

    def _timeout_s(self, call: ToolCall) -> float:
        wanted = self._settings.call_timeout_s if call.timeout_s is None else call.timeout_s
        if not math.isfinite(wanted) or wanted <= 0:
            raise InvalidRequest("a tool call's timeout must be a positive number of seconds", param="timeout_s")
        return min(wanted, self._settings.call_timeout_s_max)

    def _refused(self, call: ToolCall, why: str) -> ToolResult:
        self._outcomes[ToolOutcome.ERROR] += 1
        return ToolResult(
            call_id=call.call_id,
            tool=call.tool,
            tool_key=tool_key(call.tool, call.arguments),
            outcome=ToolOutcome.ERROR,
            output=why,
        )

    def _ended_in_queue(self, call: ToolCall, key: ToolKey, queue_s: float) -> ToolResult:
        self._outcomes[ToolOutcome.CANCELLED] += 1
        return ToolResult(
            call_id=call.call_id,
            tool=call.tool,
            tool_key=key,
            outcome=ToolOutcome.CANCELLED,
            output="[Cancelled before it started.]",
            queue_s=queue_s,
        )


def _progress(call: ToolCall, key: ToolKey, update: Update) -> ToolProgress:
    return ToolProgress(
        call_id=call.call_id, tool_key=key, progress=update.progress, total=update.total, message=update.message
    )


async def _ended(running: asyncio.Task[Execution]) -> None:
    """Stop `running` if its caller goes away; returns when what it ran has ended."""
    if not running.done():
        running.cancel()
        await asyncio.wait({running})


async def _again_and_again(step: Callable[[], Awaitable[float]]) -> None:
    """Do `step`, wait as long as it says, and so on; a fault is logged and does not end it."""
    while True:
        try:
            pause_s = await step()
        except Exception:  # noqa: BLE001 - whatever it is, sandboxes must not stay for ever because of it
            _LOG.exception("housekeeping of sandboxes failed; trying again")
            pause_s = _AFTER_FAULT_S
        await asyncio.sleep(pause_s)


def default_state_dir() -> Path:
    """Where workspaces live if the settings do not say: a place that sandboxes of this user can reach."""
    if os.geteuid() == 0:
        return Path("/var/lib/continuum/tools")
    return Path.home() / ".local" / "state" / "continuum" / "tools"


def _flat(arguments: dict[str, Any]) -> dict[str, str | bytes | int]:
    """Arguments as the agent takes them; their schemas allow strings, integers and booleans."""
    return {name: int(value) if isinstance(value, bool) else value for name, value in arguments.items()}
