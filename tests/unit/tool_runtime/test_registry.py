"""Tools as a model sees them, and arguments as a model writes them."""

from __future__ import annotations

import re

import pytest
from jsonschema import Draft202012Validator

from agent_program.errors import ToolNotFound
from tool_runtime import registry
from tool_runtime.registry import ArgumentsInvalid, parse_arguments

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
