"""Engine and tools through Serve's deployment handles. The program's id goes along as `session_id`, which is what the request
router keeps programs on their replicas by; Serve does not carry it from one hop to the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from agent_program.clock import Clock
from agent_program.errors import EngineUnavailable, InvalidRequest, PlatformError, TurnFailed, Unavailable
from agent_program.ids import ProgramId, TenantId
from agent_program.tool_events import ToolEvent
from agent_program.turn import TurnHints
from continuum_router.config import RouterSettings
from continuum_router.exchange import ENGINE_NAMESPACE, tell
from deployments.ports import ContextOverflow, ReleasedProgram, ReplicaLost, ToolHostLost, TurnOutcome
from deployments.ray_errors import translated_ray_errors
from deployments.turn_minder import SentItem, TurnItem, TurnMinder, TurnPatience, turn_outcome
from tool_runtime.held_program import HeldProgram
from tool_runtime.registry import ToolSpec
from tool_runtime.tool_call import ToolCall, ToolProgress, ToolResult, ToolStarted

logger = logging.getLogger(__name__)

_ADVICE_TIMEOUT_S = 10.0


class RayEngineClient:
    """`EngineClient` over the handle of the engine deployment; also what the chat API streams from."""

    def __init__(self, handle: DeploymentHandle, *, router: RouterSettings, clock: Clock) -> None:
        self._handle = handle
        self._minder = TurnMinder(
            patience=TurnPatience(turn_s=router.turn_timeout_s, silence_s=router.stream_silence_s),
            clock=clock,
            tell=partial(tell, ENGINE_NAMESPACE),
        )

    @asynccontextmanager
    async def chat(self, body: Mapping[str, Any], hints: TurnHints | None) -> AsyncIterator[AsyncIterator[TurnItem]]:
        """The turn's stream; leaving the context aborts what still runs.

        Raises (also while iterating):
            ReplicaLost: the replica died or is out of reach; what came before is all there is.
            Unavailable: no replica took the turn.
        """
        options: dict[str, Any] = {"stream": True, "method_name": "chat"}
        if hints is not None:
            options["session_id"] = hints.program_id
        response = self._handle.options(**options).remote(dict(body), hints)

        async def items() -> AsyncGenerator[SentItem, None]:
            with translated_ray_errors(lost=ReplicaLost, what="the engine replica"):
                async for item in response:
                    yield item

        sent = items()
        watched = self._minder.watch(sent, hints)
        try:
            yield watched
        finally:
            response.cancel()
            await watched.aclose()
            await sent.aclose()

    async def run_turn(self, body: Mapping[str, Any], hints: TurnHints) -> TurnOutcome:
        async with self.chat({**body, "stream": False}, hints) as items:
            return await turn_outcome(items, engine_error)

    async def tool_event(self, event: ToolEvent) -> None:
        await _advise(self._handle, event.program_id, "tool_event", event)

    async def release(self, program_id: str) -> ReleasedProgram | None:
        answer = await _advise(self._handle, program_id, "release_program", program_id)
        return None if answer is None else ReleasedProgram(**answer)


class RayToolClient:
    """`ToolClient` over the handle of the tool deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def call(
        self, call: ToolCall, on_started: Callable[[ToolStarted | ToolProgress], Awaitable[None]]
    ) -> ToolResult:
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

    async def release(self, program_id: str, *, tenant_id: TenantId, delete_workspace: bool) -> None:
        options = {"tenant_id": tenant_id, "delete_workspace": delete_workspace}
        await _advise(self._handle, program_id, "release", ProgramId(program_id), **options)

    async def registered(self) -> Sequence[ToolSpec]:
        """The tools that actors run, by the one that knows most (an MCP server may be away from one and not from another).

        Raises:
            Unavailable: no actor says.
        """
        answers: list[list[ToolSpec]] = await self._everywhere("tools")
        if not answers:
            raise Unavailable("no tool actor says which tools there are", retry_after_s=1)
        return max(answers, key=len)

    async def held(self, quiet_s: float) -> Sequence[HeldProgram]:
        answers = await self._everywhere("held", quiet_s)
        return [held for answer in answers for held in answer]

    async def release_everywhere(self, held: HeldProgram, *, delete_workspace: bool) -> None:
        await self._everywhere("release", held.program_id, tenant_id=held.tenant_id, delete_workspace=delete_workspace)

    async def _everywhere(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """The answers of the actors that gave one."""
        try:
            results = await self._handle.broadcast(method, *arguments, **keywords).results_async(
                timeout_s=_ADVICE_TIMEOUT_S, return_exceptions=True
            )
        except (TimeoutError, RayError, RayServeException) as error:
            logger.warning("%s on every %s: %s", method, self._handle.deployment_name, error)
            return []
        for fault in results:
            if isinstance(fault, BaseException):
                logger.warning("%s on a %s: %s", method, self._handle.deployment_name, fault)
        return [result for result in results if not isinstance(result, BaseException)]


async def _advise(handle: DeploymentHandle, program_id: str, method: str, *arguments: Any, **keywords: Any) -> Any:
    """Call a method on the program's replica. It is advice: an error is logged, and no program waits for it for long.

    Returns:
        The replica's answer; None where it gave none.
    """
    what = f"{method} on {handle.deployment_name}"
    response = handle.options(session_id=program_id, method_name=method).remote(*arguments, **keywords)
    try:
        async with asyncio.timeout(_ADVICE_TIMEOUT_S):
            with translated_ray_errors(lost=Unavailable, what=what):
                return await response
    except TimeoutError:
        response.cancel()
        logger.warning("program %s: %s took longer than %g s", program_id, what, _ADVICE_TIMEOUT_S)
    except PlatformError as error:
        logger.warning("program %s: %s", program_id, error)
    return None


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
