"""The tools there are: name, description for the model, JSON Schema of the arguments.

Tools are values; what runs them is the sandbox's exec agent (`tool_runtime/inside/`). Arguments are checked against the
schema before anything runs, and what is wrong with them is put in words that a model can act on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from agent_program.errors import ToolNotFound

ERRORS_SHOWN_MAX = 5


class ArgumentsInvalid(ValueError):
    """The model's arguments do not fit the tool's schema; the message says how, for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec:
    """One tool as a model sees it."""

    #: `[a-zA-Z0-9_-]{1,64}`.
    name: str
    #: What it does and when to use it, for the model.
    description: str
    #: JSON Schema (2020-12) of the arguments; its root is an object.
    parameters: Mapping[str, Any]
    #: Running it twice does no more than running it once: an interrupted call may be repeated.
    idempotent: bool = False


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_PATH = {"type": "string", "minLength": 1, "maxLength": 4096}

_BUILTIN = (
    ToolSpec(
        name="shell",
        description=(
            "Run a bash command in the program's own shell session. The working directory, variables, functions and background "
            "jobs survive between calls. There is no network and no terminal; standard input is empty."
        ),
        parameters=_object(
            ["command"],
            command={"type": "string", "minLength": 1, "description": "The bash command or script."},
        ),
    ),
    ToolSpec(
        name="python",
        description=(
            "Run Python code in the program's own interpreter. Variables, imports and the working directory survive between calls; "
            "the value of a last expression is printed."
        ),
        parameters=_object(["code"], code={"type": "string", "minLength": 1, "description": "Python source text."}),
    ),
    ToolSpec(
        name="read_file",
        description="Read a text file, optionally only some of its lines. Relative paths start at the workspace.",
        parameters=_object(
            ["path"],
            path=_PATH,
            first_line={"type": "integer", "minimum": 1, "description": "First line to read, counted from 1."},
            max_lines={"type": "integer", "minimum": 1, "description": "At most this many lines."},
        ),
        idempotent=True,
    ),
    ToolSpec(
        name="write_file",
        description="Write a text file, replacing it if it exists; missing directories are made.",
        parameters=_object(["path", "content"], path=_PATH, content={"type": "string"}),
        idempotent=True,
    ),
    ToolSpec(
        name="edit_file",
        description=(
            "Replace one passage of a text file. `old_text` must be there exactly once, to the letter, unless `replace_all` is true."
        ),
        parameters=_object(
            ["path", "old_text", "new_text"],
            path=_PATH,
            old_text={
                "type": "string",
                "minLength": 1,
                "description": "The passage as it stands, with enough around it to be unique.",
            },
            new_text={"type": "string", "description": "What to put in its place."},
            replace_all={"type": "boolean", "description": "Replace every occurrence."},
        ),
    ),
    ToolSpec(
        name="list_files",
        description="List a directory: one entry a line, directories end with a slash, files with their size in bytes.",
        parameters=_object(
            [],
            path=_PATH,
            depth={"type": "integer", "minimum": 1, "maximum": 10, "description": "Levels to descend; 1 by default."},
        ),
        idempotent=True,
    ),
    ToolSpec(
        name="search_files",
        description="Search text files below a directory for a regular expression; answers lines as path:line:text.",
        parameters=_object(
            ["pattern"],
            pattern={
                "type": "string",
                "minLength": 1,
                "maxLength": 1000,
                "description": "A Python regular expression.",
            },
            path=_PATH,
            glob={
                "type": "string",
                "minLength": 1,
                "maxLength": 200,
                "description": "Only files whose name matches, such as *.py.",
            },
        ),
        idempotent=True,
    ),
    ToolSpec(
        name="http_fetch",
        description=(
            "Fetch a web page or file by HTTP and return its text. Only hosts that the operator allows can be reached; redirects "
            "are followed."
        ),
        parameters=_object(
            ["url"],
            url={"type": "string", "minLength": 1, "maxLength": 4096, "description": "A whole http or https address."},
            method={"type": "string", "enum": ["GET", "HEAD"]},
        ),
        idempotent=True,
    ),
)

#: Built-in tools by name, in the order in which they are listed.
BUILTIN_TOOLS: Mapping[str, ToolSpec] = {spec.name: spec for spec in _BUILTIN}


def get(name: str) -> ToolSpec:
    """The tool called `name`.

    Raises:
        ToolNotFound: there is none; the message lists those there are.
    """
    try:
        return BUILTIN_TOOLS[name]
    except KeyError:
        known = ", ".join(BUILTIN_TOOLS)
        raise ToolNotFound(f"there is no tool called {name[:100]!r}; there are: {known}", param="tools") from None


def openai_schema(spec: ToolSpec) -> dict[str, Any]:
    """`spec` as an entry of a chat completion's `tools`."""
    return {
        "type": "function",
        "function": {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)},
    }


def parse_arguments(spec: ToolSpec, arguments: Mapping[str, Any] | str, *, bytes_max: int) -> dict[str, Any]:
    """The call's arguments, read and checked against the tool's schema.

    Raises:
        ArgumentsInvalid: too large, not JSON, not an object, or not as the schema says.
    """
    text = arguments if isinstance(arguments, str) else _dump(spec, arguments)
    if len(text.encode("utf-8", "replace")) > bytes_max:
        raise ArgumentsInvalid(f"The arguments of {spec.name} are larger than {bytes_max} bytes.")
    try:
        # Read even what came parsed: JSON's own types and nothing else go on, and a caller's object is never shared.
        parsed = json.loads(text or "{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise ArgumentsInvalid(
            f"The arguments of {spec.name} are not valid JSON: {exc}. Send one JSON object."
        ) from exc
    if not isinstance(parsed, dict):
        raise ArgumentsInvalid(f"The arguments of {spec.name} must be one JSON object, not {type(parsed).__name__}.")
    faults = sorted(
        Draft202012Validator(dict(spec.parameters)).iter_errors(parsed), key=lambda fault: list(map(str, fault.path))
    )
    if faults:
        told = "; ".join(
            f"{'.'.join(map(str, fault.path)) or 'arguments'}: {fault.message[:300]}"
            for fault in faults[:ERRORS_SHOWN_MAX]
        )
        wanted = json.dumps({name: _briefly(schema) for name, schema in spec.parameters.get("properties", {}).items()})
        raise ArgumentsInvalid(f"The arguments of {spec.name} are wrong: {told}. Expected: {wanted}.")
    return parsed


def _dump(spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(arguments))
    except (TypeError, ValueError, RecursionError) as exc:
        raise ArgumentsInvalid(f"The arguments of {spec.name} are not JSON: {exc}") from exc


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _briefly(schema: Mapping[str, Any]) -> str:
    return str(schema.get("type", "any"))
