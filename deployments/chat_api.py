"""`/v1/chat/completions`: the request of any OpenAI client, put on the replica of its program.

    read and check the body ─► who is it? ─► the program's replica ─► status and headers ─► the body, as it comes

A turn whose replica dies before the client has seen a byte of the answer is sent once more. After that the client sees the
loss as an error event at the end of its stream. A client that goes away takes its turn with it: leaving the turn's context
aborts it in the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agent_program.errors import EngineUnavailable, InvalidRequest, ModelNotFound, PlatformError
from agent_program.turn import TurnHints
from deployments.chat_identity import IdentifiedChat, identify
from deployments.ports import ReplicaLost
from engine_replicas.turn_stream import TurnClosed, TurnOpened

logger = logging.getLogger(__name__)

_REPLAYS_MAX = 1


class ChatEngine(Protocol):
    """Where turns are streamed from; `RayEngineClient` in production."""

    def chat(
        self, body: dict[str, Any], hints: TurnHints | None
    ) -> AbstractAsyncContextManager[AsyncIterator[TurnOpened | str | TurnClosed]]:
        """The items of one turn; leaving the context aborts it. Raises ReplicaLost and Unavailable."""
        ...


class ChatApi:
    """Answers chat completions."""

    def __init__(self, engine: ChatEngine, *, model: str) -> None:
        self._engine = engine
        self._model = model

    async def answer(self, request: Request, body: object) -> Response:
        """The response to one chat completion; raises PlatformError for what is refused before the engine sees it."""
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object")
        model = body.get("model", self._model)
        if model != self._model:
            raise ModelNotFound(f"the model {str(model)[:100]!r} is not served; {self._model!r} is", param="model")
        chat = identify({**body, "model": self._model}, request.headers)
        for attempt in range(1 + _REPLAYS_MAX):
            try:
                return await self._attempt(chat)
            except (ReplicaLost, EngineUnavailable) as error:
                logger.warning("a turn was lost before it was answered (attempt %d): %s", attempt + 1, error)
                if attempt == _REPLAYS_MAX:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, chat: IdentifiedChat) -> Response:
        stack = AsyncExitStack()
        try:
            items = await stack.enter_async_context(self._engine.chat(chat.body, chat.hints))
            opened = await anext(items, None)
            if not isinstance(opened, TurnOpened):
                raise ReplicaLost("the engine replica ended the turn before opening it")
            headers = _headers(chat, opened)
            if opened.is_stream:
                # From here on the response owns the turn.
                stream = _stream(stack, items)
                return StreamingResponse(
                    stream, status_code=opened.status, headers=headers, media_type="text/event-stream"
                )
            document = "".join([item async for item in items if isinstance(item, str)])
        except BaseException:
            await stack.aclose()
            raise
        await stack.aclose()
        return Response(document, status_code=opened.status, headers=headers, media_type="application/json")


def _headers(chat: IdentifiedChat, opened: TurnOpened) -> dict[str, str]:
    headers: dict[str, str] = {"x-continuum-replica": opened.replica_id}
    if chat.hints is not None:
        headers["x-continuum-program"] = chat.hints.program_id
    return headers


async def _stream(stack: AsyncExitStack, items: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
    async with stack:
        try:
            async for item in items:
                if isinstance(item, str):
                    yield item
        except asyncio.CancelledError:
            raise
        except PlatformError as error:
            logger.warning("a stream broke: %s", error)
            yield f"data: {json.dumps(error.body())}\n\n"
