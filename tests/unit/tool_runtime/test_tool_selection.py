"""What a program's `tools` list may hold."""

from __future__ import annotations

from typing import Any

import pytest

from agent_program.errors import InvalidRequest, ToolNotFound
from tool_runtime.registry import BUILTIN_TOOLS, ToolKind, ToolSpec
from tool_runtime.tool_selection import select_tools

_NOTHING = {"type": "object", "properties": {}}
READ = ToolSpec(name="files__read", description="", parameters=_NOTHING, kind=ToolKind.MCP, server="files")
WRITE = ToolSpec(
    name="files__write", description="", parameters=_NOTHING, kind=ToolKind.MCP, server="files", needs_approval=True
)
KNOWN = {**BUILTIN_TOOLS, READ.name: READ, WRITE.name: WRITE}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": _NOTHING}


def select(*entries: Any, tools_max: int = 8) -> tuple[ToolSpec, ...]:
    return select_tools(list(entries), KNOWN, tools_max=tools_max)


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


def test_a_name_is_the_registered_tool() -> None:
    assert select("shell", "files__read") == (BUILTIN_TOOLS["shell"], READ)


def test_an_openai_entry_with_a_registered_name_is_that_tool_whatever_is_sent_along() -> None:
    assert select(function(name="shell", description="mine", parameters=_NOTHING)) == (BUILTIN_TOOLS["shell"],)


@pytest.mark.parametrize("entry", [function(**WEATHER), {"type": "function", **WEATHER}])
def test_a_function_that_is_not_registered_is_run_by_the_client(entry: dict[str, Any]) -> None:
    (spec,) = select(entry)
    assert (spec.kind, spec.name, spec.description) == (ToolKind.CLIENT, "weather", "The weather.")


def test_a_function_without_parameters_takes_none() -> None:
    (spec,) = select(function(name="now", description="The time."))
    assert spec.parameters == _NOTHING


def test_a_name_alone_that_nobody_knows_is_a_typo_and_no_function_of_the_clients() -> None:
    for entry in ("shel", function(name="shel")):
        with pytest.raises(ToolNotFound, match="shel"):
            select(entry)


def test_a_server_brings_all_its_tools_or_those_that_are_allowed() -> None:
    assert select({"type": "mcp", "server_label": "files"}) == (READ, WRITE)
    for name in ("read", "files__read"):
        assert select({"type": "mcp", "server_label": "files", "allowed_tools": [name]}) == (READ,)


def test_consent_can_be_asked_for_and_not_taken_back() -> None:
    (shell,) = select({**function(name="shell"), "require_approval": "always"})
    assert shell.needs_approval
    (_, write) = select({"type": "mcp", "server_label": "files", "require_approval": "never"})
    assert write.needs_approval


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ("shell", "must be a list"),
        ([7], r"tools\.0"),
        ([{"type": "retrieval"}], r"tools\.0\.type"),
        ([{"type": "function"}], "needs a name"),
        ([{"type": "function", "function": "shell"}], "needs a name"),
        ([function(name="a b", description="x")], "letters, digits"),
        ([function(name="f", description=7)], "description is text"),
        ([function(name="f", parameters=[])], "JSON Schema"),
        ([function(name="f", parameters={"type": "string"})], "type is object"),
        ([function(name="f", parameters={"type": "object", "required": "x"})], "no JSON Schema"),
        ([function(name="f", description="x" * 9000)], "longer than"),
        ([{"type": "mcp", "server_label": "files", "server_url": "http://x"}], "the operator's"),
        ([{"type": "mcp"}], "server_label"),
        ([{"type": "mcp", "server_label": "files", "allowed_tools": "read"}], "a list of names"),
        ([{**function(name="shell"), "require_approval": 1}], "always or never"),
        (["shell", "shell"], "named twice"),
        (["files__read", {"type": "mcp", "server_label": "files"}], "named twice"),
        (["shell"] * 9, "at most 8"),
    ],
)
def test_what_is_malformed_is_refused_and_named(entries: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        select_tools(entries, KNOWN, tools_max=8)


def test_a_server_or_tool_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ToolNotFound, match="there are: files"):
        select({"type": "mcp", "server_label": "web"})
    with pytest.raises(ToolNotFound, match="files__read"):
        select({"type": "mcp", "server_label": "files", "allowed_tools": ["delete"]})


def test_a_server_with_too_many_tools_is_too_many() -> None:
    with pytest.raises(InvalidRequest, match="at most 1 tools, not 2"):
        select({"type": "mcp", "server_label": "files"}, tools_max=1)
