"""Which functions are registered: those of the settings' modules, and those that installed packages offer.

A package adds tools with an entry point in the group `continuum.tools`, whose object is a tool, or a module or a list that
holds tools:

    [project.entry-points."continuum.tools"]
    weather = "weather_tools:forecast"

One that is not right stops the start: a platform that came up without a tool would fail its programs later, and less clearly.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tool_runtime.functions import BadTool, FunctionTool
from tool_runtime.registry import BUILTIN_TOOLS

ENTRY_POINT_GROUP = "continuum.tools"
_FUNCTIONS_MAX = 256


def load_functions(
    modules: Sequence[str], *, installed: Iterable[EntryPoint] | None = None
) -> Mapping[str, FunctionTool]:
    """Every registered function by its tool's name.

    Args:
        modules: names of modules, or `module:attribute`.
        installed: the entry points to look at; those of the group `continuum.tools` unless given.

    Raises:
        BadTool: something cannot be imported, is no tool, holds none, or bears a name that is taken.
    """
    found: dict[str, FunctionTool] = {}
    for reference in modules:
        _take(found, _imported(reference), f"tools.function_modules: {reference}")
    for entry in entry_points(group=ENTRY_POINT_GROUP) if installed is None else installed:
        where = f"the entry point {entry.name} = {entry.value} of {ENTRY_POINT_GROUP}"
        _take(found, _imported(entry.value), where)
    if len(found) > _FUNCTIONS_MAX:
        raise BadTool(f"{len(found)} functions are registered, at most {_FUNCTIONS_MAX} may be")
    return found


def _imported(reference: str) -> Any:
    name, _, attribute = reference.partition(":")
    try:
        target: Any = importlib.import_module(name)
        for part in filter(None, attribute.split(".")):
            target = getattr(target, part)
    except BadTool:
        raise
    except Exception as exc:
        raise BadTool(f"{reference} cannot be imported: {type(exc).__name__}: {exc}") from exc
    return target


def _take(found: dict[str, FunctionTool], target: Any, where: str) -> None:
    tools = _tools_of(target)
    if not tools:
        raise BadTool(f"{where} holds no tool; decorate a function with @tool")
    for tool in tools:
        name = tool.spec.name
        if name in BUILTIN_TOOLS:
            raise BadTool(f"{where}: {name} is the name of a built-in tool")
        if found.setdefault(name, tool) is not tool:
            raise BadTool(f"{where}: two tools are called {name}")


def _tools_of(target: Any) -> list[FunctionTool]:
    if isinstance(target, FunctionTool):
        return [target]
    if isinstance(target, types.ModuleType):
        return [value for value in vars(target).values() if isinstance(value, FunctionTool)]
    if isinstance(target, list | tuple) and all(isinstance(value, FunctionTool) for value in target):
        return list(target)
    return []
