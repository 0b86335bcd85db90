"""What a submission may hold, checked field by field before anything starts.

Every error names the field. Unknown fields are errors here (a typo in `limits` must not run a program without limits); on
chat completions unknown *hints* are ignored, because there a hint is advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from agent_program.errors import InvalidRequest, ModelNotFound
from agent_program.ids import DEFAULT_TENANT, ProgramId, TenantId, new_program_id, parse_program_id
from deployments.program import Limits, ProgramSpec
from deployments.program_settings import ProgramSettings
from deployments.wire_values import Strict, validated
from tool_runtime.registry import ToolSpec
from tool_runtime.tool_selection import select_tools

_METADATA_KEY_CHARS, _METADATA_VALUE_CHARS = 64, 512


class SubmittedLimits(Strict):
    """Limits that the submitter names; the rest take their defaults."""

    max_turns: int | None = Field(default=None, ge=1)
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    max_total_tokens: int | None = Field(default=None, ge=1)
    max_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tool_timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    action_expires_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Sampling(Strict):
    """Sampling parameters of every turn: OpenAI's, and those that vLLM adds."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    stop: str | list[str] | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > 16:
            raise ValueError("at most 16 stop strings")
        return value


class NamedFunction(Strict):
    """The function that a tool choice names."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str


class FunctionChoice(Strict):
    """A tool choice of one function, in OpenAI's shape."""

    type: Literal["function"]
    function: NamedFunction


class SubmitProgram(Strict):
    """The body of `POST /v1/programs`."""

    program_id: str | None = None
    #: A program that has ended: this one goes on with its conversation, and with its tools where it names none.
    previous_program_id: str | None = None
    #: The program that starts this one as a sub-program: it goes where that one is, while there is room.
    parent_program_id: str | None = None
    model: str | None = None
    #: The system message.
    instructions: str | None = None
    #: The first user message; instead of `messages`.
    input: str | None = None
    #: A conversation in OpenAI's chat shape; instead of `input`.
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    #: Names of registered tools, functions in OpenAI's shape, MCP servers: see `tool_runtime/tool_selection.py`.
    tools: list[Any] = Field(default=[])
    #: As in OpenAI's API: auto, required, none, or one function; checked with the tools.
    tool_choice: Any = None
    limits: SubmittedLimits = SubmittedLimits()
    sampling: Sampling = Sampling()
    metadata: dict[str, str] = Field(default={})

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> SubmitProgram:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input or messages")
        if self.previous_program_id is not None and self.instructions is not None:
            raise ValueError("instructions: the previous program's stand; they are the beginning of its conversation")
        return self


