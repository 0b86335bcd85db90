"""What a server's list comes to, what its answers read like, and what its settings may be. Nothing is started."""

from __future__ import annotations

import base64
from typing import Any

import mcp_types as types
import pytest
from pydantic import ValidationError

from tool_runtime.config import McpServerSettings, ToolRuntimeSettings
from tool_runtime.mcp_results import text_of
from tool_runtime.mcp_servers import backoff_s
from tool_runtime.mcp_tools import digest, listing
from tool_runtime.registry import ToolKind

HERE = McpServerSettings(command="server")


def tool(name: str, **fields: Any) -> types.Tool:
    return types.Tool(**{"name": name, "description": "A tool.", "input_schema": {"type": "object"}, **fields})


def test_a_tool_is_called_by_its_servers_name_and_its_own() -> None:
    found = listing("files", [tool("read.text"), tool("write")], HERE)
    assert list(found.tools) == ["files__read_text", "files__write"]
    read = found.tools["files__read_text"]
    assert (read.remote_name, read.spec.kind, read.spec.server) == ("read.text", ToolKind.MCP, "files")
    assert read.spec.parameters == {"type": "object", "properties": {}}


def test_what_cannot_be_offered_is_left_out_and_said() -> None:
    found = listing("s", [tool("a.b"), tool("a_b"), tool("x" * 70), tool("long", description="y" * 9000)], HERE)
    assert list(found.tools) == ["s__a_b"]
    assert [fault.split(":")[0] for fault in found.faults] == ["'a_b'", f"'{'x' * 70}'", "'long'"]


def test_only_allowed_tools_are_taken_and_absent_ones_are_said() -> None:
    settings = McpServerSettings(command="server", allowed_tools=("one", "gone"))
    found = listing("s", [tool("one"), tool("two")], settings)
    assert list(found.tools) == ["s__one"]
    assert found.faults == ("'gone': allowed by the settings, and not there",)


def test_hints_count_where_the_server_is_trusted() -> None:
    reads = tool("reads", annotations=types.ToolAnnotations(read_only_hint=True))
    again = tool("again", annotations=types.ToolAnnotations(idempotent_hint=True))
    trusted = McpServerSettings(command="server", trust=True)
    assert [one.spec.idempotent for one in listing("s", [reads, again, tool("x")], trusted).tools.values()] == [
        True,
        True,
        False,
    ]
    assert not any(one.spec.idempotent for one in listing("s", [reads, again], HERE).tools.values())


def test_a_tools_digest_changes_with_all_that_one_relies_on_and_nothing_else() -> None:
    same = tool("t", title="Shown to people", meta={"version": 2})
    assert digest(tool("t")) == digest(same)
    others = [
        tool("t", description="Another tool."),
        tool("t", input_schema={"type": "object", "required": ["a"]}),
        tool("t", annotations=types.ToolAnnotations(idempotent_hint=True)),
    ]
    assert len({digest(tool("t")), *map(digest, others)}) == 4


DATA = base64.b64encode(b"12345").decode()


@pytest.mark.parametrize(
    ("content", "structured", "text"),
    [
        ([types.TextContent(type="text", text="one"), types.TextContent(type="text", text="two")], None, "one\ntwo"),
        ([types.TextContent(type="text", text='{"a": 1}')], {"a": 1}, '{"a": 1}'),
        ([], {"a": "ä"}, '{"a": "ä"}'),
        ([], None, ""),
        ([types.ImageContent(type="image", data=DATA, mime_type="image/png")], None, "[image, image/png, 5 bytes]"),
        ([types.AudioContent(type="audio", data=DATA, mime_type="audio/wav")], None, "[audio, audio/wav, 5 bytes]"),
        (
            [types.ResourceLink(type="resource_link", name="log", uri="file:///log", description="What happened.")],
            None,
            "[resource log: file:///log – What happened.]",
        ),
        (
            [
                types.EmbeddedResource(
                    type="resource", resource=types.TextResourceContents(uri="file:///a", text="inside")
                )
            ],
            None,
            "[resource file:///a]\ninside",
        ),
        (
            [types.EmbeddedResource(type="resource", resource=types.BlobResourceContents(uri="file:///b", blob=DATA))],
            None,
            "[resource file:///b, of unknown type, 5 bytes]",
        ),
    ],
)
def test_an_answer_reads_as_text(content: list[Any], structured: Any, text: str) -> None:
    assert text_of(types.CallToolResult(content=content, structured_content=structured)) == text


def test_a_server_that_keeps_breaking_is_left_alone_for_twice_as_long_each_time_and_no_longer_than_a_minute() -> None:
    assert [backoff_s(failures) for failures in (0, 1, 2, 3, 7, 8, 1000)] == [0, 0.5, 1, 2, 32, 60, 60]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "either command or url"),
        ({"command": "x", "url": "https://a.example/mcp"}, "either command or url"),
        ({"url": "https://a.example", "args": ["x"]}, "go with command"),
        ({"command": "x", "headers": {"a": "b"}}, "go with url"),
        ({"url": "a.example/mcp"}, "whole http or https address"),
        ({"url": "https://user@a.example/mcp"}, "without a user name"),
        ({"url": "http://10.0.0.1/mcp"}, "is no rule"),
        ({"url": "https://a.example", "allow_addresses": ["10.0.0.0/99"]}, "10.0.0.0/99"),
        ({"command": "x", "readable": ["relative"]}, "a whole path"),
        ({"command": "x", "readable": ["/tmp/x"]}, "sandbox's own"),
        ({"command": "x", "readable": ["/"]}, "sandbox's own"),
        ({"command": "x", "readable": ["/opt/../etc"]}, "a whole path"),
        ({"command": "x", "timeout": 3}, "Extra inputs"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        McpServerSettings(**settings)


@pytest.mark.parametrize("name", ["", "a__b", "_a", "a_", "a b", "ä", "x" * 33])
def test_a_servers_name_must_make_names_of_tools(name: str) -> None:
    with pytest.raises(ValidationError, match="a server's name"):
        ToolRuntimeSettings(mcp_servers={name: HERE})
    assert ToolRuntimeSettings(mcp_servers={"my-files_2": HERE}).mcp_servers["my-files_2"] == HERE
