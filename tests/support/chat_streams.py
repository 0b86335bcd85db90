"""Chunks of a chat stream as vLLM sends them, and what they add up to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def chunk(
    content: str | None = None,
    *,
    role: str | None = None,
    reasoning: str | None = None,
    finish: str | None = None,
    usage: dict[str, int] | None = None,
    chat_id: str = "chat",
) -> str:
    """One event."""
    delta = {"role": role, "content": content, "reasoning_content": reasoning}
    said = {name: value for name, value in delta.items() if value is not None}
    return _event({"delta": said, "index": 0, "finish_reason": finish}, chat_id, usage)


def tool_chunk(name: str | None, arguments: str, *, call_id: str = "call", chat_id: str = "chat") -> str:
    """One event with a piece of a tool call; the first piece has the name."""
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    call: dict[str, Any] = {"index": 0, "function": function}
    if name is not None:
        call |= {"id": call_id, "type": "function"}
    return _event({"delta": {"tool_calls": [call]}, "index": 0, "finish_reason": None}, chat_id, None)


def _event(choice: dict[str, Any], chat_id: str, usage: dict[str, int] | None) -> str:
    body: dict[str, Any] = {"id": chat_id, "object": "chat.completion.chunk", "created": 1, "choices": [choice]}
    if usage is not None:
        body["usage"] = usage
    return f"data: {json.dumps(body)}\n\n"


def events(stream: Iterable[str]) -> list[dict[str, Any]]:
    """The chunks, parsed, without the end mark."""
    data = [event.removeprefix("data: ").strip() for event in stream]
    return [json.loads(text) for text in data if text != "[DONE]"]


def text_of(stream: Iterable[str]) -> str:
    """The content that a client puts together."""
    return "".join(
        choice["delta"].get("content") or "" for event in events(stream) for choice in event.get("choices", ())
    )
