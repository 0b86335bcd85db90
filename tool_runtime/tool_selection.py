"""What a program's `tools` list may hold, and which tools it comes to. Pure.

    "shell"                                                            a registered tool, by its name
    {"type": "function", "function": {"name": "shell"}}                the same in OpenAI's shape
    {"type": "function", "function": {"name", "description", "parameters"}}   a tool of the client's own, if none is registered
                                                                       under its name: the client runs it (`ToolKind.CLIENT`)
    {"type": "mcp", "server_label": "files", "allowed_tools": [...]}   the tools of a configured MCP server, all or some

OpenAI's flat shape of the Responses API (`{"type": "function", "name", …}`) is taken as well. `require_approval: "always"` on
an entry asks for somebody's consent before each call; "never" takes back nothing that the operator asks for. A registered
name is the registered tool, whatever description or schema is sent along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_program.errors import InvalidRequest, ToolNotFound
from tool_runtime import registry
from tool_runtime.registry import ToolKind, ToolSpec

_APPROVALS = {"always": True, "never": False}
_MCP_KEYS = frozenset({"type", "server_label", "server_description", "allowed_tools", "require_approval"})


def select_tools(entries: object, known: Mapping[str, ToolSpec], *, tools_max: int) -> tuple[ToolSpec, ...]:
    """The tools that `entries` name, in their order; `known` are the registered ones by name.

    Raises:
        ToolNotFound: an entry names a tool or a server that is not registered.
        InvalidRequest: an entry is malformed, a tool is named twice, or there are more than `tools_max`.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise InvalidRequest("tools must be a list", param="tools")
    if len(entries) > tools_max:
        raise InvalidRequest(f"at most {tools_max} tools", param="tools")
    selected: dict[str, ToolSpec] = {}
    for position, entry in enumerate(entries):
        for spec in _specs(entry, known, f"tools.{position}"):
            if spec.name in selected:
                raise InvalidRequest(f"tools: {spec.name} is named twice", param="tools")
            selected[spec.name] = spec
    if len(selected) > tools_max:
        raise InvalidRequest(f"at most {tools_max} tools, not {len(selected)}", param="tools")
    return tuple(selected.values())


def _specs(entry: object, known: Mapping[str, ToolSpec], where: str) -> Sequence[ToolSpec]:
    if isinstance(entry, str):
        return [registry.get(entry, known)]
    if not isinstance(entry, Mapping):
        raise InvalidRequest(f"{where}: a tool's name, or an object with a type", param=where)
    match entry.get("type"):
        case "function":
            return [_with_approval(_function(entry, known, where), entry, where)]
        case "mcp":
            return [_with_approval(spec, entry, where) for spec in _of_server(entry, known, where)]
    raise InvalidRequest(f"{where}.type: function or mcp", param=f"{where}.type")


def _function(entry: Mapping[str, Any], known: Mapping[str, ToolSpec], where: str) -> ToolSpec:
    function = entry.get("function", entry)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}: a function needs a name", param=where)
    if name in known or not {"description", "parameters"} & set(function):
        return registry.get(name, known)
    parameters = function.get("parameters")
    description = function.get("description")
    if not isinstance(parameters, Mapping | None) or not isinstance(description, str | None):
        raise InvalidRequest(f"{where}: description is text, parameters a JSON Schema", param=where)
    spec = ToolSpec(
        name=name,
        description=description or "",
        parameters=parameters or {"type": "object", "properties": {}},
        kind=ToolKind.CLIENT,
    )
    fault = registry.fault_of(spec)
    if fault is not None:
        raise InvalidRequest(f"{where}: {name[:100]!r} cannot be offered: {fault}", param=where)
    return spec


def _of_server(entry: Mapping[str, Any], known: Mapping[str, ToolSpec], where: str) -> Sequence[ToolSpec]:
    if unknown := sorted(set(map(str, entry)) - _MCP_KEYS):
        raise InvalidRequest(
            f"{where}.{unknown[0][:100]}: MCP servers are the operator's; name one by server_label", param=where
        )
    label, allowed = entry.get("server_label"), entry.get("allowed_tools")
    if not isinstance(label, str):
        raise InvalidRequest(f"{where}.server_label: the name of a configured MCP server", param=where)
    if allowed is not None and not (isinstance(allowed, list) and all(isinstance(name, str) for name in allowed)):
        raise InvalidRequest(f"{where}.allowed_tools: a list of names", param=where)
    own = {spec.name: spec for spec in known.values() if spec.server == label}
    if not own:
        servers = ", ".join(sorted({spec.server for spec in known.values() if spec.server})) or "none"
        raise ToolNotFound(f"no MCP server {label[:100]!r} has tools here; there are: {servers}", param="tools")
    if allowed is None:
        return list(own.values())
    # As the server calls them, or as they are registered.
    return [registry.get(name if name in own else f"{label}__{name}", own) for name in allowed]


def _with_approval(spec: ToolSpec, entry: Mapping[str, Any], where: str) -> ToolSpec:
    asked = entry.get("require_approval", "never")
    if not isinstance(asked, str) or asked not in _APPROVALS:
        raise InvalidRequest(f"{where}.require_approval: always or never", param=where)
    return replace(spec, needs_approval=spec.needs_approval or _APPROVALS[asked])
