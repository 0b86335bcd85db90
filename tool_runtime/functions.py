"""`@tool`: a Python function as a tool that models may call.

    from tool_runtime.functions import tool

    @tool
    def word_count(text: str, unique: bool = False) -> int:
        '''Count the words of a text.

        Args:
            text: What to count.
            unique: Count each word once.
        '''
        words = text.split()
        return len(set(words) if unique else words)

Its schema comes from the type hints and the docstring. Where it runs is declared, and never guessed:

    runs_in=RunsIn.SANDBOX   (default) in a Python process of its own in the program's sandbox, from its module's source text: the
                             module may import the standard library and what the sandbox's Python has, and arguments are JSON
    runs_in=RunsIn.ACTOR     in the tool actor itself, trusted with all that the actor may do; `async def` or plain, the latter
                             in a thread, which cannot be stopped: at its limit the call ends and the thread is left behind

What cannot work is refused when the function is declared, not when a model calls it.
"""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticUndefined

from agent_program.ids import ProgramId, TenantId
from tool_runtime import registry
from tool_runtime.registry import ToolKind, ToolSpec

SOURCE_BYTES_MAX = 256 * 1024
_PLAIN = (str, int, float, bool, type(None), Any)
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):")


class BadTool(ValueError):
    """A function that cannot be a tool; the message names it and says why."""


