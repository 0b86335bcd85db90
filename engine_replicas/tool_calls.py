"""Which tools a program runs after a turn, read from what the turn said. Pure.

In this order: what the client declared; the calls that the engine's parser found; fenced shell blocks in the text, which is
how agents without function calling (mini-swe-agent and its kin) ask for a command. Nothing found means the turn was an
answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agent_program.ids import ToolKey
from agent_program.turn import TurnHints
from tool_runtime.tool_key import tool_key

#: Text is looked at from its end, where an agent's action stands; a longer answer is not searched whole.
_TEXT_SEARCHED_MAX = 65_536
#: Calls of one turn that are looked at; more only make the combined key longer.
CALLS_MAX = 16

_FENCED_SHELL = re.compile(
    r"^```[ \t]*(?:bash|sh|shell|zsh|console|mswea_bash_command)[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE
)


def next_tools(message: Mapping[str, Any], hints: TurnHints | None) -> tuple[ToolKey, ...]:
    """The keys of the tools that run next, one for each call, in the order of the calls.

    Args:
        message: an assistant message in OpenAI's shape; malformed parts of it are passed over.
        hints: what the client declared.
    """
    if hints is not None and hints.next_tool is not None:
        return (hints.next_tool,)
    return _called(message.get("tool_calls")) or _fenced(message.get("content"))


def _called(calls: object) -> tuple[ToolKey, ...]:
    keys = []
    for call in calls[:CALLS_MAX] if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name, str) and name:
            arguments = function.get("arguments")
            keys.append(tool_key(name, arguments if isinstance(arguments, (str, Mapping)) else {}))
    return tuple(keys)


def _fenced(content: object) -> tuple[ToolKey, ...]:
    if not isinstance(content, str):
        return ()
    commands = _FENCED_SHELL.findall(content[-_TEXT_SEARCHED_MAX:])
    return tuple(tool_key("shell", {"command": command}) for command in commands[:CALLS_MAX])