def previous_program_id(body: object) -> ProgramId | None:
    """The program that a submission goes on with, before the rest of it is looked at.

    Raises:
        InvalidRequest: it is not a valid id.
    """
    named = body.get("previous_program_id") if isinstance(body, dict) else None
    return None if named is None else parse_program_id(named, what="previous_program_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviousProgram:
    """What a program leaves to the one that goes on with it."""

    messages: tuple[Mapping[str, Any], ...]
    tool_specs: list[dict[str, Any]]


_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
#: A tool may well print nothing, and an assistant may have called tools only.
_ROLES_THAT_SPEAK = frozenset({"system", "developer", "user"})


def parse_submission(
    body: object,
    *,
    model: str,
    tools: Mapping[str, ToolSpec],
    settings: ProgramSettings,
    now_wall_s: float,
    tenant_id: TenantId = DEFAULT_TENANT,
    previous: PreviousProgram | None = None,
) -> ProgramSpec:
    """The program that a submission describes, with every default filled in; `previous` is the one that it goes on with.

    Raises:
        InvalidRequest, ModelNotFound, ToolNotFound: each names the field.
    """
    sent = validated(SubmitProgram, body)
    if sent.model is not None and sent.model != model:
        raise ModelNotFound(f"the model {sent.model!r} is not served; {model!r} is", param="model")
    tool_specs = [tool.to_wire() for tool in select_tools(sent.tools, tools, tools_max=settings.tools_max)]
    before = previous or PreviousProgram(messages=(), tool_specs=[])
    if "tools" not in sent.model_fields_set:
        # The same tools, or the prompt would differ from its first token on and nothing of the prefix be found again.
        tool_specs = before.tool_specs
    return ProgramSpec(
        id=new_program_id() if sent.program_id is None else parse_program_id(sent.program_id),
        tenant_id=tenant_id,
        model=model,
        messages=[*map(dict, before.messages), *_messages(sent, settings)],
        tool_specs=tool_specs,
        tool_choice=_tool_choice(sent.tool_choice, [tool["name"] for tool in tool_specs]),
        limits=_limits(sent.limits, settings),
        sampling=sent.sampling.model_dump(exclude_none=True),
        metadata=_metadata(sent.metadata, settings),
        parent_program_id=_named_program(sent.parent_program_id, "parent_program_id"),
        previous_program_id=_named_program(sent.previous_program_id, "previous_program_id"),
        created_at=now_wall_s,
    )


def _named_program(program_id: str | None, field: str) -> ProgramId | None:
    return None if program_id is None else parse_program_id(program_id, what=field)


def _tool_choice(choice: object, names: list[str]) -> str | dict[str, Any]:
    if choice is None:
        return "auto" if names else "none"
    if isinstance(choice, dict):
        name = validated(FunctionChoice, choice, within="tool_choice").function.name
        if name not in names:
            raise InvalidRequest(f"tool_choice names {name[:100]!r}, which is not among tools", param="tool_choice")
        return {"type": "function", "function": {"name": name}}
    if choice not in ("auto", "required", "none"):
        raise InvalidRequest("tool_choice: one of auto, required, none, or a function", param="tool_choice")
    if choice == "required" and not names:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    return str(choice) if names else "none"


def _messages(sent: SubmitProgram, settings: ProgramSettings) -> list[dict[str, Any]]:
    messages = list(sent.messages or [])
    if len(messages) > settings.messages_max:
        raise InvalidRequest(f"at most {settings.messages_max} messages", param="messages")
    for position, message in enumerate(messages):
        _check_message(message, where=f"messages.{position}")
    if sent.input is not None:
        _check_says_something(sent.input, what="input")
        messages = [{"role": "user", "content": sent.input}]
    if sent.instructions is not None:
        _check_says_something(sent.instructions, what="instructions")
        messages.insert(0, {"role": "system", "content": sent.instructions})
    return messages


def _check_message(message: Mapping[str, Any], *, where: str) -> None:
    """What a turn would be refused for by the engine is refused here, while nothing has started."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role: one of {', '.join(sorted(_ROLES))}", param=f"{where}.role")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not (content is None or isinstance(content, str) or is_parts):
        raise InvalidRequest(f"{where}.content: a text or a list of content parts", param=f"{where}.content")
    if role in _ROLES_THAT_SPEAK:
        _check_says_something(content, what=f"{where}.content")
    if role == "tool" and content is None:
        raise InvalidRequest(f"{where}.content: a tool message holds the tool's output", param=f"{where}.content")


def _check_says_something(content: str | list[Any] | None, *, what: str) -> None:
    if not content or (isinstance(content, str) and not content.strip()):
        raise InvalidRequest(f"{what} is empty", param=what)


def _limits(sent: SubmittedLimits, settings: ProgramSettings) -> Limits:
    named = sent.model_dump(exclude_none=True)
    for name, value in named.items():
        ceiling = getattr(settings.limit_ceilings, name)
        if value > ceiling:
            raise InvalidRequest(f"limits.{name}: at most {ceiling:g}", param=f"limits.{name}")
    return Limits(**{**settings.limit_defaults.model_dump(), **named})


def _metadata(metadata: dict[str, str], settings: ProgramSettings) -> dict[str, str]:
    if len(metadata) > settings.metadata_max:
        raise InvalidRequest(f"at most {settings.metadata_max} metadata entries", param="metadata")
    for key, value in metadata.items():
        if len(key) > _METADATA_KEY_CHARS or len(value) > _METADATA_VALUE_CHARS:
            limits = f"{_METADATA_KEY_CHARS} and {_METADATA_VALUE_CHARS} characters"
            raise InvalidRequest(f"metadata keys and values may have at most {limits}", param="metadata")
    return metadata
