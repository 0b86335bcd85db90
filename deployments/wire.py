"""What clients may send to the programs API, checked field by field before anything starts.

Every error names the field. Unknown fields are errors here (a typo in `limits` must not run a program without limits); on
chat completions unknown *hints* are ignored, because there a hint is advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from agent_program.errors import InvalidRequest, ModelNotFound, ToolNotFound
from agent_program.ids import DEFAULT_TENANT, new_program_id, parse_program_id
from agent_program.tool_events import ToolEvent, ToolEventKind, ToolOutcome
from deployments.program import Limits, ProgramSpec
from deployments.program_settings import ProgramSettings
from tool_runtime.registry import ToolSpec
from tool_runtime.tool_key import tool_key

_Body = TypeVar("_Body", bound=BaseModel)
_METADATA_KEY_CHARS, _METADATA_VALUE_CHARS = 64, 512


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SubmittedLimits(_Strict):
    """Limits that the submitter names; the rest take their defaults."""

    max_turns: int | None = Field(default=None, ge=1)
    max_tokens_per_turn: int | None = Field(default=None, ge=1)
    max_total_tokens: int | None = Field(default=None, ge=1)
    max_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tool_timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Sampling(_Strict):
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


class NamedFunction(_Strict):
    """The function of a tool entry; its description and parameters are the registered tool's, whatever is sent along."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str


class FunctionTool(_Strict):
    """A tool in OpenAI's shape."""

    type: Literal["function"]
    function: NamedFunction


def _function_of_name(value: object) -> object:
    return {"type": "function", "function": {"name": value}} if isinstance(value, str) else value


#: A registered tool's name, or an entry in OpenAI's shape.
ToolEntry = Annotated[FunctionTool, BeforeValidator(_function_of_name)]


class SubmitProgram(_Strict):
    """The body of `POST /v1/programs`."""

    program_id: str | None = None
    model: str | None = None
    #: The system message.
    instructions: str | None = None
    #: The first user message; instead of `messages`.
    input: str | None = None
    #: A conversation in OpenAI's chat shape; instead of `input`.
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    tools: list[ToolEntry] = []
    #: As in OpenAI's API: auto, required, none, or one function; checked with the tools.
    tool_choice: Any = None
    limits: SubmittedLimits = SubmittedLimits()
    sampling: Sampling = Sampling()
    metadata: dict[str, str] = {}

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> SubmitProgram:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input or messages")
        return self


_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def parse_submission(
    body: object,
    *,
    model: str,
    tools: Mapping[str, ToolSpec],
    settings: ProgramSettings,
    now_wall_s: float,
) -> ProgramSpec:
    """The program that a submission describes, with every default filled in.

    Raises:
        InvalidRequest, ModelNotFound, ToolNotFound: each names the field.
    """
    sent = _validated(SubmitProgram, body)
    if sent.model is not None and sent.model != model:
        raise ModelNotFound(f"the model {sent.model!r} is not served; {model!r} is", param="model")
    names = _tool_names(sent.tools, tools, settings)
    return ProgramSpec(
        id=new_program_id() if sent.program_id is None else parse_program_id(sent.program_id),
        tenant_id=DEFAULT_TENANT,
        model=model,
        messages=_messages(sent, settings),
        tools=names,
        tool_choice=_tool_choice(sent.tool_choice, names),
        limits=_limits(sent.limits, settings),
        sampling=sent.sampling.model_dump(exclude_none=True),
        metadata=_metadata(sent.metadata, settings),
        created_at=now_wall_s,
    )


class ReportedToolEvent(_Strict):
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


def parse_tool_event(program_id: str, body: object) -> ToolEvent:
    """The event that a client reports for its program.

    Raises:
        InvalidRequest: naming the field.
    """
    sent = _validated(ReportedToolEvent, body)
    is_finished = sent.kind is ToolEventKind.FINISHED
    return ToolEvent(
        program_id=parse_program_id(program_id),
        kind=sent.kind,
        tool=tool_key(sent.tool, sent.arguments or {}),
        elapsed_s=sent.elapsed_s,
        outcome=(sent.outcome or ToolOutcome.OK) if is_finished else None,
    )


def _validated(kind: type[_Body], body: object, *, within: str | None = None) -> _Body:
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [within] if within else []
        path = ".".join([*parts, *(str(part) for part in first["loc"] if not str(part).startswith("function-"))])
        text = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{path}: {text}" if path else text, param=path or None) from None


def _tool_names(entries: list[FunctionTool], known: Mapping[str, ToolSpec], settings: ProgramSettings) -> list[str]:
    if len(entries) > settings.tools_max:
        raise InvalidRequest(f"at most {settings.tools_max} tools", param="tools")
    names = [entry.function.name for entry in entries]
    for name in names:
        if name not in known:
            there = ", ".join(known)
            raise ToolNotFound(f"there is no tool called {name[:100]!r}; there are: {there}", param="tools")
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: a tool is named twice", param="tools")
    return names


def _tool_choice(choice: object, names: list[str]) -> str | dict[str, Any]:
    if choice is None:
        return "auto" if names else "none"
    if isinstance(choice, dict):
        name = _validated(FunctionTool, choice, within="tool_choice").function.name
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
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            where = f"messages.{position}.role"
            raise InvalidRequest(f"{where}: one of {', '.join(sorted(_ROLES))}", param=where)
    if sent.input is not None:
        messages = [{"role": "user", "content": sent.input}]
    if sent.instructions is not None:
        messages.insert(0, {"role": "system", "content": sent.instructions})
    return messages


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


def parse_whole_number(text: str | None, *, what: str, default: int, least: int, most: int) -> int:
    """A number from a query string or a header.

    Raises:
        InvalidRequest: not a whole number from `least` to `most`.
    """
    if text is None:
        return default
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        raise InvalidRequest(f"{what} must be a whole number from {least} to {most}", param=what)
    return number