class RunsIn(StrEnum):
    """Where a function runs."""

    SANDBOX = "sandbox"
    ACTOR = "actor"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolContext:
    """What a trusted function is given for a parameter with this annotation."""

    tenant_id: TenantId
    program_id: ProgramId
    call_id: str
    #: Say how far it is: what is done, and of how much (None where that is not known). From any thread.
    report_progress: Callable[[float, float | None], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionTool:
    """A registered function. Calling it calls the function."""

    spec: ToolSpec
    function: Callable[..., Any]
    runs_in: RunsIn
    #: Seconds that a call may take; None for the call's own limit.
    timeout_s: float | None
    #: Reads the arguments; its fields have the parameters' names as aliases.
    arguments: type[BaseModel]
    #: The parameter that takes the `ToolContext`, if there is one.
    context_parameter: str | None
    #: The text of its module, for the sandbox; None where it runs in the actor.
    source: str | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def parsed(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`arguments`, which fit the schema, as the parameters' types.

        Raises:
            ValueError: they fit the schema and not the types (a date that is none).
        """
        try:
            model = self.arguments.model_validate(dict(arguments))
        except ValidationError as exc:
            faults = exc.errors(include_url=False)[: registry.ERRORS_SHOWN_MAX]
            told = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
            raise ValueError(f"The arguments of {self.spec.name} are wrong: {told}.") from exc
        fields = type(model).model_fields
        return {str(fields[name].alias): getattr(model, name) for name in model.model_fields_set}


@typing.overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...


@typing.overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    runs_in: RunsIn = RunsIn.SANDBOX,
    idempotent: bool = False,
    needs_approval: bool = False,
    timeout_s: float | None = None,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function a tool; with options, or without brackets.

    Args:
        name: what models call it; the function's own name unless given.
        description: for models; the docstring's text up to its first section unless given.
        runs_in: see the module's text.
        idempotent: an interrupted call may run again.
        needs_approval: somebody must agree to each call.
        timeout_s: seconds that one call may take, where that is less than what the call itself allows.

    Raises:
        BadTool: it cannot be one.
    """
    if function is not None:
        return _tool(function)
    return lambda decorated: _tool(decorated, **options)


def _tool(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    runs_in: RunsIn = RunsIn.SANDBOX,
    idempotent: bool = False,
    needs_approval: bool = False,
    timeout_s: float | None = None,
) -> FunctionTool:
    if not inspect.isfunction(function):
        raise BadTool(f"@tool: {function!r} is not a function")
    name = name or function.__name__
    if timeout_s is not None and not timeout_s > 0:
        raise BadTool(f"@tool {name}: timeout_s must be positive")
    told, of_parameters = _documented(function)
    arguments, context_parameter = _arguments(name, function, runs_in, of_parameters)
    spec = ToolSpec(
        name=name,
        description=description or told,
        parameters=_schema(name, arguments),
        idempotent=idempotent,
        kind=ToolKind.FUNCTION,
        needs_approval=needs_approval,
    )
    fault = "it needs a docstring" if not spec.description else registry.fault_of(spec)
    if fault is not None:
        raise BadTool(f"@tool {name}: {fault}")
    return FunctionTool(
        spec=spec,
        function=function,
        runs_in=runs_in,
        timeout_s=timeout_s,
        arguments=arguments,
        context_parameter=context_parameter,
        source=_module_source(name, function) if runs_in is RunsIn.SANDBOX else None,
    )


def _arguments(
    name: str, function: types.FunctionType, runs_in: RunsIn, descriptions: Mapping[str, str]
) -> tuple[type[BaseModel], str | None]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError) as exc:
        raise BadTool(f"@tool {name}: its annotations cannot be read: {exc}") from exc
    fields: dict[str, Any] = {}
    context_parameter = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise BadTool(f"@tool {name}: {parameter} cannot be given by name")
        if parameter.name not in hints:
            raise BadTool(f"@tool {name}: the parameter {parameter.name} needs a type annotation")
        hint = hints[parameter.name]
        if hint is ToolContext:
            if runs_in is RunsIn.SANDBOX:
                raise BadTool(f"@tool {name}: a function in the sandbox is given no ToolContext")
            context_parameter = parameter.name
            continue
        if runs_in is RunsIn.SANDBOX and not _is_plain(hint):
            raise BadTool(
                f"@tool {name}: {parameter.name}: {hint} does not travel into the sandbox as JSON; use str, int, float, bool, list, "
                "dict, Literal, None and unions of them"
            )
        default = PydanticUndefined if parameter.default is parameter.empty else parameter.default
        # An alias, so that no parameter's name can be in the way of the model's own attributes.
        told: dict[str, Any] = {"description": descriptions[parameter.name]} if parameter.name in descriptions else {}
        field = Field(default, alias=parameter.name, **told)
        fields[f"argument_{len(fields)}"] = (hint, field)
    try:
        model = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except (PydanticUserError, TypeError) as exc:
        raise BadTool(f"@tool {name}: a parameter's type has no JSON Schema: {exc}") from exc
    return model, context_parameter


def _schema(name: str, arguments: type[BaseModel]) -> dict[str, Any]:
    try:
        schema = arguments.model_json_schema()
    except (PydanticUserError, ValueError, TypeError) as exc:
        raise BadTool(f"@tool {name}: a parameter's type has no JSON Schema: {exc}") from exc
    schema.pop("title", None)
    for of_parameter in schema.get("properties", {}).values():
        of_parameter.pop("title", None)
    schema.setdefault("properties", {})
    return schema


def _is_plain(hint: Any) -> bool:
    """JSON's own types and nothing else."""
    if hint in _PLAIN or hint in (list, dict):
        return True
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _is_plain(parts[0])
    if origin is Literal:
        return all(isinstance(value, str | int | bool | None) for value in parts)
    if origin is dict:
        return parts[0] is str and _is_plain(parts[1])
    return origin in (list, typing.Union, types.UnionType) and all(_is_plain(part) for part in parts)


def _documented(function: types.FunctionType) -> tuple[str, dict[str, str]]:
    """The docstring's text before its first section, and what its `Args:` section says of each parameter."""
    text: list[str] = []
    told: dict[str, str] = {}
    section = latest = ""
    indent: int | None = None
    for line in (inspect.getdoc(function) or "").splitlines():
        heading = _SECTION.fullmatch(line.strip()) if not line.startswith(" ") else None
        if heading is not None:
            section, indent = heading.group(1), None
        elif not section:
            text.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            entry = _ARGUMENT.fullmatch(line.strip()) if depth == indent else None
            if entry is not None:
                latest = entry.group(1)
                told[latest] = entry.group(2)
            elif latest:
                told[latest] += " " + line.strip()
    return "\n".join(text).strip(), told


def _module_source(name: str, function: types.FunctionType) -> str:
    if function.__qualname__ != function.__name__:
        raise BadTool(f"@tool {name}: a function in the sandbox must stand at the top level of its module")
    try:
        module = inspect.getmodule(function)
        source = inspect.getsource(module) if module is not None else ""
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError) as exc:
        raise BadTool(f"@tool {name}: the source of its module cannot be read: {exc}") from exc
    if not source or len(source.encode()) > SOURCE_BYTES_MAX:
        raise BadTool(f"@tool {name}: the source of its module is missing, or larger than {SOURCE_BYTES_MAX} bytes")
    if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
        raise BadTool(f"@tool {name}: its module imports by a relative name, which means nothing in the sandbox")
    return source
