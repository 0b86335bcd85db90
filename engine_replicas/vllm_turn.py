"""One turn on vLLM's chat serving: opened, read, and aborted when nobody reads on.

    open ──► refused         the body was wrong, or the engine refused: a status and one JSON document
         ──► answered        no streaming: one JSON document
         ──► streaming       opened as soon as the engine has accepted the turn, which may be long before its first token

A turn ends early in three ways: its reader closes it or is cancelled (vLLM aborts the request), its deadline passes (the
same, and the reader is told), or the engine gives it up because it dies, stops or is paused (`EngineUnavailable`, whatever
has been read: the turn may run again elsewhere).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from agent_program.errors import EngineUnavailable, InvalidRequest
from agent_program.turn import TurnHints
from engine_replicas.openai_error import error_body
from engine_replicas.vllm_chat import ObservedChat, TurnRecord, current_turn

_ERROR_EVENT = 'data: {"error"'
_DONE_EVENT = "data: [DONE]\n\n"
#: vLLM's reason for a turn that ends because the engine stops or is paused. A reader that leaves sees no reason at all.
_ABORTED = "abort"
#: The parameter that vLLM blames when a prompt is longer than the context.
_CONTEXT_PARAM = "input_tokens"


def chat_request(body: dict[str, Any]) -> ChatCompletionRequest:
    """vLLM's request for `body`.

    Raises:
        InvalidRequest: a field is missing, malformed or out of range.
    """
    try:
        return ChatCompletionRequest.model_validate(body)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False, include_input=False)
        fields = [".".join(str(part) for part in error["loc"]) for error in errors]
        message = "; ".join(f"{field}: {error['msg']}" for field, error in zip(fields[:3], errors, strict=False))
        raise InvalidRequest(message, param=fields[0] or None) from exc
    except (VLLMClientError, ValueError, TypeError, KeyError, AttributeError) as exc:
        # vLLM's validators index into nested input before its shape has been checked.
        raise InvalidRequest(f"the request is malformed: {exc}", param=getattr(exc, "parameter", None)) from exc


class VllmTurn:
    """A turn under way. Open it once, read `chunks` to the end or stop early, and close it in any case."""

    def __init__(
        self, serving: ObservedChat, request: ChatCompletionRequest, hints: TurnHints | None, *, timeout_s: float | None
    ):
        self.record = TurnRecord(hints)
        #: HTTP status and form of what `chunks` yields; known once opened.
        self.status = 200
        self.is_stream = False
        #: Why the turn ended, where it was not the engine that ended it: `error` or `timeout`.
        self.broken_by: str | None = None
        self._serving = serving
        self._request = request
        self._deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._timeout_s = timeout_s
        self._document: str | None = None
        self._message: dict[str, Any] | None = None
        self._events: AsyncGenerator[str, None] | None = None
        self._first_event: asyncio.Task[str | None] | None = None

    async def open(self) -> None:
        """Hand the turn to the engine; without streaming, wait for its answer.

        Raises:
            EngineUnavailable: the engine core is dead.
        """
        token = current_turn.set(self.record)
        try:
            await self._before_deadline(self._open())
        except EngineUnavailable:
            raise
        except EngineDeadError as exc:
            raise EngineUnavailable("the engine core is dead") from exc
        except TimeoutError:
            self._refuse(504, error_body(504, self._timeout_message()), broken_by="timeout")
        except Exception as exc:  # noqa: BLE001 - vLLM's own mapping from any exception to a status
            self._refuse_as(create_error_response(exc).error)
        finally:
            current_turn.reset(token)

    async def chunks(self) -> AsyncIterator[str]:
        """The body: server-sent events, or one JSON document.

        Raises:
            EngineUnavailable: the engine core died under the turn.
        """
        if self._document is not None:
            yield self._document
            return
        while (event := await self._next_event()) is not None:
            yield event

    async def aclose(self) -> None:
        """Abort what still runs. Closing a turn that ended changes nothing."""
        if self._first_event is not None and not self._first_event.done():
            self._first_event.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._first_event
        for generator in (self._events, self.record.outputs):
            if generator is not None:
                await generator.aclose()

    @property
    def is_complete(self) -> bool:
        """The engine generated to the end."""
        return self.record.finish_reason not in (None, _ABORTED) and self.broken_by is None

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's reason, `error` or `timeout`; None where the turn was stopped by its reader."""
        if self.broken_by is not None:
            return self.broken_by
        reason = self.record.finish_reason
        return "tool_calls" if reason == "stop" and self.message().get("tool_calls") else reason

    def message(self) -> dict[str, Any]:
        """The assistant message of the first choice, in OpenAI's shape; only once complete."""
        if self._message is None:
            record = self.record
            self._message = self._serving.message(self._request, record.output_text, record.output_token_ids)
        return self._message

    async def _open(self) -> None:
        answer = await self._serving.create_chat_completion(self._request, None)
        self._check_engine()
        if isinstance(answer, ErrorResponse):
            self._refuse_as(answer.error)
        elif isinstance(answer, ChatCompletionResponse):
            self._document = answer.model_dump_json()
            self._message = answer.choices[0].message.model_dump() if answer.choices else {}
        else:
            self._events = answer
            await self._accepted()

    async def _accepted(self) -> None:
        """Wait until the engine has the turn, or refused it."""
        assert self._events is not None
        self._first_event = asyncio.create_task(anext(self._events, None))
        accepted = asyncio.create_task(self.record.accepted.wait())
        try:
            await asyncio.wait({self._first_event, accepted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            accepted.cancel()
        self._check_engine()
        refusal = self._first_event.result() if self._first_event.done() else None
        if refusal is not None and refusal.startswith(_ERROR_EVENT):
            self._refuse_as(_error_of(refusal))
        else:
            self.is_stream = True

    async def _next_event(self) -> str | None:
        assert self._events is not None
        try:
            if self._first_event is not None:
                first, self._first_event = self._first_event, None
                event = await self._before_deadline(_result_of(first))
            else:
                event = await self._before_deadline(anext(self._events, None))
        except TimeoutError:
            self.broken_by = "timeout"
            return _event(error_body(504, self._timeout_message())) + _DONE_EVENT
        self._check_engine()
        if event is not None and event.startswith(_ERROR_EVENT):
            self.broken_by = "error"
            return _event(_body_of(_error_of(event)))
        return event

    async def _before_deadline(self, step: Coroutine[Any, Any, Any] | Any) -> Any:
        """Await `step`; cancel it at the deadline.

        vLLM answers a cancellation with an error response of its own, which would hide both the deadline and the caller's
        wish to stop, so both are looked at afterwards.
        """
        async with asyncio.timeout_at(self._deadline_s) as deadline:
            result = await step
        if deadline.expired():
            raise TimeoutError
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return result

    def _check_engine(self) -> None:
        """Raise EngineUnavailable where the engine, not the turn, is the reason that the turn ended."""
        if self.record.engine_died:
            raise EngineUnavailable("the engine core died during the turn")
        if self.record.finish_reason == _ABORTED:
            raise EngineUnavailable("the engine gave up the turn: it stops or is paused")

    def _timeout_message(self) -> str:
        return f"the turn took longer than {self._timeout_s:g} s and was aborted"

    def _refuse_as(self, error: ErrorInfo) -> None:
        self._refuse(error.code, _body_of(error), broken_by="error")

    def _refuse(self, status: int, body: dict[str, Any], *, broken_by: str) -> None:
        self.status = status
        self.broken_by = broken_by
        self._document = json.dumps(body)


async def _result_of(task: asyncio.Task[str | None]) -> str | None:
    return await task


def _error_of(event: str) -> ErrorInfo:
    return ErrorInfo.model_validate(json.loads(event.removeprefix("data: "))["error"])


def _body_of(error: ErrorInfo) -> dict[str, Any]:
    # vLLM appends the parameter to the message, which the body has in a field of its own.
    message = error.message.split(f" (parameter={error.param}", 1)[0]
    code = "context_length_exceeded" if error.param == _CONTEXT_PARAM else None
    return error_body(error.code, message, param=error.param, code=code)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
