"""What the program loop needs from the world: an engine to run turns and a place to run tools.

The loop is written against these two ports and the journal's, so that it runs the same over Ray handles (`ray_clients.py`)
and over the scripted doubles (`doubles.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_program.errors import TurnFailed, Unavailable
from agent_program.ids import TenantId
from agent_program.tool_events import ToolEvent
from agent_program.turn import TurnHints
from engine_replicas.turn_stream import TurnTimings
from tool_runtime.held_program import HeldProgram
from tool_runtime.tool_call import ToolCall, ToolProgress, ToolResult, ToolStarted


class ReplicaLost(Unavailable):
    """The replica died while it ran the turn."""

    code = "replica_lost"


class ToolHostLost(Unavailable):
    """The tool actor died while it ran the call."""

    code = "tool_host_lost"


class ContextOverflow(TurnFailed):
    """The conversation does not fit the model's context."""

    status, code, kind = 400, "context_length_exceeded", "invalid_request_error"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOutcome:
    """A finished turn."""

    #: The assistant message in OpenAI's chat shape.
    message: Mapping[str, Any]
    #: OpenAI's: stop, length or tool_calls.
    finish_reason: str | None
    prompt_tokens: int
    #: Prompt tokens whose KV was found in the prefix cache.
    cached_tokens: int
    output_tokens: int
    replica: str | None
    #: What the scheduler says about the program's retained KV; None where nothing is retained.
    lease: Mapping[str, Any] | None
    #: None where the engine did not say.
    timings: TurnTimings | None = None
    #: Tokens that a turn's prompt and output may have together; None where the engine did not say.
    context_tokens_max: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleasedProgram:
    """What the replica that held a program's KV says as it lets go of it."""

    replica: str
    #: How the program's leases have ended there, over its whole life: outcome → count.
    lease_outcomes: Mapping[str, int]


class EngineClient(Protocol):
    """Runs turns on whichever replica the program is bound to. Cancelling the awaiting task aborts the turn."""

    async def run_turn(self, body: Mapping[str, Any], hints: TurnHints) -> TurnOutcome:
        """Run one turn.

        Raises:
            ReplicaLost: the replica died; the turn may run again elsewhere.
            Unavailable, Overloaded: no replica took the turn.
            ContextOverflow: the conversation is longer than the model's context.
            TurnFailed: the engine answered with an error.
        """
        ...

    async def tool_event(self, event: ToolEvent) -> None:
        """Tell the program's replica that its tools start or have finished. Advice: an error is logged, not raised."""
        ...

    async def release(self, program_id: str) -> ReleasedProgram | None:
        """The program is over: its KV is worth nothing. Advice, like `tool_event`; None where no replica answered."""
        ...


class ToolClient(Protocol):
    """Runs tool calls where the program's workspace is."""

    async def call(
        self, call: ToolCall, on_started: Callable[[ToolStarted | ToolProgress], Awaitable[None]]
    ) -> ToolResult:
        """Run one call; `on_started` is awaited when the tool itself starts, and again when it tells how far it is. Whatever a tool does wrong is a result.

        Raises:
            ToolHostLost: the actor died; the call may have run.
            Unavailable, Overloaded, SandboxUnavailable: nothing takes the call now; it has not run.
            InvalidRequest: the call cannot be run as it is.
        """
        ...

    async def cancel(self, program_id: str, call_id: str | None = None) -> None:
        """Stop the program's running calls, or one of them, with their whole process trees."""
        ...

    async def release(self, program_id: str, *, tenant_id: TenantId, delete_workspace: bool) -> None:
        """The program is over: end its sandbox sessions."""
        ...

    async def held(self, quiet_s: float) -> Sequence[HeldProgram]:
        """What the actors hold of programs that ran nothing for `quiet_s`; an actor that does not answer holds nothing."""
        ...

    async def release_everywhere(self, held: HeldProgram, *, delete_workspace: bool) -> None:
        """`release` on every actor, wherever the program was. Advice: an error is logged."""
        ...
