"""Takes turns on an engine replica, as the platform does, and reads what came back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from agent_program.ids import ProgramId
from agent_program.turn import TurnHints
from engine_replicas.turn_stream import TurnClosed, TurnOpened

MODEL = "smollm2-135m-instruct"
SHELL_TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a shell command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "maxLength": 24}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}
COUNT_TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count to a number.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "integer", "minimum": 0, "maximum": 99}, "aloud": {"type": "boolean"}},
            "required": ["to", "aloud"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Turn:
    """Everything that one turn yielded."""

    opened: TurnOpened
    chunks: list[str] = field(repr=False)
    closed: TurnClosed

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document of a turn without streaming."""
        (text,) = self.chunks
        return json.loads(text)

    @property
    def error(self) -> dict[str, Any]:
        return self.document["error"]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The server-sent events of a stream, which must end as OpenAI's do."""
        assert "".join(self.chunks).endswith("data: [DONE]\n\n")
        lines = "".join(self.chunks).split("\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message, put together from its deltas where it was streamed, as a client sends it back."""
        if not self.opened.is_stream:
            message = self.document["choices"][0]["message"]
            return {"role": "assistant", "content": message["content"], "tool_calls": message.get("tool_calls") or []}
        content, calls = "", {}
        for event in self.events:
            for choice in event["choices"]:
                content += choice["delta"].get("content") or ""
                for delta in choice["delta"].get("tool_calls") or ():
                    call = calls.setdefault(delta["index"], {"function": {"name": "", "arguments": ""}})
                    call.update({key: delta[key] for key in ("id", "type") if delta.get(key)})
                    for key in ("name", "arguments"):
                        call["function"][key] += delta["function"].get(key) or ""
        return {"role": "assistant", "content": content, "tool_calls": [calls[index] for index in sorted(calls)]}


def hints(program_id: str, **others: Any) -> TurnHints:
    return TurnHints(program_id=ProgramId(program_id), **others)


def chat(text: str = "Say something.", **others: Any) -> dict[str, Any]:
    """A short greedy turn."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 16,
        "temperature": 0,
    } | others


async def take(replica: Any, body: dict[str, Any], turn_hints: TurnHints | None = None) -> Turn:
    """Take a whole turn."""
    opened, *chunks, closed = [item async for item in replica.chat(body, turn_hints)]
    assert isinstance(opened, TurnOpened)
    assert isinstance(closed, TurnClosed)
    assert all(isinstance(chunk, str) for chunk in chunks)
    return Turn(opened=opened, chunks=chunks, closed=closed)
