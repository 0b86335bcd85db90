"""`/v1/chat/completions`: the request of any OpenAI client, put on the replica of its program.

    read and check the body ─► who is it? ─► may it start? ─► the program's replica ─► status and headers ─► the body, as it comes

A turn whose replica dies is run on another one: from the start where the client has seen nothing, and behind what it has seen where
the answer streams (`stream_replay.py`), so that it sees one answer. Replays are few: a fixed number for each turn, and a budget for
all of them (`continuum_router/resilience.py`). Where a stream cannot go on, its client sees the loss as an error event. A client
that goes away takes its turn with it: leaving the turn's context aborts it in the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from agent_program.errors import EngineUnavailable, InvalidRequest, ModelNotFound, PlatformError
from agent_program.turn import TurnHints
from continuum_router.resilience import RetryBudget
from deployments.access import ANYBODY, Caller
from deployments.chat_identity import IdentifiedChat, identify
from deployments.edge_gate import EdgeGate
from deployments.ports import ReplicaLost
from deployments.stream_replay import ReplayMode, StreamDiverged, StreamSplicer, replay_plan
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

    def __init__(self, engine: ChatEngine, *, model: str, gate: EdgeGate, budget: RetryBudget) -> None:
        self._engine = engine
        self._model = model
        self._gate = gate
        self._budget = budget

    async def answer(self, request: Request, body: object, caller: Caller = ANYBODY) -> Response:
        """The response to one chat completion; raises PlatformError for what is refused before the engine sees it."""
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object")
        model = body.get("model", self._model)
        if model != self._model:
            raise ModelNotFound(f"the model {str(model)[:100]!r} is not served; {self._model!r} is", param="model")
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise InvalidRequest("messages: a list of at least one message", param="messages")
        chat = identify({**body, "model": self._model}, request.headers, caller)
        stack = AsyncExitStack()
        try:
            program_id = chat.hints.program_id if chat.hints is not None else None
            await stack.enter_async_context(self._gate.turn(caller.tenant_id, program_id))
            if program_id is not None and chat.hints is not None and chat.hints.is_last_turn:
                stack.callback(self._gate.program_over, program_id)
            self._budget.first_attempt()
            return await self._first_answer(chat, stack)
        except BaseException:
            await stack.aclose()
            raise

    async def _first_answer(self, chat: IdentifiedChat, stack: AsyncExitStack) -> Response:
        """The response of the first replica that begins one. A stream takes `stack` along."""
        for attempt in range(1 + _REPLAYS_MAX):
            turn = AsyncExitStack()
            try:
                items, opened = await self._opened(chat.body, chat.hints, turn)
                if opened.is_stream:
                    # From here on the response owns the turn.
                    return StreamingResponse(
                        self._stream(chat, stack, turn, items, attempt),
                        status_code=opened.status,
                        headers=_headers(chat, opened),
                        media_type="text/event-stream",
                    )
                document = "".join([item async for item in items if isinstance(item, str)])
            except (ReplicaLost, EngineUnavailable) as error:
                await turn.aclose()
                logger.warning("a turn was lost before it was answered (attempt %d): %s", attempt + 1, error)
                if attempt == _REPLAYS_MAX or not self._budget.spend():
                    raise
                continue
            except BaseException:
                await turn.aclose()
                raise
            await turn.aclose()
            await stack.aclose()
            headers = _headers(chat, opened)
            return Response(document, status_code=opened.status, headers=headers, media_type="application/json")
        raise AssertionError("the last attempt returns or raises")

    async def _opened(
        self, body: Mapping[str, Any], hints: TurnHints | None, turn: AsyncExitStack
    ) -> tuple[AsyncIterator[Any], TurnOpened]:
        items = await turn.enter_async_context(self._engine.chat(dict(body), hints))
        opened = await anext(items, None)
        if not isinstance(opened, TurnOpened):
            raise ReplicaLost("the engine replica ended the turn without opening it")
        return items, opened

    async def _stream(
        self, chat: IdentifiedChat, stack: AsyncExitStack, turn: AsyncExitStack, items: AsyncIterator[Any], attempt: int
    ) -> AsyncGenerator[str, None]:
        """The events for the client, over however many replicas it takes."""
        splicer, may_repeat = StreamSplicer(), True
        async with stack:
            while True:
                try:
                    async with turn:
                        async for item in items:
                            if isinstance(item, str):
                                for event in splicer.take(item):
                                    yield event
                    return
                except asyncio.CancelledError:
                    raise
                except (ReplicaLost, EngineUnavailable, StreamDiverged) as error:
                    logger.warning("a stream broke (attempt %d): %s", attempt + 1, error)
                    lost: PlatformError = error
                    # An answer that does not come out the same is no loss; it has one other way to go on.
                    is_second_way = may_repeat and isinstance(error, StreamDiverged)
                    may_repeat = may_repeat and not is_second_way
                    attempt += not is_second_way
                except PlatformError as error:
                    logger.warning("a stream broke: %s", error)
                    yield _error_event(error)
                    return
                plan = replay_plan(chat.body, splicer.sent, may_repeat=may_repeat)
                if plan.mode is ReplayMode.FINISH:
                    for event in splicer.finish():
                        yield event
                    return
                if plan.mode is ReplayMode.GIVE_UP or attempt > _REPLAYS_MAX or not self._budget.spend():
                    yield _error_event(lost)
                    return
                turn = AsyncExitStack()
                splicer.replays(plan.mode)
                items = self._replayed(plan.body, chat.hints, turn)

    async def _replayed(
        self, body: Mapping[str, Any], hints: TurnHints | None, turn: AsyncExitStack
    ) -> AsyncGenerator[Any, None]:
        """The items of another attempt, which must open as the first one did."""
        items, opened = await self._opened(body, hints, turn)
        if opened.status != 200 or not opened.is_stream:
            raise StreamDiverged("the replica died, and another one refused to go on with its answer")
        async for item in items:
            yield item


def _headers(chat: IdentifiedChat, opened: TurnOpened) -> dict[str, str]:
    headers: dict[str, str] = {"x-continuum-replica": opened.replica_id}
    if chat.program_id is not None:
        headers["x-continuum-program"] = chat.program_id
    return headers


def _error_event(error: PlatformError) -> str:
    return f"data: {json.dumps(error.body())}\n\n"
