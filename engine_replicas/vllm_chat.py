"""vLLM's chat serving, observed: what one turn gave and got, gathered while vLLM answers it.

Two of vLLM's classes are subclassed, none of its code is copied. `AsyncLLM.add_request` tells when the engine has accepted
the turn: from then on an error is the engine's, not the caller's. The chat serving hands over each engine output on its way
to the client, so that token counts and text need no parsing of server-sent events, and lets the prompt of a program's next
turn repeat the tokens of the one before (`token_continuity.py`).

The record of the turn under way is a context variable: vLLM calls through layers that know nothing of programs, and every
turn is opened in a context of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from agent_program.turn import TurnHints
from engine_replicas.token_continuity import TokenMemory
from engine_replicas.turn_stream import TurnTimings


class TurnRecord:
    """What the engine reported about one turn. Complete once `finish_reason` is set."""

    def __init__(self, hints: TurnHints | None):
        #: Whose turn it is; None for one of no program.
        self.hints = hints
        #: Set when the engine has the request: an error before is the caller's, after it the engine's.
        self.accepted = asyncio.Event()
        #: The prompt as text, where it is one.
        self.prompt_text: str | None = None
        self.prompt_token_ids: list[int] = []
        self.cached_tokens = 0
        #: Over all choices.
        self.output_tokens = 0
        #: Of the first choice.
        self.output_text = ""
        self.output_token_ids: list[int] = []
        self.finish_reason: str | None = None
        #: None before the end.
        self.timings: TurnTimings | None = None
        #: The engine core is gone; the turn can run on another replica.
        self.engine_died = False
        #: The engine's outputs, where they have begun: closing them aborts the request.
        self.outputs: AsyncGenerator[RequestOutput, None] | None = None

    def observe(self, output: RequestOutput) -> None:
        """Take in the next output; each token comes once, one by one in a stream, else all at the end."""
        if output.prompt_token_ids is not None:
            self.prompt_token_ids = output.prompt_token_ids
        if output.num_cached_tokens is not None:
            self.cached_tokens = output.num_cached_tokens
        for choice in output.outputs:
            self.output_tokens += len(choice.token_ids)
            if choice.index == 0:
                self.output_text += choice.text
                self.output_token_ids.extend(choice.token_ids)
                self.finish_reason = choice.finish_reason or self.finish_reason
        if self.finish_reason is not None and output.metrics is not None:
            self.timings = _timings(output.metrics)


def _timings(stats: Any) -> TurnTimings | None:
    """From vLLM's `RequestStateStats`, whose times are 0 until they happen."""
    if not 0 < stats.queued_ts <= stats.scheduled_ts <= stats.first_token_ts <= stats.last_token_ts:
        return None
    return TurnTimings(
        queue_s=stats.scheduled_ts - stats.queued_ts,
        prefill_s=stats.first_token_ts - stats.scheduled_ts,
        decode_s=stats.last_token_ts - stats.first_token_ts,
    )


current_turn: ContextVar[TurnRecord | None] = ContextVar("current_turn", default=None)


class ObservedAsyncLLM(AsyncLLM):
    """`AsyncLLM` that tells the turn when the engine has accepted it."""

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        queue = await super().add_request(*args, **kwargs)
        if (turn := current_turn.get()) is not None:
            turn.accepted.set()
        return queue


class ObservedChat(OpenAIServingChat):
    """vLLM's chat serving that shows each engine output to the turn under way."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.token_memory = TokenMemory()

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """vLLM's rendering; the prompt's tokens are those of the program's previous turn as far as that reaches."""
        rendered = await super().render_chat_request(request)
        turn = current_turn.get()
        if turn is not None and isinstance(rendered, tuple) and len(rendered[1]) == 1:
            self._continue_tokens(turn, request, rendered[1][0])
        return rendered

    def chat_completion_stream_generator(
        self, request: ChatCompletionRequest, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        return super().chat_completion_stream_generator(request, self._observed(result_generator), *args, **kwargs)

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return await super().chat_completion_full_generator(request, self._observed(result_generator), *args, **kwargs)

    def message(self, request: ChatCompletionRequest, text: str, token_ids: list[int]) -> dict[str, Any]:
        """The assistant message that `text` is, with its tool calls, as a response without streaming carries it."""
        if self.parser_cls is None or self.renderer.tokenizer is None:
            return {"content": text}
        parser = self._make_parser(request, self.renderer.tokenizer, self._effective_chat_template_kwargs(request))
        _, content, calls = parser.parse(
            text, request, enable_auto_tools=self.enable_auto_tools, model_output_token_ids=token_ids
        )
        functions = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls or ()]
        return {"content": content, "tool_calls": functions}

    def _observed(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        """The same outputs, shown to the turn that is under way now."""
        turn = current_turn.get()
        if turn is None:
            return outputs
        turn.outputs = self._shown_to(turn, outputs)
        return turn.outputs

    async def _shown_to(
        self, turn: TurnRecord, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            async for output in outputs:
                turn.observe(output)
                if turn.finish_reason is not None:
                    # Before the client hears of the end: its next turn may follow at once.
                    self._remember_tokens(turn)
                yield output
        except EngineDeadError:
            turn.engine_died = True
            raise
        finally:
            # vLLM aborts the request when its generator is closed; left to the garbage collector, it would run on a while.
            await outputs.aclose()

    def _continue_tokens(self, turn: TurnRecord, request: ChatCompletionRequest, prompt: Any) -> None:
        is_plain = prompt.get("type") == "token" and (request.n or 1) == 1 and not request.truncate_prompt_tokens
        if not is_plain or turn.hints is None or not isinstance(prompt.get("prompt"), str):
            return
        turn.prompt_text = prompt["prompt"]
        tokens, _ = self.token_memory.continue_prompt(
            turn.hints.program_id, turn.hints.branch, turn.prompt_text, prompt["prompt_token_ids"], self._encode
        )
        # `max_tokens` is deprecated but not gone; reading it as an attribute would warn on every turn.
        wanted = request.max_completion_tokens or vars(request).get("max_tokens") or 1
        if len(tokens) + wanted <= max(self.model_config.max_model_len, len(prompt["prompt_token_ids"]) + wanted):
            prompt["prompt_token_ids"] = tokens

    def _remember_tokens(self, turn: TurnRecord) -> None:
        if turn.hints is None or turn.prompt_text is None:
            return
        if turn.hints.is_last_turn:
            self.token_memory.forget(turn.hints.program_id)
            return
        written = self.renderer.get_tokenizer().decode(turn.output_token_ids, skip_special_tokens=False)
        self.token_memory.remember(
            turn.hints.program_id,
            turn.hints.branch,
            turn.prompt_text + written,
            turn.prompt_token_ids + turn.output_token_ids,
        )

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.renderer.get_tokenizer().encode(text, add_special_tokens=False)
        return token_ids


class NoClientErrors(logging.Filter):
    """Drops what vLLM logs with a traceback when a *client* erred: a hostile one could fill the disk with it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], VLLMClientError))


logging.getLogger("vllm.entrypoints.openai.chat_completion.serving").addFilter(NoClientErrors())
