"""Which tools MCP servers have, as tools of the platform: names, checks, and what is believed. Pure but for the SDK's types.

    server `files`, tool `read_text`   ─►  `files__read_text`, kind mcp

A server's list is a stranger's text. A tool that cannot be offered (a name outside OpenAI's alphabet, a schema that is none) is
left out and said so; hints about what a tool does count only where the operator trusts the server. Of each tool the digest of what
was listed is kept: a tool that turns into another one between its listing and its call is not called.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mcp_types as types

from tool_runtime import registry
from tool_runtime.config import McpServerSettings
from tool_runtime.registry import ToolKind, ToolSpec

_OUTSIDE = re.compile(r"[^a-zA-Z0-9_-]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedTool:
    """One tool of a server."""

    spec: ToolSpec
    #: As the server calls it.
    remote_name: str
    #: Of its description, its schema and its hints.
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What a server has."""

    #: By the platform's name.
    tools: Mapping[str, ListedTool]
    #: What was left out, and why.
    faults: tuple[str, ...] = ()


def listing(server: str, tools: Sequence[types.Tool], settings: McpServerSettings) -> Listing:
    """The tools of `server` that can be offered, of those that the settings allow."""
    found: dict[str, ListedTool] = {}
    faults: list[str] = []
    for tool in tools:
        if settings.allowed_tools is not None and tool.name not in settings.allowed_tools:
            continue
        spec = _spec(server, tool, settings)
        fault = registry.fault_of(spec)
        if fault is None and spec.name in found:
            fault = f"another tool is called {spec.name} as well"
        if fault is not None:
            faults.append(f"{tool.name[:100]!r}: {fault}")
            continue
        found[spec.name] = ListedTool(spec=spec, remote_name=tool.name, digest=digest(tool))
    missing = set(settings.allowed_tools or ()) - {tool.name for tool in tools}
    faults += [f"{name!r}: allowed by the settings, and not there" for name in sorted(missing)]
    return Listing(tools=found, faults=tuple(faults))


def digest(tool: types.Tool) -> str:
    """Changes with everything about a tool that a model or the platform relies on."""
    hints = tool.annotations.model_dump() if tool.annotations is not None else None
    relied_on = [tool.name, tool.description, tool.input_schema, hints]
    return hashlib.sha256(json.dumps(relied_on, sort_keys=True).encode()).hexdigest()


def _spec(server: str, tool: types.Tool, settings: McpServerSettings) -> ToolSpec:
    hints = tool.annotations if settings.trust else None
    return ToolSpec(
        name=f"{server}__{_OUTSIDE.sub('_', tool.name)}",
        description=tool.description or tool.title or tool.name,
        parameters={"properties": {}, **tool.input_schema},
        idempotent=bool(hints is not None and (hints.read_only_hint or hints.idempotent_hint)),
        kind=ToolKind.MCP,
        server=server,
        needs_approval=settings.needs_approval,
    )
