"""Tools as a model sees them, and arguments as a model writes them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from agent_program.errors import ToolNotFound
from tool_runtime import registry
from tool_runtime.registry import ArgumentsInvalid, ToolKind, ToolSpec, parse_arguments

SHELL = registry.get("shell")


def test_every_builtin_tool_has_a_legal_name_a_description_and_a_schema() -> None:
    for name, spec in registry.BUILTIN_TOOLS.items():
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name)
        assert spec.name == name
        assert len(spec.description) > 20
        Draft202012Validator.check_schema(dict(spec.parameters))
        assert spec.parameters["type"] == "object"
        assert spec.parameters["additionalProperties"] is False


def test_the_schema_is_openais() -> None:
    schema = registry.openai_schema(SHELL)
    assert schema["type"] == "function"
    assert schema["function"]["name"] == "shell"
    assert schema["function"]["parameters"]["required"] == ["command"]


def test_an_unknown_tool_is_refused_with_those_there_are() -> None:
    with pytest.raises(ToolNotFound, match=r"no tool called 'fly'; there are: shell, python"):
        registry.get("fly")


@pytest.mark.parametrize("arguments", [{"command": "ls"}, '{"command": "ls"}', ' {"command":"ls"}\n'])
def test_arguments_may_be_an_object_or_its_json(arguments: dict[str, str] | str) -> None:
    assert parse_arguments(SHELL, arguments, bytes_max=1000) == {"command": "ls"}


def test_a_tool_without_required_arguments_takes_an_empty_text() -> None:
    assert parse_arguments(registry.get("list_files"), "", bytes_max=1000) == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("{", "not valid JSON"),
        ("null", "must be one JSON object, not NoneType"),
        ('{"command": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "not valid JSON"),
        ({"command": object()}, "are not JSON"),
        ({"command": ""}, "command: '' should be non-empty"),
        ({"command": "x" * 2000}, "larger than 1000 bytes"),
        ({}, 'Expected: {"command": "string"}'),
    ],
)
def test_what_is_wrong_is_told_so_that_a_model_can_mend_it(arguments: dict[str, object] | str, told: str) -> None:
    with pytest.raises(ArgumentsInvalid, match=re.escape(told)):
        parse_arguments(SHELL, arguments, bytes_max=1000 if len(str(arguments)) < 50_000 else 10**6)


def strangers(**parameters: Any) -> ToolSpec:
    """A tool of an MCP server."""
    return ToolSpec(
        name="theirs", description="", parameters={"type": "object", **parameters}, kind=ToolKind.MCP, server="s"
    )


def test_a_strangers_patterns_are_not_tried_because_they_may_take_for_ever() -> None:
    evil = strangers(properties={"a": {"type": "string", "pattern": "(a+)+$"}, "pattern": {"type": "integer"}})
    assert parse_arguments(evil, {"a": "a" * 100 + "!", "pattern": 1}, bytes_max=1000)
    with pytest.raises(ArgumentsInvalid, match="pattern: 'x' is not of type 'integer'"):
        parse_arguments(evil, {"pattern": "x"}, bytes_max=1000)
    # What the patterns would have allowed is not refused for want of them.
    named = strangers(patternProperties={"^x-": {"type": "string"}}, additionalProperties=False)
    assert parse_arguments(named, {"x-a": "1"}, bytes_max=1000) == {"x-a": "1"}


def test_what_a_strangers_schema_refers_to_is_never_fetched() -> None:
    far = strangers(properties={"a": {"$ref": "http://localhost:1/schema.json"}})
    with pytest.raises(ArgumentsInvalid, match="cannot be applied"):
        parse_arguments(far, {"a": 1}, bytes_max=1000)
    near = strangers(properties={"a": {"$ref": "#/$defs/number"}}, **{"$defs": {"number": {"type": "integer"}}})
    with pytest.raises(ArgumentsInvalid, match="is not of type 'integer'"):
        parse_arguments(near, {"a": "x"}, bytes_max=1000)


def test_a_tool_travels_as_plain_values() -> None:
    spec = strangers(properties={})
    assert ToolSpec.from_wire(json.loads(json.dumps(spec.to_wire()))) == spec
    for broken in ({}, {**spec.to_wire(), "kind": "magic"}, {**spec.to_wire(), "more": 1}):
        with pytest.raises(ValueError):
            ToolSpec.from_wire(broken)


@pytest.mark.parametrize("spec", registry.BUILTIN_TOOLS.values(), ids=lambda spec: spec.name)
def test_the_built_in_tools_meet_what_is_asked_of_others(spec: ToolSpec) -> None:
    assert registry.fault_of(spec) is None
