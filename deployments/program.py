"""What a program is: what was submitted (`ProgramSpec`, never changes) and where it stands (`ProgramRecord`, a snapshot).

The record is what people list and poll; it can always be rebuilt from the spec and the journaled steps (`steps.py`).
Both are JSON in the store and on the wire, hence pydantic. A store outlives a version: a field that is added has a default, so that
what an older one has written can still be read.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agent_program.ids import DEFAULT_TENANT
from agent_program.states import ProgramEvent, ProgramState, next_state
from tool_runtime.registry import ToolSpec


class EndReason(StrEnum):
    """Why a program ended."""

    #: The model answered without calling a tool.
    ANSWER = "answer"
    #: The model answered without calling a tool, and the answer was cut off at `max_tokens_per_turn`.
    ANSWER_CUT_OFF = "answer_cut_off"
    MAX_TURNS = "max_turns"
    MAX_TOTAL_TOKENS = "max_total_tokens"
    MAX_SECONDS = "max_seconds"
    #: The conversation no longer fits the model's context.
    CONTEXT_OVERFLOW = "context_overflow"
    #: The engine refused the turn or answered it with an error.
    TURN_FAILED = "turn_failed"
    #: No engine replica took the turn, or the one that replayed it was lost too.
    ENGINE_UNAVAILABLE = "engine_unavailable"
    #: No sandbox or no tool actor took a tool call.
    TOOLS_UNAVAILABLE = "tools_unavailable"
    #: Runner after runner was lost with the program before any of them finished a step of it.
    RUNNERS_LOST = "runners_lost"
    #: An error inside the runner; its log has the traceback.
    INTERNAL_ERROR = "internal_error"
    CANCELLED = "cancelled"
    #: An action that it required was not taken in time.
    ACTION_EXPIRED = "action_expired"


class Limits(BaseModel):
    """What bounds one program. Reaching a limit ends it as completed, with the limit as its end reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: LLM turns, counted when they finish.
    max_turns: int = Field(ge=1)
    #: Output tokens of one turn.
    max_tokens_per_turn: int = Field(ge=1)
    #: Prompt and output tokens summed over all turns, as in `usage`; None for no bound but the others.
    max_total_tokens: int | None = Field(default=None, ge=1)
    #: Seconds from submission to end, queueing and waits for actions included.
    max_seconds: float = Field(gt=0)
    #: Seconds that an action which the program requires may take; then it ends as expired.
    action_expires_s: float = Field(default=3600.0, gt=0)
    #: Seconds of one tool call; None for the tool runtime's own limit.
    tool_timeout_s: float | None = Field(default=None, gt=0)


class ProgramSpec(BaseModel):
    """What was submitted, with every default filled in."""

    model_config = ConfigDict(frozen=True)

    id: str
    tenant_id: str
    model: str
    #: The conversation so far: system, user and earlier messages, in OpenAI's chat shape.
    messages: list[dict[str, Any]]
    #: Every tool that the program may call, as it was at submission (`ToolSpec.to_wire`). A program carries its tools: their
    #: schemas are part of every turn's prompt, and must not change under it.
    tool_specs: list[dict[str, Any]] = []
    #: OpenAI's `tool_choice`: auto, required, none, or one named function.
    tool_choice: str | dict[str, Any]
    limits: Limits
    #: Sampling parameters, passed to the engine as they are.
    sampling: dict[str, Any]
    metadata: dict[str, str]
    #: The program that started this one as a sub-program, and the ended one that it goes on with.
    parent_program_id: str | None = None
    previous_program_id: str | None = None
    #: Unix seconds.
    created_at: float

    @property
    def tools(self) -> list[str]:
        """The tools' names, in order."""
        return list(self.tools_by_name)

    @cached_property
    def tools_by_name(self) -> dict[str, ToolSpec]:
        """The tools, in order."""
        return {spec.name: spec for spec in map(ToolSpec.from_wire, self.tool_specs)}

    @property
    def requires_tool(self) -> bool:
        """Every turn must call a tool, so that no turn is a final answer."""
        return bool(self.tool_specs) and (self.tool_choice == "required" or isinstance(self.tool_choice, dict))


class Usage(BaseModel):
    """Tokens summed over a program's finished turns."""

    model_config = ConfigDict(frozen=True)

    prompt_tokens: int = 0
    #: Prompt tokens whose KV was found in the prefix cache.
    cached_tokens: int = 0
    #: Prompt tokens that had been computed in an earlier turn of the program and had to be computed again.
    recomputed_tokens: int = 0
    output_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class ProgramFailure(BaseModel):
    """Why a program failed, in the words of an error."""

    model_config = ConfigDict(frozen=True)

    code: str
    message: str


class ActionKind(StrEnum):
    """What a client is asked for."""

    #: The output of a tool that the client runs.
    OUTPUT = "output"
    #: Whether the platform may run a call.
    APPROVAL = "approval"


class RequiredCall(BaseModel):
    """One thing that a client is asked for."""

    model_config = ConfigDict(frozen=True)

    call_id: str
    kind: ActionKind
    tool: str
    #: JSON text, valid by the tool's schema.
    arguments: str


class RequiredAction(BaseModel):
    """What a program waits for; calls leave it as they are answered."""

    model_config = ConfigDict(frozen=True)

    #: Unix seconds; then the program ends as expired.
    expires_at: float
    calls: list[RequiredCall]


class ProgramRecord(BaseModel):
    """Where a program stands. Times are Unix seconds."""

    model_config = ConfigDict(frozen=True)

    id: str
    tenant_id: str = DEFAULT_TENANT
    state: ProgramState
    model: str
    created_at: float
    updated_at: float
    #: When a runner first took it; None while it is queued.
    started_at: float | None = None
    finished_at: float | None = None
    end_reason: EndReason | None = None
    error: ProgramFailure | None = None
    #: Finished turns.
    turns: int = 0
    #: The tools that run now, joined with "+"; None when none does.
    current_tool: str | None = None
    #: What the client is to do before the program goes on; None where it waits for nothing.
    required_action: RequiredAction | None = None
    tools: list[str]
    limits: Limits
    metadata: dict[str, str]
    usage: Usage = Usage()
    #: Seconds that the program waited for its tools.
    tool_seconds: float = 0.0
    tool_calls: int = 0
    #: How the leases on its retained KV ended: outcome → count.
    leases: dict[str, int] = {}
    #: The engine replica of the latest turn.
    replica: str | None = None
    #: Turns that had to run again because their replica was lost.
    replayed_turns: int = 0
    #: The text of the latest assistant message.
    output: str | None = None
    #: Someone asked to cancel it; it ends as soon as its runner has stopped what runs.
    cancel_requested: bool = False

    def to_wire(self) -> dict[str, Any]:
        """The program object of the REST API."""
        return {"object": "program", **self.model_dump(mode="json")}

    def after(self, event: ProgramEvent, **changes: Any) -> ProgramRecord:
        """The record after `event`, with `changes` applied.

        Raises:
            IllegalTransition: the state does not allow the event; this record is unchanged, as always.
        """
        return self.model_copy(update={"state": next_state(self.state, event), **changes})


def new_record(spec: ProgramSpec) -> ProgramRecord:
    """The record of a program that was just accepted."""
    return ProgramRecord(
        id=spec.id,
        tenant_id=spec.tenant_id,
        state=ProgramState.QUEUED,
        model=spec.model,
        created_at=spec.created_at,
        updated_at=spec.created_at,
        tools=spec.tools,
        limits=spec.limits,
        metadata=spec.metadata,
    )
