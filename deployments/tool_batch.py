"""The tool calls of one turn, run side by side; to the scheduler they are one wait.

The replica that holds the program's KV is told when the first call's tool really starts and when the last one has finished,
under one key (the calls' keys combined) and with the seconds in between: the wait of parallel calls is their maximum.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_program.clock import Clock
from agent_program.errors import InvalidRequest, Overloaded, PlatformError, SandboxUnavailable, Unavailable
from agent_program.ids import ProgramId, TenantId, ToolKey
from agent_program.tool_events import ToolEvent, ToolEventKind, ToolOutcome
from deployments.actions import fault_of_arguments
from deployments.ports import EngineClient, ToolClient, ToolHostLost
from deployments.program_settings import ProgramSettings
from deployments.steps import PendingCall, interrupted_result
from tool_runtime.registry import ToolKind, ToolSpec
from tool_runtime.tool_call import ToolCall, ToolProgress, ToolResult, ToolStarted
from tool_runtime.tool_key import combine, tool_key

logger = logging.getLogger(__name__)

#: An idempotent call whose actor died runs once more; if that one dies too, the tool is what kills it.
_IDEMPOTENT_RETRIES = 1


class ToolsUnavailable(PlatformError):
    """No tool actor or sandbox took the call."""

    code = "tools_unavailable"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolWait:
    """What the whole batch was to the scheduler."""

    tool_key: ToolKey
    #: From the start of the first tool to the end of the last one.
    seconds: float


Report = Callable[[dict[str, Any], ToolWait | None], Awaitable[None]]
"""Told of each result as it comes (the data of its `tool.finished` step); the last one comes with the batch's wait."""


