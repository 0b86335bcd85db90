"""The tools there are: name, description for the model, JSON Schema of the arguments, and who runs them.

    builtin    shell, python, files, http_fetch                    this module
    function   a Python function that was registered               functions.py
    mcp        a tool of an MCP server, `server__tool`             mcp_tools.py
    client     a function that whoever submitted the program runs  tool_selection.py

Tools are values. Arguments are checked against the schema before anything runs, and what is wrong with them is put in words
that a model can act on. A schema may come from a stranger, so nothing that it refers to is ever fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from agent_program.errors import ToolNotFound

ERRORS_SHOWN_MAX = 5
NAME_CHARS_MAX = 64
SCHEMA_BYTES_MAX = 64 * 1024
DESCRIPTION_CHARS_MAX = 8192
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NOWHERE: Registry[Any] = Registry()


class ToolKind(StrEnum):
    """Who runs a tool."""

    BUILTIN = "builtin"
    #: A registered Python function.
    FUNCTION = "function"
    #: An MCP server.
    MCP = "mcp"
    #: Whoever submitted the program: the program waits for the outputs to be posted.
    CLIENT = "client"


class ArgumentsInvalid(ValueError):
    """The model's arguments do not fit the tool's schema; the message says how, for the model."""


class ToolRefused(Exception):
    """The tool cannot run this call now, and has not begun; the message says why, for the model."""


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
    kind: ToolKind = ToolKind.BUILTIN
    #: The MCP server that has it; None for every other kind.
    server: str | None = None
    #: Somebody must agree to each call before it runs.
    needs_approval: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
            "idempotent": self.idempotent,
            "kind": self.kind.value,
            "server": self.server,
            "needs_approval": self.needs_approval,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ToolSpec:
        """Read `to_wire` back.

        Raises:
            ValueError: a field is missing or malformed.
        """
        try:
            return cls(**{**wire, "kind": ToolKind(wire["kind"])})
        except (KeyError, TypeError) as exc:
            raise ValueError(f"not a tool: {exc}") from exc


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


def get(name: str, tools: Mapping[str, ToolSpec] = BUILTIN_TOOLS) -> ToolSpec:
    """The tool called `name`.

    Raises:
        ToolNotFound: there is none; the message lists those there are.
    """
    try:
        return tools[name]
    except KeyError:
        known = ", ".join(tools)[:2000]
        raise ToolNotFound(f"there is no tool called {name[:100]!r}; there are: {known}", param="tools") from None


def fault_of(spec: ToolSpec) -> str | None:
    """What is wrong with a tool that is not ours, in words; None if it can be offered to a model and checked.

    The schema must be valid, have an object at its root, and refer to nothing outside itself.
    """
    if not _NAME.fullmatch(spec.name):
        return f"its name must be letters, digits, _ and -, at most {NAME_CHARS_MAX} of them"
    if len(spec.description) > DESCRIPTION_CHARS_MAX:
        return f"its description is longer than {DESCRIPTION_CHARS_MAX} characters"
    try:
        text = json.dumps(dict(spec.parameters))
    except (TypeError, ValueError, RecursionError) as exc:
        return f"its parameters are not JSON: {exc}"
    if len(text) > SCHEMA_BYTES_MAX:
        return f"its parameters are larger than {SCHEMA_BYTES_MAX} bytes"
    if spec.parameters.get("type") != "object":
        return "its parameters must be a JSON Schema whose type is object"
    try:
        Draft202012Validator.check_schema(dict(spec.parameters))
    except (SchemaError, RecursionError) as exc:
        return f"its parameters are no JSON Schema: {getattr(exc, 'message', exc)}"[:500]
    return None


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
    validator = Draft202012Validator(_checkable(spec), registry=_NOWHERE)
    try:
        faults = sorted(validator.iter_errors(parsed), key=lambda fault: list(map(str, fault.path)))
    except (Unresolvable, RecursionError, re.error) as exc:
        raise ArgumentsInvalid(f"The schema of {spec.name} cannot be applied to these arguments: {exc}"[:500]) from exc
    if faults:
        told = "; ".join(
            f"{'.'.join(map(str, fault.path)) or 'arguments'}: {fault.message[:300]}"
            for fault in faults[:ERRORS_SHOWN_MAX]
        )
        wanted = json.dumps({name: _briefly(schema) for name, schema in spec.parameters.get("properties", {}).items()})
        raise ArgumentsInvalid(f"The arguments of {spec.name} are wrong: {told}. Expected: {wanted}.")
    return parsed


def _checkable(spec: ToolSpec) -> Any:
    """The schema that arguments are checked against: a stranger's without its regular expressions, which may take for ever."""
    if spec.kind in (ToolKind.MCP, ToolKind.CLIENT):
        return _without_patterns(spec.parameters)
    return dict(spec.parameters)


def _without_patterns(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        # What `patternProperties` allows, `additionalProperties` would then refuse.
        dropped = {"patternProperties", "additionalProperties"} if "patternProperties" in schema else set()
        return {
            key: {name: _without_patterns(of) for name, of in value.items()}
            if key == "properties" and isinstance(value, Mapping)
            else _without_patterns(value)
            for key, value in schema.items()
            if key not in dropped and not (key == "pattern" and isinstance(value, str))
        }
    return [_without_patterns(value) for value in schema] if isinstance(schema, list) else schema


def _dump(spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(arguments))
    except (TypeError, ValueError, RecursionError) as exc:
        raise ArgumentsInvalid(f"The arguments of {spec.name} are not JSON: {exc}") from exc


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _briefly(schema: Mapping[str, Any]) -> str:
    return str(schema.get("type", "any"))
