"""What the tool runtime knows exactly and the scheduler wants to know: when a tool starts and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agent_program.ids import ProgramId, ToolKey


class ToolOutcome(StrEnum):
    """How a tool call ended."""

    OK = "ok"
    #: The tool ran and reported failure; its time is as good a sample as any.
    ERROR = "error"
    #: Stopped by us at its limit: the true duration is longer (a censored sample).
    TIMEOUT = "timeout"
    #: Stopped by the program's owner: censored.
    CANCELLED = "cancelled"
    #: The actor or sandbox died: censored.
    INTERRUPTED = "interrupted"

    @property
    def is_censored(self) -> bool:
        """The true duration is at least the seconds measured."""
        return self in (ToolOutcome.TIMEOUT, ToolOutcome.CANCELLED, ToolOutcome.INTERRUPTED)


class SampleSource(StrEnum):
    """Who measured a duration."""

    #: The tool runtime, from the tool's own start to its end.
    TOOL_RUNTIME = "tool_runtime"
    #: The gap between the end of a turn and the arrival of the next one (a client that runs its own tools).
    REQUEST_GAP = "request_gap"
    #: A client that runs its own tools and reports how long they took.
    CLIENT = "client"


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySample:
    """One measured tool wait."""

    tool: ToolKey
    duration_s: float
    outcome: ToolOutcome
    source: SampleSource
    #: Unix seconds at which the tool ended.
    at_wall_s: float


class ToolEventKind(StrEnum):
    """Where a program's tool calls are."""

    STARTED = "started"
    #: It runs still, and has said how far it is.
    PROGRESS = "progress"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolEvent:
    """Told to the replica that holds the program's KV."""

    program_id: ProgramId
    kind: ToolEventKind
    tool: ToolKey
    #: Seconds since the tool started (0 at STARTED): a duration, so that no two machines need one clock.
    elapsed_s: float = 0.0
    outcome: ToolOutcome | None = None
    #: How much of its work is done, from 0 to 1; None where the tool does not say, and at every other kind.
    progress: float | None = None