class ToolBatch:
    """Runs the calls of one turn that the platform runs. `run` raises ToolsUnavailable, and whatever `report` raises."""

    def __init__(
        self,
        *,
        program_id: ProgramId,
        tenant_id: TenantId,
        tool_specs: Mapping[str, ToolSpec],
        tool_timeout_s: float | None,
        settings: ProgramSettings,
        engine: EngineClient,
        tools: ToolClient,
        clock: Clock,
    ) -> None:
        self._program_id = program_id
        self._tenant_id = tenant_id
        self._tool_specs = tool_specs
        self._tool_timeout_s = tool_timeout_s
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.tool_calls_parallel_max)
        self._engine = engine
        self._tools = tools
        self._clock = clock
        self._started_s: float | None = None
        self._outcomes: list[ToolOutcome] = []
        #: The batch is one call.
        self._is_alone = False

    @staticmethod
    def key(call: PendingCall) -> ToolKey:
        """What the call is to the latency history."""
        return tool_key(call.tool, call.arguments)

    async def run(self, calls: Sequence[PendingCall], report: Report) -> None:
        """Run all calls; returns when each has been reported. Cancelling it leaves the stopping of tools to the caller."""
        key = combine([self.key(call) for call in calls])
        assert key is not None, "a batch has calls"
        left = len(calls)
        self._is_alone = left == 1

        async def one(call: PendingCall) -> None:
            nonlocal left
            data = await self._result_of(call, key)
            self._outcomes.append(ToolOutcome(data["outcome"]))
            left -= 1
            if left:
                await report(data, None)
                return
            wait = ToolWait(tool_key=key, seconds=self._elapsed_s())
            await self._tell(ToolEventKind.FINISHED, wait)
            await report(data, wait)

        try:
            async with asyncio.TaskGroup() as group:
                for call in calls:
                    group.create_task(one(call))
        except ExceptionGroup as failures:
            # The first that fails stops the others: one error says it all.
            raise failures.exceptions[0] from None

    async def _result_of(self, call: PendingCall, key: ToolKey) -> dict[str, Any]:
        if (fault := self._fault_of(call)) is not None:
            return _refused(call, self.key(call), fault)
        is_idempotent = self._tool_specs[call.tool].idempotent
        if call.is_started and not is_idempotent:
            return interrupted_result(call, tool_key=self.key(call))
        async with self._slots:
            for attempt in range(1 + _IDEMPOTENT_RETRIES):
                try:
                    return _result_data(await self._call_when_possible(call, key))
                except ToolHostLost as error:
                    logger.warning("program %s: call %s lost its actor: %s", self._program_id, call.call_id, error)
                    if not is_idempotent or attempt == _IDEMPOTENT_RETRIES:
                        return interrupted_result(call, tool_key=self.key(call))
                except InvalidRequest as error:
                    return _refused(call, self.key(call), f"The tool could not be run: {error.message}")
        raise AssertionError("the last attempt returns")

    def _fault_of(self, call: PendingCall) -> str | None:
        """Why the call is answered without being run, in words for the model."""
        spec = self._tool_specs.get(call.tool)
        if spec is None:
            return f"There is no tool {call.tool!r}. Tools: {', '.join(self._tool_specs)}."
        if spec.kind is ToolKind.CLIENT or (spec.needs_approval and not call.is_approved):
            # It is here, and not with the client, only because the client cannot be asked about it as it is.
            return fault_of_arguments(call, spec) or f"The tool {call.tool!r} cannot be run here."
        return None

    async def _call_when_possible(self, call: PendingCall, key: ToolKey) -> ToolResult:
        """Wait out a time in which nothing takes the call. It is not the program's to handle, so the model does not hear of
        it; if it lasts, the error ends the program."""
        give_up_s = self._clock.now_s() + self._settings.tool_wait_s
        while True:
            try:
                return await self._call(call, key)
            except ToolHostLost:
                raise
            except (Unavailable, Overloaded, SandboxUnavailable) as error:
                if self._clock.now_s() >= give_up_s:
                    raise ToolsUnavailable(error.message) from error
                await asyncio.sleep(self._settings.retry_s)

    async def _call(self, call: PendingCall, key: ToolKey) -> ToolResult:
        async def on_started(event: ToolStarted | ToolProgress) -> None:
            if isinstance(event, ToolProgress):
                # How far one of several is says nothing of how far they all are.
                fraction = event.fraction if self._is_alone else None
                await self._tell(ToolEventKind.PROGRESS, ToolWait(tool_key=key, seconds=self._elapsed_s()), fraction)
            elif self._started_s is None:
                self._started_s = self._clock.now_s()
                await self._tell(ToolEventKind.STARTED, ToolWait(tool_key=key, seconds=0.0))

        request = ToolCall(
            program_id=self._program_id,
            tenant_id=self._tenant_id,
            call_id=call.call_id,
            tool=call.tool,
            arguments=call.arguments,
            timeout_s=self._tool_timeout_s,
        )
        return await self._tools.call(request, on_started)

    def _elapsed_s(self) -> float:
        return 0.0 if self._started_s is None else self._clock.now_s() - self._started_s

    async def _tell(self, kind: ToolEventKind, wait: ToolWait, progress: float | None = None) -> None:
        event = ToolEvent(
            program_id=self._program_id,
            kind=kind,
            tool=wait.tool_key,
            elapsed_s=wait.seconds,
            outcome=_worst(self._outcomes) if kind is ToolEventKind.FINISHED else None,
            progress=progress,
        )
        await self._engine.tool_event(event)


def _worst(outcomes: Sequence[ToolOutcome]) -> ToolOutcome:
    """One outcome for the batch: censored if any call was, since the true maximum is then at least what was measured."""
    return next((outcome for outcome in outcomes if outcome.is_censored), outcomes[-1])


def _result_data(result: ToolResult) -> dict[str, Any]:
    return {
        "call_id": result.call_id,
        "tool": result.tool,
        "tool_key": result.tool_key,
        "outcome": result.outcome.value,
        "output": result.output,
        "exit_code": result.exit_code,
        "duration_s": result.duration_s,
        "queue_s": result.queue_s,
        "truncated_bytes": result.truncated_bytes,
    }


def _refused(call: PendingCall, key: ToolKey, message: str) -> dict[str, Any]:
    """The data of a call that never ran: the model reads the message and can act on it."""
    return {
        "call_id": call.call_id,
        "tool": call.tool,
        "tool_key": key,
        "outcome": ToolOutcome.ERROR.value,
        "output": message,
        "exit_code": None,
        "duration_s": 0.0,
        "queue_s": 0.0,
        "truncated_bytes": 0,
    }
