"""What clients send about tools that they run themselves, and about calls that need their consent. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from agent_program.errors import InvalidRequest
from agent_program.ids import ProgramId
from agent_program.tool_events import ToolEvent, ToolEventKind, ToolOutcome
from deployments.actions import ActionAnswer
from deployments.program_settings import ProgramSettings
from deployments.wire_values import Strict, validated
from tool_runtime.tool_key import tool_key


class ReportedToolEvent(Strict):
    """The body of `POST /v1/programs/{id}/tool_events`: a client that runs its own tools says when they start and end."""

    kind: ToolEventKind
    tool: str = Field(min_length=1, max_length=256)
    #: The call's arguments, where the client wants a finer key than the tool's name: a shell command becomes its program.
    arguments: dict[str, Any] | str | None = None
    #: Seconds since the tool started.
    elapsed_s: float = Field(default=0.0, ge=0, lt=1e9, allow_inf_nan=False)
    outcome: ToolOutcome | None = None

    @field_validator("kind", "outcome", mode="before")
    @classmethod
    def _enum_of_text(cls, value: object, info: Any) -> object:
        kinds = {"kind": ToolEventKind, "outcome": ToolOutcome}[info.field_name]
        if isinstance(value, str):
            try:
                return kinds(value)
            except ValueError:
                raise ValueError(f"one of {', '.join(kinds)}") from None
        return value


def parse_tool_event(program_id: ProgramId, body: object) -> ToolEvent:
    """The event that a client reports for its program.

    Raises:
        InvalidRequest: naming the field.
    """
    sent = validated(ReportedToolEvent, body)
    is_finished = sent.kind is ToolEventKind.FINISHED
    return ToolEvent(
        program_id=program_id,
        kind=sent.kind,
        tool=tool_key(sent.tool, sent.arguments or {}),
        elapsed_s=sent.elapsed_s,
        outcome=(sent.outcome or ToolOutcome.OK) if is_finished else None,
    )


class SentAnswer(Strict):
    """One entry of `tool_outputs`."""

    call_id: str = Field(min_length=1, max_length=256)
    output: str | None = None
    is_error: bool = False
    duration_s: float | None = Field(default=None, ge=0, lt=1e9, allow_inf_nan=False)
    approve: bool | None = None
    reason: str | None = Field(default=None, max_length=4096)

    @model_validator(mode="before")
    @classmethod
    def _call_id_by_either_name(cls, sent: Any) -> Any:
        # OpenAI's chat messages call it tool_call_id.
        if isinstance(sent, dict) and "tool_call_id" in sent and "call_id" not in sent:
            return {
                **{key: value for key, value in sent.items() if key != "tool_call_id"},
                "call_id": sent["tool_call_id"],
            }
        return sent

    @model_validator(mode="after")
    def _an_output_or_a_decision(self) -> SentAnswer:
        if (self.output is None) == (self.approve is None):
            raise ValueError("give either output or approve")
        return self


class SentAnswers(Strict):
    """The body of `POST /v1/programs/{id}/tool_outputs`."""

    tool_outputs: list[SentAnswer] = Field(min_length=1, max_length=256)


def parse_answers(body: object, settings: ProgramSettings) -> tuple[ActionAnswer, ...]:
    """What a client answers to the calls that its program waits for.

    Raises:
        InvalidRequest: naming the field.
    """
    sent = validated(SentAnswers, body).tool_outputs
    if len({answer.call_id for answer in sent}) < len(sent):
        raise InvalidRequest("tool_outputs: a call is answered twice", param="tool_outputs")
    for position, answer in enumerate(sent):
        if len(answer.output or "") > settings.tool_output_chars_max:
            where = f"tool_outputs.{position}.output"
            raise InvalidRequest(f"{where}: at most {settings.tool_output_chars_max} characters", param=where)
    return tuple(
        ActionAnswer(
            call_id=answer.call_id,
            output=answer.output,
            is_error=answer.is_error,
            duration_s=answer.duration_s,
            approved=answer.approve,
            reason=answer.reason,
        )
        for answer in sent
    )
