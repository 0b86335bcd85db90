"""A chat stream that goes on although its replica died: what the client has seen, what to ask another replica, what to leave out.

A client has seen a beginning of the answer. It gets the rest, as one stream with one id, and nothing twice:

    nothing that says anything was sent      RESTART     the same request; its first chunk is not repeated
    every choice has said why it ended       FINISH      there is nothing left to ask
    greedy, or a seed was given              AGAIN       the same request: the same text comes, and what was sent of it is left
                                                         out. Where other text comes (floating point sums depend on the batch),
                                                         the stream says so and breaks off, or goes on by CONTINUE
    sampled, and only text was sent          CONTINUE    the text so far becomes the beginning of the assistant's message, and the
                                                         engine writes on (vLLM's `continue_final_message`)
    otherwise                                GIVE_UP     half a tool call, hidden reasoning, several choices or a grammar cannot
                                                         be entered in the middle

In CONTINUE, so many tokens count as sent as there were chunks with text: vLLM sends a chunk a token. Its usage is put right by
that: the total is what the engine says either way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agent_program.errors import TurnFailed

_DONE = "[DONE]"
#: With any of these the output follows a grammar, which would begin anew.
_GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_REASONING = ("reasoning_content", "reasoning")
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")


class StreamDiverged(TurnFailed):
    """The replica died, and its answer could not be generated the same again; what was sent of it stands."""

    code = "stream_diverged"


class ReplayMode(StrEnum):
    """How a broken stream goes on."""

    RESTART = "restart"
    FINISH = "finish"
    AGAIN = "again"
    CONTINUE = "continue"
    GIVE_UP = "give_up"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """What to ask another replica."""

    mode: ReplayMode
    #: The request; the original where nothing is asked.
    body: Mapping[str, Any]


@dataclass(slots=True)
class SentToolCall:
    """What was sent of one tool call."""

    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class SentChoice:
    """What was sent of one choice."""

    content: str = ""
    reasoning: str = ""
    tool_calls: dict[int, SentToolCall] = field(default_factory=dict)
    has_role: bool = False
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(slots=True)
class SentStream:
    """What a client has seen of a stream so far. Grows with what it was sent."""

    #: `id`, `created` and the like, of the first chunk: all chunks of one answer share them.
    head: dict[str, Any] = field(default_factory=dict)
    choices: dict[int, SentChoice] = field(default_factory=dict)
    #: Chunks with text.
    text_chunks: int = 0
    is_done: bool = False

    def choice(self, index: int) -> SentChoice:
        return self.choices.setdefault(index, SentChoice())


def replay_plan(body: Mapping[str, Any], sent: SentStream, *, may_repeat: bool = True) -> ReplayPlan:
    """How the stream of `body` goes on behind what was sent. Without `may_repeat` not by generating the same again."""
    if not any(choice.says_something for choice in sent.choices.values()):
        is_finished = bool(sent.choices) and all(choice.finish_reason for choice in sent.choices.values())
        return ReplayPlan(mode=ReplayMode.FINISH if is_finished else ReplayMode.RESTART, body=body)
    choices = body.get("n") or 1
    if len(sent.choices) >= choices and all(choice.finish_reason for choice in sent.choices.values()):
        return ReplayPlan(mode=ReplayMode.FINISH, body=body)
    if may_repeat and _is_deterministic(body):
        return ReplayPlan(mode=ReplayMode.AGAIN, body=body)
    if choices == 1 and _is_text_alone(body, sent.choice(0)):
        return ReplayPlan(mode=ReplayMode.CONTINUE, body=_continued(body, sent))
    return ReplayPlan(mode=ReplayMode.GIVE_UP, body=body)


def _is_deterministic(body: Mapping[str, Any]) -> bool:
    return body.get("temperature") == 0 or isinstance(body.get("seed"), int)


def _is_text_alone(body: Mapping[str, Any], choice: SentChoice) -> bool:
    response_format = body.get("response_format")
    has_grammar = any(body.get(name) for name in _GRAMMARS) or (
        isinstance(response_format, Mapping) and response_format.get("type") != "text"
    )
    is_forced = body.get("tool_choice") not in (None, "auto", "none")
    is_taken = body.get("continue_final_message") or body.get("echo")
    return not (choice.reasoning or choice.tool_calls or has_grammar or is_forced or is_taken)


def _continued(body: Mapping[str, Any], sent: SentStream) -> dict[str, Any]:
    said = {"role": "assistant", "content": sent.choice(0).content}
    continued = {
        **body,
        "messages": [*body["messages"], said],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    for name in _TOKEN_LIMITS:
        if isinstance(limit := body.get(name), int):
            continued[name] = max(0 if name == "min_tokens" else 1, limit - sent.text_chunks)
    return continued


class StreamSplicer:
    """Passes the events of one answer on, over however many replicas it takes. One for each request."""

    def __init__(self) -> None:
        self.sent = SentStream()
        self._mode: ReplayMode | None = None
        self._continued_chunks = 0
        #: What the present replica has produced so far, where it repeats what was sent.
        self._repeated = SentStream()

    def replays(self, mode: ReplayMode) -> None:
        """From now on the events are another replica's."""
        self._mode = mode
        self._continued_chunks = self.sent.text_chunks
        self._repeated = SentStream()

    def take(self, text: str) -> Iterator[str]:
        """What of these events the client is to get.

        Raises:
            StreamDiverged: a replica that generates the same again generates something else.
        """
        for event in text.split("\n\n"):
            if not event.strip():
                continue
            if not event.startswith("data: "):
                yield f"{event}\n\n"
                continue
            data = event.removeprefix("data: ")
            if data == _DONE:
                self.sent.is_done = True
                yield f"{event}\n\n"
                continue
            yield from self._chunk(event, data)

    def finish(self) -> Iterator[str]:
        """The end of a stream of which nothing but the end is missing."""
        if not self.sent.is_done:
            self.sent.is_done = True
            yield f"data: {_DONE}\n\n"

    def _chunk(self, event: str, data: str) -> Iterator[str]:
        chunk = json.loads(data)
        if not isinstance(chunk, dict) or "choices" not in chunk:
            yield f"{event}\n\n"  # an error of the engine, or something newer than us
            return
        if self._mode is None:
            self._note(chunk)
            yield f"{event}\n\n"
            return
        spliced = self._spliced(chunk)
        if spliced is not None:
            self._note(spliced)
            yield f"data: {json.dumps(spliced)}\n\n"

    def _spliced(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """A chunk of a replacement as the client may see it; None where it has seen all of it."""
        usage = self._usage(chunk.get("usage"))
        choices = [self._choice(choice) for choice in chunk["choices"]]
        kept = [choice for choice in choices if choice is not None]
        if chunk["choices"] and not kept:
            return None
        spliced = {**chunk, **self.sent.head, "choices": kept}
        if usage is not None:
            spliced["usage"] = usage
        return spliced

    def _usage(self, usage: Any) -> dict[str, Any] | None:
        if not isinstance(usage, dict) or self._mode is not ReplayMode.CONTINUE:
            return usage if isinstance(usage, dict) else None
        counted = self._continued_chunks
        return {
            **usage,
            "prompt_tokens": usage.get("prompt_tokens", 0) - counted,
            "completion_tokens": (usage.get("completion_tokens") or 0) + counted,
        }

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        index, delta = choice.get("index", 0), dict(choice.get("delta") or {})
        sent = self.sent.choice(index)
        if sent.finish_reason is not None:
            return None
        if sent.has_role:
            delta.pop("role", None)
        if self._mode is ReplayMode.AGAIN:
            self._cut(index, delta, sent)
        is_empty = not any(delta.get(name) for name in ("role", "content", "tool_calls", *_REASONING))
        if is_empty and choice.get("finish_reason") is None:
            return None
        return {**choice, "delta": delta}

    def _cut(self, index: int, delta: dict[str, Any], sent: SentChoice) -> None:
        """Leave out of a delta what the client has."""
        again = self._repeated.choice(index)
        if text := delta.get("content"):
            delta["content"] = _rest(again.content, text, sent.content)
            again.content += text
        if thought := _reasoning(delta):
            rest_of_thought = _rest(again.reasoning, thought, sent.reasoning)
            again.reasoning += thought
            delta.update({name: rest_of_thought for name in _REASONING if delta.get(name)})
        if calls := delta.get("tool_calls"):
            rest = [self._cut_call(call, again, sent) for call in calls]
            delta["tool_calls"] = [call for call in rest if call is not None]

    @staticmethod
    def _cut_call(call: dict[str, Any], again: SentChoice, sent: SentChoice) -> dict[str, Any] | None:
        position = call.get("index", 0)
        known = sent.tool_calls.get(position)
        repeated = again.tool_calls.setdefault(position, SentToolCall())
        function = dict(call.get("function") or {})
        text = function.get("arguments") or ""
        if known is None:
            repeated.arguments += text
            return call
        if (name := function.pop("name", None)) and name != known.name:
            raise StreamDiverged
        function["arguments"] = _rest(repeated.arguments, text, known.arguments)
        repeated.arguments += text
        # The call keeps the id under which the client knows it: ids are random.
        cut = {key: value for key, value in call.items() if key not in ("id", "type")}
        return {**cut, "function": function} if function["arguments"] else None

    def _note(self, chunk: Mapping[str, Any]) -> None:
        sent = self.sent
        if not sent.head:
            sent.head = {
                key: chunk[key] for key in ("id", "created", "model", "object", "system_fingerprint") if key in chunk
            }
        says_text = False
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            known = sent.choice(choice.get("index", 0))
            known.has_role = known.has_role or bool(delta.get("role"))
            known.content += delta.get("content") or ""
            known.reasoning += _reasoning(delta)
            known.finish_reason = choice.get("finish_reason") or known.finish_reason
            says_text = says_text or bool(delta.get("content") or _reasoning(delta))
            for call in delta.get("tool_calls") or ():
                noted = known.tool_calls.setdefault(call.get("index", 0), SentToolCall())
                function = call.get("function") or {}
                noted.name += function.get("name") or ""
                noted.arguments += function.get("arguments") or ""
        sent.text_chunks += says_text


def _reasoning(delta: Mapping[str, Any]) -> str:
    # Some versions send the same text under two names.
    return next((delta[name] for name in _REASONING if delta.get(name)), "")


def _rest(before: str, text: str, sent: str) -> str:
    """What of `text`, which follows `before`, lies behind `sent`; raises where it is not what was sent."""
    overlap = sent[len(before) : len(before) + len(text)]
    if not text.startswith(overlap):
        raise StreamDiverged
    return text[len(overlap) :]
