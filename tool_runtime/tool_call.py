"""A tool call and what comes back from it.

A call always ends in exactly one `ToolResult`, whatever happens: bad arguments, a tool that fails, a timeout, a sandbox
that dies. Between the call and its result there is at most one `ToolStarted`, sent when the tool itself begins: what
came before is queueing (`queue_s`), what comes after is the tool's own time (`duration_s`), and only the latter is a
latency sample. A tool that tells how far it is adds `ToolProgress` in between, not more often than once a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_program.ids import DEFAULT_TENANT, ProgramId, TenantId, ToolKey
from agent_program.tool_events import ToolOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call that a model asked for."""

    program_id: ProgramId
    #: Unique within the program; the model's own id where it gave one.
    call_id: str
    #: The tool's name as the model wrote it.
    tool: str
    #: The arguments, or the JSON text of them as the model wrote it (which may not parse).
    arguments: Mapping[str, Any] | str
    tenant_id: TenantId = DEFAULT_TENANT
    #: Seconds that the tool may take; None for the runtime's default. Capped by the runtime's maximum.
    timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolStarted:
    """The tool began to run."""

    call_id: str
    tool_key: ToolKey
    #: Seconds from the call to this moment: waiting for a slot, for the session, for a sandbox to start.
    queue_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolProgress:
    """The tool runs, and says how far it is."""

    call_id: str
    tool_key: ToolKey
    #: In the tool's own unit; it does not decrease.
    progress: float
    #: What `progress` will be at the end; None where the tool does not know.
    total: float | None = None
    #: What it is doing, for people.
    message: str | None = None

    @property
    def fraction(self) -> float | None:
        """The part that is done, from 0 to 1; None where the tool does not know its total."""
        return min(1.0, max(0.0, self.progress / self.total)) if self.total and self.total > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """How a call ended; `output` is the text that the model is given."""

    call_id: str
    tool: str
    tool_key: ToolKey
    outcome: ToolOutcome
    output: str
    #: The command's exit status; None where the tool has none or did not get that far.
    exit_code: int | None = None
    #: Seconds that the tool itself ran; 0 where it never started.
    duration_s: float = 0.0
    queue_s: float = 0.0
    #: Bytes of output that were dropped from the middle.
    truncated_bytes: int = 0


ToolEventOfCall = ToolStarted | ToolProgress | ToolResult
