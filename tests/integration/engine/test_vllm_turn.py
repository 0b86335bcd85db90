"""How one turn opens, is read and ends, on a scripted chat serving in the place of vLLM's: no engine runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.v1.engine.exceptions import EngineDeadError

from agent_program.errors import EngineUnavailable, InvalidRequest
from engine_replicas.vllm_chat import TurnRecord, current_turn
from engine_replicas.vllm_turn import VllmTurn, chat_request

pytestmark = pytest.mark.integration

HELLO, DONE = 'data: {"choices": []}\n\n', "data: [DONE]\n\n"


def error_event(status: int, message: str) -> str:
    return f"data: {json.dumps({'error': {'message': message, 'type': 't', 'param': None, 'code': status}})}\n\n"


class Serving:
    """Streams what `script` yields; knows whether it was closed."""

    def __init__(self, script: Callable[[TurnRecord], AsyncGenerator[str, None]]):
        self._script = script
        self.is_closed = False

    async def create_chat_completion(self, request: Any, raw_request: Any) -> Any:
        turn = current_turn.get()
        assert turn is not None
        return self._stream(turn)

    def message(self, *_: Any) -> dict[str, Any]:
        return {"content": "", "tool_calls": []}

    async def _stream(self, turn: TurnRecord) -> AsyncGenerator[str, None]:
        try:
            async for event in self._script(turn):
                yield event
        finally:
            self.is_closed = True


class Answering(Serving):
    """Answers without streaming, by `answer`."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]):
        self._answer = answer

    async def create_chat_completion(self, request: Any, raw_request: Any) -> Any:
        return await self._answer()


def a_turn(serving: Serving, timeout_s: float | None = None) -> VllmTurn:
    request = chat_request({"messages": [{"role": "user", "content": "hi"}], "stream": True})
    return VllmTurn(serving, request, None, timeout_s=timeout_s)


async def read(turn: VllmTurn) -> list[str]:
    return [chunk async for chunk in turn.chunks()]


async def forever(turn: TurnRecord) -> AsyncGenerator[str, None]:
    turn.accepted.set()
    await asyncio.Event().wait()
    yield HELLO


async def test_a_stream_opens_when_the_engine_has_it_not_when_it_speaks() -> None:
    speaks = asyncio.Event()

    async def script(turn: TurnRecord) -> AsyncGenerator[str, None]:
        turn.accepted.set()
        await speaks.wait()
        yield HELLO
        yield DONE

    turn = a_turn(Serving(script))
    await turn.open()
    assert (turn.status, turn.is_stream) == (200, True)
    speaks.set()
    assert await read(turn) == [HELLO, DONE]
    assert turn.broken_by is None


async def test_a_stream_that_begins_with_an_error_was_refused() -> None:
    async def script(turn: TurnRecord) -> AsyncGenerator[str, None]:
        yield error_event(400, "no such grammar")
        yield DONE

    serving = Serving(script)
    turn = a_turn(serving)
    await turn.open()
    assert (turn.status, turn.is_stream, turn.finish_reason) == (400, False, "error")
    (document,) = await read(turn)
    assert json.loads(document)["error"]["code"] == "invalid_request"
    await turn.aclose()
    assert serving.is_closed


async def test_an_error_inside_a_stream_is_an_event_of_ours() -> None:
    async def script(turn: TurnRecord) -> AsyncGenerator[str, None]:
        turn.accepted.set()
        yield HELLO
        yield error_event(500, "broke")
        yield DONE

    turn = a_turn(Serving(script))
    await turn.open()
    _, error, done = await read(turn)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert done == DONE
    assert turn.finish_reason == "error"
    assert not turn.is_complete


@pytest.mark.parametrize("was_read", [False, True])
async def test_a_core_that_dies_is_told_apart_from_an_error(was_read: bool) -> None:
    async def script(turn: TurnRecord) -> AsyncGenerator[str, None]:
        if was_read:
            turn.accepted.set()
            yield HELLO
        turn.engine_died = True
        yield error_event(500, "EngineCore encountered an issue")

    async def open_and_read() -> None:
        turn = a_turn(Serving(script))
        await turn.open()
        await read(turn)

    with pytest.raises(EngineUnavailable):
        await open_and_read()


@pytest.mark.parametrize("was_read", [False, True])
async def test_a_turn_that_the_engine_gave_up_is_not_an_answer(was_read: bool) -> None:
    async def script(turn: TurnRecord) -> AsyncGenerator[str, None]:
        if was_read:
            turn.accepted.set()
            yield HELLO
        turn.finish_reason = "abort"
        yield HELLO

    turn = a_turn(Serving(script))

    async def open_and_read() -> None:
        await turn.open()
        await read(turn)

    with pytest.raises(EngineUnavailable):
        await open_and_read()
    assert not turn.is_complete


async def test_a_core_that_is_dead_already_cannot_open_a_turn() -> None:
    async def dead() -> None:
        raise EngineDeadError

    with pytest.raises(EngineUnavailable):
        await a_turn(Answering(dead)).open()


async def test_a_stream_ends_at_its_deadline_and_says_so() -> None:
    serving = Serving(forever)
    turn = a_turn(serving, timeout_s=0.05)
    await turn.open()
    (text,) = await read(turn)
    error, done = text.split("\n\n", 1)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "turn_timeout"
    assert done == DONE
    assert turn.finish_reason == "timeout"
    assert serving.is_closed


async def test_an_answer_ends_at_its_deadline_although_vllm_hides_the_cancellation() -> None:
    async def answer() -> ErrorResponse:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return ErrorResponse(error=ErrorInfo(message="Client disconnected", type="t", code=400))

    turn = a_turn(Answering(answer), timeout_s=0.05)
    await turn.open()
    assert (turn.status, turn.finish_reason) == (504, "timeout")


async def test_a_cancelled_answer_stays_cancelled_although_vllm_hides_it() -> None:
    waits = asyncio.Event()

    async def answer() -> ErrorResponse:
        with contextlib.suppress(asyncio.CancelledError):
            waits.set()
            await asyncio.Event().wait()
        return ErrorResponse(error=ErrorInfo(message="Client disconnected", type="t", code=400))

    task = asyncio.create_task(a_turn(Answering(answer), timeout_s=600).open())
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_closing_before_the_first_event_closes_the_stream() -> None:
    serving = Serving(forever)
    turn = a_turn(serving)
    await turn.open()
    await turn.aclose()
    assert serving.is_closed
    await turn.aclose()


async def test_closing_in_the_middle_closes_the_stream_and_the_engines_outputs() -> None:
    closed = []

    async def outputs() -> AsyncGenerator[Any, None]:
        try:
            yield SimpleNamespace()
        finally:
            closed.append(True)

    async def script(turn: TurnRecord) -> AsyncGenerator[str, None]:
        turn.accepted.set()
        turn.outputs = outputs()
        async for _ in turn.outputs:
            yield HELLO

    serving = Serving(script)
    turn = a_turn(serving)
    await turn.open()
    chunks = turn.chunks()
    assert await anext(chunks) == HELLO
    await turn.aclose()
    assert serving.is_closed
    assert closed == [True]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [], "max_tokens": "many"}, "max_tokens"),
        ({"messages": [], "tools": []}, "tools"),
        ({"messages": [], "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [], "tools": [{}], "tool_choice": {"type": "function", "function": {"name": "x"}}}, None),
    ],
)
def test_a_body_that_is_wrong_names_its_field(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_request(body)
    assert caught.value.param == param
    assert caught.value.message
