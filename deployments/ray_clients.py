"""Engine and tools through Serve's deployment handles. The program's id goes along as `session_id`, which is what the request
router keeps programs on their replicas by; Serve does not carry it from one hop to the next."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ray.serve.handle import DeploymentHandle

from agent_program.errors import EngineUnavailable, InvalidRequest, PlatformError, TurnFailed, Unavailable
from agent_program.ids import ProgramId
from agent_program.tool_events import ToolEvent
from agent_program.turn import TurnHints
from deployments.ports import ContextOverflow, ReplicaLost, ToolHostLost, TurnOutcome
from deployments.ray_errors import translated_ray_errors
from engine_replicas.turn_stream import TurnClosed, TurnOpened
from tool_runtime.tool_call import ToolCall, ToolResult, ToolStarted

logger = logging.getLogger(__name__)

_ADVICE_TIMEOUT_S = 10.0

TurnItem = TurnOpened | str | TurnClosed


class RayEngineClient:
    """`EngineClient` over the handle of the engine deployment; also what the chat API streams from."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    @asynccontextmanager
    async def chat(self, body: Mapping[str, Any], hints: TurnHints | None) -> AsyncIterator[AsyncIterator[TurnItem]]:
        """The turn's stream; leaving the context aborts what still runs.

        Raises (also while iterating):
            ReplicaLost: the replica died; what came before is all there is.
            Unavailable: no replica took the turn.
        """
        options: dict[str, Any] = {"stream": True, "method_name": "chat"}
        if hints is not None:
            options["session_id"] = hints.program_id
        response = self._handle.options(**options).remote(dict(body), hints)

        async def items() -> AsyncIterator[TurnItem]:
            with translated_ray_errors(lost=ReplicaLost, what="the engine replica"):
                async for item in response:
                    yield item

        try:
            yield items()
        finally:
            response.cancel()

    async def run_turn(self, body: Mapping[str, Any], hints: TurnHints) -> TurnOutcome:
        opened: TurnOpened | None = None
        closed: TurnClosed | None = None
        text = ""
        async with self.chat({**body, "stream": False}, hints) as items:
            async for item in items:
                match item:
                    case TurnOpened():
                        opened = item
                    case TurnClosed():
                        closed = item
                    case str():
                        text += item
        if opened is None or closed is None:
            raise ReplicaLost("the engine replica ended the turn without closing it")
        document = json.loads(text)
        if opened.status != 200:
            raise engine_error(opened.status, document)
        choice = document["choices"][0]
        return TurnOutcome(
            message=choice["message"],
            finish_reason=choice["finish_reason"],
            prompt_tokens=closed.prompt_tokens,
            cached_tokens=closed.cached_tokens,
            output_tokens=closed.output_tokens,
            replica=opened.replica_id,
            lease=closed.lease,
        )

    async def tool_event(self, event: ToolEvent) -> None:
        await _advise(self._handle, event.program_id, "tool_event", event)

    async def release(self, program_id: str) -> None:
        await _advise(self._handle, program_id, "release_program", program_id)


class RayToolClient:
    """`ToolClient` over the handle of the tool deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def call(self, call: ToolCall, on_started: Callable[[ToolStarted], Awaitable[None]]) -> ToolResult:
        handle = self._handle.options(session_id=call.program_id, method_name="call", stream=True)
        response = handle.remote(call)
        try:
            with translated_ray_errors(lost=ToolHostLost, what="the tool actor"):
                async for item in response:
                    if isinstance(item, ToolResult):
                        return item
                    await on_started(item)
        finally:
            response.cancel()
        raise ToolHostLost("the tool actor ended the call without a result")

    async def cancel(self, program_id: str, call_id: str | None = None) -> None:
        await _advise(self._handle, program_id, "cancel", ProgramId(program_id), call_id)

    async def release(self, program_id: str, *, delete_workspace: bool) -> None:
        await _advise(self._handle, program_id, "release", ProgramId(program_id), delete_workspace=delete_workspace)


async def _advise(handle: DeploymentHandle, program_id: str, method: str, *arguments: Any, **keywords: Any) -> None:
    """Call a method on the program's replica. It is advice: an error is logged, and no program waits for it for long."""
    what = f"{method} on {handle.deployment_name}"
    response = handle.options(session_id=program_id, method_name=method).remote(*arguments, **keywords)
    try:
        async with asyncio.timeout(_ADVICE_TIMEOUT_S):
            with translated_ray_errors(lost=Unavailable, what=what):
                await response
    except TimeoutError:
        response.cancel()
        logger.warning("program %s: %s took longer than %g s", program_id, what, _ADVICE_TIMEOUT_S)
    except PlatformError as error:
        logger.warning("program %s: %s", program_id, error)


def engine_error(status: int, document: Mapping[str, Any]) -> PlatformError:
    """An error document of vLLM's OpenAI serving as one of ours, with a stable code.

    vLLM says `param: input_tokens` or `input_text` where a prompt is too long (renderers/params.py), and in one path only the
    message does (entrypoints/serve/utils/api_utils.py).
    """
    error = document.get("error") or {}
    message, param = str(error.get("message") or "the engine answered with an error"), error.get("param")
    if status == 400:
        if param in ("input_tokens", "input_text") or "maximum context length" in message:
            return ContextOverflow(message, param="messages")
        return InvalidRequest(message, param=param)
    if status == 503:
        return EngineUnavailable(message, retry_after_s=1)
    return TurnFailed(message, param=param)
